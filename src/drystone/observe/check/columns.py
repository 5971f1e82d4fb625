"""Columns of a published run: from their words and numbers to a layout and a recipe.

Each table of measurements has its own words for the same thing (`zero1 (distributed optimizer)`,
`megatron-sp`, `qlora 4bit nf4 (bnb)`). The rules are here, one function per column.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from drystone.describe.layout import Layout, Schedule, Sharding
from drystone.describe.model import ModelSpec
from drystone.describe.recipe import (
    RECOMPUTE_MODULES,
    AttentionKernel,
    Lora,
    Loss,
    Offload,
    Optimizer,
    Precision,
    Recipe,
    Recompute,
    RecomputeKind,
    Tuning,
)
from drystone.errors import RequestError, UnknownName
from drystone.estimate.memory.terms import adapter_parameters
from drystone.observe.check.expert_columns import expert_fields

Row = Mapping[str, str]
# Parameters as stated and as counted that are no further apart than this are the same model.
_SAME_PARAMS = 0.03

_MAX_LAYERS = 10_000

# Larger numbers are slips of a pen: no model has as many heads, no job as many GPUs.
_LARGEST = 10**9


def whole_number_of(row: Row, name: str, default: int | None = None) -> int:
    """The whole number in a column; `default` where it is empty."""
    text = row.get(name, "")
    if not text:
        if default is None:
            raise RequestError(f"column {name} is empty")
        return default
    value = number_of(row, name)
    if value != round(value) or value > _LARGEST:
        raise RequestError(f"column {name}: {text!r} is not a whole number up to {_LARGEST:,}")
    return round(value)


def number_of(row: Row, name: str) -> float:
    """The number in a column; 0 where it is empty."""
    text = row.get(name, "")
    try:
        value = float(text) if text else 0.0
    except ValueError:
        raise RequestError(f"column {name}: {text!r} is not a number") from None
    if not 0 <= value < math.inf:
        raise RequestError(f"column {name}: {text!r} is not a number from 0 on")
    return value


def is_yes(row: Row, name: str) -> bool:
    """Whether a column says yes, in one of the ways in which tables say it."""
    return row.get(name, "").lower() in ("yes", "true", "1")


# --- the layout ------------------------------------------------------------------------------


def parse_layout(row: Row, model: ModelSpec) -> Layout:
    """How the run was split."""
    tp, pp = whole_number_of(row, "tp", 1), whole_number_of(row, "pp", 1)
    dp, cp = whole_number_of(row, "dp"), whole_number_of(row, "cp", _ulysses(row.get("sp", "")))
    virtual = _virtual_stages(row.get("vpp", ""), pp, model.num_layers)
    return Layout(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=whole_number_of(row, "ep", 1),
        etp=_expert_tensor(row, tp=tp, ranks=dp * cp),
        micro_batch=whole_number_of(row, "micro_batch"),
        sharding=_sharding(row["sharding"]),
        shard_size=_shard_size(row["sharding"], dp * cp, tp),
        sequence_parallel=tp > 1
        and (row.get("sp", "").startswith("megatron-sp") or is_yes(row, "sp")),
        schedule=Schedule.INTERLEAVED if virtual > 1 else Schedule.ONE_F_ONE_B,
        virtual_stages=virtual,
        keep_gathered=row["sharding"].startswith("fsdp-grad-op"),
        vocab_barriers=_vocab_barriers(row.get("notes", ""), pp),
    )


def _expert_tensor(row: Row, *, tp: int, ranks: int) -> int:
    """Tensor parallelism of experts: stated, or as its launcher has it unless told otherwise.

    Megatron-LM divides experts as it divides everything else, where that leaves room for `ep`, and
    its tests state it in their names; what is built on it sets 1.
    """
    if row.get("etp"):
        return whole_number_of(row, "etp")
    if stated := re.search(r"_etp(\d+)", row.get("model", "")):
        return int(stated.group(1))
    is_plain = row["framework"].startswith("Megatron-LM core")
    return tp if is_plain and ranks % whole_number_of(row, "ep", 1) == 0 else 0


def _ulysses(text: str) -> int:
    """Ranks that split the sequence in front of attention and the heads inside it."""
    match = re.match(r"ulysses\D*(\d+)", text)
    return int(match.group(1)) if match else 1


def _shard_size(text: str, copies: int, tp: int) -> int:
    """Hybrid sharding: the stated group, or the copies of the model inside a node of eight."""
    if not text.startswith("hsdp"):
        return 0
    match = re.search(r"(\d+)", text)
    return int(match.group(1)) if match else math.gcd(copies, max(1, 8 // max(1, tp)))


def _virtual_stages(text: str, pp: int, num_layers: int) -> int:
    if pp == 1 or not text:
        return 1
    match = re.search(r"(\d+)", text)
    number = int(match.group(1)) if match else 1
    if text.startswith("layers/stage"):
        return max(1, num_layers // pp // number)
    return number


def _vocab_barriers(notes: str, pp: int) -> int:
    """Methods of the vocabulary-parallel pipelines of arXiv:2411.05288, by their names there."""
    match = re.match(r"method (vocab-1|vocab-2|vocab|synctwice|interlaced)\b", notes)
    if match is None:
        return 0
    name = match.group(1)
    if name == "interlaced":
        return pp // 2  # one and a half times the micro-batches in flight
    return 2 if name in ("synctwice", "vocab-1") else 1


_ZERO = r"zero[- ]?(?:stage[- ]?)?"


def _sharding(text: str) -> Sharding:
    rules = (
        (r"no_shard", Sharding.NONE),
        (rf"{_ZERO}(3|\+\+)|^fsdp|^hsdp|^full_shard|optim_grads_params", Sharding.ZERO3),
        (rf"{_ZERO}2|shard_grad_op", Sharding.ZERO2),
        (rf"{_ZERO}1|dist(ributed)?[-_ ]?opt", Sharding.ZERO1),
        (rf"^no(ne)?\b|^d?dp$|ddp|{_ZERO}0|^$", Sharding.NONE),
    )
    for pattern, sharding in rules:
        if re.search(pattern, text.lower()):
            return sharding
    raise UnknownName("sharding", text, ["none", "ddp", "zero1", "zero2", "zero3", "fsdp-full"])


# --- the recipe ------------------------------------------------------------------------------


def parse_recipe(row: Row, layout: Layout, model: ModelSpec) -> Recipe:
    """How the model was trained."""
    framework = row["framework"]
    launcher = launcher_of(framework)
    global_batch = whole_number_of(row, "global_batch", 0) or (
        layout.dp * layout.micro_batch * whole_number_of(row, "grad_accum", 1)
    )
    tuning, lora, weight_bits = _parse_tuning(row, model)
    return Recipe(
        seq_len=whole_number_of(row, "seq_len"),
        global_batch=global_batch,
        precision=_kept_precision(_precision(row["precision"]), launcher, layout),
        optimizer=_optimizer(row.get("optimizer", "")),
        recompute=_recompute(row["recompute"], layout, model.num_layers),
        attention=_attention_kernel(row),
        loss=_loss(framework, row.get("model", "")),
        tuning=tuning,
        lora=lora,
        weight_bits=weight_bits,
        keeps_16_bit=_keeps_16_bit(row, layout),
        offload=_offload(row.get("offload", "")),
        compiled=row.get("compile", "") not in ("", "no", "eager"),
        # Megatron's own tests and the BLOOM runs keep its default; others train without dropout.
        dropout=0.1 if re.search(r"Megatron-LM core|Megatron.*DeepSpeed", framework) else 0.0,
        launcher=launcher,
        **expert_fields(row),
    )


# The names of single projects first, then the families that many build on; any case.
_LAUNCHERS = (
    (r"megatron-lm core.*transformer_engine", "megatron-te"),
    (r"megatron-lm core.*local", "megatron-local"),
    (r"galvatron", "galvatron"),
    (r"auto-?model", "automodel"),
    (r"\bnemo\b|megatron[- ]bridge|dgx ?cloud", "nemo"),
    (r"maxtext", "maxtext"),
    (r"accelerate.{0,8}fsdp", "accelerate"),
    (r"torch-?titan", "torchtitan"),
    (r"lit-?gpt", "litgpt"),
    (r"nanotron", "nanotron"),
    (r"composer|llm-foundry", "composer"),
    (r"fsdp_qlora", "fsdp-qlora"),
    (r"deeplearningexamples", "nvidia-examples"),
    (r"megatron.*deepspeed|neox", "megatron-deepspeed"),
    (r"megatron|mcore|libai|internevo|primus", "megatron-te"),
    (r"deepspeed|easycontext|xtuner|colossal", "deepspeed"),
    (r"\bhf\b|hugging ?face|peft|transformers|\btrl\b|sfttrainer|accelerate", "hf-trainer"),
    (r"swift|llama-?factory|axolotl|unsloth", "hf-trainer"),
    (r"fsdp|torch-?tune", "torch-fsdp"),
)


def launcher_of(framework: str) -> str:
    """The launcher whose conventions a framework follows; plain PyTorch when nobody knows it."""
    for pattern, launcher in _LAUNCHERS:
        if re.search(pattern, framework, re.IGNORECASE):
            return launcher
    return "pytorch"


def _precision(text: str) -> Precision:
    rules = (
        (r"nvfp4", Precision.NVFP4_MIXED),
        (r"^(?!.*cs).*(mxfp8|fp8-?mx)", Precision.MXFP8_MIXED),
        (r"fp8", Precision.FP8_MIXED),
        (r"^amp fp16", Precision.AMP_FP16),
        (r"^amp bf16", Precision.AMP_BF16),
        (r"^tf32", Precision.TF32),
        (r"^fp32", Precision.FP32),
        (r"^(fp16|float16)[- ]mixed|^mixed.*(fp16|float16)", Precision.FP16_MIXED),
        (
            r"(bf16|bfloat16)([- ]mixed|.*(master|\bo2\b))|^mixed.*(bf16|bfloat16)",
            Precision.BF16_MIXED,
        ),
        (r"^(pure )?(bfloat16|bf16)", Precision.BF16),
        (r"^(pure )?(float16|fp16)", Precision.FP16),
    )
    for pattern, precision in rules:
        if re.search(pattern, text.lower()):
            return precision
    raise UnknownName("precision", text, [known.value for known in Precision])


# Megatron's `--bf16` and `--fp16` wrap every optimizer in one with fp32 weights.
_KEEP_MASTER = ("megatron-te", "megatron-local", "megatron-deepspeed", "nemo")


def _kept_precision(stated: Precision, launcher: str, layout: Layout) -> Precision:
    """Megatron and DeepSpeed's ZeRO keep an fp32 master, also where only 16 bit is stated."""
    mixed = {Precision.BF16: Precision.BF16_MIXED, Precision.FP16: Precision.FP16_MIXED}
    has_master = launcher in _KEEP_MASTER or (
        launcher == "deepspeed" and layout.sharding is not Sharding.NONE
    )
    return mixed.get(stated, stated) if has_master else stated


