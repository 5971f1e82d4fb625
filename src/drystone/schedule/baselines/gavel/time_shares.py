"""Gavel's linear programmes: the share of the time that each job has on each GPU type.

A job runs on so many GPUs, of one type at a time; x[job, type] is its share of the time there:

    sum over types of x[job, type] <= 1
    sum over jobs of GPUs[job] x x[job, type] <= GPUs of the type
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from drystone.schedule.programme import Programme, solve
from drystone.schedule.snapshot import FloatArray, IntArray

_MAX_BISECTIONS: Final = 12
_NEAR_ENOUGH: Final = 1.01
# How much the sum counts beside the least: enough to hand out what the least does not need.
_TIE_BREAK: Final = 1e-4
_MAX_GAIN: Final = 1e6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharingProblem:
    """The jobs and the GPUs that are to be shared."""

    speeds: FloatArray  # (jobs, types); 0: it cannot run there
    num_gpus: IntArray  # of each job
    weights: FloatArray
    capacity: IntArray  # by type
    elapsed_seconds: FloatArray  # since submission
    remaining_samples: FloatArray
    total_samples: FloatArray


def greatest_sum(problem: SharingProblem) -> FloatArray:
    """The most samples a second in all, whoever makes them."""
    rows, _ = np.nonzero(problem.speeds)
    gains = problem.speeds[problem.speeds > 0]
    return _spread(problem, _solve(problem, gains, rows, np.zeros(len(gains))))


def greatest_least(problem: SharingProblem) -> FloatArray:
    """Max-min fairness: the job that gets least of its fair speed gets as much as possible.

    Fair is an equal share of every type; a job on more GPUs deserves as much less of the time.
    """
    fair = _fair_speeds(problem)
    scale = problem.num_gpus / (problem.weights * np.where(fair > 0, fair, 1.0))
    return _raise_least(problem, problem.speeds * scale[:, None])


def fairest_finish(problem: SharingProblem) -> FloatArray:
    """Finish-time fairness: the worst ratio of end to fair end is as small as possible.

    The end of a job is what has passed plus what is left at the speed it gets; the fair end is its
    whole work at its fair speed of now. A ratio can be kept if everybody can have the speed that it
    asks for; the least such ratio is found by bisection.
    """
    elapsed, left = problem.elapsed_seconds, np.maximum(problem.remaining_samples, 1e-9)
    fair_end = problem.total_samples / np.maximum(_fair_speeds(problem), 1e-300)
    best = greatest_least(problem)
    low, high = float((elapsed / fair_end).max(initial=0.0)), _worst_ratio(problem, best, fair_end)
    for _ in range(_MAX_BISECTIONS):
        if high <= low * _NEAR_ENOUGH:
            break
        ratio = (low + high) / 2
        shares = _raise_least(
            problem, problem.speeds * (ratio * fair_end - elapsed)[:, None] / left[:, None]
        )
        reached = _worst_ratio(problem, shares, fair_end)
        if reached < high:
            best, high = shares, reached
        if reached > ratio:
            low = ratio
    return best


def _worst_ratio(problem: SharingProblem, shares: FloatArray, fair_end: FloatArray) -> float:
    speeds = np.maximum((shares * problem.speeds).sum(axis=1), 1e-300)
    ends = problem.elapsed_seconds + np.maximum(problem.remaining_samples, 1e-9) / speeds
    return float((ends / fair_end).max(initial=0.0))


def _fair_speeds(problem: SharingProblem) -> FloatArray:
    """The speed of each job if every type were shared equally."""
    equal = problem.capacity / max(int(problem.capacity.sum()), 1)
    fair: FloatArray = problem.speeds @ equal
    return fair


def _raise_least(problem: SharingProblem, gains: FloatArray) -> FloatArray:
    """Shares whose least sum of gains is greatest."""
    rows, _ = np.nonzero(problem.speeds)
    # In units of what the slowest job could have at most, within what a solver can tell apart.
    best = np.maximum(gains.max(axis=1, initial=0.0), 1e-300)
    flat = np.minimum(gains / best.min(initial=np.inf), _MAX_GAIN)[problem.speeds > 0]
    costs = _TIE_BREAK / max(len(gains), 1) * (gains / best[:, None])[problem.speeds > 0]
    return _spread(problem, _solve(problem, costs, rows, flat))


def _spread(problem: SharingProblem, flat: FloatArray) -> FloatArray:
    shares = np.zeros(problem.speeds.shape)
    shares[problem.speeds > 0] = np.clip(flat, 0.0, 1.0)
    return shares


def _solve(
    problem: SharingProblem, gains: FloatArray, jobs: IntArray, least: FloatArray
) -> FloatArray:
    """Maximise the sum of gains, and the least over jobs of the sum of `least` where it is given.

    Variables: one for each pair of a job and a type that it can run on, and the least itself.
    Rows: the time of each job, the GPUs of each type, and by job: least <= its sum of gains.
    """
    _, kinds = np.nonzero(problem.speeds)
    num_jobs, num_types = problem.speeds.shape
    entries = [
        (jobs, np.ones(len(gains))),
        (num_jobs + kinds, problem.num_gpus[jobs].astype(np.float64)),
    ]
    has_least = bool(least.any())
    if has_least:
        entries.append((num_jobs + num_types + jobs, -least))
    rows = np.stack([entry_rows for entry_rows, _ in entries], axis=1).ravel()
    values = np.stack([entry_values for _, entry_values in entries], axis=1).ravel()
    columns = np.repeat(np.arange(len(gains)), len(entries))
    costs, upper = -gains, np.ones(len(gains))
    bounds = np.concatenate((np.ones(num_jobs), problem.capacity.astype(np.float64)))
    if has_least:
        able = np.unique(jobs)
        columns = np.concatenate((columns, np.full(len(able), len(gains))))
        rows = np.concatenate((rows, num_jobs + num_types + able))
        values = np.concatenate((values, np.ones(len(able))))
        costs, upper = np.append(costs, -1.0), np.append(upper, np.inf)
        bounds = np.concatenate((bounds, np.zeros(num_jobs)))
    programme = Programme(
        costs=costs, columns=columns, rows=rows, values=values, row_upper=bounds, upper=upper
    )
    return solve(programme)[: len(gains)]
