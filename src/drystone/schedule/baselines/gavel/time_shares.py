"""Which share of the time should each job have on each GPU type? Gavel's linear programmes.

A job runs on so many GPUs, of one type at a time; x[job, type] is its share of the time there:

    sum over types of x[job, type] <= 1
    sum over jobs of GPUs[job] x x[job, type] <= GPUs of the type

HiGHS (github:ERGO-Code/HiGHS, MIT) is the optional extra `solver`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from drystone.errors import DrystoneError, MissingExtra
from drystone.schedule.snapshot import FloatArray, IntArray

_MOST_BISECTIONS: Final = 12
_NEAR_ENOUGH: Final = 1.01
# How much the sum counts beside the least: enough to hand out what the least does not need.
_TIE_BREAK: Final = 1e-4
_WIDEST: Final = 1e6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sharing:
    """The jobs and the GPUs that are to be shared."""

    speeds: FloatArray  # (jobs, types); 0: it cannot run there
    num_gpus: IntArray  # of each job
    weights: FloatArray
    capacity: IntArray  # by type
    elapsed_seconds: FloatArray  # since submission
    remaining_samples: FloatArray
    total_samples: FloatArray


def greatest_sum(sharing: Sharing) -> FloatArray:
    """The most samples a second in all, whoever makes them."""
    rows, _ = np.nonzero(sharing.speeds)
    gains = sharing.speeds[sharing.speeds > 0]
    return _spread(sharing, _solve(sharing, gains, rows, np.zeros(len(gains))))


def greatest_least(sharing: Sharing) -> FloatArray:
    """Max-min fairness: the job that gets least of its fair speed gets as much as possible.

    Fair is an equal share of every type; a job on more GPUs deserves as much less of the time.
    """
    fair = _fair_speeds(sharing)
    scale = sharing.num_gpus / (sharing.weights * np.where(fair > 0, fair, 1.0))
    return _raise_least(sharing, sharing.speeds * scale[:, None])


def fairest_finish(sharing: Sharing) -> FloatArray:
    """Finish-time fairness: the worst ratio of end to fair end is as small as possible.

    The end of a job is what has passed plus what is left at the speed it gets; the fair end is its
    whole work at its fair speed of now. A ratio can be kept if everybody can have the speed that it
    asks for; the least such ratio is found by bisection.
    """
    elapsed, left = sharing.elapsed_seconds, np.maximum(sharing.remaining_samples, 1e-9)
    fair_end = sharing.total_samples / np.maximum(_fair_speeds(sharing), 1e-300)
    best = greatest_least(sharing)
    low, high = float((elapsed / fair_end).max(initial=0.0)), _worst_ratio(sharing, best, fair_end)
    for _ in range(_MOST_BISECTIONS):
        if high <= low * _NEAR_ENOUGH:
            break
        ratio = (low + high) / 2
        shares = _raise_least(
            sharing, sharing.speeds * (ratio * fair_end - elapsed)[:, None] / left[:, None]
        )
        reached = _worst_ratio(sharing, shares, fair_end)
        if reached < high:
            best, high = shares, reached
        if reached > ratio:
            low = ratio
    return best


def _worst_ratio(sharing: Sharing, shares: FloatArray, fair_end: FloatArray) -> float:
    speeds = np.maximum((shares * sharing.speeds).sum(axis=1), 1e-300)
    ends = sharing.elapsed_seconds + np.maximum(sharing.remaining_samples, 1e-9) / speeds
    return float((ends / fair_end).max(initial=0.0))


def _fair_speeds(sharing: Sharing) -> FloatArray:
    """The speed of each job if every type were shared equally."""
    equal = sharing.capacity / max(int(sharing.capacity.sum()), 1)
    fair: FloatArray = sharing.speeds @ equal
    return fair


def _raise_least(sharing: Sharing, gains: FloatArray) -> FloatArray:
    """Shares whose least sum of gains is greatest."""
    rows, _ = np.nonzero(sharing.speeds)
    # In units of what the slowest job could have at most, within what a solver can tell apart.
    best = np.maximum(gains.max(axis=1, initial=0.0), 1e-300)
    flat = np.minimum(gains / best.min(initial=np.inf), _WIDEST)[sharing.speeds > 0]
    costs = _TIE_BREAK / max(len(gains), 1) * (gains / best[:, None])[sharing.speeds > 0]
    return _spread(sharing, _solve(sharing, costs, rows, flat))


def _spread(sharing: Sharing, flat: FloatArray) -> FloatArray:
    shares = np.zeros(sharing.speeds.shape)
    shares[sharing.speeds > 0] = np.clip(flat, 0.0, 1.0)
    return shares


def _solve(sharing: Sharing, gains: FloatArray, rows: IntArray, least: FloatArray) -> FloatArray:
    """Maximise the sum of gains, and the least over jobs of the sum of `least` where it is given.

    Variables: one for each pair of a job and a type that it can run on, and the least itself.
    """
    try:
        import highspy
    except ImportError as error:
        raise MissingExtra("Gavel's programmes need HiGHS", "solver") from error
    if not len(gains):
        return np.zeros(0)
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    solver.passModel(_programme(highspy, sharing, gains, rows, least))
    solver.run()
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        status = solver.modelStatusToString(solver.getModelStatus())
        raise DrystoneError(f"HiGHS found no shares for {len(sharing.speeds)} jobs: {status}")
    return np.array(solver.getSolution().col_value)[: len(gains)]


def _programme(
    highspy: Any, sharing: Sharing, gains: FloatArray, rows: IntArray, least: FloatArray
) -> Any:
    _, kinds = np.nonzero(sharing.speeds)
    num_jobs, num_types = sharing.speeds.shape
    has_least = bool(least.any())
    count = len(gains)
    # Rows: the time of each job, the GPUs of each type, and by job: least <= its sum of gains.
    entries = [
        (rows, np.ones(count)),
        (num_jobs + kinds, sharing.num_gpus[rows].astype(np.float64)),
    ]
    if has_least:
        entries.append((num_jobs + num_types + rows, -least))
    index = np.stack([one for one, _ in entries], axis=1).ravel()
    value = np.stack([one for _, one in entries], axis=1).ravel()
    starts = np.arange(count + 1) * len(entries)
    costs, upper = -gains, np.ones(count)
    bounds = np.concatenate((np.ones(num_jobs), sharing.capacity.astype(np.float64)))
    if has_least:
        able = np.unique(rows)
        index = np.concatenate((index, num_jobs + num_types + able))
        value = np.concatenate((value, np.ones(len(able))))
        starts = np.append(starts, len(index))
        costs, upper = np.append(costs, -1.0), np.append(upper, highspy.kHighsInf)
        bounds = np.concatenate((bounds, np.zeros(num_jobs)))
    programme = highspy.HighsLp()
    programme.num_col_, programme.num_row_ = len(costs), len(bounds)
    programme.col_cost_, programme.col_lower_ = costs, np.zeros(len(costs))
    programme.col_upper_, programme.row_upper_ = upper, bounds
    programme.row_lower_ = np.full(len(bounds), -highspy.kHighsInf)
    matrix = programme.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kColwise
    matrix.start_, matrix.index_, matrix.value_ = starts, index, value
    return programme