def _optimizer(text: str) -> Optimizer:
    for pattern, optimizer in (
        (r"8.?bit", Optimizer.ADAM_8BIT),
        (r"muon", Optimizer.MUON),
        (r"lamb", Optimizer.LAMB),
        (r"lion", Optimizer.LION),
        (r"adafactor", Optimizer.ADAFACTOR),
        (r"sgd.*momentum", Optimizer.SGD_MOMENTUM),
        (r"sgd", Optimizer.SGD),
    ):
        if re.search(pattern, text.lower()):
            return optimizer
    return Optimizer.ADAM


def _recompute(text: str, layout: Layout, num_layers: int) -> Recompute:
    text = text.lower()
    if re.match(r"(none|no|off|false)\b|0$", text):
        return Recompute()
    if "every other layer" in text:
        return Recompute(kind=RecomputeKind.FULL, every=2)
    if re.match(r"full|block\D{0,12}\d", text):
        # Megatron's `--recompute-method block`: so many layers of each (virtual) stage.
        if stated := re.search(r"block\D{0,12}(\d+)", text):
            here = num_layers / (layout.pp * layout.virtual_stages)
            return Recompute(kind=RecomputeKind.FULL, every=max(1.0, here / int(stated.group(1))))
        return Recompute(kind=RecomputeKind.FULL)
    if re.search(r"selective|^sac\b|attention only|core_attn", text):
        modules = [name for name in RECOMPUTE_MODULES if re.search(rf"\b{name}\b", text)]
        return Recompute(kind=RecomputeKind.SELECTIVE, modules=tuple(modules))
    if re.match(r"(yes|on|true|uniform|unsloth|gradient|activation)\b|1$", text):
        return Recompute(kind=RecomputeKind.FULL)  # as the switches of most launchers mean it
    raise UnknownName("recomputation", text, ["none", "selective", "full"])


