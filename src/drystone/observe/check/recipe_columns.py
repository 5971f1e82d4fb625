"""Columns of a published run that say how a model was trained: from their words to a recipe.

Every table has words of its own (`bf16 (fp32 master)`, `qlora 4bit nf4 (bnb)`, `block 4`). What is
not understood is an error with what is known, never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeVar

from drystone.describe.layout import Layout, Sharding
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
from drystone.observe.check.columns import SAID_NO, Row, number_of, whole_number_of
from drystone.observe.check.expert_columns import expert_fields

# Parameters as stated and as counted that are no further apart than this are the same model.
_SAME_PARAMS = 0.03
Word = TypeVar("Word")


def _first(text: str, rules: Iterable[tuple[str, Word]]) -> Word | None:
    """What the first pattern that the text contains stands for; any case."""
    return next((word for pattern, word in rules if re.search(pattern, text, re.I)), None)


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
        optimizer=_first(row.get("optimizer", ""), _OPTIMIZERS) or Optimizer.ADAM,
        recompute=_recompute(row["recompute"], layout, model.num_layers),
        attention=_attention_kernel(row),
        loss=_loss(framework, row.get("model", "")),
        tuning=tuning,
        lora=lora,
        weight_bits=weight_bits,
        keeps_16_bit=_keeps_16_bit(row, layout),
        offload=_offload(row.get("offload", "").lower()),
        compiled=row.get("compile", "").lower() not in (*SAID_NO, "eager"),
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
    (r"maxtext|\bjax\b|paxml|levanter", "maxtext"),
    (r"accelerate.{0,8}fsdp", "accelerate"),
    (r"torch-?titan", "torchtitan"),
    (r"lit-?gpt", "litgpt"),
    (r"nanotron", "nanotron"),
    (r"composer|llm-foundry", "composer"),
    (r"fsdp_qlora", "fsdp-qlora"),
    (r"deeplearningexamples", "nvidia-examples"),
    (r"megatron.*deepspeed|deepspeed.*megatron|neox", "megatron-deepspeed"),
    (r"megatron|mcore|libai|internevo|primus|flagscale|mindspeed", "megatron-te"),
    (r"deepspeed|easycontext|xtuner|colossal|openrlhf", "deepspeed"),
    (r"\bhf\b|hugging ?face|peft|transformers|\btrl\b|sfttrainer|accelerate", "hf-trainer"),
    (r"swift|llama-?factory|axolotl|unsloth", "hf-trainer"),
    (r"fsdp|torch-?tune|veomni|\bverl\b|olmo.?core|lingua", "torch-fsdp"),
)


def launcher_of(framework: str) -> str:
    """The launcher whose conventions a framework follows; plain PyTorch when nobody knows it."""
    return _first(framework, _LAUNCHERS) or "pytorch"


# The first that a text contains. Lightning says `16-mixed`; O1 and O2 are levels of NVIDIA's Apex.
_PRECISIONS = (
    (r"nvfp4", Precision.NVFP4_MIXED),
    (r"^(?!.*cs).*(mxfp8|fp8-?mx)", Precision.MXFP8_MIXED),
    (r"fp8|float8", Precision.FP8_MIXED),
    (r"^amp bf16", Precision.AMP_BF16),
    (r"^amp (fp16|float16)|^amp$|^o1\b", Precision.AMP_FP16),
    (r"^tf32", Precision.TF32),
    (r"^fp32|^float32", Precision.FP32),
    (r"^(fp16|float16)[- ]mixed|^mixed.*(fp16|float16)|^16-mixed|^o2\b", Precision.FP16_MIXED),
    (
        r"(bf16|bfloat16)([- ]mixed|.*(master|\bo2\b|fp32))|^mixed.*(bf16|bfloat16)",
        Precision.BF16_MIXED,
    ),
    (r"^(pure )?(bfloat16|bf16)", Precision.BF16),
    (r"^(fp16|float16).*(master|fp32)", Precision.FP16_MIXED),
    (r"^(pure )?(float16|fp16|half)", Precision.FP16),
)


def _precision(text: str) -> Precision:
    if (found := _first(text, _PRECISIONS)) is None:
        raise UnknownName("precision", text, [known.value for known in Precision])
    return found


# Megatron's `--bf16` and `--fp16` wrap every optimizer in one with fp32 weights.
_KEEP_MASTER = ("megatron-te", "megatron-local", "megatron-deepspeed", "nemo")


def _kept_precision(stated: Precision, launcher: str, layout: Layout) -> Precision:
    """Megatron and DeepSpeed's ZeRO keep an fp32 master, also where only 16 bit is stated."""
    mixed = {Precision.BF16: Precision.BF16_MIXED, Precision.FP16: Precision.FP16_MIXED}
    has_master = launcher in _KEEP_MASTER or (
        launcher == "deepspeed" and layout.sharding is not Sharding.NONE
    )
    return mixed.get(stated, stated) if has_master else stated


