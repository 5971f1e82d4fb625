"""What would one layout cost: memory on every stage, seconds a step, dollars?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from drystone.describe.gpu_prices import Price
from drystone.describe.layout import Layout, Layouts, check_layout
from drystone.describe.machine import Machine
from drystone.describe.model import ModelSpec
from drystone.describe.recipe import Recipe
from drystone.errors import InvalidSpec
from drystone.estimate.learned.pooled import Correction, kind_of, type_name
from drystone.estimate.memory.peak import ITEM_SOURCES, MOMENTS, estimate_memory
from drystone.estimate.parameters import count_model
from drystone.estimate.time.speed import SpeedEstimate, estimate_speed
from drystone.units import HOUR_SECONDS

if TYPE_CHECKING:
    from drystone.describe.profile import Profile


FloatArray = npt.NDArray[np.float64]

BILLION_TOKENS = 1e9


@overload
def dollars_per_billion_tokens(
    tokens_per_second_per_gpu: float, *, gpu_dollars_per_hour: float
) -> float: ...


@overload
def dollars_per_billion_tokens(
    tokens_per_second_per_gpu: FloatArray, *, gpu_dollars_per_hour: float | FloatArray
) -> FloatArray: ...


def dollars_per_billion_tokens(
    tokens_per_second_per_gpu: float | FloatArray, *, gpu_dollars_per_hour: float | FloatArray
) -> float | FloatArray:
    """Price of a billion tokens: the GPU count cancels, as pace and price are both per GPU."""
    if np.any(np.asarray(gpu_dollars_per_hour) < 0):
        raise InvalidSpec(f"a price of {gpu_dollars_per_hour} dollars an hour is below 0")
    dollars_per_second = gpu_dollars_per_hour / HOUR_SECONDS
    return dollars_per_second * BILLION_TOKENS / tokens_per_second_per_gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEstimate:
    """Memory on one rank of one pipeline stage, at its peak moment."""

    stage: int
    moment: str
    items: dict[str, float]  # bytes; they add up to device_bytes
    allocated_bytes: float
    reserved_bytes: float
    device_bytes: float
    required_bytes: float
    low_bytes: float  # `required_bytes`: four of five published runs lie between these ends
    high_bytes: float
    fits: bool  # `required_bytes` are there
    risk: float  # the share of such runs that would run out of memory, by the published ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What one layout of one job would cost."""

    model: ModelSpec
    recipe: Recipe
    layout: Layout
    machine: Machine
    stages: tuple[StageEstimate, ...]
    speed: SpeedEstimate
    price: Price | None
    learned: Mapping[str, Correction] = field(default_factory=dict)  # memory, speed: what runs say

    @property
    def hungriest(self) -> StageEstimate:
        """The stage that needs most memory."""
        return max(self.stages, key=lambda stage: stage.device_bytes)

    @property
    def fits(self) -> bool:
        """Whether every stage fits."""
        return all(stage.fits for stage in self.stages)

    @property
    def memory_sources(self) -> dict[str, str]:
        """The formula behind each item of memory."""
        reference = "DPO's frozen copy of the model in 16 bit; arXiv:2305.18290"
        asked = self.hungriest.items
        return ITEM_SOURCES | ({"reference": reference} if "reference" in asked else {})

    @property
    def dollars_per_billion_tokens(self) -> float | None:
        """What a billion tokens would cost to rent; None where no price is known."""
        if self.price is None:
            return None
        return dollars_per_billion_tokens(
            self.speed.tokens_per_second_per_gpu,
            gpu_dollars_per_hour=self.price.on_demand_dollars_per_gpu_hour,
        )

    def to_json(self) -> dict[str, Any]:
        """The documented shape of `drystone estimate --json`."""
        counted = count_model(self.model)
        speed = self.speed
        return {
            "model": {
                "name": self.model.name,
                "parameters": counted.total,
                "active_parameters": counted.active,
                "source": self.model.source,
            },
            "recipe": asdict(self.recipe) | {"recompute": str(self.recipe.recompute)},
            "layout": asdict(self.layout)
            | {"text": str(self.layout), "gpus": self.layout.num_gpus},
            "gpu": {
                "name": self.machine.gpu.name,
                "memory_bytes": self.machine.gpu.memory_bytes,
                "usable_bytes": self.machine.gpu.usable_bytes,
                "gpus_per_node": self.machine.gpus_per_node,
                "intra": asdict(self.machine.intra),
                "inter": asdict(self.machine.inter),
                "source": self.machine.gpu.source,
            },
            "fits": self.fits,
            "memory": {
                "hungriest_stage": self.hungriest.stage,
                "stages": [asdict(stage) for stage in self.stages],
                "sources": self.memory_sources,
            },
            "speed": {
                "items_seconds": speed.items,
                "step_seconds": speed.step_seconds,
                "tokens_per_second": speed.tokens_per_second_per_gpu * speed.num_gpus,
                "tokens_per_second_per_gpu": speed.tokens_per_second_per_gpu,
                "model_flops_utilisation": speed.model_flops_utilisation,
                "sources": speed.sources,
            },
            "learned": {measure: asdict(found) for measure, found in self.learned.items()},
            "price": (asdict(self.price) if self.price else {})
            | {"dollars_per_billion_tokens": self.dollars_per_billion_tokens},
        }


