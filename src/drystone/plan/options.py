"""The option table of one job: resources against speed as arrays, the plan of each row beside it.

The best Cell of each type and count comes from one array search per type. For a grid of counts at
once are estimated: two types data parallel (`uneven/pairs`), and pipelines over groups of one type
or more (`groups/grid`), whichever is faster. What another option beats in
everything is left out. The parts are cached by job and hardware.

A row knows how it is carried out: a Cell by its place in the search, a division of a module as the
plan that was made for it. Mixed ways are estimated without the exact searches (tens of
milliseconds each), so those are done once for a row, when it is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations
from typing import Final

import numpy as np
import numpy.typing as npt

from drystone.describe.machine import Machine
from drystone.describe.model import ModelSpec, ModuleSpec
from drystone.describe.option import FloatArray, IntArray, OptionSet
from drystone.describe.pool import Pool
from drystone.describe.recipe import (
    Recipe,
)
from drystone.errors import NothingFits
from drystone.plan.cells.search import Cells, cell_plan, search_cells
from drystone.plan.cells.unlike import plan_unlike_stages
from drystone.plan.executable import EqualWays, equal_ways, marked
from drystone.plan.groups.grid import GroupWays, group_ways, pair_grid, part_of, run_grid
from drystone.plan.groups.pipelines import plan_groups
from drystone.plan.plan import Plan, Way
from drystone.plan.uneven.data_parallel import plan_uneven
from drystone.plan.uneven.modules import plan_module_grid
from drystone.plan.uneven.pairs import pair_speeds

BoolArray = npt.NDArray[np.bool_]
_Part = tuple[IntArray, FloatArray, FloatArray, IntArray]  # counts, step seconds, bytes, Cell

_MAX_MICRO_BATCH: Final = 16  # of Cells; larger ones are never much faster
# An assumption about scripts whose model nobody told us: each doubling of the GPUs gains this much.
# It only decides what is tried first; what is measured replaces it.
_SCRIPT_EFFICIENCY: Final = 0.9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobOptions:
    """The options of one job on the GPUs of a pool: each type alone first, then several."""

    pool: Pool
    table: OptionSet  # a column for each group of the pool
    shape: ModelSpec | ModuleSpec | None  # None: a script whose model nobody told us
    recipe: Recipe
    cell: IntArray  # by row: the row of `cells[type]`; -1: data parallel with shares of its own
    cells: tuple[Cells, ...] = ()  # by type: the best Cell of each count
    piped: IntArray | None = None  # by row: the row of `groups`; -1: no pipeline over groups
    groups: GroupWays | None = None
    is_for_runtime: bool = True
    plans: dict[int, Plan] = field(default_factory=dict)  # by row, of those that were made

    def __len__(self) -> int:
        return len(self.table)

    def plan(self, row: int) -> Plan | None:
        """Who computes what, made once for each row; None for a script."""
        if row not in self.plans and isinstance(self.shape, ModelSpec):
            self.plans[row] = self._make_plan(self.shape, row)
        return self.plans.get(row)

    def _make_plan(self, model: ModelSpec, row: int) -> Plan:
        some = part_of(self.pool, self.table.counts[row].tolist())
        plan = self._make_listed(model, row, some)
        if len(some.groups) == 1 and (self.is_for_runtime or plan.way is Way.GROUPS):
            [group] = some.groups
            seconds = plan.step_seconds
            return plan_unlike_stages(model, self.recipe, group, below_seconds=seconds) or plan
        return plan

    def _make_listed(self, model: ModelSpec, row: int, some: Pool) -> Plan:
        """The plan that the speed of the row was estimated from, or a faster one."""
        if self.cell[row] >= 0:
            cells = self.cells[int(self.table.counts[row].argmax())]
            return cell_plan(model, cells, int(self.cell[row]), some.groups[0])
        if self.groups is not None and self.piped is not None and self.piped[row] >= 0:
            found = self.groups.plan(int(self.piped[row]))
            return found if len(some.groups) == 1 else self._make_pipeline(model, some, found)
        uneven = plan_uneven(model, self.recipe, some)
        if not isinstance(uneven, Plan):
            raise NothingFits(f"{model.name} does not fit on {some}: {uneven}")
        return uneven

    def _make_pipeline(self, model: ModelSpec, pool: Pool, found: Plan) -> Plan:
        """The fastest pipeline over all GPUs of a pool: at least as fast as the one found."""
        best = plan_groups(model, self.recipe, pool)
        if (
            best is None
            or best.num_gpus != pool.num_gpus
            or best.step_seconds >= found.step_seconds
            or (self.is_for_runtime and marked(best).not_executable)
        ):
            return found
        return best


def job_options(
    shape: ModelSpec | ModuleSpec | None, recipe: Recipe, pool: Pool, *, prunes: bool
) -> JobOptions:
    """What our own runtime can execute of a job; with `prunes` without what fewer GPUs beat."""
    if shape is None:
        return _script_options(recipe, pool)
    if isinstance(shape, ModuleSpec):
        return _module_options(shape, recipe, pool, prunes=prunes)
    return enumerate_options(shape, recipe, pool, prunes=prunes, is_for_runtime=True)


def enumerate_options(
    model: ModelSpec,
    recipe: Recipe,
    pool: Pool,
    *,
    prunes: bool = True,
    is_for_runtime: bool = False,
) -> JobOptions:
    """Every option worth having on the pool: each type alone, and several types at once.

    With `prunes` without those that fewer GPUs beat; who may not take fewer wants them all. One
    type alone runs as its best Cell, or, with `is_for_runtime`, as our own runtime would run it.
    """
    find = _executed if is_for_runtime else _best_cells
    ways = [find(model, recipe, group.machine, group.count) for group in pool.groups]
    parts: list[_Part] = [
        (_spread({column: way.counts}, len(ways)), way.step_seconds, way.high_bytes, way.cell)
        for column, way in enumerate(ways)
    ]
    parts += [
        _together(model, recipe, pool, columns) for columns in combinations(range(len(ways)), 2)
    ]
    piped = [np.full(len(part[1]), -1) for part in parts]
    groups = _pipelines(model, recipe, pool, is_for_runtime=is_for_runtime)
    if groups is not None:
        number = len(groups.counts)
        none = np.full(number, -1)
        parts.append((groups.counts, groups.step_seconds, np.zeros(number), none))
        piped.append(np.arange(number))
    counts = np.concatenate([part[0] for part in parts])
    speeds = recipe.global_batch / np.concatenate([part[1] for part in parts])
    rows = _undominated(counts, speeds) if prunes else _fastest_each(counts, speeds)
    return JobOptions(
        pool=pool,
        table=OptionSet(
            counts=counts[rows],
            samples_per_second=speeds[rows],
            memory_bytes=np.concatenate([part[2] for part in parts])[rows],
        ),
        shape=model,
        recipe=recipe,
        cell=np.concatenate([part[3] for part in parts])[rows],
        cells=tuple(way.cells for way in ways),
        piped=np.concatenate(piped)[rows],
        groups=groups,
        is_for_runtime=is_for_runtime,
    )


@lru_cache(maxsize=256)
def _pipelines(
    model: ModelSpec, recipe: Recipe, pool: Pool, *, is_for_runtime: bool
) -> GroupWays | None:
    """Pipelines over groups that are faster than each of their types alone."""
    find = _executed if is_for_runtime else _best_cells
    grids = [run_grid(group.count) for group in pool.groups]
    limits = []
    for group, grid in zip(pool.groups, grids, strict=True):
        way = find(model, recipe, group.machine, group.count)
        alone = np.full(grid[-1] + 1, np.inf)
        alone[way.counts] = way.step_seconds
        limits.append(np.minimum.accumulate(alone)[list(grid)])
    return group_ways(model, recipe, pool, grids, limits, is_for_runtime=is_for_runtime)


def _fastest_each(counts: IntArray, speeds: FloatArray) -> IntArray:
    """Rows without those that are slower on the same GPUs."""
    order = np.lexsort((-speeds, *counts.T))
    is_first = np.ones(len(order), dtype=bool)
    is_first[1:] = (np.diff(counts[order], axis=0) != 0).any(axis=1)
    return np.sort(order[is_first])


def _spread(columns: Mapping[int, IntArray], num_types: int) -> IntArray:
    """Counts of some types as (options, types)."""
    counts = np.zeros((len(next(iter(columns.values()))), num_types), dtype=np.int64)
    for column, numbers in columns.items():
        counts[:, column] = numbers
    return counts


def _together(model: ModelSpec, recipe: Recipe, pool: Pool, columns: tuple[int, int]) -> _Part:
    """Two types: the counts of a grid that fit."""
    first, second = (pool.groups[column] for column in columns)
    speeds = pair_speeds(
        model,
        recipe,
        (first.machine, second.machine),
        pool.between,
        (pair_grid(first.count), pair_grid(second.count)),
    )
    rows = np.flatnonzero(np.isfinite(speeds.step_seconds))
    counts = {columns[0]: speeds.first_count[rows], columns[1]: speeds.second_count[rows]}
    return (
        _spread(counts, len(pool.groups)),
        speeds.step_seconds[rows],
        speeds.high_bytes[rows],
        np.full(len(rows), -1),
    )


def _undominated(counts: IntArray, speeds: FloatArray) -> IntArray:
    """Rows without those that are beaten: no more GPUs of any type, and at least as fast."""
    # Only options of no other types can beat one; bits say which types each uses.
    types = (counts > 0) @ (1 << np.arange(counts.shape[1]))
    kept = np.ones(len(speeds), dtype=bool)
    for mine in sorted(set(types.tolist())):
        rows = np.flatnonzero(types == mine)
        rivals = np.flatnonzero((types & ~mine) == 0)
        beats = speeds[rivals, None] >= speeds[rows]
        same = speeds[rivals, None] == speeds[rows]
        for column in counts.T:
            beats &= column[rivals, None] <= column[rows]
            same &= column[rivals, None] == column[rows]
        # Of equals, the first stays; nobody beats itself.
        beats &= ~same | (rivals[:, None] < rows)
        kept[rows] = ~beats.any(axis=0)
    return np.flatnonzero(kept)


def _module_options(module: ModuleSpec, recipe: Recipe, pool: Pool, *, prunes: bool) -> JobOptions:
    """One type alone, and two together; each is planned, so each has its plan."""
    grids = [pair_grid(group.count) for group in pool.groups]
    plans = plan_module_grid(module, recipe, pool, grids, prunes=prunes)
    needs = [max(need.high_bytes for need in plan.needs) for plan in plans.values()]
    return JobOptions(
        pool=pool,
        table=OptionSet(
            counts=np.array(list(plans), dtype=np.int64).reshape(len(plans), len(grids)),
            samples_per_second=np.array(
                [recipe.global_batch / plan.step_seconds for plan in plans.values()]
            ),
            memory_bytes=np.array(needs),
        ),
        shape=module,
        recipe=recipe,
        cell=np.full(len(plans), -1),
        plans=dict(enumerate(plans.values())),
    )


def _script_options(recipe: Recipe, pool: Pool) -> JobOptions:
    """One type alone, as fast as the peaks of the types say; of memory nothing is known."""
    gpus = [group.gpu for group in pool.groups]
    peaks = np.array([gpu.bf16_flops or gpu.fp16_flops or gpu.fp32_flops for gpu in gpus])
    counts = np.concatenate(
        [
            _spread({column: np.array(count_grid(group.count))}, len(gpus))
            for column, group in enumerate(pool.groups)
        ]
    )
    numbers = counts.sum(axis=1)
    gains = _SCRIPT_EFFICIENCY ** np.log2(numbers) * numbers
    table = OptionSet(
        counts=counts,
        samples_per_second=peaks[counts.argmax(axis=1)] / peaks.min() * gains,
        memory_bytes=np.zeros(len(counts)),
    )
    cell = np.full(len(counts), -1)
    return JobOptions(pool=pool, table=table, shape=None, recipe=recipe, cell=cell)


@lru_cache(maxsize=256)
def _best_cells(model: ModelSpec, recipe: Recipe, machine: Machine, most: int) -> EqualWays:
    cells = search_cells(
        model, recipe, machine, count_grid(most), most_micro_batch=_MAX_MICRO_BATCH
    ).best()
    return EqualWays(
        counts=cells.layouts.num_gpus,
        step_seconds=cells.step_seconds,
        high_bytes=cells.high_bytes,
        cell=np.arange(len(cells)),
        cells=cells,
    )


def _executed(model: ModelSpec, recipe: Recipe, machine: Machine, most: int) -> EqualWays:
    return equal_ways(model, recipe, machine, count_grid(most), _MAX_MICRO_BATCH)


def count_grid(most: int) -> tuple[int, ...]:
    """Counts worth trying: all up to 64, then in steps of an eighth, and `most` itself."""
    counts = list(range(1, min(most, 64) + 1))
    step = 8
    while counts[-1] < most:
        if counts[-1] >= 8 * step:
            step *= 2
        counts.append(min(most, counts[-1] + step))
    return tuple(counts)
