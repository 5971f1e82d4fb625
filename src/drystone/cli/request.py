"""Recipe, GPUs and prices that a command line asks for; a wrong word is refused with known ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from drystone.cli.options import words
from drystone.describe.catalogue import find_gpu, load_gpus
from drystone.describe.files.cluster import ClusterSpec, load_cluster_file
from drystone.describe.gpu import GpuSpec
from drystone.describe.gpu_prices import Price, cheapest_price
from drystone.describe.machine import find_link, measured_machine
from drystone.describe.model import ModelSpec
from drystone.describe.model_source import ModuleReference, resolve_model
from drystone.describe.pool import Pool, make_pool, parse_pool
from drystone.describe.recipe import (
    AttentionKernel,
    CudaGraphs,
    ExpertDispatch,
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


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """How a model is trained, as `estimate` and `plan` take it."""

    seq_len: Annotated[
        int,
        typer.Option(
            "--sequence",
            "--seq-len",
            help="Tokens in a sequence; none: as the model's context, 4096 at most.",
        ),
    ] = 0
    precision: Annotated[
        str,
        typer.Option(
            help="auto (bf16-mixed where every GPU knows it, else fp16-mixed; emulated: fp32), "
            f"{', '.join(Precision)}.",
            autocompletion=words("auto", *Precision),
        ),
    ] = "auto"
    optimizer: Annotated[
        str, typer.Option(help=f"{', '.join(Optimizer)}.", autocompletion=words(*Optimizer))
    ] = "adam"
    step_kernel: Annotated[str, typer.Option(help="fused, foreach or loop.")] = "fused"
    attention: Annotated[str, typer.Option(help="fused or eager.")] = "fused"
    loss: Annotated[str, typer.Option(help="plain, fused or chunked.")] = "plain"
    tuning: Annotated[
        str, typer.Option(help="full, lora or qlora.", autocompletion=words(*Tuning))
    ] = "full"
    lora_rank: Annotated[int, typer.Option(help="Rank of the adapters.")] = 16
    offload: Annotated[str, typer.Option(help="none, optimizer, state or activations.")] = "none"
    compiled: Annotated[bool, typer.Option("--compile", help="With torch.compile.")] = False
    dropout: Annotated[float, typer.Option(help="Share of activations dropped.")] = 0.0
    expert_dispatch: Annotated[
        str,
        typer.Option(
            help="How tokens reach their experts: auto (as the launcher), alltoall or fused "
            "(DeepEP, HybridEP).",
            autocompletion=words(*ExpertDispatch),
        ),
    ] = "auto"
    cuda_graphs: Annotated[
        str,
        typer.Option(
            help="What the host need not launch: auto (as the launcher), none, layers or full.",
            autocompletion=words(*CudaGraphs),
        ),
    ] = "auto"
    overlap_dispatch: Annotated[
        bool, typer.Option(help="Tokens travel to experts while other ones are computed.")
    ] = False
    balanced_experts: Annotated[
        bool, typer.Option(help="Every expert gets as many tokens, as benchmarks force it.")
    ] = False
    launcher: Annotated[
        str, typer.Option(help="Whose conventions on bytes apply: see docs/launchers.md.")
    ] = "drystone"

    def recipe(
        self,
        model: ModelSpec | None,
        *,
        global_batch: int,
        recompute: str = "none",
        gpus: Iterable[GpuSpec] = (),
        is_emulated: bool = False,
    ) -> Recipe:
        """The recipe that the options describe; `auto` is for these GPUs."""
        for name, value in (("--sequence", self.seq_len), ("--batch", global_batch)):
            if value < 0:
                raise InvalidSpec(f"{name} is {value}, must be >= 1 (or 0 for the usual)")
        find_launcher(self.launcher)
        if self.precision == "auto":
            precision = auto_precision(gpus, is_emulated=is_emulated)
        else:
            precision = parse_word(Precision, self.precision, "precision")
        return Recipe(
            seq_len=self.seq_len or usual_seq_len(model),
            global_batch=global_batch,
            precision=precision,
            optimizer=parse_word(Optimizer, self.optimizer, "optimizer"),
            step_kernel=parse_word(StepKernel, self.step_kernel, "step kernel"),
            recompute=Recompute.parse(recompute),
            attention=parse_word(AttentionKernel, self.attention, "attention kernel"),
            loss=parse_word(Loss, self.loss, "loss"),
            tuning=parse_word(Tuning, self.tuning, "tuning"),
            lora=Lora(rank=self.lora_rank),
            offload=parse_word(Offload, self.offload, "offload"),
            compiled=self.compiled,
            dropout=self.dropout,
            expert_dispatch=parse_word(ExpertDispatch, self.expert_dispatch, "expert dispatch"),
            cuda_graphs=parse_word(CudaGraphs, self.cuda_graphs, "kind of CUDA graphs"),
            overlap_dispatch=self.overlap_dispatch,
            balanced_experts=self.balanced_experts,
            launcher=self.launcher,
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
        raise UnknownName(what, text, [known.value for known in kind]) from None


def own_price(gpu: GpuSpec, dollars_per_gpu_hour: float) -> Price:
    """The price of --price."""
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


def with_profile(pool: Pool | None, path: Path, network: str = "") -> Pool:
    """The same GPUs, those of the type that a profile was measured on with what it says."""
    from drystone.describe.profile import load_profile

    profile = load_profile(path)
    device = profile.device
    if pool is None:
        raise InvalidSpec("a profile is of GPUs that are there", hint="Name them with --gpus")
    names = [group.gpu.name for group in pool.groups]
    try:
        measured = find_gpu(device).name
    except UnknownName:  # the driver's name of a device; no doubt is possible with one type
        measured = names[0] if len(names) == 1 else ""
    if measured not in names:
        raise InvalidSpec(
            f"the profile is of {device!r}, and the GPUs are {', '.join(names)}",
            hint="Write the type's name under `device` in the profile",
        )
    groups = []
    for group in pool.groups:
        if group.gpu.name == measured:
            group = replace(group, machine=measured_machine(group.machine, profile))
        groups.append(group)
    return make_pool(groups, between=pool.between if network else None)


def read_profiles(paths: Sequence[Path] | None) -> None:
    """Profiles of GPU types: every estimate of this process stands on them from now on."""
    if paths:
        from drystone.describe.profile import adopt_profile_files

        adopt_profile_files(paths)


def read_cluster(path: Path | None) -> ClusterSpec | None:
    """What a cluster file says: GPU types of one's own are known from now on."""
    return None if path is None else load_cluster_file(path, needs_nodes=False)


def say_own(gpus: Iterable[GpuSpec]) -> None:
    """Tell types that a file describes from those of the catalogue."""
    from drystone.cli.output import make_console

    for gpu in gpus:
        if gpu.is_own:
            told = f"{gpu.name} is a GPU type of your own: {gpu.source}"
            make_console(stderr=True).print(told, style="yellow", highlight=False)


def find_prices(text: str, cluster: ClusterSpec | None = None) -> dict[str, float]:
    """The example prices; over them a file's, and those of `A100-80G=1.80,V100-32G=0.90`."""
    prices = example_prices() | dict(cluster.dollars_per_gpu_hour if cluster else {})
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, dollars = part.partition("=")
        try:
            price = float(dollars)
        except ValueError:
            price = -1.0
        if not 0 <= price < float("inf"):
            raise InvalidSpec(
                f"{part!r} is not a price",
                hint="Write dollars per GPU and hour, like A100-80G=1.80",
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
