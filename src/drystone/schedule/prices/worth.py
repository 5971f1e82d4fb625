"""What is each option of each job worth now?

A job that ends a second earlier saves its weight in job seconds, and frees its GPUs a second
earlier. At GPU prices p (job seconds that a GPU second is worth) the cheapest way to do a sample is

    cost = min over options of (weight + p(end) . counts) / speed,

so a sample done now is worth that much, and an option is worth cost * speed a second. What counts
are the prices when the job will end, p(end): there a sample more or less lengthens or shortens the
job. As jobs end, GPUs get cheaper: p(end) = p(now) * the part of the jobs that will still be there
(by weight).
So in a crowd short jobs come first, and at low prices all get wide. With linear speedup on equal
GPUs this is "least remaining time first"; where more GPUs help nobody, all jobs count the same.

A start loses `start` seconds of a decision that holds for `hold` seconds or to the end of the
job. What a job runs already has no start to pay for: a change must pay for itself in that time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from drystone.schedule.belief import Guess
from drystone.schedule.snapshot import FloatArray, Snapshot

# How long a decision is expected to hold; a restart must pay for itself in that time.
HOLD_SECONDS: Final = 300.0
# No job is taken to end sooner: what is left is never known better than that.
_SHORTEST_SECONDS: Final = 60.0
# An option that keeps the deadline is worth up to this much more, the less time there is to spare.
DEADLINE_FACTOR: Final = 10.0
# A job that has all but ended is worth at least this share of a long one: else nobody would ever
# pay for the GPUs on which it could end.
_LEAST_SHARE: Final = 0.02
_LEVELS_A_DOUBLING: Final = 4.0
_AMPLE: Final = 4.0  # times the time that is needed at the fastest: no hurry yet


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Worth:
    """What the options of each job are worth, (jobs, options); 0 where there is none."""

    values: FloatArray  # what a job runs now has no start to pay for
    after_start: FloatArray  # every option, its start paid
    speeds: FloatArray  # samples a second, as they are known

    def cost_of_move(self, row: int, option: int) -> float:
        """What a job loses if it starts again with the same option elsewhere."""
        return float(self.values[row, option] - self.after_start[row, option])


def worth_of_options(
    snapshot: Snapshot,
    speeds: FloatArray,
    weights: FloatArray,
    prices: FloatArray,
    guess: Guess | None = None,
) -> Worth:
    """The worth of each option, (jobs, options), for jobs of these weights at these prices.

    `guess` is what is left of each job, where the snapshot does not know it.
    """
    jobs = snapshot.jobs
    usable = np.maximum(speeds, 1e-100)
    paid = snapshot.options.paid(prices).take(jobs.option_set, axis=0)
    left = jobs.remaining_samples if guess is None else guess.samples
    remaining = np.maximum(left, 1e-9)[:, None]
    seconds = remaining / usable
    sharpness = None if guess is None else guess.sharpness
    full = _sample_costs(weights[:, None], paid, usable, seconds, sharpness)[:, None] * speeds
    _raise_by_deadlines(full, snapshot, seconds)
    held = np.clip(seconds, _LEAST_SHARE * snapshot.startup_seconds, HOLD_SECONDS)
    after_start = full * held
    held += snapshot.startup_seconds
    after_start /= held
    values = after_start.copy()
    current = snapshot.running_cells
    values.put(current, full.take(current))
    return Worth(values=values, after_start=after_start, speeds=speeds)


def _sample_costs(
    weights: FloatArray,
    paid: FloatArray,
    speeds: FloatArray,
    seconds: FloatArray,
    sharpness: FloatArray | None,
) -> FloatArray:
    """By job: what a sample costs at the prices of the time when the job will end."""
    num_jobs, width = seconds.shape
    if width == 0:
        return np.zeros(num_jobs)
    first = np.arange(0, num_jobs * width, width)
    best = ((weights + paid) / speeds).argmin(axis=1)
    end = np.maximum(seconds.take(first + best), _SHORTEST_SECONDS)
    turn = end / weights[:, 0]
    if sharpness is None:
        still_there = _still_there(turn, weights[:, 0])
    else:
        still_there = _expected_there(turn, weights[:, 0], sharpness)
    costs = still_there[:, None] * paid
    costs += weights
    costs /= speeds
    least: FloatArray = costs.take(first + costs.argmin(axis=1))
    return least


def _still_there(turn: FloatArray, weights: FloatArray) -> FloatArray:
    """By job: the part of the weight of all jobs that ends with it or later.

    Jobs end in the order of time over weight: Smith's rule (1956) for the least weighted delay.
    Equals end in the order in which they came: who shares with an equal ends with it at the end of
    both, who comes first ends halfway.
    """
    order = turn.argsort(kind="stable")
    ordered = weights.take(order)
    after = ordered[::-1].cumsum()[::-1]
    part: FloatArray = np.empty(len(order))
    part[order] = after / after[:1]  # also where there is no job
    return part


def _expected_there(turn: FloatArray, weights: FloatArray, sharpness: FloatArray) -> FloatArray:
    """The same where nobody knows who ends first: the part that is expected to end later.

    Jobs of about the same turn are counted together, so that the time does not grow with the square
    of their number.
    """
    level = np.round(_LEVELS_A_DOUBLING * np.log2(turn)).astype(np.int64)
    keys, group = np.unique(
        np.stack((level, np.round(sharpness).astype(np.int64))), axis=1, return_inverse=True
    )
    levels, at = np.unique(level, return_inverse=True)
    there = np.bincount(at, weights=weights) / weights.sum()
    earlier = (keys[0][:, None] - levels) / _LEVELS_A_DOUBLING * keys[1][:, None]
    part: FloatArray = (there / (1.0 + np.exp2(np.minimum(earlier, 1000.0)))).sum(axis=1)
    return part.take(group.ravel())


def _raise_by_deadlines(full: FloatArray, snapshot: Snapshot, seconds: FloatArray) -> None:
    """Options that keep the deadline count more: the more, the less time is to spare."""
    deadlines = snapshot.jobs.deadline_seconds
    if not full.size or not deadlines.min() < np.inf:
        return
    current = snapshot.running_cells
    needed = seconds + snapshot.startup_seconds
    needed.put(current, seconds.take(current))
    there = deadlines - snapshot.now_seconds  # without a deadline for ever, so there is no hurry
    first = np.arange(0, needed.size, needed.shape[1])
    fastest = needed.take(first + needed.argmin(axis=1))  # quicker than min() along short rows
    spare = there / np.maximum(fastest, 1e-9)
    hurry = np.minimum(np.maximum((_AMPLE - spare) / (_AMPLE - 1.0), 0.0), 1.0)
    more = 1.0 + (DEADLINE_FACTOR - 1.0) * hurry
    np.multiply(full, more[:, None], out=full, where=needed <= there[:, None])


def seconds_late(snapshot: Snapshot, row: int, speeds: FloatArray) -> float:
    """By how much a job misses its deadline, even if its fastest option started now."""
    spec = snapshot.jobs.specs[row]
    if spec.deadline_seconds == math.inf:
        return 0.0
    fastest = int(speeds[row].argmax()) if speeds.shape[1] else -1
    if fastest < 0 or speeds[row, fastest] <= 0:
        return 0.0
    left = float(snapshot.jobs.remaining_samples[row]) / float(speeds[row, fastest])
    end = snapshot.now_seconds + float(snapshot.startup_seconds[row, fastest]) + left
    return max(end - spec.deadline_seconds, 0.0)