_OPTIMIZERS = (
    (r"8.?bit", Optimizer.ADAM_8BIT),
    (r"muon", Optimizer.MUON),
    (r"lamb", Optimizer.LAMB),
    (r"lion", Optimizer.LION),
    (r"adafactor", Optimizer.ADAFACTOR),
    (r"sgd.*momentum", Optimizer.SGD_MOMENTUM),
    (r"sgd", Optimizer.SGD),
)


def _recompute(text: str, layout: Layout, num_layers: int) -> Recompute:
    text = text.lower()
    if re.match(r"(none|no|off|false)\b|0$|-$", text):
        return Recompute()
    if "every other layer" in text:
        return Recompute(kind=RecomputeKind.FULL, every=2)
    if stated := re.match(r"(?:full\D{0,3})?(\d+(?:\.\d+)?) ?%$", text):
        share = min(1.0, float(stated.group(1)) / 100)
        return Recompute(kind=RecomputeKind.FULL, every=1 / share) if share else Recompute()
    if re.match(r"full|block\D{0,12}\d", text):
        # Megatron's `--recompute-method block`: so many layers of each (virtual) stage.
        if stated := re.search(r"block\D{0,12}(\d+)", text):
            here = num_layers / (layout.pp * layout.virtual_stages)
            if not (layers := int(stated.group(1))):
                return Recompute()
            return Recompute(kind=RecomputeKind.FULL, every=max(1.0, here / layers))
        return Recompute(kind=RecomputeKind.FULL)
    modules = tuple(name for name in RECOMPUTE_MODULES if re.search(rf"\b{name}\b", text))
    if modules or re.search(r"selective|^sac\b|attention only", text):
        return Recompute(kind=RecomputeKind.SELECTIVE, modules=modules)
    if re.match(r"(yes|on|true|uniform|unsloth|gradient|activation|ac)\b|1$", text):
        return Recompute(kind=RecomputeKind.FULL)  # as the switches of most launchers mean it
    raise UnknownName("recomputation", text, ["none", "selective", "full"])


def _attention_kernel(row: Row) -> AttentionKernel:
    text, framework = row.get("attention", ""), row["framework"]
    if re.match(r"eager|unfused|local|math|naive|vanilla|(no|without) flash", text, re.IGNORECASE):
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


_FULL = (
    r"full|fft$|all param|sft\b|(continued )?pre-?train|(cpt|pt)$|fine-?tun(e|ing)$|train(ing)?$"
)


def _parse_tuning(row: Row, model: ModelSpec) -> tuple[Tuning, Lora, float]:
    text = row["tuning"].lower()
    if re.match(_FULL, text):
        return Tuning.FULL, Lora(), 0.0
    if not re.match(r"(\d.?bit )?q?-?lora\b", text):
        raise RequestError(f"tuning method {row['tuning']!r} has no formula")
    stated = re.search(r"\b(?:r|rank) ?[= ] ?(\d+)", text)
    lora = Lora(
        rank=round(number_of(row, "lora_rank")) or (int(stated.group(1)) if stated else 16),
        targets=_lora_targets(row, model),
        train_embeddings="trainable embedding" in text,
    )
    is_eight = re.search(r"8.?bit|int8", text)
    if not text.startswith("q") and not is_eight and not re.search(r"4.?bit|nf4|int4", text):
        return Tuning.LORA, lora, 0.0
    if is_eight:
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
    if text in SAID_NO or text.startswith("none"):
        return Offload.NONE
    if "activation" in text:
        return Offload.ACTIVATIONS
    return Offload.STATE if re.search(r"param|^(full|all|state)", text) else Offload.OPTIMIZER
