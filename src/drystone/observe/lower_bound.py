"""No policy could do better than this: a bound that knows that jobs share the GPUs.

Each job alone on its fastest option is a bound that forgets the others. Here time is cut into
slots, and GPU seconds of a slot have a price for each type. For any prices l >= 0

    B(l) = sum over jobs of min over ends C of [C - submission + least payment for its work until C]
           - sum over slots and types of l . GPU seconds

is no more than the sum of completion times of any schedule: the GPU seconds that a schedule uses
are no more than there are, so what jobs pay is no more than what is taken off. It is the Lagrange
dual of a programme indexed by time (Dyer and Wolsey, 1990), in which jobs may be preempted, moved
and mixed at will without a cost; only the first start counts. The least payment is bounded from
below in turn, by duality in a job's work: for any m >= 0 it is at least

    m * work + sum over slots of seconds * min(0, min over options of price . counts - m * speed).

Work is counted in seconds at the fastest option of each phase; an option that is as fast as this in
one phase is taken to be so in all. Good prices are those of a run of the policy `prices`; from
there they go up where more is used than there is, and down where less is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from drystone.describe.option import OptionSet
from drystone.observe.simulation import PolicyRun, RunRecord, Scenario
from drystone.run.events import Finished, Started
from drystone.schedule.options import fastest_seconds
from drystone.schedule.snapshot import FloatArray

_MOST_SLOTS: Final = 400
_SLOTS_BEYOND: Final = 30
_NUM_STEPS: Final = 100
# By how much, as a logarithm, prices change where twice as much is used as there is; and how much
# less with every step.
_FIRST_RISE: Final = 0.3
_SLOWING: Final = 0.03
_LEAST_PRICE: Final = 1e-3  # less, as a share of the highest, is nothing
# A job is taken to end at several times at once, as long as those are worse by no more than about
# this share: without it all equal jobs would jump at every change of prices. The bound is exact.
_FIRST_BLUR: Final = 0.2
_LAST_BLUR: Final = 0.02
# What a second of work may cost at most at the margin, from the least to the most that is tried.
_MARGINS: Final = np.concatenate(([0.0], np.geomspace(0.05, 400.0, 95)))
_JOBS_AT_ONCE: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Kind:
    """Jobs that choose from the same options."""

    counts: FloatArray  # (options, types)
    rates: FloatArray  # by option: seconds of work done in a second
    release: FloatArray  # by job: when its first start can be over
    work: FloatArray  # by job: seconds at its fastest
    waited: FloatArray  # by job: from its submission to `release`


def shared_bound_seconds(scenario: Scenario, run: PolicyRun) -> float:
    """What the jobs that a run finished need at least in the mean, on the nodes that there are.

    Not a number where nodes can be rented, whose number nobody knows before, and where the true
    speeds are not those that are seen.
    """
    done = finished_jobs(run)
    if not done or scenario.offers or scenario.faults.speed_error_share:
        return math.nan
    kinds = _kinds(scenario, done)
    edges = _edges(run, kinds)
    prices = _recorded_prices(run.record, scenario.gpu_types, edges)
    return _ascend(kinds, edges, _capacity(scenario), prices) / len(done)


def with_shared_bound(scenario: Scenario, runs: Sequence[PolicyRun]) -> list[PolicyRun]:
    """The same runs; those that finished the most jobs have the bound over the same jobs beside."""
    thorough = max(runs, key=lambda run: (len(finished_jobs(run)), bool(run.record.prices)))
    done = finished_jobs(thorough)
    seconds = shared_bound_seconds(scenario, thorough)
    return [
        replace(
            run,
            report=replace(
                run.report,
                shared_bound_ratio=run.report.mean_completion_seconds / seconds,
            ),
        )
        if finished_jobs(run) == done
        else run
        for run in runs
    ]


def finished_jobs(run: PolicyRun) -> frozenset[str]:
    """The jobs that were done."""
    return frozenset(event.job_id for event in run.log if isinstance(event, Finished))


def _capacity(scenario: Scenario) -> FloatArray:
    of_type = dict.fromkeys(scenario.gpu_types, 0.0)
    for node in scenario.nodes:
        of_type[node.gpu] += node.num_gpus
    return np.array(list(of_type.values()))


def _kinds(scenario: Scenario, done: Collection[str]) -> list[_Kind]:
    grouped: dict[tuple[int, float], tuple[OptionSet, list[tuple[float, float, float]]]] = {}
    for job in scenario.jobs:
        if job.id not in done:
            continue
        options = scenario.options_of(job)
        own = job.startup_seconds
        can = options.samples_per_second > 0
        num_gpus = options.counts[can].sum(axis=1)
        start = own if own >= 0 else float(scenario.startup.seconds(num_gpus).min(initial=math.inf))
        work = fastest_seconds(options, job.total_samples)
        jobs = grouped.setdefault((id(options), own), (options, []))[1]
        jobs.append((job.submit_seconds + start, work, start))
    kinds = []
    for options, jobs in grouped.values():
        release, work, waited = np.array(jobs).T
        counts, rates = _best_rows(options)
        kinds.append(_Kind(counts=counts, rates=rates, release=release, work=work, waited=waited))
    return kinds


def _best_rows(options: OptionSet) -> tuple[FloatArray, FloatArray]:
    """What options take and their rates, without those that take more than another for less."""
    speeds = np.stack([options.speeds(phase) for phase in range(options.num_phases)])
    rates = (speeds / np.maximum(speeds.max(axis=1, keepdims=True), 1e-300)).max(axis=0)
    can = np.flatnonzero(rates > 0)
    counts, rates = options.counts[can].astype(np.float64), rates[can]
    is_less = (counts[:, None] >= counts).all(axis=2) & (rates[:, None] <= rates)
    is_equal = is_less & is_less.T
    is_less &= ~is_equal | (np.arange(len(rates)) < np.arange(len(rates))[:, None])
    np.fill_diagonal(is_less, False)
    keep = ~is_less.any(axis=1)
    return counts[keep], rates[keep]


def _edges(run: PolicyRun, kinds: Sequence[_Kind]) -> FloatArray:
    """Where slots begin and end: where most happens they are the shortest."""
    times = [event.time_seconds for event in run.log if isinstance(event, Started | Finished)]
    releases = np.concatenate([kind.release for kind in kinds])
    happens = np.sort(np.concatenate((times, releases)))
    often = np.quantile(happens, np.linspace(0, 1, _MOST_SLOTS // 2))
    evenly = np.linspace(releases.min(), happens[-1], _MOST_SLOTS // 2)
    edges = np.unique(np.concatenate((often, evenly)))
    edges = edges[edges >= releases.min()]
    # Beyond the run GPUs cost nothing, and everybody can be done in the time it needs alone.
    longest = max(float(kind.work.max()) for kind in kinds)
    beyond = edges[-1] + longest * np.linspace(0.02, 1.02, _SLOTS_BEYOND)
    found: FloatArray = np.concatenate((edges, beyond))
    return found


def _recorded_prices(record: RunRecord, types: Sequence[str], edges: FloatArray) -> FloatArray:
    """By slot and type: the mean of the prices of a run in it; 0 where there were none."""
    if not record.prices or tuple(record.gpu_types) != tuple(types):
        return np.zeros((len(edges) - 1, len(types)))
    times = np.array(record.price_times_seconds)
    values = np.array(record.prices)
    inside = np.unique(np.concatenate((times, edges)))
    at = np.searchsorted(times, inside, side="right") - 1
    held = np.where((at >= 0)[:, None], values[np.maximum(at, 0)], 0.0)
    paid = np.cumsum(held[:-1] * np.diff(inside)[:, None], axis=0)
    total = np.vstack((np.zeros(len(types)), paid))[np.searchsorted(inside, edges)]
    prices: FloatArray = np.diff(total, axis=0) / np.diff(edges)[:, None]
    prices[-_SLOTS_BEYOND:] = 0.0
    return prices


def _ascend(
    kinds: Sequence[_Kind], edges: FloatArray, capacity: FloatArray, prices: FloatArray
) -> float:
    """The best bound that is found, over all jobs."""
    there = np.diff(edges)[:, None] * capacity
    best = -math.inf
    least = _LEAST_PRICE * max(float(prices.max(initial=0.0)), _LEAST_PRICE)
    for step, blur in enumerate(np.geomspace(_FIRST_BLUR, _LAST_BLUR, _NUM_STEPS).tolist()):
        bound, used = _bound(kinds, edges, prices, blur)
        best = max(best, bound - float((prices * there).sum()))
        over = np.clip(used / np.maximum(there, 1e-9) - 1.0, -1.0, 1.0)
        rise = _FIRST_RISE / (1.0 + _SLOWING * step)
        prices = np.maximum(prices, least) * np.exp(rise * over)
        prices[-_SLOTS_BEYOND:] = 0.0
        prices[prices <= least] = 0.0
    return best


def _bound(
    kinds: Sequence[_Kind], edges: FloatArray, prices: FloatArray, blur: float
) -> tuple[float, FloatArray]:
    """What all jobs need and pay at least, and the GPU seconds that they then use, by slot."""
    total = 0.0
    used = np.zeros_like(prices)
    seconds = np.diff(edges)
    for kind in kinds:
        cost = prices @ kind.counts.T  # (slots, options)
        saved = np.zeros((len(_MARGINS), len(seconds)))
        taken = np.full(saved.shape, -1, dtype=np.int64)
        for option, rate in enumerate(kind.rates.tolist()):
            gain = cost[:, option] - _MARGINS[:, None] * rate
            is_better = gain < saved
            np.copyto(saved, gain, where=is_better)
            np.copyto(taken, option, where=is_better)
        until = np.zeros((len(_MARGINS), len(edges)))
        np.cumsum(saved * seconds, axis=1, out=until[:, 1:])
        share = np.zeros((len(_MARGINS), len(edges) + 1))  # how many jobs use a slot at a margin
        for begin in range(0, len(kind.work), _JOBS_AT_ONCE):
            part = slice(begin, begin + _JOBS_AT_ONCE)
            total += _bound_of_jobs(
                kind.release[part], kind.work[part], kind.waited[part], edges, until, share, blur
            )
        share = share.cumsum(axis=1)[:, : len(seconds)]
        for option in range(len(kind.rates)):
            times = np.where(taken == option, share, 0.0).sum(axis=0) * seconds
            used += times[:, None] * kind.counts[option]
    return total, used


def _bound_of_jobs(
    release: FloatArray,
    work: FloatArray,
    waited: FloatArray,
    edges: FloatArray,
    until: FloatArray,
    share: FloatArray,
    blur: float,
) -> float:
    """What these jobs need and pay at least; what they use of slots is added to `share`."""
    slot = np.clip(np.searchsorted(edges, release, side="right") - 1, 0, len(edges) - 2)
    part = (release - edges[slot]) / (edges[slot + 1] - edges[slot])
    before = until[:, slot] * (1 - part) + until[:, slot + 1] * part  # (margins, jobs)
    fixed = _MARGINS[:, None] * work - before
    # (margins, jobs, edges): time and payment, if the job ends at an edge.
    ends = fixed[:, :, None] + until[:, None, :] + (edges - release[:, None])
    ends[:, np.arange(len(work)), slot] = _MARGINS[:, None] * work
    # Within a slot it is a straight line for each margin: no less than at the lower of its ends.
    lower = np.minimum(ends[:, :, :-1], ends[:, :, 1:])
    margin = lower.argmax(axis=0)
    by_slot = np.take_along_axis(lower, margin[None], axis=0)[0]
    by_slot[edges[1:] < (release + work)[:, None] - 1e-9 * np.maximum(edges[1:], 1.0)] = np.inf
    least = by_slot.min(axis=1)
    chance = np.exp((least[:, None] - by_slot) / (blur * least[:, None] + 1e-9))
    chance /= chance.sum(axis=1, keepdims=True)
    picked, at = (chance > 1e-3).nonzero()
    weight, used_margin = chance[picked, at], margin[picked, at]
    np.add.at(share, (used_margin, slot[picked]), weight * (1.0 - part[picked]))
    np.add.at(share, (used_margin, slot[picked] + 1), weight * part[picked])
    np.subtract.at(share, (used_margin, at + 1), weight)
    return float((np.maximum(least, work) + waited).sum())
