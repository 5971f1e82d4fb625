"""What are the best ways to run one job on these GPUs? All ways, ranked, with reasons.

Every type alone (Cells, of like and of unlike stages), and all of them at once both ways: data
parallel with uneven shares, and a pipeline over groups. Slow types can be a burden, so the mixed
ways are tried over the fastest two types, three, and so on. When nothing fits, the answer is a
`Refusal`: how near it was, and what to change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from drystone.describe.layout import Layouts
from drystone.describe.model import ModelSpec
from drystone.describe.pool import GpuGroup, Pool, make_pool
from drystone.describe.recipe import Offload, Recipe, Recompute, auto_precision
from drystone.plan.cells.search import RECOMPUTES, Cells, NearestMiss, cell_plan, search_cells
from drystone.plan.cells.unlike import plan_unlike_stages
from drystone.plan.executable import executable_cells, marked
from drystone.plan.groups.pipelines import plan_groups
from drystone.plan.options import count_grid
from drystone.plan.plan import Plan, Way
from drystone.plan.uneven.assignment import AssignmentShortfall
from drystone.plan.uneven.data_parallel import plan_uneven

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """How near one GPU type alone came to running the job."""

    gpu: str
    miss: NearestMiss


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanList:
    """The plans of one job, the fastest first; or, when there are none, how near it was."""

    plans: tuple[Plan, ...]
    misses: tuple[Miss, ...]
    shortfall: AssignmentShortfall | None = None


def plan_job(
    model: ModelSpec,
    recipe: Recipe,
    pool: Pool,
    *,
    dollars_per_gpu_hour: Mapping[str, float] | None = None,
    chooses_precision: bool = False,
) -> PlanList:
    """All ways to run the job on the pool, ranked by speed, then by price, then by simplicity.

    With `chooses_precision` every plan has the precision that `auto` means on its GPUs.
    """
    prices = dollars_per_gpu_hour or {}
    plans: list[Plan] = []
    misses: list[Miss] = []
    best_alone: dict[str, Plan] = {}
    for group in pool.groups:
        mine = _with_precision(recipe, [group]) if chooses_precision else recipe
        cells = search_cells(model, mine, group.machine, count_grid(group.count))
        found = _cell_plans(model, cells, group)
        if found:
            best_alone[group.gpu.name] = min(found, key=lambda plan: plan.step_seconds)
        elif cells.nearest is not None:
            misses.append(Miss(gpu=group.gpu.name, miss=cells.nearest))
        plans += found
        alone = best_alone.get(group.gpu.name)
        below = alone.step_seconds if alone else float("inf")
        if unlike := plan_unlike_stages(model, mine, group, below_seconds=below):
            plans.append(unlike)
            best_alone[group.gpu.name] = unlike
    shortfall = None
    for some in _subpools(pool, best_alone):
        mine = _with_precision(recipe, some.groups) if chooses_precision else recipe
        uneven = plan_uneven(model, mine, some)
        if isinstance(uneven, Plan):
            plans.append(uneven)
        else:
            shortfall = uneven
        piped = plan_groups(model, mine, some)
        if piped is not None:
            plans.append(piped)
    plans = [priced(marked(plan), prices) for plan in plans]
    return PlanList(plans=_explained(_ranked(plans)), misses=tuple(misses), shortfall=shortfall)


def plan_data_parallel(
    model: ModelSpec,
    recipe: Recipe,
    pool: Pool,
    *,
    dollars_per_gpu_hour: Mapping[str, float] | None = None,
    chooses_precision: bool = False,
) -> PlanList:
    """What FSDP, DeepSpeed's ZeRO and DDP can do: equal GPUs, data split, state sharded or not."""
    none, _, full = RECOMPUTES
    return plan_some_cells(
        model,
        recipe,
        pool,
        partial(_is_data_parallel, recipe.offload),
        recomputes=(none, full),
        dollars_per_gpu_hour=dollars_per_gpu_hour,
        chooses_precision=chooses_precision,
    )


def _is_data_parallel(offload: Offload, splits: Layouts) -> BoolArray:
    alone = splits.tp * splits.pp * splits.cp * splits.ep == 1
    # Only ZeRO-3 and FSDP move the weights out as well, and the optimizer alone needs ZeRO.
    least = {Offload.STATE: 3, Offload.OPTIMIZER: 1}.get(offload, 0)
    keeps = splits.keep_gathered > 0 if offload is Offload.OPTIMIZER else np.False_
    return np.asarray(
        alone & (splits.shard_size == splits.dp) & (splits.sharding >= least) & ~keeps
    )


