"""Pipelines over groups of GPUs for many numbers of GPUs at once, as options of a job.

The exact search (`search`) answers for one pool. A scheduler wants hundreds of pools, so here each
group brings a few splits of each count that use all its GPUs, fast ones and roomy ones, and every
combination of them is judged by a formula: all stages end together, and layers need not be whole.
The best combination of each pool is then worked out exactly. The plan itself is searched for when
the option is chosen, and is at least as fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Final

import numpy as np

from drystone.describe.model import ModelSpec
from drystone.describe.option import FloatArray, IntArray
from drystone.describe.pool import GpuGroup, Pool, make_pool
from drystone.describe.recipe import Recipe
from drystone.estimate.time.overlap import straggler_share
from drystone.plan.cells.search import RECOMPUTES
from drystone.plan.executable import executes_splits, has_plain_blocks
from drystone.plan.groups.pipelines import host_seconds, micro_batch_sizes, pipeline_plan
from drystone.plan.groups.search import Pipelines, work_out
from drystone.plan.groups.splits import DEEPEST, GroupSplits, Setting, full_splits, join_splits
from drystone.plan.plan import Plan

# By number of groups: splits of each that are combined with those of the others.
_NUM_SPLITS: Final = {1: 4, 2: 4, 3: 3, 4: 2}
# By number of groups: counts of each type that are tried, the largest and its halves.
_NUM_COUNTS: Final = {3: 4, 4: 3, 5: 2}
_NUM_WORKED_OUT: Final = 6  # of each pool
_SIMPLER: Final = 0.999  # of two ways that take about the same time, the simpler one
_MAX_OF_RUNS: Final = 8  # GPUs of one type in one node, as two runs of unlike stages
_MAX_TYPES: Final = 6  # at once; the sets of more than that are too many


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupWays:
    """The pipeline found for each of many pools."""

    model: ModelSpec
    recipe: Recipe
    pool: Pool  # the whole
    counts: IntArray  # (pools, types)
    step_seconds: FloatArray  # by pool
    pipelines: tuple[Pipelines, ...]  # tables of them
    place: IntArray  # (pools, 2): which table, and the row in it
    recompute: IntArray  # by split: index into RECOMPUTES

    def plan(self, row: int) -> Plan:
        """One of them as a plan."""
        table, index = self.place[row].tolist()
        best = self.pipelines[table].pick(index)
        used = np.flatnonzero(self.counts[row])
        number = np.zeros(self.counts.shape[1], dtype=np.int64)
        number[used] = np.arange(len(used))
        splits, first = best.setting.splits, int(best.rows[0])
        setting = Setting(
            splits=splits._replace(group_index=number[splits.group_index]),
            choices=(),
            num_micro=self.recipe.global_batch // int(splits.micro_batch[first]),
            recompute_index=int(self.recompute[first]),
        )
        return pipeline_plan(
            self.model,
            self.recipe,
            part_of(self.pool, self.counts[row].tolist()),
            replace(best, setting=setting),
        )


def pair_grid(most: int) -> tuple[int, ...]:
    """Counts tried beside another type: powers of two, half-way between from four on, `most`."""
    counts = {most}
    power = 1
    while power <= most:
        counts.add(power)
        if power >= 4 and power * 3 // 2 <= most:
            counts.add(power * 3 // 2)
        power *= 2
    return tuple(sorted(counts))


def run_grid(most: int) -> tuple[int, ...]:
    """Counts tried in one pipeline: all up to those of two runs, and those of `pair_grid`."""
    return tuple(sorted({*range(1, min(most, _MAX_OF_RUNS) + 1), *pair_grid(most)}))


def part_of(pool: Pool, counts: Sequence[int]) -> Pool:
    """So many GPUs of each type of a pool, joined as all of them are."""
    groups = [
        GpuGroup(machine=group.machine, count=count)
        for group, count in zip(pool.groups, counts, strict=True)
        if count
    ]
    return make_pool(groups, between=pool.between)


def group_ways(
    model: ModelSpec,
    recipe: Recipe,
    pool: Pool,
    grids: Sequence[tuple[int, ...]],
    limits: Sequence[FloatArray],
    *,
    is_for_runtime: bool,
) -> GroupWays | None:
    """For each pool its pipeline, where it takes less than the limits.

    Of one type alone its stages have unlike layers, in one run or two (`cells/unlike` tries more).

    `grids` are the counts of each type that are tried, ascending, and `limits` are seconds by type
    and count of the grid. With `is_for_runtime` only what our own runtime executes. None if there
    is no such pipeline.
    """
    if is_for_runtime and not has_plain_blocks(model):
        return None
    table = _Table.make(model, recipe, pool, grids, is_for_runtime=is_for_runtime)
    found = _runs_of_one_type(table, pool, limits)
    for number in range(1, min(len(grids), _MAX_TYPES, model.num_layers) + 1):
        rows = table.choose(number)
        for columns in combinations(range(len(grids)), number):
            counts = _counts_of([grids[column] for column in columns], number)
            limit = np.min(
                [limits[column][places] for column, places in zip(columns, counts.T, strict=True)],
                axis=0,
            )
            limit = limit if number > 1 else _SIMPLER * limit
            best = table.best(columns, counts, [rows[column] for column in columns], limit)
            if best is not None:
                places, pipelines = best
                whole = np.zeros((len(places), len(grids)), dtype=np.int64)
                for column, mine in zip(columns, counts[places].T, strict=True):
                    whole[:, column] = np.array(grids[column])[mine]
                found.append((whole, pipelines))
    if not found:
        return None
    return GroupWays(
        model=model,
        recipe=recipe,
        pool=pool,
        counts=np.concatenate([counts for counts, _ in found]),
        step_seconds=np.concatenate([pipelines.step_seconds for _, pipelines in found]),
        pipelines=tuple(pipelines for _, pipelines in found),
        place=np.concatenate(
            [
                np.stack([np.full(len(counts), index), np.arange(len(counts))], axis=1)
                for index, (counts, _) in enumerate(found)
            ]
        ),
        recompute=table.recompute,
    )


def _runs_of_one_type(
    table: _Table, pool: Pool, limits: Sequence[FloatArray]
) -> list[tuple[IntArray, Pipelines]]:
    """Pipelines of two runs of stages on GPUs of one type, in one node; the best of each count."""
    rows = table.choose(2)
    found: list[tuple[IntArray, Pipelines]] = []
    for column, group in enumerate(pool.groups):
        most = min(_MAX_OF_RUNS, group.count, group.machine.gpus_per_node)
        # Up to `most` the grid has every count, so a count's place is the one before it.
        pairs = [(a - 1, b - 1) for b in range(1, most) for a in range(1, min(b, most - b) + 1)]
        if not pairs:
            continue
        counts = np.array(pairs, dtype=np.int64)
        total = counts.sum(axis=1) + 2
        limit = _SIMPLER * limits[column][total - 1]
        best = table.best((column, column), counts, [rows[column]] * 2, limit)
        if best is None:
            continue
        places, pipelines = best
        order = np.lexsort((pipelines.step_seconds, total[places]))
        order = order[np.diff(total[places][order], prepend=0) > 0]
        whole = np.zeros((len(order), len(pool.groups)), dtype=np.int64)
        whole[:, column] = total[places][order]
        found.append((whole, pipelines.take(order)))
    return found


def _counts_of(grids: list[tuple[int, ...]], number: int) -> IntArray:
    """Places in the grids, one row a pool: of two types all that are tried beside another type.

    Of more types the largest of each and its halves; of one all.
    """
    tried = []
    for grid in grids:
        wanted = set(grid) if number == 1 else set(pair_grid(grid[-1]))
        if number > 2:
            wanted &= {grid[-1] >> halvings for halvings in range(_NUM_COUNTS.get(number, 1))}
        tried.append([place for place, count in enumerate(grid) if count in wanted])
    return np.array(list(product(*tried)), dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Table:
    """Splits of all types, counts and settings, and what to combine them by."""

    splits: GroupSplits
    recompute: IntArray  # by split: index into RECOMPUTES
    count_place: IntArray  # by split: place of its count in the grid of its type
    setting: IntArray  # by split: the same recomputation and micro-batch
    num_micro: IntArray  # by setting
    usable_bytes: IntArray  # by type
    host_seconds: FloatArray  # by type
    grids: Sequence[tuple[int, ...]]
    num_layers: int

    @classmethod
    def make(
        cls,
        model: ModelSpec,
        recipe: Recipe,
        pool: Pool,
        grids: Sequence[tuple[int, ...]],
        *,
        is_for_runtime: bool,
    ) -> _Table:
        sizes = micro_batch_sizes(recipe)
        parts, recompute, places = [], [], []
        for index, kind in enumerate(RECOMPUTES):
            own = replace(recipe, recompute=kind)
            for column, (group, grid) in enumerate(zip(pool.groups, grids, strict=True)):
                part = full_splits(model, own, group, pool.between, sizes, grid)
                parts.append(part._replace(group_index=np.full_like(part.tp, column)))
                recompute.append(np.full_like(part.tp, index))
                places.append(np.searchsorted(grid, part.num_gpus))
        splits = join_splits(parts, renumbers=False)
        kinds = np.concatenate(recompute)
        allowed = splits.held_layers[np.arange(len(kinds)), splits.num_stages] > 0
        if is_for_runtime:
            allowed &= executes_splits(model, recipe, splits.tp, splits.dp, kinds)
        size = np.searchsorted(sizes, splits.micro_batch)
        return cls(
            splits=splits,
            recompute=kinds,
            count_place=np.concatenate(places),
            setting=np.where(allowed, kinds * len(sizes) + size, -1),
            num_micro=np.tile(recipe.global_batch // np.array(sizes), len(RECOMPUTES)),
            usable_bytes=np.array([group.gpu.usable_bytes for group in pool.groups]),
            host_seconds=np.array([host_seconds(model, recipe, group) for group in pool.groups]),
            grids=grids,
            num_layers=model.num_layers,
        )

    def choose(self, number: int) -> list[IntArray]:
        """A few splits of each type among `number`, (counts, settings, few); -1: no such."""
        splits, few = self.splits, _NUM_SPLITS.get(number, 1)
        num_settings = len(self.num_micro)
        share = (self.num_micro[self.setting] - 1.0) / number
        score = splits.seconds.layer * (1.0 + share / splits.num_stages)
        held = splits.held_layers[np.arange(len(score)), splits.num_stages]
        chosen = []
        for column, grid in enumerate(self.grids):
            is_mine = (splits.group_index == column) & (self.setting >= 0)
            if number == 1:  # a single stage is a plain Cell
                is_mine &= splits.num_stages > 1
            mine = np.flatnonzero(is_mine)
            key = self.count_place[mine] * num_settings + self.setting[mine]
            found = _fast_and_roomy(key, score[mine], held[mine], len(grid) * num_settings, few)
            rows = np.where(found >= 0, np.append(mine, -1)[found], -1)
            chosen.append(rows.reshape(len(grid), num_settings, few))
        return chosen

    def best(
        self, columns: tuple[int, ...], counts: IntArray, rows: list[IntArray], limit: FloatArray
    ) -> tuple[IntArray, Pipelines] | None:
        """Which of the pools have a pipeline below the limit, and the best one of each."""
        # The groups with most memory first: the first stages keep most.
        order = np.argsort(-self.usable_bytes[list(columns)], kind="stable")
        axes = []
        for axis, at in enumerate(order.tolist()):
            shape = [len(counts), len(self.num_micro), *[1] * len(columns)]
            shape[2 + axis] = -1
            axes.append(rows[at][counts[:, at]].reshape(shape))
        host = float(self.host_seconds[list(columns)].max())
        seconds = self._judge(axes) + host
        flat = seconds.reshape(len(counts), -1)
        few = min(_NUM_WORKED_OUT, flat.shape[1])
        picked = np.argpartition(flat, few - 1, axis=1)[:, :few]
        pools, places = np.nonzero(np.take_along_axis(flat, picked, axis=1) < limit[:, None])
        if not len(pools):
            return None
        inner = np.unravel_index(picked[pools, places], seconds.shape[1:])
        chosen = [np.broadcast_to(axis, seconds.shape)[(pools, *inner)] for axis in axes]
        return self._work_out(pools, np.stack(chosen, axis=1), host, limit)

    def _work_out(
        self, pools: IntArray, chosen: IntArray, host: float, limit: FloatArray
    ) -> tuple[IntArray, Pipelines] | None:
        """The best of each pool exactly, the groups in this order or the other way round."""
        both = np.concatenate([chosen, chosen[:, ::-1]])
        setting = Setting(splits=self.splits, choices=(), num_micro=0, recompute_index=0)
        found = work_out(
            setting,
            both,
            num_layers=self.num_layers,
            host_seconds=host,
            num_micro=self.num_micro[self.setting[both[:, 0]]],
        )
        pools = np.concatenate([pools, pools])
        order = np.lexsort((found.step_seconds, pools))
        order = order[np.diff(pools[order], prepend=-1) > 0]
        kept = order[found.step_seconds[order] < limit[pools[order]]]
        return (pools[kept], found.take(kept)) if len(kept) else None

    def _judge(self, axes: list[IntArray]) -> FloatArray:
        """Seconds of a step without what the host takes; infinite where it does not fit."""
        splits, seconds = self.splits, self.splits.seconds
        stages = [splits.num_stages[rows] for rows in axes]
        pace = [seconds.layer[rows] for rows in axes]
        sends = [
            np.maximum(seconds.outer_send[rows] / n, seconds.inner_send[rows])
            for rows, n in zip(axes, stages, strict=True)
        ]
        depth = sum(stages)
        rate = sum(n / p for n, p in zip(stages, pace, strict=True))
        fixed = sum(n * send / p for n, p, send in zip(stages, pace, sends, strict=True))
        slowest = (self.num_layers + fixed) / rate
        for p, send in zip(pace, sends, strict=True):
            slowest = np.maximum(slowest, p + send)
        gpus = sum(splits.num_gpus[rows].astype(np.float64) for rows in axes)
        micro = self.num_micro.reshape(1, -1, *[1] * len(axes))
        weight = micro * (1.0 + straggler_share(gpus)) - 1.0
        tail = np.zeros(1)
        held, behind = np.zeros(1), depth
        for rows, p, n in zip(axes, pace, stages, strict=True):
            tail = np.maximum(tail, splits.once.seconds(rows, slowest / p))
            behind = behind - n
            front = np.minimum(behind + n, DEEPEST)
            held = held + splits.held_layers[rows, front] - splits.held_layers[rows, front - n]
        step = (weight + depth) * slowest + tail
        fits = (held >= self.num_layers) & (depth <= self.num_layers)
        for rows in axes:
            fits = fits & (rows >= 0)
        return np.where(fits, step, np.inf)


def _fast_and_roomy(
    key: IntArray, score: FloatArray, held: FloatArray, num_keys: int, few: int
) -> IntArray:
    """For each key the rows that nothing beats in score and room: the fastest and the roomiest."""
    order = np.lexsort((-held, score, key))
    key, held = key[order], held[order]
    begin = np.searchsorted(key, np.arange(num_keys))
    place = np.arange(len(key)) - begin[key]
    table = np.full((num_keys, int(place.max(initial=0)) + 1), -1, dtype=np.int64)
    room = np.full(table.shape, -np.inf)
    table[key, place], room[key, place] = order, held
    before = np.maximum.accumulate(room, axis=1)
    kept = np.concatenate([table[:, :1] >= 0, room[:, 1:] > before[:, :-1]], axis=1)
    rank = np.cumsum(kept, axis=1) - 1
    last = rank[:, -1:]
    found = np.full((num_keys, few), -1, dtype=np.int64)
    rows, columns = np.nonzero(kept & ((rank < few - 1) | (rank == last)))
    found[rows, np.minimum(rank[rows, columns], few - 1)] = table[rows, columns]
    return found
