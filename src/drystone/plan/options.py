"""What can a scheduler choose from, for one job? Resources against speed, as arrays.

An option is a number of GPUs of each type, and what the job does with them: samples a second,
memory, dollars an hour. The best Cell of each type and count comes from one array search per type;
two types together are estimated for a grid of counts at once (`pairs`). What another option beats
in everything is left out. The parts are cached by job and hardware; a measurement rescales the list
at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations

import numpy as np
import numpy.typing as npt

from drystone.describe.machine import Machine
from drystone.describe.model import ModelSpec, QkNorm, Side
from drystone.describe.pool import Pool
from drystone.describe.recipe import Offload, Precision, Recipe, Tuning
from drystone.describe.trainable import check_trainable
from drystone.plan.cells.search import Cells, search_cells
from drystone.plan.plan import Plan
from drystone.plan.uneven.pairs import equal_speeds, pair_speeds

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EqualWays:
    """The faster of both ways on each count of equal GPUs that is enough."""

    counts: IntArray
    step_seconds: FloatArray
    high_bytes: FloatArray
    cell: IntArray  # row of `cells`; -1: data parallel, layer by layer
    cells: Cells  # the best one of each count that splits layers or matrices


@lru_cache(maxsize=256)
def equal_ways(
    model: ModelSpec,
    recipe: Recipe,
    machine: Machine,
    counts: tuple[int, ...],
    most_micro_batch: int = 0,
) -> EqualWays:
    """What the runtime would do on each of `counts` GPUs of one type."""
    shared = equal_speeds(model, recipe, machine, counts)
    cells = split_cells(model, recipe, machine, counts, most_micro_batch)
    row_of = {int(count): row for row, count in enumerate(cells.layouts.num_gpus)}
    cell = np.array([row_of.get(count, -1) for count in counts], dtype=np.int64)
    seconds, high_bytes = np.append(cells.step_seconds, np.inf), np.append(cells.high_bytes, 0.0)
    is_split = seconds[cell] < shared.step_seconds
    best = np.where(is_split, seconds[cell], shared.step_seconds)
    fits = np.flatnonzero(np.isfinite(best))
    return EqualWays(
        counts=np.array(counts, dtype=np.int64)[fits],
        step_seconds=best[fits],
        high_bytes=np.where(is_split, high_bytes[cell], shared.high_bytes)[fits],
        cell=np.where(is_split, cell, -1)[fits],
        cells=cells,
    )


def split_cells(
    model: ModelSpec,
    recipe: Recipe,
    machine: Machine,
    counts: tuple[int, ...],
    most_micro_batch: int = 0,
) -> Cells:
    """For each count the best Cell that splits layers or matrices and can be executed."""
    cells = search_cells(model, recipe, machine, counts, most_micro_batch=most_micro_batch)
    layouts = cells.layouts
    gaps = _gaps(
        model, recipe, tp=layouts.tp, pp=layouts.pp, cp=layouts.cp, ep=layouts.ep,
        vocab_barriers=layouts.vocab_barriers,
    )  # fmt: skip
    is_split = (layouts.tp * layouts.pp > 1) & _has_plain_blocks(model)
    return cells.take(np.flatnonzero(is_split & ~np.any(list(gaps.values()), axis=0))).best()


def marked(plan: Plan) -> Plan:
    """The plan with what the runtime cannot execute of it, if anything (docs/runtime.md)."""
    assert isinstance(plan.model, ModelSpec)  # modules have a search of their own
    layout = plan.layout
    found = _gaps(
        plan.model,
        plan.recipe,
        tp=np.array([max(stage.tp for stage in plan.stages)]),
        pp=np.array([len(plan.stages)]),
        cp=np.array([layout.cp if layout else 1]),
        ep=np.array([layout.ep if layout else 1]),
        vocab_barriers=np.array([layout.vocab_barriers if layout else 0]),
    )
    gaps = [words for words, applies in found.items() if applies[0]]
    reasons = [f"the runtime does not execute {', '.join(gaps)} yet"] if gaps else []
    if problems := check_trainable(plan.model):
        reasons.append(f"the runtime does not train this model: {'; '.join(problems)}")
    return replace(plan, not_executable="; ".join(reasons)) if reasons else plan


def _has_plain_blocks(model: ModelSpec) -> bool:
    """Whether Cells can split its layers; a script may train what `check_trainable` refuses."""
    return not model.is_moe and not any(
        block.attention.is_latent or block.side is Side.ENCODER for block in model.blocks
    )


def _gaps(
    model: ModelSpec,
    recipe: Recipe,
    *,
    tp: IntArray,
    pp: IntArray,
    cp: IntArray,
    ep: IntArray,
    vocab_barriers: IntArray,
) -> dict[str, BoolArray]:
    """What the runtime does not execute, in words, and for which of these layouts that matters."""
    of_layout = {
        "context parallelism": cp > 1,
        "expert parallelism": ep > 1,
        "a vocabulary spread over stages": vocab_barriers > 0,
        "offloaded activations of split layers": (tp * pp > 1)
        & (recipe.offload is Offload.ACTIVATIONS),
        "adapters on split matrices": (tp > 1) & (recipe.tuning is not Tuning.FULL),
        "queries normalised over split heads": (tp > 1)
        & any(block.attention.qk_norm is QkNorm.FULL for block in model.blocks),
    }
    of_all = {
        "pure fp16": recipe.precision is Precision.FP16,
        "quantised weights": recipe.tuning is Tuning.QLORA,
    }
    return of_layout | {words: np.full(len(tp), applies) for words, applies in of_all.items()}


FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_MOST_MICRO_BATCH = 16  # of Cells; larger ones are never much faster


def count_grid(most: int) -> tuple[int, ...]:
    """Counts worth trying: all up to 64, then in steps of an eighth, and `most` itself."""
    counts = list(range(1, min(most, 64) + 1))
    step = 8
    while counts[-1] < most:
        if counts[-1] >= 8 * step:
            step *= 2
        counts.append(min(most, counts[-1] + step))
    return tuple(counts)


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Options:
    """The options of one job: one row each, each type alone first, then pairs."""

    gpus: tuple[str, ...]  # the types, in the order of the columns of `counts`
    counts: IntArray  # (options, types)
    samples_per_second: FloatArray
    high_bytes: FloatArray  # of the hungriest rank
    dollars_per_hour: FloatArray  # nan where no price is known
    batch_shares: FloatArray  # (options, types): of the batch that each type computes
    cell: IntArray  # row of `cells[type]`; -1: data parallel with shares of its own, or mixed
    cells: tuple[Cells, ...]  # by type: the best Cell of each count

    def __len__(self) -> int:
        return len(self.samples_per_second)

    def undominated(self) -> Options:
        """Without those that are beaten: no more GPUs of any type, and at least as fast."""
        # Only options of no other types can beat one; bits say which types each uses.
        types = (self.counts > 0) @ (1 << np.arange(self.counts.shape[1]))
        kept = np.ones(len(self), dtype=bool)
        for mine in sorted(set(types.tolist())):
            rows = np.flatnonzero(types == mine)
            rivals = np.flatnonzero((types & ~mine) == 0)
            speeds = self.samples_per_second
            beats = speeds[rivals, None] >= speeds[rows]
            same = speeds[rivals, None] == speeds[rows]
            for column in self.counts.T:
                beats &= column[rivals, None] <= column[rows]
                same &= column[rivals, None] == column[rows]
            # Of equals, the first stays; nobody beats itself.
            beats &= ~same | (rivals[:, None] < rows)
            kept[rows] = ~beats.any(axis=0)
        return self.take(np.flatnonzero(kept))

    def alone(self, gpu: str) -> Options:
        """Of one type alone, by count."""
        column = self.gpus.index(gpu)
        rows = np.flatnonzero(
            (self.counts[:, column] > 0) & (self.counts.sum(axis=1) == self.counts[:, column])
        )
        return self.take(rows[np.argsort(self.counts[rows, column], kind="stable")])

    def monotone(self, gpu: str, most: int) -> FloatArray:
        """The best speed with at most 0, 1, ... `most` GPUs of one type alone."""
        mine = self.alone(gpu)
        speeds = np.zeros(most + 1)
        counts = mine.counts[:, self.gpus.index(gpu)]
        within = counts <= most
        np.maximum.at(speeds, counts[within], mine.samples_per_second[within])
        best: FloatArray = np.maximum.accumulate(speeds)
        return best

    def hull(self, gpu: str) -> Options:
        """Of one type alone: the counts on the upper concave hull of speed, from zero."""
        mine = self.alone(gpu)
        counts = mine.counts[:, self.gpus.index(gpu)]
        return mine.take(concave_hull(counts, mine.samples_per_second))

    def corrected(self, factors: Mapping[str, float]) -> Options:
        """With speeds rescaled by what was measured on some types, measured over estimated.

        A mixed option gains or loses with the part of the batch that each type computes, since its
        shares follow the new speeds.
        """
        by_type = np.array([factors.get(name, 1.0) for name in self.gpus])
        return replace(
            self, samples_per_second=self.samples_per_second * (self.batch_shares @ by_type)
        )

    def take(self, rows: IntArray) -> Options:
        """Some of them."""
        return replace(
            self,
            counts=self.counts[rows],
            samples_per_second=self.samples_per_second[rows],
            high_bytes=self.high_bytes[rows],
            dollars_per_hour=self.dollars_per_hour[rows],
            batch_shares=self.batch_shares[rows],
            cell=self.cell[rows],
        )


def concave_hull(counts: IntArray, speeds: FloatArray) -> IntArray:
    """Positions on the upper concave hull of (count, speed), the origin included; counts ascend."""
    points = [(0.0, 0.0), *zip(counts.tolist(), speeds.tolist(), strict=True)]
    kept = [0]
    for index in range(1, len(points)):
        while len(kept) > 1 and _slope(points, kept[-2], kept[-1]) <= _slope(
            points, kept[-1], index
        ):
            kept.pop()
        if points[index][1] > points[kept[-1]][1]:
            kept.append(index)
    return np.array([index - 1 for index in kept[1:]], dtype=np.int64)


def _slope(points: list[tuple[float, float]], one: int, other: int) -> float:
    (x, y), (u, v) = points[one], points[other]
    return (v - y) / (u - x) if u != x else float("inf")


def enumerate_options(
    model: ModelSpec,
    recipe: Recipe,
    pool: Pool,
    *,
    dollars_per_gpu_hour: Mapping[str, float] | None = None,
    prunes: bool = True,
    is_for_runtime: bool = False,
) -> Options:
    """Every option worth having on the pool: each type alone, and pairs of types.

    With `prunes` without those that fewer GPUs beat; who may not take fewer wants them all. One
    type alone runs as its best Cell, or, with `is_for_runtime`, as our own runtime would run it.
    """
    prices = dollars_per_gpu_hour or {}
    names = tuple(group.gpu.name for group in pool.groups)
    find = _executed if is_for_runtime else _best_cells
    ways = [find(model, recipe, group.machine, group.count) for group in pool.groups]
    parts = [
        _alone(column, found, recipe.global_batch, len(ways)) for column, found in enumerate(ways)
    ]
    parts += [
        _together(model, recipe, pool, columns) for columns in combinations(range(len(ways)), 2)
    ]
    counts = np.concatenate([part.counts for part in parts])
    column = np.array([prices.get(name, np.nan) for name in names])
    found = Options(
        gpus=names,
        counts=counts,
        samples_per_second=np.concatenate([part.samples_per_second for part in parts]),
        high_bytes=np.concatenate([part.high_bytes for part in parts]),
        dollars_per_hour=np.where(counts > 0, counts * column, 0.0).sum(axis=1),
        batch_shares=np.concatenate([part.batch_shares for part in parts]),
        cell=np.concatenate([part.cell for part in parts]),
        cells=tuple(one.cells for one in ways),
    )
    return found.undominated() if prunes else found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Part:
    """The options of one type or of one pair."""

    counts: IntArray
    samples_per_second: FloatArray
    high_bytes: FloatArray
    batch_shares: FloatArray
    cell: IntArray


@lru_cache(maxsize=256)
def _best_cells(model: ModelSpec, recipe: Recipe, machine: Machine, most: int) -> EqualWays:
    cells = search_cells(
        model, recipe, machine, count_grid(most), most_micro_batch=_MOST_MICRO_BATCH
    ).best()
    return EqualWays(
        counts=cells.layouts.num_gpus,
        step_seconds=cells.step_seconds,
        high_bytes=cells.high_bytes,
        cell=np.arange(len(cells)),
        cells=cells,
    )


def _executed(model: ModelSpec, recipe: Recipe, machine: Machine, most: int) -> EqualWays:
    return equal_ways(model, recipe, machine, count_grid(most), _MOST_MICRO_BATCH)


def _alone(column: int, ways: EqualWays, batch: int, num_types: int) -> _Part:
    counts = np.zeros((len(ways.counts), num_types), dtype=np.int64)
    counts[:, column] = ways.counts
    return _Part(
        counts=counts,
        samples_per_second=batch / ways.step_seconds,
        high_bytes=ways.high_bytes,
        batch_shares=(counts > 0).astype(np.float64),
        cell=ways.cell,
    )


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
    counts = np.zeros((len(rows), len(pool.groups)), dtype=np.int64)
    counts[:, columns[0]] = speeds.first_count[rows]
    counts[:, columns[1]] = speeds.second_count[rows]
    shares = np.zeros(counts.shape)
    shares[:, columns[0]] = speeds.first_share[rows]
    shares[:, columns[1]] = 1.0 - speeds.first_share[rows]
    return _Part(
        counts=counts,
        samples_per_second=recipe.global_batch / speeds.step_seconds[rows],
        high_bytes=speeds.high_bytes[rows],
        batch_shares=shares,
        cell=np.full(len(rows), -1),
    )
