"""How long does one training step take, and what is the time spent on?

Theory of operation. The slowest pipeline stage decides: it holds ceil(layers / pp) layers and, as
the last one, the head. Its time per micro-batch is what the GPU computes (`compute`, `work`) plus
the communication that cannot hide (`network`), or the time its host needs to enqueue all that,
whichever is longer. A step is that time for every micro-batch, once the other stages to fill and
drain the pipeline (arXiv:2104.04473: divided by the virtual stages), then gradients, optimizer and
the host's own work. All layouts are computed at once; nothing here looks at a single one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from drystone.describe.generations import generation_of
from drystone.describe.layout import Layouts
from drystone.describe.machine import Machine, measured_machine
from drystone.describe.model import ModelSpec
from drystone.describe.recipe import Recipe
from drystone.estimate.launchers import find_launcher
from drystone.estimate.learned.pooled import kind_of, type_name
from drystone.estimate.time.experts import expert_habits
from drystone.estimate.time.step import (
    Prepared,
    prepare_step,
    split_layouts,
    stage_seconds,
    step_seconds,
)
from drystone.estimate.time.work import make_work

if TYPE_CHECKING:  # a profile is checked by pydantic, which nobody needs who has no profile
    from drystone.describe.profile import Profile

FloatArray = npt.NDArray[np.float64]

SOURCES = {
    "matmul": "2 (A + A0) (D + D0) / rate per multiplication, forward and backward; compute.py",
    "attention": "FLOPs of attention proper over what fused kernels reach; arXiv:2307.08691",
    "memory_bound": "bytes that norms, activations, residuals, casts and the loss move / bandwidth",
    "recompute": "the part of the forward pass that is repeated; arXiv:2205.05198",
    "launch_bound": "host time to enqueue a micro-batch beyond what the GPU needs for it",
    "tensor_parallel": "two collectives a layer and direction; arXiv:1909.08053",
    "context_parallel": "keys and values around the ring beyond attention; arXiv:2310.01889",
    "expert_parallel": "two all-to-all a layer and direction; arXiv:2006.16668",
    "data_parallel": "gradients and gathered weights beyond what compute hides; arXiv:2304.11277",
    "pipeline_send": "activations and their gradients to the next stage; arXiv:2104.04473",
    "pipeline_bubble": "(pp - 1) stages of filling and draining / virtual stages; arXiv:2104.04473",
    "optimizer": "bytes of weights, gradients and states / bandwidth, or / bus when offloaded",
    "straggler": "a step waits for the slowest of n equal GPUs: sqrt(2 ln n) spreads of their pace",
    "host": "data, clipping, loss scaling and logging once a step, by launcher",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedEstimate:
    """One layout's step, itemised in seconds."""

    items: dict[str, float]
    tokens_per_step: float
    num_gpus: int
    model_flops_per_token: float
    peak_flops: float

    @property
    def step_seconds(self) -> float:
        """The whole step."""
        return sum(self.items.values())

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """The pace."""
        return self.tokens_per_step / self.step_seconds / self.num_gpus

    @property
    def model_flops_utilisation(self) -> float:
        """The share of the peak that the model's own FLOPs come to."""
        return self.tokens_per_second_per_gpu * self.model_flops_per_token / self.peak_flops

    @property
    def sources(self) -> dict[str, str]:
        """The formula behind each item."""
        reference = "a forward pass of DPO's frozen model; arXiv:2305.18290"
        return SOURCES | ({"reference": reference} if "reference" in self.items else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedEstimates:
    """Many layouts' steps: seconds of each item, one entry a layout."""

    matmul_seconds: FloatArray
    attention_seconds: FloatArray
    memory_bound_seconds: FloatArray
    recompute_seconds: FloatArray
    launch_bound_seconds: FloatArray
    tensor_parallel_seconds: FloatArray
    context_parallel_seconds: FloatArray
    expert_parallel_seconds: FloatArray
    data_parallel_seconds: FloatArray
    pipeline_send_seconds: FloatArray
    pipeline_bubble_seconds: FloatArray
    optimizer_seconds: FloatArray
    straggler_seconds: FloatArray
    host_seconds: FloatArray
    step_seconds: FloatArray
    tokens_per_step: FloatArray
    num_gpus: FloatArray
    model_flops_per_token: float
    peak_flops: float

    def __len__(self) -> int:
        return len(self.step_seconds)

    @property
    def tokens_per_second_per_gpu(self) -> FloatArray:
        """The pace."""
        return self.tokens_per_step / (self.step_seconds * self.num_gpus)

    @property
    def model_flops_utilisation(self) -> FloatArray:
        """The model's FLOPs over the peak of the precision.

        6 per multiplied parameter and token plus attention; nothing that is recomputed, and of a
        causal mask only the half that is needed (others count it whole: 12 x layers x hidden x s).
        """
        return self.tokens_per_second_per_gpu * (self.model_flops_per_token / self.peak_flops)

    def row(self, index: int) -> SpeedEstimate:
        """One layout's estimate as plain numbers."""
        names = [
            field.name for field in fields(self) if field.name.removesuffix("_seconds") in SOURCES
        ]
        return SpeedEstimate(
            items={n.removesuffix("_seconds"): float(getattr(self, n)[index]) for n in names},
            tokens_per_step=float(self.tokens_per_step[index]),
            num_gpus=int(self.num_gpus[index]),
            model_flops_per_token=self.model_flops_per_token,
            peak_flops=self.peak_flops,
        )


def estimate_speed(
    model: ModelSpec,
    recipe: Recipe,
    layouts: Layouts,
    machine: Machine,
    *,
    profile: Profile | None = None,
) -> SpeedEstimates:
    """One training step of every layout. The layouts are taken as checked (`check_layout`).

    What the profile has measured replaces the formula or the constant that stands for it.
    """
    prepared = prepare(model, recipe, machine, profile)
    step = step_seconds(prepared, layouts)
    factor = _step_factor(profile or machine.profile, model.name, recipe.launcher)
    seconds = {name: getattr(step, name) for name in SOURCES}
    if factor != 1.0:
        seconds = {name: factor * array for name, array in seconds.items()}
    return SpeedEstimates(
        **{f"{name}_seconds": array for name, array in seconds.items()},
        step_seconds=factor * step.total,
        tokens_per_step=step.tokens_per_step,
        num_gpus=step.num_gpus,
        model_flops_per_token=prepared.work.model_flops_per_token,
        peak_flops=prepared.device.peak_flops,
    )


def _step_factor(profile: Profile | None, model: str, launcher: str) -> float:
    if profile is None or not profile.steps:
        return 1.0
    from drystone.estimate.learned.profile import step_factor

    return step_factor(profile, model, launcher)


@lru_cache(maxsize=256)
def prepare(
    model: ModelSpec, recipe: Recipe, machine: Machine, profile: Profile | None
) -> Prepared:
    """The part of an estimate that no layout changes; kept for the next call.

    A profile that is given replaces that of the machine.
    """
    gpu, launcher = generation_of(machine.gpu), find_launcher(recipe.launcher).speed
    if profile is not None:
        machine = measured_machine(machine, profile)
    prepared = prepare_step(model, recipe, machine, gpu=gpu, launcher=launcher)
    return _measured(prepared, model, machine.profile) if machine.profile else prepared


def _measured(prepared: Prepared, model: ModelSpec, profile: Profile) -> Prepared:
    """With what the profile has measured in the place of the formulas."""
    from drystone.estimate.learned.profile import (
        correction_of,
        make_correction,
        measured_device,
        measured_launcher,
        slowed,
    )

    recipe = prepared.recipe
    launcher = measured_launcher(profile, prepared.launcher)
    kind = kind_of(model, recipe, None, type_name(prepared.machine.gpu))
    factor = correction_of(profile, "speed", kind).factor
    measured = measured_device(profile, prepared.device)
    device, machine = slowed(measured, prepared.machine, factor)
    prepared = replace(
        prepared,
        device=device,
        machine=machine,
        launcher=launcher,
        work=make_work(model, recipe, device, launcher),
        experts=expert_habits(recipe, launcher),
        host_slowness=factor * (1.0 if profile.launch_seconds else prepared.host_slowness),
    )
    timed = [
        layer
        for layer in profile.layers
        if (layer.model, layer.seq_len, profile.precision)
        == (model.name, recipe.seq_len, recipe.precision.value)
    ]
    paces = [
        pace
        for pace in profile.paces
        if (pace.model, pace.launcher) == (model.name, recipe.launcher)
    ]
    sizes = Layouts.build(micro_batch=[layer.micro_batch for layer in timed] or [1])
    stage = stage_seconds(prepared, split_layouts(sizes, recipe, prepared.work))
    number, num_layers = len(timed), prepared.work.num_layers
    estimated = (
        stage.forward[:number] / num_layers,
        (stage.backward - stage.recompute)[:number] / num_layers,
    )
    return replace(prepared, correction=make_correction(timed, paces, estimated))
