"""What does it cost to learn from preferences: DPO and reward models?

Both compare a chosen answer with a rejected one, so a sample is two sequences, which TRL puts into
one micro-batch (`DPOTrainer.concatenated_forward`, `RewardTrainer`). DPO (arXiv:2305.18290) also
asks a frozen copy of the model, the reference, about both: its weights are there beside the
trained ones, in 16 bit and divided as the launcher divides frozen weights, and its forward pass is
added to every step. With adapters the reference is the model with its adapters switched off: no
second copy, but the same forward pass. A reward model has one number in the place of the logits.

No published run of these is in the tables, so the range is that of other runs.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from drystone.describe.gpu_prices import Price
from drystone.describe.layout import Layout
from drystone.describe.machine import Machine
from drystone.describe.model import Head, ModelSpec
from drystone.describe.recipe import Precision, Recipe, Tuning
from drystone.estimate.learned.residuals import exceeds_share
from drystone.estimate.time.speed import SpeedEstimate
from drystone.estimate.whole import Estimate, StageEstimate, estimate_layout, estimate_stages

if TYPE_CHECKING:
    from drystone.describe.profile import Profile


class Objective(StrEnum):
    """What the loss compares."""

    NEXT_TOKEN = "next-token"
    DPO = "dpo"
    REWARD = "reward"


_SEQUENCES: Final = 2  # of a sample: chosen and rejected
# What a forward pass alone takes of an item of a training step: one of three products of each
# multiplication, one of three and a half of attention, and half of what both directions send.
_FORWARD_SHARES: Final = {
    "matmul": 1 / 3,
    "attention": 1 / 3.5,
    "memory_bound": 1 / 3,
    "launch_bound": 1 / 2,
    "tensor_parallel": 1 / 2,
    "context_parallel": 1 / 2,
    "expert_parallel": 1 / 2,
    "pipeline_send": 1 / 2,
    "pipeline_bubble": 1 / 3,
    "straggler": 1 / 3,
}


def estimate_objective(
    model: ModelSpec,
    recipe: Recipe,
    layout: Layout,
    machine: Machine,
    objective: Objective,
    *,
    price: Price | None = None,
    profile: Profile | None = None,
) -> Estimate:
    """One layout, for any objective; batches are counted in samples, which may be pairs."""
    if objective is Objective.NEXT_TOKEN:
        return estimate_layout(model, recipe, layout, machine, price=price, profile=profile)
    if objective is Objective.REWARD:
        model = replace(model, head=Head.CLASSIFY)
    recipe = replace(recipe, global_batch=_SEQUENCES * recipe.global_batch)
    layout = replace(layout, micro_batch=_SEQUENCES * layout.micro_batch)
    estimate = estimate_layout(model, recipe, layout, machine, price=price, profile=profile)
    if objective is Objective.REWARD:
        return estimate
    stages = estimate.stages
    if recipe.tuning is Tuning.FULL:
        frozen = replace(recipe, tuning=Tuning.LORA, precision=_narrow(recipe.precision))
        held = estimate_stages(model, frozen, layout, machine)
        stages = tuple(
            _with_reference(stage, other.items["weights"], recipe, machine)
            for stage, other in zip(stages, held, strict=True)
        )
    return replace(estimate, stages=stages, speed=_with_forward(estimate.speed, recipe))


def _narrow(precision: Precision) -> Precision:
    """Frozen weights are kept in 16 bit, whatever the trained ones are kept in."""
    return Precision.FP16 if precision.value.startswith("fp16") else Precision.BF16


def _with_reference(
    stage: StageEstimate, reference_bytes: float, recipe: Recipe, machine: Machine
) -> StageEstimate:
    required, room = stage.required_bytes + reference_bytes, machine.gpu.usable_bytes
    risk = exceeds_share(recipe.launcher, is_full=True, reading="allocated", room=room / required)
    return replace(
        stage,
        items=stage.items | {"reference": reference_bytes},
        allocated_bytes=stage.allocated_bytes + reference_bytes,
        reserved_bytes=stage.reserved_bytes + reference_bytes,
        device_bytes=stage.device_bytes + reference_bytes,
        required_bytes=required,
        low_bytes=stage.low_bytes * required / stage.required_bytes,
        high_bytes=stage.high_bytes * required / stage.required_bytes,
        fits=required <= room,
        risk=risk,
    )


def _with_forward(speed: SpeedEstimate, recipe: Recipe) -> SpeedEstimate:
    """A forward pass of the reference; with adapters two of three products were left, not three."""
    shares = dict(_FORWARD_SHARES)
    if recipe.tuning is not Tuning.FULL:  # no gradients of frozen weights: forward and one product
        shares["matmul"] = 1 / 2
    seconds = sum(shares.get(name, 0.0) * spent for name, spent in speed.items.items())
    return replace(speed, items=speed.items | {"reference": seconds})
