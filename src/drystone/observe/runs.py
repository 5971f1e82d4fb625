"""Published training runs, read from a CSV: what was run, and what was measured.

The columns are those of the measurement tables (documented in `docs/measurements.md`). A row whose
columns do not suffice becomes a `SkippedRun` with the reason; nothing is guessed in silence.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

from drystone.describe.layout import Layout, Schedule, Sharding, check_layout
from drystone.describe.model import Attention, Block, Experts, Head, Mlp, ModelSpec, Norm, QkNorm
from drystone.describe.recipe import (
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
from drystone.errors import DrystoneError, RequestError, UnknownName, UnreadableFile
from drystone.units import GiB

REQUIRED_COLUMNS = (
    "run_id", "framework", "arch", "layers", "hidden", "heads", "vocab", "seq_len", "gpu",
    "dp", "sharding", "tp", "pp", "micro_batch", "precision", "recompute", "tuning",
)  # fmt: skip
MEMORY_COLUMNS = ("mem_gib", "kind")
SPEED_COLUMNS = ("tokens_per_s_per_gpu",)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """One run that somebody made and wrote down."""

    run_id: str
    dataset: str
    framework: str
    model: ModelSpec
    recipe: Recipe
    layout: Layout
    gpu_name: str
    gpus_per_node: int
    interconnect: str
    kind: str  # allocated, reserved, nvidia-smi, unstated, oom-boundary
    reports_last_stage: bool  # the reading is of the last pipeline stage only
    measured_memory_bytes: float  # 0: none
    measured_tokens_per_second_per_gpu: float  # 0: none
    ran_out_of_memory: bool
    notes: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedRun:
    """A row that cannot be judged, and why."""

    run_id: str
    dataset: str
    reason: str


def load_runs(path: Path, *, measure: str) -> list[PublishedRun | SkippedRun]:
    """Every row of the table, in order; `measure` is `memory` or `speed`."""
    rows = _load_rows(path, measure=measure)
    return [parse_run(row, measure=measure) for row in rows]


def parse_run(row: dict[str, str], *, measure: str) -> PublishedRun | SkippedRun:
    """One row as a run, or the reason why it cannot be one."""
    row = {key: (value or "").strip() for key, value in row.items() if key is not None}
    run_id = row["run_id"]
    dataset = re.sub(r"-?\d+[a-z]*$", "", run_id) or run_id
    try:
        _refuse_marked(row, measure=measure)
        return _parse_complete(row, run_id=run_id, dataset=dataset)
    except DrystoneError as error:
        return SkippedRun(run_id=run_id, dataset=dataset, reason=str(error))


def _load_rows(path: Path, *, measure: str) -> list[dict[str, str]]:
    wanted = REQUIRED_COLUMNS + (MEMORY_COLUMNS if measure == "memory" else SPEED_COLUMNS)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            header = list(reader.fieldnames or [])
            missing = [name for name in wanted if name not in header]
            if missing:
                raise UnreadableFile(
                    f"the column{'s' if len(missing) > 1 else ''} {', '.join(missing)} "
                    f"{'are' if len(missing) > 1 else 'is'} missing",
                    where=str(path),
                    hint=f"Needed: {', '.join(wanted)}; see docs/measurements.md",
                )
            return list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UnreadableFile(
            f"cannot be read as CSV: {error}", where=str(path), hint="Check the path and the encoding"
        ) from None


def _refuse_marked(row: dict[str, str], *, measure: str) -> None:
    notes = row.get("notes", "")
    for mark in ("SUSPECT", "DO NOT USE"):
        if mark in notes:
            raise RequestError(f"marked {mark}")
    if row.get("config_complete", "yes") == "no":
        raise RequestError(f"configuration incomplete: {row.get('missing') or 'see notes'}")
    if measure == "memory" and not row["mem_gib"] and row["kind"] != "oom-boundary":
        raise RequestError("no memory reading")
    if measure == "speed" and not row["tokens_per_s_per_gpu"] and not row.get("step_time_s"):
        raise RequestError("no speed reading")


def _parse_complete(row: dict[str, str], *, run_id: str, dataset: str) -> PublishedRun:
    model = parse_shape(row)
    layout = _parse_layout(row, model)
    recipe = _parse_recipe(row, layout)
    problems = [one for one in check_layout(model, recipe, layout) if "global batch" not in one]
    if problems:
        raise RequestError("; ".join(problems))
    num_gpus = _int(row, "gpus", layout.num_gpus)
    nodes = _int(row, "nodes", 0) or max(1, num_gpus // 8)
    kind = row.get("kind", "")
    return PublishedRun(
        run_id=run_id,
        dataset=dataset,
        framework=row["framework"],
        model=model,
        recipe=recipe,
        layout=layout,
        gpu_name=row.get("gpu_spec_key") or row["gpu"],
        gpus_per_node=max(1, num_gpus // nodes),
        interconnect=row.get("interconnect", ""),
        kind=kind,
        reports_last_stage="last rank" in row.get("notes", ""),
        measured_memory_bytes=_float(row, "mem_gib") * GiB,
        measured_tokens_per_second_per_gpu=_measured_pace(row, recipe, num_gpus),
        ran_out_of_memory=kind == "oom-boundary",
        notes=row.get("notes", ""),
    )


def _measured_pace(row: dict[str, str], recipe: Recipe, num_gpus: int) -> float:
    if row.get("tokens_per_s_per_gpu"):
        return _float(row, "tokens_per_s_per_gpu")
    step_seconds = _float(row, "step_time_s")
    return recipe.global_batch * recipe.seq_len / step_seconds / num_gpus if step_seconds else 0.0


# --- the model -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Style:
    """What an architecture name implies beyond the numbers of a row."""

    norm: Norm = Norm.RMS
    bias: bool = False
    qkv_bias: bool = False
    positions: bool = False
    qk_norm: QkNorm = QkNorm.NONE
    num_norms: int = 2
    parallel: bool = False
    activation: str = "silu"
    causal: bool = True


_GPT = _Style(norm=Norm.LAYER, bias=True, qkv_bias=True, positions=True, activation="gelu")
_STYLES = {
    "gpt": _GPT,
    "gpt_bigcode": _GPT,
    "mpt": _Style(norm=Norm.LAYER_NO_BIAS, positions=True, activation="gelu"),
    "bert": _Style(norm=Norm.LAYER, bias=True, qkv_bias=True, positions=True,
                   activation="gelu", causal=False),
    "gpt-neox": _Style(norm=Norm.LAYER, bias=True, qkv_bias=True, parallel=True, activation="gelu"),
    "falcon": _Style(norm=Norm.LAYER, num_norms=1, parallel=True, activation="gelu"),
    "phi": _Style(norm=Norm.LAYER, bias=True, qkv_bias=True, num_norms=1, parallel=True,
                  activation="gelu"),
    "phi3": _Style(),
    "llama": _Style(),
    "mistral": _Style(),
    "mixtral": _Style(),
    "moe": _GPT,
    "qwen": _Style(qkv_bias=True),
    "qwen2": _Style(qkv_bias=True),
    "qwen3": _Style(qk_norm=QkNorm.HEAD),
    "gemma": _Style(activation="gelu"),
    "gemma2": _Style(num_norms=4, activation="gelu"),
}  # fmt: skip


def parse_shape(row: dict[str, str]) -> ModelSpec:
    """The model of a row: its numbers, and what the architecture's name implies."""
    arch = row["arch"].split(" ")[0].lower()
    if not arch:
        raise RequestError("the architecture is not stated")
    if arch not in _STYLES:
        raise UnknownName("architecture", arch, _STYLES, where=row["run_id"])
    style = _STYLES[arch]
    hidden, heads = _int(row, "hidden"), _int(row, "heads")
    attention = Attention(
        num_heads=heads,
        num_kv_heads=_int(row, "kv_heads", heads),
        head_dim=_int(row, "head_dim", hidden // heads),
        qkv_bias=style.qkv_bias,
        out_bias=style.bias,
        qk_norm=style.qk_norm,
        causal=style.causal,
    )
    block = Block(
        attention=attention,
        feed_forward=_feed_forward(row, style, hidden),
        norm=style.norm,
        num_norms=style.num_norms,
        parallel_residual=style.parallel,
    )
    return ModelSpec(
        name=row.get("model", "") or row["run_id"],
        family=arch,
        hidden_size=hidden,
        stack=((block, _int(row, "layers")),),
        vocab_size=_int(row, "vocab"),
        tied_embeddings=row.get("tied_emb", "") == "yes",
        learned_positions=_int(row, "seq_len") if style.positions else 0,
        final_norm=style.norm,
        head=Head.MASKED if arch == "bert" else Head.LANGUAGE,
    )


def _feed_forward(row: dict[str, str], style: _Style, hidden: int) -> Mlp | Experts:
    ffn, gated = _int(row, "ffn", 4 * hidden), row.get("gated_mlp", "") == "yes"
    if not row.get("moe_experts"):
        return Mlp(ffn_size=ffn, gated=gated, bias=style.bias, activation=style.activation)
    return Experts(
        num_experts=_int(row, "moe_experts"),
        top_k=_int(row, "moe_topk", 1),
        ffn_size=ffn,
        gated=gated,
        bias=style.bias,
        activation=style.activation,
    )


# --- the layout ------------------------------------------------------------------------------


def _parse_layout(row: dict[str, str], model: ModelSpec) -> Layout:
    pp = _int(row, "pp", 1)
    virtual = _virtual_stages(row.get("vpp", ""), pp, model.num_layers)
    return Layout(
        dp=_int(row, "dp"),
        tp=_int(row, "tp", 1),
        pp=pp,
        cp=_int(row, "cp", 1),
        ep=_int(row, "ep", 1),
        micro_batch=_int(row, "micro_batch"),
        sharding=_sharding(row["sharding"]),
        sequence_parallel=row.get("sp", "").startswith("megatron-sp") and _int(row, "tp", 1) > 1,
        schedule=Schedule.INTERLEAVED if virtual > 1 else Schedule.ONE_F_ONE_B,
        virtual_stages=virtual,
        keep_gathered=row["sharding"].startswith("fsdp-grad-op"),
        vocab_barriers=_vocab_barriers(row.get("notes", ""), pp),
    )


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


def _sharding(text: str) -> Sharding:
    rules = (
        (r"zero3|fsdp-full|fsdp-grad-op|hsdp|optim_grads_params", Sharding.ZERO3),
        (r"zero2", Sharding.ZERO2),
        (r"zero1|distributed optimizer", Sharding.ZERO1),
        (r"^none|ddp|zero0|^$", Sharding.NONE),
    )
    for pattern, sharding in rules:
        if re.search(pattern, text):
            return sharding
    raise UnknownName("sharding", text, ["none", "ddp", "zero1", "zero2", "zero3", "fsdp-full"])


# --- the recipe ------------------------------------------------------------------------------


def _parse_recipe(row: dict[str, str], layout: Layout) -> Recipe:
    framework = row["framework"]
    launcher = launcher_of(framework)
    global_batch = _int(row, "global_batch", 0) or (
        layout.dp * layout.micro_batch * _int(row, "grad_accum", 1)
    )
    tuning, lora, weight_bits = _parse_tuning(row)
    return Recipe(
        seq_len=_int(row, "seq_len"),
        global_batch=global_batch,
        precision=_precision(row["precision"]),
        optimizer=_optimizer(row.get("optimizer", "")),
        recompute=_recompute(row["recompute"]),
        attention=_attention_kernel(row.get("attention", ""), framework),
        loss=Loss.CHUNKED if "liger" in framework else _loss(framework),
        tuning=tuning,
        lora=lora,
        weight_bits=weight_bits,
        offload=_offload(row.get("offload", "")),
        compiled=row.get("compile", "") not in ("", "no", "eager"),
        # Megatron's own tests and the BLOOM runs keep its default; others train without dropout.
        dropout=0.1 if re.search(r"Megatron-LM core|Megatron.*DeepSpeed", framework) else 0.0,
        launcher=launcher,
    )


_LAUNCHERS = (
    (r"Megatron-LM core.*transformer_engine", "megatron-te"),
    (r"Megatron-LM core.*local", "megatron-local"),
    (r"Megatron-LM fork", "megatron-te"),
    (r"Megatron.*DeepSpeed", "megatron-deepspeed"),
    (r"Megatron-LM|NeMo|Megatron-Bridge", "megatron-te"),
    (r"accelerate FSDP", "accelerate"),
    (r"HF Trainer.*DeepSpeed|^DeepSpeed", "deepspeed"),
    (r"HF Trainer", "hf-trainer"),
    (r"torchtitan", "torchtitan"),
    (r"litgpt", "litgpt"),
    (r"nanotron", "nanotron"),
    (r"composer|llm-foundry", "composer"),
    (r"Galvatron", "galvatron"),
    (r"fsdp_qlora", "fsdp-qlora"),
    (r"PEFT", "hf-trainer"),
    (r"DeepLearningExamples", "nvidia-examples"),
    (r"PyTorch FSDP", "torch-fsdp"),
)


def launcher_of(framework: str) -> str:
    """The launcher whose conventions a framework follows; plain PyTorch when nobody knows it."""
    for pattern, launcher in _LAUNCHERS:
        if re.search(pattern, framework):
            return launcher
    return "pytorch"


def _precision(text: str) -> Precision:
    rules = (
        (r"fp8|mxfp8|nvfp4", Precision.FP8_MIXED),
        (r"^amp fp16", Precision.AMP_FP16),
        (r"^amp bf16", Precision.AMP_BF16),
        (r"^tf32", Precision.TF32),
        (r"^fp32", Precision.FP32),
        (r"^fp16-mixed", Precision.FP16_MIXED),
        (r"bf16-mixed", Precision.BF16_MIXED),
        (r"^(bfloat16|bf16)", Precision.BF16),
        (r"^(float16|fp16)", Precision.FP16),
    )
    for pattern, precision in rules:
        if re.search(pattern, text):
            return precision
    raise UnknownName("precision", text, [one.value for one in Precision])


def _optimizer(text: str) -> Optimizer:
    for pattern, optimizer in (
        (r"8.?bit", Optimizer.ADAM_8BIT), (r"muon", Optimizer.MUON), (r"lamb", Optimizer.LAMB),
        (r"lion", Optimizer.LION), (r"adafactor", Optimizer.ADAFACTOR),
        (r"sgd.*momentum", Optimizer.SGD_MOMENTUM), (r"sgd", Optimizer.SGD),
    ):  # fmt: skip
        if re.search(pattern, text.lower()):
            return optimizer
    return Optimizer.ADAM


def _recompute(text: str) -> Recompute:
    if text.startswith("none"):
        return Recompute()
    if "every other layer" in text:
        return Recompute(kind=RecomputeKind.FULL, every=2)
    if text.startswith("full"):
        return Recompute(kind=RecomputeKind.FULL)
    if "selective" in text:
        return Recompute(kind=RecomputeKind.SELECTIVE)
    raise UnknownName("recomputation", text, ["none", "selective", "full"])


def _attention_kernel(text: str, framework: str) -> AttentionKernel:
    if text.startswith(("eager", "unfused", "local")):
        return AttentionKernel.EAGER
    if text.startswith("default") and ("local" in framework or "lts image" in framework):
        # Megatron's local layers know no fused attention, and the Transformer Engine of the LTS
        # image falls back to the unfused one in the deterministic mode of these tests.
        return AttentionKernel.EAGER
    return AttentionKernel.FUSED


def _loss(framework: str) -> Loss:
    return Loss.FUSED if "foak" in framework else Loss.PLAIN


def _parse_tuning(row: dict[str, str]) -> tuple[Tuning, Lora, float]:
    text = row["tuning"].lower()
    if text.startswith("full"):
        return Tuning.FULL, Lora(), 0.0
    if not re.match(r"q?lora", text):
        raise RequestError(f"tuning method {row['tuning']!r} has no formula")
    lora = Lora(
        rank=round(_float(row, "lora_rank")) or 16,
        train_embeddings="trainable embedding" in text,
    )
    if not text.startswith("q"):
        return Tuning.LORA, lora, 0.0
    return Tuning.QLORA, lora, 4.127 if "dq" in text else 4.5


def _offload(text: str) -> Offload:
    if text in ("", "none"):
        return Offload.NONE
    if "activations" in text:
        return Offload.ACTIVATIONS
    return Offload.STATE if "params" in text else Offload.OPTIMIZER


def _int(row: dict[str, str], name: str, default: int | None = None) -> int:
    text = row.get(name, "")
    if not text:
        if default is None:
            raise RequestError(f"column {name} is empty")
        return default
    try:
        value = float(text)
    except ValueError:
        raise RequestError(f"column {name}: {text!r} is not a number") from None
    if value != round(value) or value < 0:
        raise RequestError(f"column {name}: {text!r} is not a whole number")
    return round(value)


def _float(row: dict[str, str], name: str) -> float:
    text = row.get(name, "")
    try:
        return float(text) if text else 0.0
    except ValueError:
        raise RequestError(f"column {name}: {text!r} is not a number") from None
