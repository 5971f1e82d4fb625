"""Which classes of jobs arrive, how often and how large? Counted from what a policy sees.

A class is a set of options: the same model and batch on the same GPUs. Rates and sizes are plain
averages since the first look, as the theorem needs long-run averages and nothing else (boa.md 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from drystone.schedule.budget import JobClasses, classes_from_speeds
from drystone.schedule.snapshot import FloatArray, Snapshot

LEAST_SECONDS: Final = 3600.0  # a rate is not guessed from less: the first job is no flood


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrivals:
    """What has arrived so far, by option set."""

    since_seconds: float
    active: frozenset[str]  # the jobs of the last look: whoever is not in it is new
    num_jobs: FloatArray
    samples: FloatArray
    weights: FloatArray  # sums


def first_arrivals(now_seconds: float) -> Arrivals:
    """Nothing yet."""
    empty = np.zeros(0)
    return Arrivals(
        since_seconds=now_seconds, active=frozenset(), num_jobs=empty, samples=empty, weights=empty
    )


def count_arrivals(arrivals: Arrivals, snapshot: Snapshot) -> Arrivals:
    """Add the jobs that were not there at the last look."""
    jobs, num_sets = snapshot.jobs, len(snapshot.options.samples_per_second)
    new = [row for row, spec in enumerate(jobs.specs) if spec.id not in arrivals.active]
    sets = jobs.option_set[new]

    def added(before: FloatArray, values: list[float]) -> FloatArray:
        total = np.bincount(sets, weights=values, minlength=num_sets).astype(np.float64)
        total[: len(before)] += before
        return total

    submitted = min((jobs.specs[row].submit_seconds for row in new), default=np.inf)
    return Arrivals(
        since_seconds=min(arrivals.since_seconds, submitted),
        active=frozenset(spec.id for spec in jobs.specs),
        num_jobs=added(arrivals.num_jobs, [1.0] * len(new)),
        samples=added(arrivals.samples, [jobs.specs[row].total_samples for row in new]),
        weights=added(arrivals.weights, [jobs.specs[row].priority for row in new]),
    )


def believed_classes(
    arrivals: Arrivals, snapshot: Snapshot, option_prices: FloatArray
) -> JobClasses | None:
    """The classes seen so far; an option without a finite price cannot be had. None: no classes."""
    options = snapshot.options
    can_be_had = np.isfinite(option_prices) & (options.samples_per_second > 0)
    rows = np.flatnonzero((arrivals.num_jobs > 0) & can_be_had.any(axis=1))
    if not len(rows):
        return None
    number = arrivals.num_jobs[rows]
    elapsed = max(snapshot.now_seconds - arrivals.since_seconds, LEAST_SECONDS)
    return classes_from_speeds(
        arrivals_per_second=number / elapsed,
        mean_samples=arrivals.samples[rows] / number,
        price_dollars_per_hour=np.where(can_be_had, option_prices, 0.0)[rows],
        samples_per_second=np.where(can_be_had, options.samples_per_second, 0.0)[rows],
        startup_seconds=snapshot.startup.seconds(options.num_gpus[rows]),
        weights=arrivals.weights[rows] / number,
    )