def plan_some_cells(
    model: ModelSpec,
    recipe: Recipe,
    pool: Pool,
    may: Callable[[Layouts], BoolArray],
    *,
    recomputes: tuple[Recompute, ...] = RECOMPUTES,
    dollars_per_gpu_hour: Mapping[str, float] | None = None,
    chooses_precision: bool = False,
) -> PlanList:
    """Plans on equal GPUs, of those layouts that `may` allows."""
    plans: list[Plan] = []
    misses: list[Miss] = []
    for group in pool.groups:
        mine = _with_precision(recipe, [group]) if chooses_precision else recipe
        counts = count_grid(group.count)
        cells = search_cells(model, mine, group.machine, counts, recomputes=recomputes)
        allowed = cells.take(np.flatnonzero(may(cells.layouts)))
        found = _cell_plans(model, allowed, group)
        if not found and cells.nearest is not None:
            misses.append(Miss(gpu=group.gpu.name, miss=cells.nearest))
        plans += found
    plans = [priced(marked(plan), dollars_per_gpu_hour or {}) for plan in plans]
    return PlanList(plans=_explained(_ranked(plans)), misses=tuple(misses))


def plan_executable(model: ModelSpec, recipe: Recipe, pool: Pool) -> Plan | AssignmentShortfall:
    """The fastest plan on all GPUs of the pool that the runtime executes.

    Data parallel, layer by layer or with whole weights; or, on equal GPUs, a Cell of like or unlike
    stages.
    """
    best = plan_uneven(model, recipe, pool)
    if len(pool.groups) > 1:
        return best
    [group] = pool.groups
    cells = executable_cells(model, recipe, group.machine, (group.count,))
    seconds = best.step_seconds if isinstance(best, Plan) else float("inf")
    if len(cells) and cells.step_seconds[0] < seconds:
        best, seconds = cell_plan(model, cells, 0, group), float(cells.step_seconds[0])
    return plan_unlike_stages(model, recipe, group, below_seconds=seconds) or best


def _with_precision(recipe: Recipe, groups: Sequence[GpuGroup]) -> Recipe:
    return replace(recipe, precision=auto_precision(group.gpu for group in groups))


def _subpools(pool: Pool, best_alone: Mapping[str, Plan]) -> list[Pool]:
    """The fastest two types, three, and so on to all; types that run nothing alone come last."""

    def pace(group: GpuGroup) -> float:
        alone = best_alone.get(group.gpu.name)
        return alone.tokens_per_second if alone else 0.0

    ordered = sorted(pool.groups, key=lambda group: (-pace(group), group.gpu.name))
    return [
        make_pool(ordered[:number], between=pool.between) for number in range(2, len(ordered) + 1)
    ]


# --- Cells as plans --------------------------------------------------------------------------


def _cell_plans(model: ModelSpec, cells: Cells, group: GpuGroup) -> list[Plan]:
    """Of one type: the fastest, and the one that costs least GPU time for a token."""
    if not len(cells):
        return []
    best = cells.best()
    seconds = best.step_seconds
    picks = {int(seconds.argmin()), int((seconds * best.layouts.num_gpus).argmin())}
    return [cell_plan(model, best, index, group) for index in sorted(picks)]


# --- ranking and reasons ---------------------------------------------------------------------


def priced(plan: Plan, prices: Mapping[str, float]) -> Plan:
    """The plan with what its GPUs cost, where all prices are known."""
    if not all(name in prices for name in plan.gpus):
        return plan
    dollars = sum(prices[name] * count for name, count in plan.gpus.items())
    return replace(plan, dollars_per_hour=dollars)


def _ranked(plans: list[Plan]) -> list[Plan]:
    ways = list(Way)
    return sorted(
        plans,
        key=lambda plan: (
            plan.step_seconds,
            plan.dollars_per_hour or 0.0,
            plan.num_gpus,
            ways.index(plan.way),
        ),
    )


def _explained(plans: list[Plan]) -> tuple[Plan, ...]:
    """Each plan with one sentence: why it wins, or by how much it loses."""
    if not plans:
        return ()
    first = plans[0]
    cheapest = min(plans, key=lambda plan: plan.dollars_per_billion_tokens or float("inf"))
    explained = []
    for plan in plans:
        if plan is first:
            reason = f"fastest: {_advantage(first, plans)}"
        else:
            reason = f"{plan.step_seconds / first.step_seconds:.2f}x the time of the fastest"
        if plan is cheapest and plan.dollars_per_hour is not None:
            reason += "; cheapest for a token"
        explained.append(replace(plan, reason=reason))
    return tuple(explained)


def _advantage(first: Plan, plans: list[Plan]) -> str:
    """What the winner has over the best plan of another way or on other GPUs."""
    others = [p for p in plans if p is not first and (p.way, p.gpus) != (first.way, first.gpus)]
    if not others:
        return "the only way that fits"
    second = others[0]
    on = " + ".join(f"{count} {gpu}" for gpu, count in second.gpus.items())
    gain = second.step_seconds / first.step_seconds
    return f"{gain:.2f}x the speed of the next, {second.way.value} on {on}"
