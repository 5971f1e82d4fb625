"""Plans for a user's own module: its batch and state divided over GPUs, equal or not.

As `data_parallel` does for known models (Cephalo, arXiv:2411.01075), from what a trace knows:
bytes and operations, not how long kernels take. So compute is counted at the pace of the GPU's
best matrix multiplication, and a collective shows in full: the plan is about who does what. What
is measured corrects the speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import inf

import numpy as np
import numpy.typing as npt

from drystone.describe.gpu import GpuSpec
from drystone.describe.model import ModuleSpec
from drystone.describe.pool import GpuGroup, Pool, make_pool
from drystone.describe.recipe import Precision, Recipe
from drystone.estimate.launchers import find_launcher
from drystone.estimate.learned.residuals import memory_range
from drystone.estimate.memory.layer_major import layer_major_recipe
from drystone.estimate.memory.peak import context_bytes, workspace_bytes
from drystone.estimate.memory.terms import StateBytes, state_bytes
from drystone.estimate.module.estimate import best_flops
from drystone.estimate.time.overlap import straggler_share
from drystone.plan.plan import GpuNeed, Plan
from drystone.plan.uneven.assignment import Assignment, AssignmentShortfall, plan_assignment
from drystone.plan.uneven.data_parallel import hungriest_ranks, make_plan, slowest_ring
from drystone.plan.uneven.spec import AssignmentSpec, RankKind, ring_regimes

FloatArray = npt.NDArray[np.float64]

_MAX_MICRO_BATCH = 64
_GRADIENT_BYTES = 4.0  # of a whole layer: added and reduced in fp32
_FULL_WIDTH = (Precision.FP32, Precision.TF32)


def plan_module_grid(
    module: ModuleSpec,
    recipe: Recipe,
    pool: Pool,
    grids: Sequence[tuple[int, ...]],  # by type: the numbers of GPUs to try
    *,
    prunes: bool,
) -> dict[tuple[int, ...], Plan]:
    """By GPUs of each type: one type alone, then pairs; those that fit.

    With `prunes`, pairs only where that is faster than each of the two alone.
    """
    wanted = [{column: number} for column, numbers in enumerate(grids) for number in numbers]
    wanted += [
        {first: number, second: more}
        for first, second in combinations(range(len(grids)), 2)
        for number in grids[first]
        for more in grids[second]
    ]
    alone: dict[tuple[int, int], float] = {}  # by type and number: seconds of a step
    plans: dict[tuple[int, ...], Plan] = {}
    for some in wanted:
        groups = [
            GpuGroup(machine=pool.groups[column].machine, count=number)
            for column, number in some.items()
        ]
        plan = plan_module(module, recipe, make_pool(groups))
        if not isinstance(plan, Plan):
            continue
        if len(some) == 1:
            alone |= dict.fromkeys(some.items(), plan.step_seconds)
        elif prunes and plan.step_seconds >= min(alone.get(part, inf) for part in some.items()):
            continue
        plans[tuple(some.get(column, 0) for column in range(len(grids)))] = plan
    return plans


def plan_module(module: ModuleSpec, recipe: Recipe, pool: Pool) -> Plan | AssignmentShortfall:
    """The fastest division of batch and state over all GPUs of the pool."""
    mine = layer_major_recipe(recipe)
    state = state_bytes(mine, find_launcher(mine.launcher))
    spec = _assignment_spec(module, mine, pool, state)
    found = plan_assignment(spec)
    if isinstance(found, AssignmentShortfall):
        return found
    return make_plan(
        module,
        mine,
        pool,
        found,
        items=_time_items(module, mine, pool, found),
        needs=_needs(pool, spec, found),
        reason="a module of its own: data parallel, by what a trace of it told",
    )


def section_flops(module: ModuleSpec) -> dict[str, float]:
    """Operations of one sample by section of the engine: a block both ways, and the rest."""
    return {
        "forward": module.block_forward_flops,
        "backward": module.block_backward_flops + module.block_forward_flops,
        "head": module.outer_flops,
    }


def _assignment_spec(
    module: ModuleSpec, recipe: Recipe, pool: Pool, state: StateBytes
) -> AssignmentSpec:
    _, high = memory_range()
    kept = state.weights + state.gradients + state.master + state.moments + state.step
    width = 4.0 if recipe.precision in _FULL_WIDTH else 2.0
    params = module.num_params / module.num_layers
    launcher = find_launcher(recipe.launcher).speed
    share = launcher.gather_share if len(pool.groups) == 1 else launcher.network_gather_share
    return AssignmentSpec(
        kinds=tuple(
            _rank_kind(module, recipe, group, pool.num_gpus, width) for group in pool.groups
        ),
        batch=recipe.global_batch,
        state_bytes=module.num_params * kept * high,
        regimes=ring_regimes(
            slowest_ring(pool),
            num_ranks=pool.num_gpus,
            allgather_bytes=params * width / share,
            reduce_scatter_bytes=params * _GRADIENT_BYTES / share,
        ),
        may_idle=True,
    )


def _rank_kind(
    module: ModuleSpec, recipe: Recipe, group: GpuGroup, num_ranks: int, width: float
) -> RankKind:
    samples = np.arange(min(recipe.global_batch, _MAX_MICRO_BATCH) + 1, dtype=np.float64)
    rate = best_flops(group.gpu, recipe)
    outer = module.outer_flops / module.num_layers
    return RankKind(
        num_ranks=group.count,
        forward_seconds=samples * module.block_forward_flops / rate,
        backward_seconds=samples * (module.block_backward_flops + outer) / rate,
        compute_memory_bytes=_compute_bytes(module, group.gpu, samples, num_ranks, width),
        usable_bytes=float(group.gpu.usable_bytes),
    )


def _compute_bytes(
    module: ModuleSpec, gpu: GpuSpec, samples: FloatArray, num_ranks: int, width: float
) -> FloatArray:
    """What a rank needs beside its share of the state, in the moments of `layer_major.py`.

    All that is no block is one layer, and its gradient stays from the loss to the end.
    """
    block, around = float(module.block_params), float(module.outer_params)
    further, is_busy = np.maximum(samples - 1, 0), samples > 0

    def line(first: float, more: float) -> FloatArray:
        return np.where(is_busy, first + more * further, 0.0)

    hidden = line(module.first_hidden_bytes, module.further_hidden_bytes)
    inside = line(module.first_block_bytes, module.further_block_bytes)
    outside = line(module.first_outer_bytes, module.further_outer_bytes)
    held = _GRADIENT_BYTES * around
    moments = (
        width * (2 * block + around) + held + outside + 3 * hidden,
        2 * width * block + 2 * _GRADIENT_BYTES * block + held + inside + 2 * hidden,
        width * around + held + _GRADIENT_BYTES * block + width * around * is_busy + 2 * hidden,
    )
    fixed = workspace_bytes(gpu) + context_bytes(int(num_ranks > 1), find_launcher("drystone"))
    _, high = memory_range()
    found: FloatArray = (fixed + np.max(moments, axis=0)) * high
    return found


def _time_items(
    module: ModuleSpec, recipe: Recipe, pool: Pool, found: Assignment
) -> dict[str, float]:
    busy = module.num_layers * found.synchronised_layer_seconds
    launcher = find_launcher(recipe.launcher).speed
    return {
        "layers": busy,
        "straggler": float(straggler_share(pool.num_gpus)) * busy,
        "host": launcher.step_host_seconds,
    }


def _needs(pool: Pool, spec: AssignmentSpec, found: Assignment) -> tuple[GpuNeed, ...]:
    """Of the hungriest rank of each type."""
    _, high = memory_range()
    return tuple(
        GpuNeed(
            gpu=group.gpu.name,
            count=group.count,
            required_bytes=high_bytes / high,
            high_bytes=high_bytes,
            usable_bytes=float(group.gpu.usable_bytes),
        )
        for group, _, high_bytes in hungriest_ranks(pool, spec, found)
    )
