"""How much is left of a job, if nobody says how long it is?

What jobs have done is counted from the speeds they are seen to make, in seconds at their fastest.
Lengths are kept as a table of lives: for each of the spans between powers of `_BASE` seconds, how
many jobs came to it, and how many ended in it. Jobs that still run count as far as they have come,
so that short jobs, which end first, do not make all jobs look short. There is a table for all jobs,
one for each model, one for each kind (model and batch) and one for each owner's jobs of a kind; in
every span the share that ends is mixed with one observation of the next wider table, and of all
jobs with Lomax's law: half of those that have run for t and an hour end in as much again.

What counts of a job that has done d is not what is left on average: one long job among many
makes all look long. It is the least, over all spans that it could be given from now on, of the
time spent in it over the chance to end in it (the inverse of Gittins' index, 1979): who is served
in that order has the least mean delay. A guess stands until it is wrong by more than `_DOUBT`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from drystone.describe.job import JobSpec
from drystone.schedule.snapshot import FloatArray, IntArray, Snapshot

Key = tuple[str | int, ...]
_BASE: Final = 2.0**0.5
_NUM_SPANS: Final = 50  # up to a year
_PRIOR_SECONDS: Final = 3600.0
_DOUBT: Final = 2.0
_FORGETTING: Final = 0.995  # with each job that ends, what was seen of its table counts less


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """A job as it was at the last decision."""

    keys: tuple[Key, ...]  # its tables, the widest first
    done_samples: float
    samples_per_second: float
    fastest: float
    left_seconds: float = 0.0  # what it was taken to have left, at its fastest; 0: nothing yet
    sharpness: float = 1.0  # how sure that was: `Guess.sharpness`


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LengthMemory:
    """What active jobs have done, and by table the spans in which those ended that are gone."""

    seen: Mapping[str, _Seen] = field(default_factory=dict)
    ended: Mapping[Key, FloatArray] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Guess:
    """What jobs are taken to have left, and how sure that is."""

    samples: FloatArray
    # By job: k, where another that is taken to have r times as much left ends later with
    # probability 1 / (1 + r ** -k). 1: as if both could end at any time; infinite: it is known.
    sharpness: FloatArray


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
        done, left, sharpness = 0.0, 0.0, 1.0
        if old:
            done = old.done_samples + old.samples_per_second * elapsed_seconds
            left, sharpness = old.left_seconds, old.sharpness
            if speed > 0 and old.samples_per_second == 0:
                done += speed * elapsed_seconds / 2  # it came up some time in between
        seen[spec.id] = _Seen(
            keys=old.keys if old else tables_of(spec),
            done_samples=done,
            samples_per_second=speed,
            fastest=best,
            left_seconds=left,
            sharpness=sharpness,
        )
    gone = [job for job_id, job in memory.seen.items() if job_id not in seen]
    return LengthMemory(seen=seen, ended=_with_ends(memory.ended, gone, elapsed_seconds))


def _with_ends(
    ended: Mapping[Key, FloatArray], gone: list[_Seen], elapsed_seconds: float
) -> Mapping[Key, FloatArray]:
    if not gone:
        return ended
    after = dict(ended)
    for job in gone:
        # It ended at an unknown time since the last decision.
        total = job.done_samples + job.samples_per_second * elapsed_seconds / 2
        if total <= 0 or job.fastest <= 0:
            continue
        span = int(_spans(np.array([total / job.fastest]))[0])
        for key in job.keys:
            counts = after.get(key, np.zeros(_NUM_SPANS)) * _FORGETTING
            counts[span] += 1.0
            after[key] = counts
    return after


def tables_of(spec: JobSpec) -> tuple[Key, ...]:
    """The tables that a job belongs to, the widest first."""
    kind = (spec.model, spec.global_batch)
    tables: tuple[Key, ...] = ((), (spec.model,), kind)
    return (*tables, (*kind, spec.owner)) if spec.owner else tables


def _spans(seconds: FloatArray) -> IntArray:
    """By length: the span that it lies in; the first is up to a second."""
    at = np.ceil(np.log(np.maximum(seconds, 1e-9)) / np.log(_BASE))
    spans: IntArray = np.clip(at, 0, _NUM_SPANS - 1).astype(np.int64)
    return spans


_ENDS: Final = _BASE ** np.arange(_NUM_SPANS)
_BEGINS: Final = np.concatenate(([0.0], _ENDS[:-1]))
_PRIOR: Final = (_ENDS - _BEGINS) / (_PRIOR_SECONDS + _ENDS)  # the share that ends in a span

_IS_LATER: Final = np.triu(np.ones((_NUM_SPANS, _NUM_SPANS), dtype=np.bool_))
# What is left at the beginning of a span (row) of a job that ends in the middle of one (column).
_LOG_LEFT: Final = np.log(np.maximum((_BEGINS + _ENDS) / 2 - _BEGINS[:, None], 1e-9))
# Of the logarithm of a time that is distributed exponentially: pi / sqrt(6).
_EXPONENTIAL_SPREAD: Final = math.pi / math.sqrt(6.0)
_MAX_SHARPNESS: Final = 8.0


def guess_remaining(snapshot: Snapshot, memory: LengthMemory) -> tuple[Guess, LengthMemory]:
    """What each job is taken to have left, and the memory of these guesses."""
    jobs = [memory.seen[spec.id] for spec in snapshot.jobs.specs]
    fastest = np.maximum([job.fastest for job in jobs], 1e-100)
    spans = _spans(np.array([job.done_samples for job in jobs]) / fastest)
    came: dict[Key, FloatArray] = {}  # by table: jobs that run, by the span that they are in
    for job, span in zip(jobs, spans.tolist(), strict=True):
        for key in job.keys:
            if key not in came:
                came[key] = np.zeros(_NUM_SPANS)
            came[key][span] += 1.0
    shares: dict[Key, FloatArray] = {}
    for keys in {job.keys for job in jobs}:
        wider = _PRIOR
        for key in keys:
            if key not in shares:
                shares[key] = _share_ending(memory.ended.get(key), came[key], wider)
            wider = shares[key]
    known = {key: _Ahead.of(shares[key]) for key in {job.keys[-1] for job in jobs}}
    seen = dict(memory.seen)
    left_seconds, sharpness = np.empty(len(jobs)), np.empty(len(jobs))
    for row, (spec, job, span) in enumerate(
        zip(snapshot.jobs.specs, jobs, spans.tolist(), strict=True)
    ):
        ahead, stood = known[job.keys[-1]], job.left_seconds
        left = float(ahead.effort_seconds[span])
        if not stood / _DOUBT < left < stood * _DOUBT:
            left = _DOUBT ** round(math.log(left, _DOUBT))
            sure = float(ahead.sharpness[span])
            job = seen[spec.id] = replace(job, left_seconds=left, sharpness=sure)
        left_seconds[row], sharpness[row] = job.left_seconds, job.sharpness
    guess = Guess(samples=left_seconds * fastest, sharpness=sharpness)
    return guess, LengthMemory(seen=seen, ended=memory.ended)


def _share_ending(ended: FloatArray | None, came: FloatArray, wider: FloatArray) -> FloatArray:
    """By span: the share of those who come to it that end in it."""
    ends = np.zeros(_NUM_SPANS) if ended is None else ended
    # Who runs has come to the beginning of its span: it counts for all before.
    passed = np.cumsum((ends + came)[::-1])[::-1] - came
    share: FloatArray = (ends + wider) / (passed + 1.0)
    return share


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Ahead:
    """What lies ahead of a job, by the span that it has come to."""

    effort_seconds: FloatArray  # the inverse of Gittins' index
    sharpness: FloatArray

    @staticmethod
    def of(share: FloatArray) -> _Ahead:
        """By a table of lives."""
        alive = np.maximum(np.concatenate(([1.0], np.cumprod(1.0 - share))), 1e-30)
        spans = (_ENDS - _BEGINS) * (alive[:-1] + alive[1:]) / 2
        time = np.concatenate(([0.0], np.cumsum(spans)))
        spent, ending = time[1:] - time[:-1, None], alive[:-1, None] - alive[1:]
        effort = np.where(ending > 0, spent / np.maximum(ending, 1e-300), np.inf)
        effort = np.where(_IS_LATER, effort, np.inf).min(axis=1)
        # The spread of the logarithm of what is left.
        chance = np.where(_IS_LATER, -np.diff(alive), 0.0) + 1e-30
        chance /= chance.sum(axis=1, keepdims=True)
        mean = (chance * _LOG_LEFT).sum(axis=1, keepdims=True)
        spread = np.sqrt((chance * (_LOG_LEFT - mean) ** 2).sum(axis=1))
        sharpness = np.clip(_EXPONENTIAL_SPREAD / np.maximum(spread, 1e-9), 1.0, _MAX_SHARPNESS)
        return _Ahead(effort_seconds=np.maximum(effort, 1.0), sharpness=sharpness)


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