def estimate_layout(
    model: ModelSpec,
    recipe: Recipe,
    layout: Layout,
    machine: Machine,
    *,
    price: Price | None = None,
    profile: Profile | None = None,
) -> Estimate:
    """Everything about one layout; refuses one that the model cannot be split into."""
    problems = check_layout(model, recipe, layout)
    if problems:
        raise InvalidSpec(
            "; ".join(problems),
            where=f"layout {layout} of {model.name}",
            hint="Change the degrees, the micro-batch or the global batch",
        )
    speed = estimate_speed(model, recipe, Layouts.of([layout]), machine, profile=profile).row(0)
    stages = estimate_stages(model, recipe, layout, machine)
    learned = _learned(model, recipe, layout, machine, profile or machine.profile)
    if learned:
        known = learned["speed"].parts.get("run", 1.0)  # all else is in the estimate already
        items = {name: known * seconds for name, seconds in speed.items.items()}
        speed = replace(speed, items=items)
        stages = tuple(_corrected(stage, learned["memory"], machine) for stage in stages)
    return Estimate(
        model=model,
        recipe=recipe,
        layout=layout,
        machine=machine,
        stages=stages,
        speed=speed,
        price=price,
        learned=learned,
    )


def _learned(
    model: ModelSpec, recipe: Recipe, layout: Layout, machine: Machine, profile: Profile | None
) -> dict[str, Correction]:
    """What runs that were measured here say about this one."""
    if profile is None or not profile.readings:
        return {}
    from drystone.estimate.learned.profile import correction_of

    kind = kind_of(model, recipe, layout, type_name(machine.gpu))
    return {measure: correction_of(profile, measure, kind) for measure in ("memory", "speed")}


def _corrected(stage: StageEstimate, learned: Correction, machine: Machine) -> StageEstimate:
    """Every item times what was learned; the range is as much narrower as more is known."""
    factor, room = learned.factor, machine.gpu.usable_bytes
    required = stage.required_bytes
    low, high = learned.scaled_range(stage.low_bytes / required, stage.high_bytes / required)
    return replace(
        stage,
        items={name: factor * size for name, size in stage.items.items()},
        allocated_bytes=factor * stage.allocated_bytes,
        reserved_bytes=factor * stage.reserved_bytes,
        device_bytes=factor * stage.device_bytes,
        required_bytes=factor * required,
        low_bytes=low * required,
        high_bytes=high * required,
        fits=factor * required <= room,
        risk=0.0 if high * required <= room and learned.width_share < 1 else stage.risk,
    )


def estimate_stages(
    model: ModelSpec, recipe: Recipe, layout: Layout, machine: Machine
) -> tuple[StageEstimate, ...]:
    """Memory of every pipeline stage: the layout, repeated once per stage, in one array call."""
    layouts = Layouts.of([layout] * layout.pp)
    gpu = machine.gpu
    memory = estimate_memory(model, recipe, layouts, stage=np.arange(layout.pp), gpu=gpu)
    items, fits, ends = memory.items(), memory.fits(gpu), memory.likely_range()
    risk = memory.risk(gpu)
    return tuple(
        StageEstimate(
            stage=stage,
            moment=MOMENTS[int(memory.moment[stage])],
            items={name: float(array[stage]) for name, array in items.items()},
            allocated_bytes=float(memory.allocated[stage]),
            reserved_bytes=float(memory.reserved[stage]),
            device_bytes=float(memory.device[stage]),
            required_bytes=float(memory.required[stage]),
            low_bytes=float(ends.low[stage]),
            high_bytes=float(ends.high[stage]),
            fits=bool(fits[stage]),
            risk=float(risk[stage]),
        )
        for stage in range(layout.pp)
    )
