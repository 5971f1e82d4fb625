"""From the words of a command line to a recipe; a wrong word is refused with the known ones."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TypeVar

from drystone.describe.gpu import GpuSpec
from drystone.describe.gpu_prices import Price
from drystone.describe.layout import Layout
from drystone.describe.model import ModelSpec
from drystone.describe.recipe import (
    AttentionKernel,
    Lora,
    Loss,
    Offload,
    Optimizer,
    Precision,
    Recipe,
    Recompute,
    StepKernel,
    Tuning,
)
from drystone.errors import InvalidSpec, UnknownName
from drystone.estimate.launchers import find_launcher

_USUAL_SEQ_LEN = 4096
Word = TypeVar("Word", bound=StrEnum)


def build_recipe(
    model: ModelSpec | None,
    layout: Layout,
    *,
    seq_len: int,
    global_batch: int,
    precision: str,
    optimizer: str,
    step_kernel: str,
    recompute: str,
    attention: str,
    loss: str,
    tuning: str,
    lora_rank: int,
    offload: str,
    compiled: bool,
    dropout: float,
    launcher: str,
) -> Recipe:
    """The recipe that the options describe; 0 stands for the usual."""
    for name, value in (("--seq-len", seq_len), ("--global-batch", global_batch)):
        if value < 0:
            raise InvalidSpec(f"{name} is {value}, must be >= 1 (or 0 for the usual)")
    find_launcher(launcher)
    return Recipe(
        seq_len=seq_len or usual_seq_len(model),
        global_batch=global_batch or layout.dp * layout.micro_batch,
        precision=parse_word(Precision, precision, "precision"),
        optimizer=parse_word(Optimizer, optimizer, "optimizer"),
        step_kernel=parse_word(StepKernel, step_kernel, "step kernel"),
        recompute=Recompute.parse(recompute),
        attention=parse_word(AttentionKernel, attention, "attention kernel"),
        loss=parse_word(Loss, loss, "loss"),
        tuning=parse_word(Tuning, tuning, "tuning"),
        lora=Lora(rank=lora_rank),
        offload=parse_word(Offload, offload, "offload"),
        compiled=compiled,
        dropout=dropout,
        launcher=launcher,
    )


def auto_precision(text: str, gpus: Sequence[GpuSpec] = ()) -> str:
    """`auto` means bf16 with fp32 master, or fp16 where one of the GPUs knows no bf16."""
    if text != "auto":
        return text
    knows_bf16 = all(gpu.bf16_flops for gpu in gpus)
    return Precision.BF16_MIXED.value if knows_bf16 else Precision.FP16_MIXED.value


def usual_seq_len(model: ModelSpec | None) -> int:
    """The tokens of an image, or the model's context up to 4096."""
    if model is None:
        return _USUAL_SEQ_LEN
    if model.vision is not None:
        return model.vision.num_tokens
    return min(model.context_length or _USUAL_SEQ_LEN, _USUAL_SEQ_LEN)


def parse_word(kind: type[Word], text: str, what: str) -> Word:
    """One of an enumeration's words."""
    try:
        return kind(text.strip().lower())
    except ValueError:
        raise UnknownName(what, text, [one.value for one in kind]) from None


def own_price(gpu: GpuSpec, dollars_per_gpu_hour: float) -> Price:
    """A price that the person gave."""
    return Price(
        gpu=gpu.name,
        cloud="yours",
        instance="",
        num_gpus=1,
        region="",
        on_demand_dollars_per_gpu_hour=dollars_per_gpu_hour,
        spot_dollars_per_gpu_hour=0.0,
        date="",
        source="--price",
    )
