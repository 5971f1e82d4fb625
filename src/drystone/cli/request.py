"""From the words of a command line to a recipe; a wrong word is refused with the known ones."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from drystone.cli.names import complete_models, words
from drystone.describe.catalogue import find_gpu, load_gpus
from drystone.describe.files.cluster import ClusterSpec, load_cluster_file
from drystone.describe.gpu import GpuSpec
from drystone.describe.gpu_prices import Price, cheapest_price
from drystone.describe.layout import Layout
from drystone.describe.machine import find_link
from drystone.describe.model import ModelSpec
from drystone.describe.model_source import ModuleReference, resolve_model
from drystone.describe.pool import Pool, make_pool, parse_pool
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
    auto_precision,
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
    gpus: Iterable[GpuSpec] = (),
    is_emulated: bool = False,
) -> Recipe:
    """The recipe that the options describe; 0 stands for the usual, `auto` is for these GPUs."""
    for name, value in (("--seq-len", seq_len), ("--global-batch", global_batch)):
        if value < 0:
            raise InvalidSpec(f"{name} is {value}, must be >= 1 (or 0 for the usual)")
    find_launcher(launcher)
    return Recipe(
        seq_len=seq_len or usual_seq_len(model),
        global_batch=global_batch or layout.dp * layout.micro_batch,
        precision=auto_precision(gpus, is_emulated=is_emulated)
        if precision == "auto"
        else parse_word(Precision, precision, "precision"),
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


def find_shape(text: str) -> ModelSpec:
    """The model; a module that only torch knows cannot be split by a plan."""
    found = resolve_model(text)
    if isinstance(found, ModuleReference):
        raise InvalidSpec(
            "a Python function cannot be planned: what is inside its blocks is not known",
            where=text,
            hint="`drystone estimate` traces it under data parallelism",
        )
    return found


def find_pool(text: str, network: str, cluster: ClusterSpec | None = None) -> Pool:
    """The GPUs, or all of a cluster where none are named; and the network between unlike nodes."""
    between = find_link(network) if network else None
    if text or cluster is None:
        return parse_pool(text, between=between)
    return make_pool(cluster.pool().groups, between=between)


def read_cluster(path: Path | None) -> ClusterSpec | None:
    """What a cluster file says: GPU types of one's own are known from now on."""
    return None if path is None else load_cluster_file(path, needs_nodes=False)


def say_own(gpus: Iterable[GpuSpec]) -> None:
    """Nobody may take a type that a file describes for one of the catalogue."""
    from drystone.cli.output import make_console

    for gpu in gpus:
        if gpu.is_own:
            told = f"{gpu.name} is a GPU type of your own: {gpu.source}"
            make_console(stderr=True).print(told, style="yellow", highlight=False)


def find_prices(text: str, cluster: ClusterSpec | None = None) -> dict[str, float]:
    """The example prices; over them a file's, and those of `A100-80G=1.80,V100-32G=0.90`."""
    prices = example_prices() | dict(cluster.dollars_per_gpu_hour if cluster else {})
    for part in filter(None, (one.strip() for one in text.split(","))):
        name, _, dollars = part.partition("=")
        try:
            price = float(dollars)
        except ValueError:
            price = -1.0
        if not 0 <= price < float("inf"):
            raise InvalidSpec(
                f"{part!r} is no price", hint="Write dollars per GPU and hour, like A100-80G=1.80"
            )
        prices[find_gpu(name).name] = price
    return prices


def example_prices() -> dict[str, float]:
    """The cheapest example price of each GPU type, dollars per hour on demand."""
    prices = {gpu.name: cheapest_price(gpu.name) for gpu in load_gpus()}
    return {
        name: price.on_demand_dollars_per_gpu_hour
        for name, price in prices.items()
        if price is not None
    }


_PRECISIONS = words("auto", "fp32", "tf32", "bf16-mixed", "fp16-mixed", "bf16", "fp16",
                    "fp8-mixed", "amp-bf16", "amp-fp16")  # fmt: skip
_OPTIMIZERS = words("adam", "adam-8bit", "sgd", "sgd-momentum", "adafactor", "lion", "muon", "lamb")

ModelName = Annotated[
    str,
    typer.Argument(
        help="A name (see `drystone models`), a config.json or its folder, or module.py:function.",
        autocompletion=complete_models,
    ),
]
SeqLen = Annotated[
    int, typer.Option(help="Tokens in a sequence; 0: as the model's context, 4096 at most.")
]
PrecisionWord = Annotated[
    str,
    typer.Option(
        help="auto (bf16-mixed where every GPU knows it, else fp16-mixed; emulated: fp32), fp32, "
        "tf32, bf16-mixed, fp16-mixed, bf16, fp16, fp8-mixed, amp-bf16, amp-fp16.",
        autocompletion=_PRECISIONS,
    ),
]
OptimizerWord = Annotated[
    str,
    typer.Option(
        help="adam, adam-8bit, sgd, sgd-momentum, adafactor, lion, muon, lamb.",
        autocompletion=_OPTIMIZERS,
    ),
]
StepKernelWord = Annotated[str, typer.Option(help="fused, foreach or loop.")]
AttentionWord = Annotated[str, typer.Option(help="fused or eager.")]
LossWord = Annotated[str, typer.Option(help="plain, fused or chunked.")]
TuningWord = Annotated[
    str, typer.Option(help="full, lora or qlora.", autocompletion=words("full", "lora", "qlora"))
]
LoraRank = Annotated[int, typer.Option(help="Rank of the adapters.")]
OffloadWord = Annotated[str, typer.Option(help="none, optimizer, state or activations.")]
Compiled = Annotated[bool, typer.Option("--compile", help="With torch.compile.")]
Dropout = Annotated[float, typer.Option(help="Share of activations dropped.")]
LauncherName = Annotated[
    str, typer.Option(help="Whose conventions on bytes apply: see docs/launchers.md.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
ClusterFile = Annotated[
    Path | None,
    typer.Option("--cluster", help="A cluster file: GPU types of your own, and prices."),
]
