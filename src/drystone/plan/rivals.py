"""Rivals of a plan: other ways to run a job on the same equal GPUs that may really be faster.

An estimate is off by some per cent, so the best of it need not be the best. Plans within its error
of the best are worth a few steps each at the launch, one for each pair of tensor-parallel degree
and number of stages: those that differ by less are alike in what the estimate may have wrong.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np

from drystone.describe.layout import Sharding
from drystone.describe.model import ModelSpec
from drystone.describe.pool import GpuGroup, make_pool
from drystone.describe.recipe import Recipe
from drystone.plan.cells.search import cell_plan
from drystone.plan.executable import executed_layouts
from drystone.plan.plan import Plan
from drystone.plan.uneven.data_parallel import plan_uneven

# Median error of estimated times, each source of measurements left out in turn (docs/speed.md).
ESTIMATE_ERROR: Final = 0.082
MAX_RIVALS: Final = 2


def rival_plans(model: ModelSpec, recipe: Recipe, group: GpuGroup, best: Plan) -> tuple[Plan, ...]:
    """The fastest other plans on all GPUs of the group, as far as the estimate may be wrong."""
    if group.count < 2:
        return ()
    limit = best.step_seconds * (1.0 + ESTIMATE_ERROR)
    kinds, rivals = {_kind(best)}, []
    for plan in _near_plans(model, recipe, group, limit):
        if _kind(plan) not in kinds:
            kinds.add(_kind(plan))
            rivals.append(plan)
    return tuple(rivals[:MAX_RIVALS])


def plan_words(plan: Plan) -> str:
    """`dp4 tp2, micro 2, none`: what tells a plan from its rivals. Unlike stages are all named."""
    stages = [f"dp{stage.dp} tp{stage.tp}" for stage in plan.stages]
    layers = [stage.end_layer - stage.first_layer for stage in plan.stages]
    if len(set(stages)) > 1:
        splits = " > ".join(f"{way} x{n}" for way, n in zip(stages, layers, strict=True))
    else:
        splits = f"{stages[0]} pp{len(stages)}" if len(stages) > 1 else stages[0]
    micro = plan.stages[0].ranks[0].micro_batch
    return f"{plan.way.value}: {splits}, micro {micro}, recompute {plan.recipe.recompute}"


@lru_cache(maxsize=256)
def _near_plans(
    model: ModelSpec, recipe: Recipe, group: GpuGroup, limit: float
) -> tuple[Plan, ...]:
    """Plans that take at most so many seconds, the fastest first."""
    cells = executed_layouts(model, recipe, group.machine, (group.count,))
    near = np.flatnonzero(cells.step_seconds <= limit)
    near = near[np.argsort(cells.step_seconds[near], kind="stable")]
    degrees = np.stack([cells.layouts.tp[near], cells.layouts.pp[near]], axis=1)
    _, first = np.unique(degrees, axis=0, return_index=True)
    found = [cell_plan(model, cells, index, group) for index in near[first].tolist()]
    shared = plan_uneven(model, recipe, make_pool([group]))
    if isinstance(shared, Plan) and shared.step_seconds <= limit:
        found.append(shared)
    return tuple(sorted(found, key=lambda plan: plan.step_seconds))


def _kind(plan: Plan) -> tuple[object, ...]:
    """Plans of one kind are wrongly estimated alike."""
    degrees = tuple((stage.tp, stage.dp) for stage in plan.stages)
    return (plan.sharding is Sharding.ZERO3, *degrees)
