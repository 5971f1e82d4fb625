"""Choices by block or phase of a job, where every change costs a restart.

The speedup of a training job changes as it runs (the gradient noise grows, so larger batches pay),
so a job is cut into blocks of epochs, each with its own speeds. Starting takes a rescaling time,
and so does every change between blocks; the GPUs are paid for meanwhile. boa.md 2.4 [D]: where a
dollar is worth mu seconds, the best choices are found exactly by a Viterbi recursion over blocks,

    V_e(k) = x_e / s_e(k) (1 + mu c_k) + min(V_{e-1}(k), min_j V_{e-1}(j) + R_k (1 + mu c_k))

with V_0 paying R_k (1 + mu c_k) for the start; c is the price, x the work, R the rescaling time.
The restart term does not depend on where one comes from, so a block costs one pass over choices.

A whole path through the blocks is then one choice of the class in `frontier.py`, with the
seconds and dollars of one job. The paths on the hull are found from both ends, the cheapest and the
fastest: the recursion with the weights at which two neighbouring paths are equally good either
finds one below their line, or proves that there is none. All classes are walked at once.

`weigh_rest` is the recursion from the other end, for jobs under way. With a rate of (w + mu price)
for every second on option k, x_e samples in phase e and a restart of R seconds,

    run_e(k) = x_e / s_e(k) rate(k) + go_{e+1}(k)
    go_e(k)  = min(run_e(k), min_j run_e(j) + R_j rate(j)),     go after the last phase = 0

is the least cost from the beginning of phase e on of a job that is on option k by then. Jobs of one
kind (the same phases, length, weight and startup) share it: O(phases x kinds x options).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from drystone.errors import InvalidSpec
from drystone.schedule.budget.frontier import JobClasses
from drystone.schedule.snapshot import BoolArray, FloatArray, IntArray, Snapshot
from drystone.units import HOUR_SECONDS

_SAME: Final = 1e-10  # relative: a path that is better by less than this is rounding
_TIE: Final = 1e-9  # a weight so small that it only decides between equals


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockClasses:
    """Classes of jobs that run in blocks; a class with fewer blocks ends with blocks of no work."""

    arrivals_per_second: FloatArray  # (classes,)
    weights: FloatArray  # (classes,)
    block_samples: FloatArray  # (classes, blocks)
    samples_per_second: FloatArray  # (classes, blocks, choices); 0: no such choice in this block
    price_dollars_per_hour: FloatArray  # (classes, choices)
    rescaling_seconds: FloatArray  # (classes, choices): to get to that choice

    def __post_init__(self) -> None:
        if self.samples_per_second.ndim != 3:
            raise InvalidSpec("samples_per_second must be (classes, blocks, choices)")
        rows, blocks, choices = self.samples_per_second.shape
        shapes = {
            "arrivals_per_second": (rows,),
            "weights": (rows,),
            "block_samples": (rows, blocks),
            "price_dollars_per_hour": (rows, choices),
            "rescaling_seconds": (rows, choices),
        }
        for name, shape in shapes.items():
            if getattr(self, name).shape != shape:
                raise InvalidSpec(f"{name} is {getattr(self, name).shape}, must be {shape}")
        for name in (*shapes, "samples_per_second"):
            values = getattr(self, name)
            if not (np.isfinite(values).all() and (values >= 0).all()):
                raise InvalidSpec(f"{name} must be finite and 0 or more")
        has_choice = (self.samples_per_second > 0).any(axis=2)
        if not ((self.block_samples == 0) | has_choice).all():
            row = int(np.nonzero((self.block_samples > 0) & ~has_choice)[0][0])
            raise InvalidSpec(f"class {row} has a block with work and no choice for it")
        if not (self.block_samples > 0).any(axis=1).all():
            raise InvalidSpec("every class needs a block with work")


@dataclass(frozen=True, kw_only=True, eq=False)
class PathClasses:
    """The paths on the hull of each class, as choices of `frontier.py`."""

    classes: JobClasses
    paths: IntArray  # (classes, paths, blocks): the choice in every block; -1: no such path


def best_paths(
    blocks: BlockClasses, rows: IntArray, time_weight: FloatArray, money_weight: FloatArray
) -> IntArray:
    """The path with the least weighted sum of seconds and dollars, for each of `rows`.

    The recursion above, with (1 + mu c) as time_weight + money_weight x dollars a second.
    """
    price = blocks.price_dollars_per_hour[rows] / HOUR_SECONDS
    rate = time_weight[:, None] + money_weight[:, None] * price
    restart = blocks.rescaling_seconds[rows] * rate
    busy = _block_seconds(blocks, rows)
    num_blocks = busy.shape[1]
    here = np.arange(busy.shape[2])
    came_from = np.empty(busy.shape, dtype=np.int64)
    value = restart + _times(busy[:, 0], rate)
    for block in range(1, num_blocks):
        best = value.argmin(axis=1)[:, None]
        changed = np.take_along_axis(value, best, axis=1) + restart
        stays = value <= changed
        came_from[:, block] = np.where(stays, here, best)
        value = np.where(stays, value, changed) + _times(busy[:, block], rate)
    path = np.empty((len(rows), num_blocks), dtype=np.int64)
    path[:, -1] = value.argmin(axis=1)
    each = np.arange(len(rows))
    for block in range(num_blocks - 1, 0, -1):
        path[:, block - 1] = came_from[each, block, path[:, block]]
    return path


def path_costs(
    blocks: BlockClasses, rows: IntArray, paths: IntArray
) -> tuple[FloatArray, FloatArray]:
    """Seconds and dollars of one job of each row that follows its path."""
    at = paths[:, :, None]
    busy = np.take_along_axis(_block_seconds(blocks, rows), at, axis=2)[:, :, 0]
    restart = np.take_along_axis(blocks.rescaling_seconds[rows], paths, axis=1)
    price = np.take_along_axis(blocks.price_dollars_per_hour[rows], paths, axis=1) / HOUR_SECONDS
    restarts = np.ones(paths.shape, dtype=bool)
    restarts[:, 1:] = paths[:, 1:] != paths[:, :-1]
    seconds = busy + np.where(restarts, restart, 0.0)
    return seconds.sum(axis=1), (seconds * price).sum(axis=1)


def trace_paths(blocks: BlockClasses) -> PathClasses:
    """The paths on the hull of every class, from the cheapest to the fastest."""
    every = np.arange(len(blocks.arrivals_per_second))
    ones, zeros = np.ones(len(every)), np.zeros(len(every))
    found = _Found(blocks)
    cheap = found.add(every, best_paths(blocks, every, zeros, ones))
    fastest, cost = path_costs(blocks, every, best_paths(blocks, every, ones, zeros))
    tie = _TIE * fastest / np.where(cost > 0, cost, 1.0)
    fast = found.add(every, best_paths(blocks, every, ones, tie))
    while len(cheap):
        cheap, fast = _split(blocks, found, cheap, fast)
    return found.collect()


class _Found:
    """The paths found so far, in the order in which they were found."""

    def __init__(self, blocks: BlockClasses) -> None:
        self._blocks = blocks
        self.rows = np.empty(0, dtype=np.int64)
        self.paths = np.empty((0, blocks.block_samples.shape[1]), dtype=np.int64)
        self.seconds = np.empty(0)
        self.dollars = np.empty(0)

    def add(self, rows: IntArray, paths: IntArray) -> IntArray:
        """Keep paths of these rows; where they are kept."""
        seconds, dollars = path_costs(self._blocks, rows, paths)
        first = len(self.rows)
        self.rows = np.concatenate([self.rows, rows])
        self.paths = np.concatenate([self.paths, paths])
        self.seconds = np.concatenate([self.seconds, seconds])
        self.dollars = np.concatenate([self.dollars, dollars])
        return np.arange(first, len(self.rows))

    def collect(self) -> PathClasses:
        """By class, the cheapest path first."""
        blocks = self._blocks
        order = np.lexsort((self.seconds, self.dollars, self.rows))
        rows = self.rows[order]
        numbers = np.bincount(rows, minlength=len(blocks.arrivals_per_second))
        column = np.arange(len(rows)) - np.repeat(np.cumsum(numbers) - numbers, numbers)
        shape = (len(numbers), int(numbers.max()))
        seconds, dollars = np.full(shape, np.inf), np.zeros(shape)
        paths = np.full((*shape, self.paths.shape[1]), -1, dtype=np.int64)
        seconds[rows, column] = self.seconds[order]
        dollars[rows, column] = self.dollars[order]
        paths[rows, column] = self.paths[order]
        classes = JobClasses(
            arrivals_per_second=blocks.arrivals_per_second,
            job_seconds=seconds,
            job_dollars=dollars,
            weights=blocks.weights,
        )
        return PathClasses(classes=classes, paths=paths)


def _split(
    blocks: BlockClasses, found: _Found, cheap: IntArray, fast: IntArray
) -> tuple[IntArray, IntArray]:
    """Look for a path below the line between each two neighbours; the pairs still to be split."""
    money = found.dollars[fast] - found.dollars[cheap]
    time = found.seconds[cheap] - found.seconds[fast]
    apart = (money > 0) & (time > 0)
    cheap, fast, money, time = cheap[apart], fast[apart], money[apart], time[apart]
    if not len(cheap):
        return cheap, fast
    rows = found.rows[cheap]
    # Weights at which both ends are worth the same, scaled to 1.
    scale = money * found.seconds[cheap] + time * found.dollars[cheap]
    time_weight, money_weight = money / scale, time / scale
    paths = best_paths(blocks, rows, time_weight, money_weight)
    seconds, dollars = path_costs(blocks, rows, paths)
    below = time_weight * seconds + money_weight * dollars < 1 - _SAME
    middle = found.add(rows[below], paths[below])
    cheap, fast = cheap[below], fast[below]
    return np.concatenate([cheap, middle]), np.concatenate([middle, fast])


def _block_seconds(blocks: BlockClasses, rows: IntArray) -> FloatArray:
    """Seconds of every block on every choice: 0 without work, infinite without speed."""
    work = blocks.block_samples[rows][:, :, None]
    speeds = blocks.samples_per_second[rows]
    seconds = np.where(work > 0, np.inf, np.zeros(speeds.shape))
    np.divide(np.broadcast_to(work, speeds.shape), speeds, out=seconds, where=speeds > 0)
    return seconds


def _times(seconds: FloatArray, rate: FloatArray) -> FloatArray:
    """Seconds times what a second costs, where infinity times nothing stays infinite."""
    costs = np.full(seconds.shape, np.inf)
    np.multiply(seconds, rate, out=costs, where=np.isfinite(seconds))
    return costs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RestOfJobs:
    """Job-hours and dollars, weighed against each other, for what is left of every job."""

    start: FloatArray  # (jobs, options): if it is started on this option now; infinite: cannot be
    stay: FloatArray  # (jobs,): if it goes on as it is; nan while it waits


def weigh_rest(
    snapshot: Snapshot, job_prices: FloatArray, multiplier: float, startup_seconds: FloatArray
) -> RestOfJobs:
    """The least of time and money for the rest of each job; prices, startups: (jobs, options).

    An option with an infinite price cannot be had. Where lengths are unknown, what counts is
    (w + mu price) / speed: neither a start nor a later phase weighs anything then.
    """
    jobs, speeds = snapshot.jobs, snapshot.job_speeds
    able = (speeds > 0) & np.isfinite(job_prices)
    rate = jobs.weights[:, None] + multiplier * np.where(able, job_prices, 0.0)
    known = snapshot.knows_lengths
    work = _work_in_phase(snapshot) if known else np.ones(len(jobs))
    seconds = np.broadcast_to(work[:, None], speeds.shape) / np.where(able, speeds, 1.0)
    later = (
        _cost_of_later_phases(snapshot, rate, able, startup_seconds)
        if known
        else np.zeros(rate.shape)
    )
    restart = startup_seconds if known else np.zeros(rate.shape)
    stay = np.full(len(jobs), np.nan)
    running = np.flatnonzero(jobs.is_running)
    at = (running, jobs.option[running])
    # What a running job has is there whatever it costs, even if it could not be had anew.
    held = multiplier * np.where(np.isfinite(job_prices[at]), job_prices[at], 0.0)
    stay[running] = (jobs.weights[running] + held) * work[running] / speeds[at] + later[at]
    start = np.where(able, rate * (seconds + restart) + later, np.inf)
    return RestOfJobs(start=start, stay=stay)


def _work_in_phase(snapshot: Snapshot) -> FloatArray:
    """Samples that each job has yet to do in the phase it is in."""
    remaining = np.maximum(snapshot.jobs.remaining_samples, 0.0)
    ends = snapshot.options.end_samples
    if not len(ends):
        return remaining
    left = ends[snapshot.jobs.option_set] - (_totals(snapshot) - remaining)
    work: FloatArray = np.clip(left, 0.0, remaining)
    return work


def _totals(snapshot: Snapshot) -> FloatArray:
    return np.array([spec.total_samples for spec in snapshot.jobs.specs])


def _cost_of_later_phases(
    snapshot: Snapshot,
    rate: FloatArray,
    able: BoolArray,
    startup_seconds: FloatArray,
) -> FloatArray:
    """The least cost after the phase that each job is in, (jobs, options)."""
    later = np.zeros(rate.shape)
    following = snapshot.options.next_set
    if not len(following):
        return later
    phased = np.flatnonzero(following[snapshot.jobs.option_set] >= 0)
    if not len(phased):
        return later
    last = _last_sets(following)[snapshot.jobs.option_set[phased]]
    startups = np.array([snapshot.jobs.specs[row].startup_seconds for row in phased])
    keys = np.stack([last, _totals(snapshot)[phased], snapshot.jobs.weights[phased], startups], 1)
    _, first, kind = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    chains = _chains(following, last[first])
    go = _go(snapshot, chains, phased[first], rate, able, startup_seconds)
    # A job in the phase t before its last one goes on with the phase t - 1 before the last.
    before_last = np.argmax(
        chains[kind.ravel()] == snapshot.jobs.option_set[phased][:, None], axis=1
    )
    later[phased] = go[before_last - 1, kind.ravel()]
    return later


def _last_sets(following: IntArray) -> IntArray:
    """The last phase of every set, by pointer doubling: O(sets log phases)."""
    jump = np.where(following >= 0, following, np.arange(len(following)))
    while True:
        further = jump[jump]
        if np.array_equal(further, jump):
            return jump
        jump = further


def _chains(following: IntArray, last: IntArray) -> IntArray:
    """The sets of each chain from its last phase backwards, then -1; (chains, phases)."""
    before = np.full(len(following), -1, dtype=np.int64)
    known = np.flatnonzero(following >= 0)
    before[following[known]] = known
    columns = [last]
    while (columns[-1] >= 0).any():
        now = columns[-1]
        columns.append(np.where(now >= 0, before[np.maximum(now, 0)], -1))
    return np.stack(columns[:-1], axis=1)


def _go(
    snapshot: Snapshot,
    chains: IntArray,
    rows: IntArray,
    rate: FloatArray,
    able: BoolArray,
    startup_seconds: FloatArray,
) -> FloatArray:
    """The costs to go, (phases from the last one backwards, kinds, options)."""
    table = snapshot.options
    total = _totals(snapshot)[rows]
    kind_rate, kind_able = rate[rows], able[rows]
    restart = np.where(kind_able, startup_seconds[rows] * kind_rate, np.inf)
    go = np.zeros((chains.shape[1], *kind_rate.shape))
    after = np.zeros(kind_rate.shape)
    for column in range(chains.shape[1]):
        sets = chains[:, column]
        begin_set = (
            chains[:, column + 1] if column + 1 < chains.shape[1] else np.full(len(sets), -1)
        )
        begin = np.where(begin_set >= 0, table.end_samples[np.maximum(begin_set, 0)], 0.0)
        end = np.minimum(table.end_samples[np.maximum(sets, 0)], total)
        work = np.where(sets >= 0, np.maximum(end - begin, 0.0), 0.0)[:, None]
        speeds = table.samples_per_second[np.maximum(sets, 0)]
        usable = kind_able & (speeds > 0)
        run = np.where(usable, work / np.where(usable, speeds, 1.0) * kind_rate, np.inf) + after
        best = (run + restart).min(axis=1, keepdims=True)
        after = go[column] = np.minimum(run, best)
    return go
