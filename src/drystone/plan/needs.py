"""What does training a model take, by GPU type? The fewest GPUs, their memory, speed and price."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, hypot

from drystone.describe.gpu import GpuSpec
from drystone.describe.machine import default_machine
from drystone.describe.model import ModelSpec
from drystone.describe.recipe import Recipe
from drystone.estimate.learned.pooled import shipped_spreads
from drystone.estimate.whole import estimate_layout
from drystone.plan.answers import find_gpus_for

# Of a normal distribution: four of five measured speeds lie within so many standard deviations.
_FOUR_OF_FIVE = 1.2816


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The fewest GPUs of one type that train one recipe, and what they do."""

    model: str
    tuning: str
    seq_len: int
    gpu: str
    num_gpus: int
    layout: str
    recompute: str
    low_bytes: float  # of the hungriest GPU
    high_bytes: float
    low_tokens_per_second: float
    high_tokens_per_second: float
    dollars_per_billion_tokens: float | None


def needs_of(
    model: ModelSpec,
    recipe: Recipe,
    gpus: Sequence[GpuSpec],
    *,
    dollars_per_gpu_hour: Mapping[str, float],
) -> list[Need]:
    """One row for each GPU type that does, in their order."""
    found = find_gpus_for(
        model, recipe, gpus, dollars_per_gpu_hour=dollars_per_gpu_hour, chooses_precision=True
    )
    spread = exp(_FOUR_OF_FIVE * hypot(*shipped_spreads("speed")))
    rows = {}
    for answer in found:
        plan = answer.smallest
        layout = plan.layout
        assert layout is not None  # on GPUs of one type a plan is a Cell
        gpu = next(spec for spec in gpus if spec.name == answer.gpu)
        # Ranks that do not divide the batch take turns with what is over; memory is that of more.
        at_once = layout.dp * layout.micro_batch
        even = replace(plan.recipe, global_batch=-(-recipe.global_batch // at_once) * at_once)
        whole = estimate_layout(model, even, layout, default_machine(gpu))
        pace = plan.tokens_per_second
        rows[answer.gpu] = Need(
            model=model.name,
            tuning=recipe.tuning.value,
            seq_len=recipe.seq_len,
            gpu=answer.gpu,
            num_gpus=plan.num_gpus,
            layout=str(layout),
            recompute=str(plan.recipe.recompute),
            low_bytes=whole.hungriest.low_bytes,
            high_bytes=whole.hungriest.high_bytes,
            low_tokens_per_second=pace / spread,
            high_tokens_per_second=pace * spread,
            dollars_per_billion_tokens=plan.dollars_per_billion_tokens,
        )
    return [rows[gpu.name] for gpu in gpus if gpu.name in rows]