def _attention_kernel(row: Row) -> AttentionKernel:
    text, framework = row.get("attention", ""), row["framework"]
    if text.startswith(("eager", "unfused", "local")):
        return AttentionKernel.EAGER
    if not text.startswith("default"):
        return AttentionKernel.FUSED
    if framework.endswith("local"):
        return AttentionKernel.EAGER  # Megatron's local layers know no fused attention
    if "lts image" in framework and row.get("meas_date", "") < "2026":
        # The Transformer Engine of the older LTS image has no fused kernel for the deterministic
        # mode in which these tests run.
        return AttentionKernel.EAGER
    return AttentionKernel.FUSED


def _loss(framework: str, model: str) -> Loss:
    # The loss of torchtune's and Unsloth's recipes is computed in chunks, as Liger's is.
    if re.search(r"liger|torch-?tune|unsloth", framework, re.IGNORECASE):
        return Loss.CHUNKED
    return Loss.FUSED if "foak" in framework or "cross_entropy_loss_fusion" in model else Loss.PLAIN


def _parse_tuning(row: Row, model: ModelSpec) -> tuple[Tuning, Lora, float]:
    text = row["tuning"].lower()
    if re.match(r"full|sft\b|(continued )?pre-?train|fine-?tun(e|ing)$", text):
        return Tuning.FULL, Lora(), 0.0
    if not re.match(r"q?lora", text):
        raise RequestError(f"tuning method {row['tuning']!r} has no formula")
    lora = Lora(
        rank=round(number_of(row, "lora_rank")) or 16,
        targets=_lora_targets(row, model),
        train_embeddings="trainable embedding" in text,
    )
    if not text.startswith("q"):
        return Tuning.LORA, lora, 0.0
    if re.search(r"8.?bit|int8", text):
        return Tuning.QLORA, lora, 8.0
    return Tuning.QLORA, lora, 4.127 if "dq" in text else 4.5


