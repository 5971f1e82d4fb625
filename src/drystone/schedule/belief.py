"""How much is left of a job, if nobody says how long it is?

What jobs have done is counted from the speeds they are seen to make. When a job is gone, its total
is remembered with others of its kind (model and batch), and with those of all jobs, in seconds at
their fastest. A job that has done d is then taken to have left what those that did more than d had
left at that point, on average: of its own kind, mixed with one observation of the wider guess,
which is the same over all jobs, mixed with one of the snapshot's guess ("as much again").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from drystone.describe.job import JobSpec
from drystone.schedule.snapshot import FloatArray, Snapshot

Kind = tuple[str, int]
_MAX_OF_A_KIND: Final = 50
_MAX_OF_ALL: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """A job as it was at the last decision."""

    kind: Kind
    done_samples: float
    samples_per_second: float
    fastest: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LengthMemory:
    """What active jobs have done, and how long those were that are gone."""

    seen: Mapping[str, _Seen] = field(default_factory=dict)
    totals: Mapping[Kind, tuple[float, ...]] = field(default_factory=dict)  # samples
    all_seconds: tuple[float, ...] = ()  # at the fastest option of each


def update_lengths(
    snapshot: Snapshot, before: LengthMemory | None, elapsed_seconds: float
) -> LengthMemory:
    """Count what was done since the last decision, and remember who is gone."""
    memory = before or LengthMemory()
    jobs = snapshot.jobs
    speeds = jobs.measured_speeds if jobs.measured_speeds is not None else np.zeros(len(jobs))
    fastest = snapshot.job_speeds.max(axis=1, initial=0.0)
    seen: dict[str, _Seen] = {}
    for spec, speed, best in zip(jobs.specs, speeds.tolist(), fastest.tolist(), strict=True):
        old = memory.seen.get(spec.id)
        done = old.done_samples + old.samples_per_second * elapsed_seconds if old else 0.0
        if old and speed > 0 and old.samples_per_second == 0:
            done += speed * elapsed_seconds / 2  # it came up some time in between
        seen[spec.id] = _Seen(
            kind=kind_of(spec), done_samples=done, samples_per_second=speed, fastest=best
        )
    gone = [job for job_id, job in memory.seen.items() if job_id not in seen]
    return _remember(memory, seen, gone, elapsed_seconds)


def _remember(
    memory: LengthMemory, seen: Mapping[str, _Seen], gone: list[_Seen], elapsed_seconds: float
) -> LengthMemory:
    totals, every = dict(memory.totals), list(memory.all_seconds)
    for job in gone:
        # It ended at an unknown time since the last decision.
        total = job.done_samples + job.samples_per_second * elapsed_seconds / 2
        if total > 0 and job.fastest > 0:
            totals[job.kind] = (*totals.get(job.kind, ()), total)[-_MAX_OF_A_KIND:]
            every.append(total / job.fastest)
    return LengthMemory(seen=seen, totals=totals, all_seconds=tuple(every[-_MAX_OF_ALL:]))


def kind_of(spec: JobSpec) -> Kind:
    """Jobs of one kind are expected to be of like length."""
    return (spec.model, spec.global_batch)


def guess_remaining(snapshot: Snapshot, memory: LengthMemory) -> FloatArray:
    """Samples that each job is expected to have left."""
    jobs = snapshot.jobs
    done = np.array([memory.seen[spec.id].done_samples for spec in jobs.specs])
    fastest = np.maximum(snapshot.job_speeds.max(axis=1, initial=0.0), 1e-100)
    left, number = _mean_left(np.array(memory.all_seconds), done / fastest)
    guess: FloatArray = (left * fastest * number + jobs.remaining_samples) / (number + 1)
    rows_of: dict[Kind, list[int]] = {}
    for row, spec in enumerate(jobs.specs):
        kind = kind_of(spec)
        if kind in memory.totals:
            rows_of.setdefault(kind, []).append(row)
    for kind, rows in rows_of.items():
        left, number = _mean_left(np.array(memory.totals[kind]), done[rows])
        guess[rows] = (left * number + guess[rows]) / (number + 1)
    return guess


def _mean_left(totals: FloatArray, done: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Of those totals that are above what was done: what is left on average, and how many."""
    totals = np.sort(totals)
    rest = np.concatenate((np.cumsum(totals[::-1])[::-1], [0.0]))
    at = np.searchsorted(totals, done, side="right")
    number = (len(totals) - at).astype(np.float64)
    left = np.where(number > 0, rest[at] / np.maximum(number, 1.0) - done, 0.0)
    return left, number


# By job: for each GPU type, seen / said; nan where it has not run yet.
Ratios = Mapping[str, FloatArray]

_MIN_RATIO: Final = 0.1  # less is a fault, not a wrong estimate
_MAX_RATIO: Final = 10.0
_AS_SAID: Final = 1e-3  # a difference this small is none
_CARRIED: Final = 0.5  # the exponent with which a ratio counts for types that were not tried


def update_ratios(snapshot: Snapshot, known: Ratios) -> dict[str, FloatArray]:
    """What was known, with what is seen now; jobs that are gone are forgotten."""
    jobs = snapshot.jobs
    ratios = {job_id: known[job_id] for job_id in known if job_id in jobs.row_of} if known else {}
    seen = jobs.measured_speeds
    if seen is None:
        return ratios
    rows, said = snapshot.running, snapshot.job_speeds.take(snapshot.running_cells)
    seen = seen.take(rows)
    # Of whom nothing is known yet, only those are of interest who do not do just as is said.
    told = ((seen > 0) if ratios else (seen > 0) & (seen != said)).nonzero()[0]
    if not len(told):
        return ratios
    rows, seen = rows.take(told), seen.take(told)
    ratio = np.clip(seen / np.maximum(said.take(told), 1e-300), _MIN_RATIO, _MAX_RATIO)
    for row, now in zip(rows.tolist(), ratio.tolist(), strict=True):
        job_id = jobs.specs[row].id
        before = ratios.get(job_id)
        if before is None and abs(now - 1) < _AS_SAID:
            continue
        kinds = snapshot.counts(row, int(jobs.option[row])) > 0
        if before is None:
            before = np.full(len(snapshot.gpu_types), np.nan)
        ratios[job_id] = np.where(kinds, now, before)
    return ratios


def corrected_speeds(snapshot: Snapshot, ratios: Ratios) -> FloatArray:
    """Samples a second of every option, (jobs, options), by what is known of each job."""
    if not ratios:
        return snapshot.job_speeds
    rows = np.array([snapshot.jobs.row_of[job_id] for job_id in ratios], dtype=np.int64)
    known = np.stack(list(ratios.values()))
    others = np.exp(_CARRIED * np.nanmean(np.log(known), axis=1))[:, None]
    factors = np.where(np.isnan(known), others, known)[:, None, :]
    takes = snapshot.options.counts[snapshot.jobs.option_set[rows]] > 0
    slowest = np.where(takes, factors, np.inf).min(axis=2, initial=np.inf)
    speeds = snapshot.job_speeds.copy()
    speeds[rows] *= np.where(np.isfinite(slowest), slowest, 1.0)
    return speeds
