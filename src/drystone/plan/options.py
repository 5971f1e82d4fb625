"""What can a scheduler choose from, for one job? Resources against speed, as arrays.

An option is a number of GPUs of each type, and what the job does with them: samples a second,
memory, dollars an hour. What another option beats in everything is left out. The best Cell of each
type and count comes from one array search per type; mixed options join two types at the pace that
uneven shares allow. The list is cached by job and hardware; a measurement rescales it at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from drystone.describe.cluster import Machine
from drystone.describe.model import ModelSpec
from drystone.describe.pool import GpuGroup, Pool
from drystone.describe.recipe import Recipe
from drystone.plan.cells import Cells, search_cells

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def count_grid(most: int) -> tuple[int, ...]:
    """Counts worth trying: all up to 32, then in steps of an eighth, and `most` itself."""
    counts = list(range(1, min(most, 32) + 1))
    step = 4
    while counts[-1] < most:
        if counts[-1] >= 8 * step:
            step *= 2
        counts.append(min(most, counts[-1] + step))
    return tuple(counts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Options:
    """The options of one job: one row each, ordered by GPUs of each type."""

    gpus: tuple[str, ...]  # the types, in the order of the columns of `counts`
    counts: IntArray  # (options, types)
    samples_per_second: FloatArray
    high_bytes: FloatArray  # of the hungriest rank
    dollars_per_hour: FloatArray  # nan where no price is known
    cell: IntArray  # row of `cells[type]`, or -1 for a mixed option
    cells: tuple[Cells, ...]  # by type: the best Cell of each count

    def __len__(self) -> int:
        return len(self.samples_per_second)

    def undominated(self) -> Options:
        """Without those that are beaten: no more GPUs of any type, and at least as fast."""
        fewer = (self.counts[:, None, :] <= self.counts[None, :, :]).all(axis=2)
        faster = self.samples_per_second[:, None] >= self.samples_per_second[None, :]
        beats = fewer & faster
        # Of equals, the first stays.
        same = beats & beats.T
        beats &= ~same | np.triu(np.ones_like(same), k=1)
        np.fill_diagonal(beats, False)
        return self.take(np.flatnonzero(~beats.any(axis=0)))

    def hull(self, gpu: str) -> Options:
        """Of one type alone: the counts on the upper concave hull of speed, from zero."""
        column = self.gpus.index(gpu)
        alone = np.flatnonzero(
            (self.counts[:, column] > 0) & (self.counts.sum(axis=1) == self.counts[:, column])
        )
        order = alone[np.argsort(self.counts[alone, column], kind="stable")]
        return self.take(
            order[concave_hull(self.counts[order, column], self.samples_per_second[order])]
        )

    def corrected(self, factors: Mapping[str, float]) -> Options:
        """With speeds rescaled by what was measured on some types."""
        by_type = np.array([factors.get(name, 1.0) for name in self.gpus])
        used = self.counts > 0
        # A mixed option is as slow as its slowest correction.
        factor = np.where(used, by_type, np.inf).min(axis=1)
        return replace(self, samples_per_second=self.samples_per_second * factor)

    def take(self, rows: IntArray) -> Options:
        """Some of them."""
        return replace(
            self,
            counts=self.counts[rows],
            samples_per_second=self.samples_per_second[rows],
            high_bytes=self.high_bytes[rows],
            dollars_per_hour=self.dollars_per_hour[rows],
            cell=self.cell[rows],
        )


def concave_hull(counts: IntArray, speeds: FloatArray) -> IntArray:
    """Positions on the upper concave hull of (count, speed), the origin included; counts ascend."""
    hull: list[int] = []
    points = [(0.0, 0.0), *zip(counts.tolist(), speeds.tolist(), strict=True)]
    kept: list[int] = [0]
    for index in range(1, len(points)):
        while len(kept) > 1 and _slope(points, kept[-2], kept[-1]) <= _slope(
            points, kept[-1], index
        ):
            kept.pop()
        if points[index][1] > points[kept[-1]][1]:
            kept.append(index)
    hull = [index - 1 for index in kept if index > 0]
    return np.array(hull, dtype=np.int64)


def _slope(points: list[tuple[float, float]], one: int, other: int) -> float:
    (x, y), (u, v) = points[one], points[other]
    return (v - y) / (u - x) if u != x else float("inf")


def enumerate_options(
    model: ModelSpec,
    recipe: Recipe,
    pool: Pool,
    *,
    dollars_per_gpu_hour: Mapping[str, float] | None = None,
) -> Options:
    """Every option worth having on the pool: each type alone, and pairs of types."""
    prices = dollars_per_gpu_hour or {}
    cells = tuple(_best_cells(model, recipe, group.machine, group.count) for group in pool.groups)
    alone = [_alone(column, found, len(cells)) for column, found in enumerate(cells)]
    mixed = _mixed(pool.groups, cells, recipe)
    parts = [part for part in (*alone, mixed) if len(part[1])]
    counts = (
        np.concatenate([part[0] for part in parts]) if parts else np.zeros((0, len(cells)), int)
    )
    column = np.array([prices.get(group.gpu.name, np.nan) for group in pool.groups])
    with np.errstate(invalid="ignore"):
        dollars = np.where(counts > 0, counts * column, 0.0).sum(axis=1)
    found = Options(
        gpus=tuple(group.gpu.name for group in pool.groups),
        counts=counts.astype(np.int64),
        samples_per_second=_joined(parts, 1),
        high_bytes=_joined(parts, 2),
        dollars_per_hour=dollars,
        cell=_joined(parts, 3).astype(np.int64),
        cells=cells,
    )
    return found.undominated()


Part = tuple[IntArray, FloatArray, FloatArray, IntArray]  # counts, speed, bytes, cell


def _joined(parts: list[Part], column: int) -> FloatArray:
    return (
        np.concatenate([np.asarray(part[column], dtype=np.float64) for part in parts])
        if parts
        else np.zeros(0)
    )


@lru_cache(maxsize=256)
def _best_cells(model: ModelSpec, recipe: Recipe, machine: Machine, most: int) -> Cells:
    return search_cells(model, recipe, machine, count_grid(most), most_micro_batch=16).best()


def _alone(column: int, cells: Cells, num_types: int) -> Part:
    counts = np.zeros((len(cells), num_types), dtype=np.int64)
    counts[:, column] = cells.layouts.num_gpus
    speed = cells.recipe.global_batch / cells.step_seconds
    return counts, speed, cells.high_bytes, np.arange(len(cells))


# What uneven shards and the wait for unlike ranks leave of the sum of two speeds; the plan of a
# mixed option is worked out exactly when it is chosen (`plan_uneven`).
_MIXED_SHARE = 0.9


def _mixed(groups: tuple[GpuGroup, ...], cells: tuple[Cells, ...], recipe: Recipe) -> Part:
    """Pairs of types, whole powers of two of each, at a share of the sum of their speeds."""
    counts, speeds, sizes = [], [], []
    for i, first in enumerate(cells):
        for j in range(i + 1, len(cells)):
            second = cells[j]
            rows, columns = _powers(first), _powers(second)
            if not len(rows) or not len(columns):
                continue
            left, right = (axis.ravel() for axis in np.meshgrid(rows, columns, indexing="ij"))
            block = np.zeros((len(left), len(groups)), dtype=np.int64)
            block[:, i] = first.layouts.num_gpus[left]
            block[:, j] = second.layouts.num_gpus[right]
            both = recipe.global_batch / first.step_seconds[left]
            both = both + recipe.global_batch / second.step_seconds[right]
            counts.append(block)
            speeds.append(_MIXED_SHARE * both)
            sizes.append(np.maximum(first.high_bytes[left], second.high_bytes[right]))
    if not counts:
        empty = np.zeros(0)
        return np.zeros((0, len(groups)), dtype=np.int64), empty, empty, empty.astype(np.int64)
    speed = np.concatenate(speeds)
    return np.concatenate(counts), speed, np.concatenate(sizes), np.full(len(speed), -1)


def _powers(cells: Cells) -> IntArray:
    number = cells.layouts.num_gpus
    return np.flatnonzero((number & (number - 1)) == 0)