# The sets of matrices that people put adapters beside, all of them first.
_TARGET_SETS = (
    Lora.KNOWN_TARGETS,
    ("q", "k", "v", "o"),
    ("q", "v"),
    ("q", "k", "v"),
    ("q", "k", "v", "o", "up", "down"),
    ("gate", "up", "down"),
)


def _lora_targets(row: Row, model: ModelSpec) -> tuple[str, ...]:
    """The matrices that the row names, or whose number of parameters it states; else all."""
    text = f"{row['tuning']}; {row.get('notes', '')}".lower()
    if re.search(r"(adapters?|lora)\b.{0,20}attention only", text):
        return ("q", "k", "v", "o")
    if named := [name for name in Lora.KNOWN_TARGETS if re.search(rf"\b{name}_proj\b", text)]:
        return tuple(named)
    stated, rank = number_of(row, "trainable_params"), round(number_of(row, "lora_rank"))
    for targets in _TARGET_SETS if stated and rank else ():
        lora = Lora(rank=rank, targets=targets)
        counted = sum(
            adapter_parameters(block, model.hidden_size, lora) for block in model.layers()
        )
        if abs(counted / stated - 1) < _SAME_PARAMS:
            return targets
    return Lora().targets


def _keeps_16_bit(row: Row, layout: Layout) -> bool:
    """PEFT upcasts nothing of a GPTQ model, and the Trainer prepares nothing under FSDP."""
    is_gptq = re.search(r"gptq|awq", row["tuning"].lower()) is not None
    return is_gptq or layout.sharding is Sharding.ZERO3


def _offload(text: str) -> Offload:
    if text in ("", "none"):
        return Offload.NONE
    if "activations" in text:
        return Offload.ACTIVATIONS
    return Offload.STATE if "params" in text else Offload.OPTIMIZER
