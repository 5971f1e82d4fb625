"""What would each job do on each GPU type and count? The Cells of all jobs as one table.

A Cell here is the best plan of a job on so many GPUs of one type, so it is an option with GPUs of
one type; options that mix types are none. Counts are levels: every count that some option has, and
its halves, since the search of `cells` halves and doubles.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from drystone.schedule.snapshot import BoolArray, FloatArray, IntArray, Snapshot


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CellTable:
    """The Cells of all jobs, (jobs, types, levels)."""

    levels: IntArray  # GPUs at each level, ascending
    speeds: FloatArray  # samples a second; 0: there is no such Cell
    options: IntArray  # the option it is, or -1
    down: IntArray  # the level that halving leads to, (jobs, types, levels); -1 from one GPU
    up: IntArray  # the level that doubling leads to; -1 where there is none

    def speed(self, row: int, kind: int, level: int) -> float:
        """Samples a second of one Cell."""
        return float(self.speeds[row, kind, level])


def make_cells(snapshot: Snapshot, is_allowed: BoolArray | None = None) -> CellTable:
    """The table of a snapshot; `is_allowed` (jobs, options) leaves options out."""
    options = snapshot.options
    kind, num_gpus, is_cell = _single_type(options.counts, options.samples_per_second)
    levels = _levels(num_gpus[is_cell])
    by_set = np.full((len(options.counts), len(snapshot.gpu_types), len(levels)), -1, np.int64)
    sets, columns = np.nonzero(is_cell)
    slowest_first = np.argsort(options.samples_per_second[sets, columns], kind="stable")
    sets, columns = sets[slowest_first], columns[slowest_first]
    at = np.searchsorted(levels, num_gpus[sets, columns])
    by_set[sets, kind[sets, columns], at] = columns  # of two Cells alike the faster stays
    chosen = by_set[snapshot.jobs.option_set]
    jobs = np.arange(len(chosen))[:, None, None]
    if chosen.size and snapshot.job_speeds.shape[1]:
        speeds = np.where(chosen >= 0, snapshot.job_speeds[jobs, chosen], 0.0)
        if is_allowed is not None:
            speeds = np.where(is_allowed[jobs, chosen], speeds, 0.0)
    else:
        speeds = np.zeros(chosen.shape)
    chosen = np.where(speeds > 0, chosen, -1)
    down, up = _steps(levels, speeds)
    return CellTable(levels=levels, speeds=speeds, options=chosen, down=down, up=up)


def _single_type(counts: IntArray, speeds: FloatArray) -> tuple[IntArray, IntArray, BoolArray]:
    """By option: its type, its GPUs, and whether it is a Cell at all."""
    if counts.size == 0:
        nothing = np.zeros(counts.shape[:2], dtype=np.int64)
        return nothing, nothing, nothing.astype(np.bool_)
    is_cell: BoolArray = ((counts > 0).sum(axis=2) == 1) & (speeds > 0)
    return counts.argmax(axis=2), counts.sum(axis=2), is_cell


def _levels(num_gpus: IntArray) -> IntArray:
    found = set(num_gpus.tolist())
    for count in list(found):
        while count > 1:
            count //= 2
            found.add(count)
    return np.array(sorted(found), dtype=np.int64)


def _steps(levels: IntArray, speeds: FloatArray) -> tuple[IntArray, IntArray]:
    """Halving leads to the largest Cell of at most half, or else to half, though it is none.

    Doubling leads to the largest Cell of at most double.
    """
    if len(levels) == 0:
        nothing = np.zeros(speeds.shape, dtype=np.int64)
        return nothing, nothing
    index = np.arange(len(levels))
    largest = np.maximum.accumulate(np.where(speeds > 0, index, -1), axis=2)
    half = np.searchsorted(levels, levels // 2)
    below = largest[:, :, half]
    down = np.where(levels == 1, -1, np.where(below >= 0, below, half))
    double = np.searchsorted(levels, 2 * levels, "right") - 1
    above = largest[:, :, double]
    return down, np.where(above > index, above, -1)
