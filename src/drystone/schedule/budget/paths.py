"""What does the rest of a job cost on each option, where speeds change by phase and changes cost?

The recursion of `blocks.py` from the other end, for jobs under way. With a rate of
(w + mu price) for every second on option k, x_e samples in phase e and a restart of R seconds,

    run_e(k) = x_e / s_e(k) rate(k) + go_{e+1}(k)
    go_e(k)  = min(run_e(k), min_j run_e(j) + R_j rate(j)),     go after the last phase = 0

is the least cost from the beginning of phase e on of a job that is on option k by then (boa.md 2.4,
[D]). Jobs of one kind (the same phases, length, weight and startup) share the recursion; a job
in its last phase needs none. O(phases x kinds x options).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from drystone.schedule.snapshot import FloatArray, IntArray, Snapshot


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
    able: np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
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
    able: np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
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
