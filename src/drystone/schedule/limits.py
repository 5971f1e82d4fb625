"""Limits of a job's owner: GPU types, number of GPUs, money and running time.

An option is left out if the job could not end on it within its money and time; where lengths are
guessed, only what is spent already counts. A job that waits and has no option left is refused, with
the reason. One that runs keeps what it has until a limit is really reached. `options_within` asks
the same of a job that is only being submitted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from drystone.describe.job import JobSpec
from drystone.describe.option import OptionSet
from drystone.errors import NothingFits
from drystone.schedule.snapshot import BoolArray, FloatArray, IntArray, Snapshot
from drystone.units import HOUR_SECONDS, format_dollars, format_seconds


class Used(NamedTuple):
    """What a job with a limit has used up to a time."""

    seconds: float = 0.0  # of running
    dollars: float = 0.0


_UNKNOWN: Final = Used(math.nan, math.nan)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Limits:
    """What is left of the options, and why nothing is left for some jobs."""

    allowed: BoolArray | None  # (jobs, options); None: no job has a limit
    refused: Mapping[int, str] = field(default_factory=dict)  # row: reason
    used: Mapping[str, Used] = field(default_factory=dict)
    left_seconds: tuple[float, ...] = ()  # until jobs that run are at a limit


def check_limits(
    snapshot: Snapshot,
    speeds: FloatArray,
    *,
    dollars_per_hour: Mapping[str, float],
    used: Mapping[str, Used],
    elapsed_seconds: float,
) -> Limits:
    """The limits of all jobs that have any. `used` is what was known one decision before."""
    rows = snapshot.jobs.is_limited.nonzero()[0]
    if not len(rows):
        return Limits(allowed=None if snapshot.barred is None else ~snapshot.barred)
    rates = np.array([dollars_per_hour.get(gpu, 0.0) for gpu in snapshot.gpu_types])
    jobs = _LimitedJobs(snapshot, rows, speeds[rows], rates / HOUR_SECONDS)
    spent = jobs.add(used, elapsed_seconds)
    allowed = np.ones(speeds.shape, dtype=np.bool_)
    allowed[rows], reasons = jobs.left(*spent)
    if snapshot.barred is not None:
        allowed &= ~snapshot.barred
    left = jobs.seconds_to_limit(*spent)
    return Limits(
        allowed=allowed,
        refused={row: why for row, why in reasons.items() if not snapshot.jobs.is_running[row]},
        used={
            snapshot.jobs.specs[row].id: Used(*job_used)
            for row, job_used in zip(rows.tolist(), np.stack(spent, axis=1).tolist(), strict=True)
        },
        left_seconds=tuple(left[left > 0].tolist()),
    )


def named_options(
    specs: Sequence[JobSpec], counts: IntArray, gpu_types: Sequence[str]
) -> BoolArray:
    """The options with GPU types and numbers that the owners allow, (jobs, options).

    `counts` is (jobs, options, types).
    """
    num_gpus = counts.sum(axis=2)
    fewest = np.array([[spec.min_gpus] for spec in specs])
    most = np.array([[spec.max_gpus] for spec in specs])
    fits = (num_gpus >= fewest) & (num_gpus <= most)
    for kind, gpu in enumerate(gpu_types):
        names = np.array([[spec.names(gpu)] for spec in specs])
        fits &= names | (counts[:, :, kind] == 0)
    return np.asarray(fits, dtype=np.bool_)


def seconds_and_dollars(
    samples: FloatArray | float,
    speeds: FloatArray,
    startup_seconds: FloatArray | float,
    dollars_per_second: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """What so many samples take on each option; infinite where it has no speed."""
    can_run = speeds > 0
    seconds = samples / np.where(can_run, speeds, 1.0) + startup_seconds
    dollars = dollars_per_second * seconds
    return np.where(can_run, seconds, np.inf), np.where(can_run, dollars, np.inf)


def options_within(
    spec: JobSpec, options: OptionSet, gpu_types: tuple[str, ...], prices: Mapping[str, float]
) -> BoolArray:
    """The options on which a job would end within its money and time, as they are estimated.

    None at all is an error that says by how much. What a type costs is 0 where no price is known.
    """
    rates = np.array([prices.get(gpu, 0.0) for gpu in gpu_types]) / HOUR_SECONDS
    speeds = options.samples_per_second
    seconds, dollars = seconds_and_dollars(spec.total_samples, speeds, 0.0, options.counts @ rates)
    is_cheap, is_short = dollars <= spec.max_cost_dollars, seconds <= spec.max_duration_seconds
    within: BoolArray = (speeds > 0) & is_cheap & is_short
    if within.any():
        return within
    if not is_cheap.any():
        wrong = (
            f"max_cost is {format_dollars(spec.max_cost_dollars)}, and the cheapest way to run it "
            f"takes about {format_dollars(float(dollars.min()))}"
        )
    else:
        quickest = format_seconds(float(seconds[is_cheap].min()))
        wrong = (
            f"max_duration is {format_seconds(spec.max_duration_seconds)}, and the quickest way "
            f"to run it within its money takes about {quickest}"
        )
    raise NothingFits(f"{spec.model}: {wrong}", hint="Allow more, or train less")


class _LimitedJobs:
    """The jobs with limits, all at once; rows are theirs, columns options."""

    def __init__(
        self, snapshot: Snapshot, rows: IntArray, speeds: FloatArray, dollars_per_second: FloatArray
    ) -> None:
        jobs = snapshot.jobs
        self._rows, self._speeds = rows, speeds
        self._specs = [jobs.specs[row] for row in rows.tolist()]
        self._gpu_types = snapshot.gpu_types
        self._counts = snapshot.options.counts[jobs.option_set[rows]]
        self._num_gpus = self._counts.sum(axis=2)
        self._option = jobs.option[rows]
        self._runs = np.flatnonzero(self._option >= 0)
        self._ran_seconds = snapshot.now_seconds - jobs.running_since_seconds[rows]
        self._attained = jobs.attained_gpu_seconds[rows]
        starts = snapshot.startup_seconds[rows]
        starts[self._runs, self._option[self._runs]] = 0.0
        self._dollars_per_second = self._counts @ dollars_per_second
        # What is to come on each option; nothing is known of it where lengths are not.
        self._seconds, self._dollars = seconds_and_dollars(
            jobs.remaining_samples[rows, None], speeds, starts, self._dollars_per_second
        )
        if not snapshot.knows_lengths:
            self._seconds, self._dollars = np.zeros(speeds.shape), np.zeros(speeds.shape)
        self._max_dollars = np.array([spec.max_cost_dollars for spec in self._specs])
        self._max_seconds = np.array([spec.max_duration_seconds for spec in self._specs])

    def add(
        self, before: Mapping[str, Used], elapsed_seconds: float
    ) -> tuple[FloatArray, FloatArray]:
        """What was used before, and since. Of a job not seen before, what its GPU hours tell."""
        at = np.arange(len(self._rows))
        known = [before.get(spec.id, _UNKNOWN) for spec in self._specs]
        seconds, dollars = np.array(known, dtype=np.float64).T
        runs = self._option >= 0
        ran = np.where(runs, np.clip(self._ran_seconds, 0.0, max(elapsed_seconds, 0.0)), 0.0)
        fewest = np.maximum(self._num_gpus, 1)
        option = np.where(runs, self._option, fewest.argmin(axis=1))
        is_new = np.isnan(seconds)
        ran = np.where(is_new, self._attained / fewest[at, option], ran)
        cost = ran * self._dollars_per_second[at, option]
        return np.where(is_new, 0.0, seconds) + ran, np.where(is_new, 0.0, dollars) + cost

    def left(self, seconds: FloatArray, dollars: FloatArray) -> tuple[BoolArray, dict[int, str]]:
        """The options that are left, and why there is none, by row of the snapshot."""
        fits = (self._speeds > 0) & named_options(self._specs, self._counts, self._gpu_types)
        money, time = dollars[:, None] + self._dollars, seconds[:, None] + self._seconds
        within = (money <= self._max_dollars[:, None]) & (time <= self._max_seconds[:, None])
        is_out = (dollars >= self._max_dollars) | (seconds >= self._max_seconds)
        keeps = self._runs[~is_out[self._runs]]
        within[keeps, self._option[keeps]] = True
        left = fits & within
        reasons = {
            int(self._rows[row]): self._why_not(
                self._specs[row],
                money[row, fits[row]],
                time[row, fits[row]],
                Used(float(seconds[row]), float(dollars[row])),
            )
            for row in np.flatnonzero(~left.any(axis=1)).tolist()
        }
        return left, reasons

    def seconds_to_limit(self, seconds: FloatArray, dollars: FloatArray) -> FloatArray:
        """How long each can go on as it runs now; infinity while it waits."""
        result = np.full(len(self._rows), np.inf)
        runs = self._runs
        rate = self._dollars_per_second[runs, self._option[runs]]
        money = np.full(len(runs), np.inf)
        np.divide((self._max_dollars - dollars)[runs], rate, out=money, where=rate > 0)
        result[runs] = np.minimum(money, (self._max_seconds - seconds)[runs])
        return result

    def _why_not(self, spec: JobSpec, money: FloatArray, time: FloatArray, used: Used) -> str:
        """The reason; `money` and `time` are of the options that the types and numbers leave."""
        if not len(money):
            return f"it may run on {_wish(spec)}, and no option of it is like that"
        least = float(money.min())
        if least > spec.max_cost_dollars:
            return (
                f"it may cost {format_dollars(spec.max_cost_dollars)}; to the end it would cost "
                f"at least {format_dollars(least)}, of which {format_dollars(used.dollars)} are "
                "spent"
            )
        return (
            f"it may run for {spec.max_duration_seconds / HOUR_SECONDS:.2f} h; within its money "
            f"it needs at least {float(time.min()) / HOUR_SECONDS:.2f} h to the end, of which it "
            f"has run {used.seconds / HOUR_SECONDS:.2f}"
        )


def _wish(spec: JobSpec) -> str:
    names = ", ".join(sorted(spec.allowed_gpus)) if spec.allowed_gpus else "any GPU"
    if spec.denied_gpus:
        names += f" but {', '.join(spec.denied_gpus)}"
    return f"{names}, {spec.min_gpus} to {spec.max_gpus} of them"
