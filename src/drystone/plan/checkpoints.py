"""Checkpoint interval of a job, by Young's rule: from what a save costs and how often things fail.

A save costs training the copy into host memory; writing goes on beside it. Saving every
`sqrt(2 x cost x mean time between failures)` loses least (Young 1974; Daly 2006 has the higher
terms, which vanish while a save takes seconds and failures are hours apart).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from drystone.describe.model import ModuleSpec
from drystone.describe.recipe import Optimizer, Tuning
from drystone.estimate.memory.terms import adapter_parameters
from drystone.estimate.parameters import count_model
from drystone.plan.plan import Plan
from drystone.units import HOUR_SECONDS

# 419 unplanned interruptions in 54 days on 16,384 H100 (arXiv:2407.21783, section 3.3.4).
_GPU_HOURS_BETWEEN_FAILURES: Final = 16_384 * 54 * 24 / 419
# Assumed: what is no fault of a GPU (reboots, out of memory on the host) ends a job once a week.
_HOURS_BETWEEN_OTHER_FAILURES: Final = 168.0
# Assumed: pinned copies over PCIe reach this; and a shared file system, for each machine.
_COPY_BYTES_PER_SECOND: Final = 10e9
_WRITE_BYTES_PER_SECOND: Final = 1e9
_GPUS_PER_MACHINE: Final = 8
# No one wants to lose more than the second, and nobody gains from saving more often than the first.
_MIN_SECONDS: Final = 30.0
_MAX_SECONDS: Final = 1800.0
_MAX_WRITING_SHARE: Final = 0.25  # of the time, so that the disk is there for others too
# Of a parameter: fp32 weights and moments, as the runtime saves them.
_TRAINED_BYTES: Final = {Optimizer.SGD: 4.0, Optimizer.SGD_MOMENTUM: 8.0}
_ADAM_BYTES: Final = 12.0
_FROZEN_BYTES: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInterval:
    """How often to save, and why."""

    checkpoint_bytes: float
    copy_seconds: float  # that training waits for
    write_seconds: float  # beside it
    failure_seconds: float  # the mean time between failures of the job
    num_steps: int  # between checkpoints

    def describe(self, step_seconds: float) -> str:
        """One line for people."""
        minutes = self.num_steps * step_seconds / 60
        return (
            f"Checkpoint of {self.checkpoint_bytes / 1e9:,.1f} GB every {self.num_steps:,} steps "
            f"({minutes:,.1f} min): a failure about every "
            f"{self.failure_seconds / HOUR_SECONDS:,.0f} h, a save stops training for "
            f"{self.copy_seconds:.1f} s and is written in about {self.write_seconds:.0f} s"
        )


def checkpoint_interval(plan: Plan) -> CheckpointInterval:
    """The steps between checkpoints that lose least, for one plan."""
    total = checkpoint_bytes(plan)
    # Data-parallel ranks of a stage save one copy together; with uneven shares the largest counts.
    shares = [rank.state_share for stage in plan.stages for rank in stage.ranks]
    largest = max(max(shares) / len(plan.stages), 1 / plan.num_gpus)
    copy_seconds = total * min(largest, 1.0) / _COPY_BYTES_PER_SECOND
    machines = max(1.0, plan.num_gpus / _GPUS_PER_MACHINE)
    write_seconds = total / (_WRITE_BYTES_PER_SECOND * machines)
    failures_an_hour = (
        plan.num_gpus / _GPU_HOURS_BETWEEN_FAILURES + 1 / _HOURS_BETWEEN_OTHER_FAILURES
    )
    failure_seconds = HOUR_SECONDS / failures_an_hour
    best = math.sqrt(2 * copy_seconds * failure_seconds)
    seconds = min(max(best, _MIN_SECONDS), _MAX_SECONDS)
    seconds = max(seconds, write_seconds / _MAX_WRITING_SHARE)
    return CheckpointInterval(
        checkpoint_bytes=total,
        copy_seconds=copy_seconds,
        write_seconds=write_seconds,
        failure_seconds=failure_seconds,
        num_steps=max(1, round(seconds / max(plan.step_seconds, 1e-9))),
    )


def checkpoint_bytes(plan: Plan) -> float:
    """Bytes of one checkpoint: weights and moments; what is frozen is saved as it is computed."""
    model, recipe = plan.model, plan.recipe
    trained_bytes = _TRAINED_BYTES.get(recipe.optimizer, _ADAM_BYTES)
    if isinstance(model, ModuleSpec):
        return model.num_params * trained_bytes
    total = float(count_model(model).total)
    if recipe.tuning is Tuning.FULL:
        return total * trained_bytes
    adapters = sum(
        num_layers * adapter_parameters(block, model.hidden_size, recipe.lora)
        for block, num_layers in model.stack
    )
    return total * _FROZEN_BYTES + adapters * trained_bytes
