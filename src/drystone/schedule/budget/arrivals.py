"""Which classes of jobs arrive, how often and how large? Counted from what a policy sees.

A class is a set of options: the same model and batch on the same GPUs; of jobs with phases, the
set of the first phase. Rates and sizes are plain averages since the first look, as the theorem
needs long-run averages and nothing else (boa.md 2.2). Until many jobs have come, what is not known
of their rate is taken from the owner, who has set the budget with the load in mind: before the
first job it is believed to be `PRIOR_BUDGETS` times what the cheapest options of such jobs cost,
and that counts as much as `PRIOR_JOBS` jobs. A rate is not guessed from less than an hour.

What a class can choose from is an option for all of a job, or, where speeds change by phase, a path
of options through its phases (`blocks.py`); paths are kept, since they do not depend on how often
jobs arrive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from drystone.schedule.budget.blocks import BlockClasses, trace_paths
from drystone.schedule.budget.frontier import JobClasses, classes_from_speeds
from drystone.schedule.snapshot import BoolArray, FloatArray, IntArray, Snapshot
from drystone.units import HOUR_SECONDS

# Seconds and dollars of a job on each path, by class, size, startup and prices.
Paths = Mapping[tuple[int, float, float, bytes], tuple[FloatArray, FloatArray]]

PRIOR_BUDGETS: Final = 2.0
PRIOR_JOBS: Final = 16.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrivals:
    """What has arrived so far, by option set."""

    since_seconds: float
    active: frozenset[str]  # the jobs of the last look: whoever is not in it is new
    num_jobs: FloatArray
    samples: FloatArray
    weights: FloatArray  # sums
    startups: FloatArray  # sums of the seconds that jobs state for their own starts

    @property
    def total(self) -> float:
        """Jobs of all sets."""
        return float(self.num_jobs.sum())


def first_arrivals(now_seconds: float) -> Arrivals:
    """Nothing yet."""
    empty = np.zeros(0)
    return Arrivals(
        since_seconds=now_seconds,
        active=frozenset(),
        num_jobs=empty,
        samples=empty,
        weights=empty,
        startups=empty,
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
        startups=added(arrivals.startups, [jobs.specs[row].startup_seconds for row in new]),
    )


def believed_classes(
    arrivals: Arrivals, snapshot: Snapshot, option_prices: FloatArray, paths: Paths | None
) -> tuple[JobClasses | None, IntArray, Paths]:
    """The classes seen so far, None where there are none; their option sets; paths through phases.

    An option without a finite price cannot be had. Without `paths` jobs with phases are taken to
    keep one option through all of them, at the speeds of the first.
    """
    options = snapshot.options
    can_be_had = np.isfinite(option_prices) & (options.samples_per_second > 0)
    rows = np.flatnonzero(
        (arrivals.num_jobs > 0) & can_be_had[: len(arrivals.num_jobs)].any(axis=1)
    )
    if not len(rows):
        return None, rows, paths or {}
    number = arrivals.num_jobs[rows]
    own = (arrivals.startups[rows] / number)[:, None]
    startups = np.where(own >= 0, own, snapshot.startup.seconds(options.num_gpus[rows]))
    sizes, prices = arrivals.samples[rows] / number, np.where(can_be_had, option_prices, 0.0)[rows]
    plain = classes_from_speeds(
        arrivals_per_second=number,
        mean_samples=sizes,
        price_dollars_per_hour=prices,
        samples_per_second=np.where(can_be_had, options.samples_per_second, 0.0)[rows],
        startup_seconds=startups,
        weights=arrivals.weights[rows] / number,
    )
    following = options.next_set
    phased = np.zeros(0, dtype=np.int64)
    if paths is not None and len(following):
        phased = np.flatnonzero(following[rows] >= 0)
    kept: dict[tuple[int, float, float, bytes], tuple[FloatArray, FloatArray]] = {}
    for at in phased.tolist():
        row, size = int(rows[at]), float(sizes[at])
        key = (row, size, float(startups[at].max()), prices[at].tobytes())
        kept[key] = (paths or {}).get(key) or _trace(
            snapshot, row, size, prices[at], startups[at], can_be_had[row]
        )
    classes = _with_paths(plain, phased, list(kept.values())) if len(phased) else plain
    return _at_believed_rates(classes, arrivals, snapshot), rows, kept


def _at_believed_rates(classes: JobClasses, arrivals: Arrivals, snapshot: Snapshot) -> JobClasses:
    """The same classes, so many jobs of which have come, at the rates at which they come."""
    number = float(classes.arrivals_per_second.sum())
    usable = np.isfinite(classes.job_seconds)
    cheapest = np.where(usable, classes.job_dollars, np.inf).min(axis=1)
    mean_dollars = float(classes.arrivals_per_second @ cheapest) / number
    elapsed = max(snapshot.now_seconds - arrivals.since_seconds, 0.0)
    told_hours = PRIOR_JOBS * PRIOR_BUDGETS * mean_dollars / snapshot.budget_dollars_per_hour
    watched_seconds = max(elapsed + told_hours * HOUR_SECONDS, HOUR_SECONDS)
    rate = (number + PRIOR_JOBS) / watched_seconds
    return replace(classes, arrivals_per_second=classes.arrivals_per_second * (rate / number))


def _trace(
    snapshot: Snapshot,
    row: int,
    size: float,
    prices: FloatArray,
    startups: FloatArray,
    usable: BoolArray,
) -> tuple[FloatArray, FloatArray]:
    """Seconds and dollars of one job on each path of the hull."""
    options, chain = snapshot.options, [row]
    while options.next_set[chain[-1]] >= 0:
        chain.append(int(options.next_set[chain[-1]]))
    ends = np.minimum(options.end_samples[chain], size)
    traced = trace_paths(
        BlockClasses(
            arrivals_per_second=np.ones(1),
            weights=np.ones(1),
            block_samples=np.diff(ends, prepend=0.0)[None],
            samples_per_second=np.where(usable, options.samples_per_second[chain], 0.0)[None],
            price_dollars_per_hour=prices[None],
            rescaling_seconds=startups[None],
        )
    ).classes
    return traced.job_seconds[0], traced.job_dollars[0]


def _with_paths(
    plain: JobClasses, phased: IntArray, paths: list[tuple[FloatArray, FloatArray]]
) -> JobClasses:
    """The classes, where those with phases choose among their paths instead of their options."""
    width = max(plain.job_seconds.shape[1], *(len(seconds) for seconds, _ in paths))
    wider = ((0, 0), (0, width - plain.job_seconds.shape[1]))
    seconds = np.pad(plain.job_seconds, wider, constant_values=np.inf)
    dollars = np.pad(plain.job_dollars, wider)
    for at, (path_seconds, path_dollars) in zip(phased.tolist(), paths, strict=True):
        seconds[at], dollars[at] = np.inf, 0.0
        seconds[at, : len(path_seconds)], dollars[at, : len(path_seconds)] = (
            path_seconds,
            path_dollars,
        )
    return JobClasses(
        arrivals_per_second=plain.arrivals_per_second,
        job_seconds=seconds,
        job_dollars=dollars,
        weights=plain.weights,
    )
