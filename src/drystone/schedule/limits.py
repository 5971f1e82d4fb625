"""Which options may a job take, by what its owner allows, and who can never run?

Types allowed and denied, fewest and most GPUs, money and running time. An option is left out if the
job could not end on it within its money and time; where lengths are guessed, only what is spent
already counts. A job that waits and has no option left is refused, with the reason. One that runs
keeps what it has until a limit is really reached.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from drystone.describe.job import JobSpec
from drystone.schedule.snapshot import BoolArray, FloatArray, Snapshot
from drystone.units import HOUR_SECONDS


class Used(NamedTuple):
    """What a job with a limit has used up to a time."""

    seconds: float = 0.0  # of running
    dollars: float = 0.0


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
    rows = [row for row, spec in enumerate(snapshot.jobs.specs) if _has_limit(spec)]
    if not rows:
        return Limits(allowed=None)
    rates = np.array([dollars_per_hour.get(gpu, 0.0) for gpu in snapshot.gpu_types])
    allowed = np.ones(speeds.shape, dtype=np.bool_)
    refused: dict[int, str] = {}
    now_used: dict[str, Used] = {}
    left: list[float] = []
    for row in rows:
        spec = snapshot.jobs.specs[row]
        job = _Job(snapshot, row, speeds[row], rates / HOUR_SECONDS)
        spent = job.add(used.get(spec.id), elapsed_seconds)
        now_used[spec.id] = spent
        allowed[row], reason = job.left(spent)
        left.append(job.seconds_to_limit(spent))
        if reason and not snapshot.jobs.is_running[row]:
            refused[row] = reason
    return Limits(
        allowed=allowed,
        refused=refused,
        used=now_used,
        left_seconds=tuple(one for one in left if one > 0),
    )


def _has_limit(spec: JobSpec) -> bool:
    return (
        spec.max_cost_dollars != math.inf
        or spec.max_duration_seconds != math.inf
        or bool(spec.allowed_gpus)
        or bool(spec.denied_gpus)
        or spec.min_gpus > 1
        or spec.max_gpus < 1_000_000
    )


class _Job:
    """One job with limits."""

    def __init__(
        self, snapshot: Snapshot, row: int, speeds: FloatArray, dollars_per_second: FloatArray
    ) -> None:
        jobs = snapshot.jobs
        self.spec, self._speeds = jobs.specs[row], speeds
        self._counts = snapshot.options.counts[jobs.option_set[row]]
        self._gpu_types, self._knows_lengths = snapshot.gpu_types, snapshot.knows_lengths
        self._option, self._now = int(jobs.option[row]), snapshot.now_seconds
        self._since = float(jobs.running_since_seconds[row])
        self._attained = float(jobs.attained_gpu_seconds[row])
        left = float(jobs.remaining_samples[row]) / np.where(speeds > 0, speeds, 1.0)
        starts = snapshot.startup_seconds[row].copy()
        if self._option >= 0:
            starts[self._option] = 0.0
        self._seconds = np.where(speeds > 0, left + starts, np.inf)
        self._dollars_per_second = self._counts @ dollars_per_second

    def add(self, before: Used | None, elapsed_seconds: float) -> Used:
        """What was used before, and since. Of a job not seen before, what its GPU hours tell."""
        if before is None:
            gpus = np.maximum(self._counts.sum(axis=1), 1)
            at = self._option if self._option >= 0 else int(np.argmin(gpus))
            seconds = self._attained / float(gpus[at])
            return Used(seconds, seconds * float(self._dollars_per_second[at]))
        if self._option < 0:
            return before
        ran = max(min(elapsed_seconds, self._now - self._since), 0.0)
        cost = ran * float(self._dollars_per_second[self._option])
        return Used(before.seconds + ran, before.dollars + cost)

    def left(self, used: Used) -> tuple[BoolArray, str]:
        """The options that are left, and why there is none."""
        spec = self.spec
        fits = self._named()
        if not fits.any():
            return fits, f"it may run on {self._wish()}, and no option of it is like that"
        money, time = self._money(used), self._time(used)
        within = (money <= spec.max_cost_dollars) & (time <= spec.max_duration_seconds)
        is_out = used.dollars >= spec.max_cost_dollars or used.seconds >= spec.max_duration_seconds
        if self._option >= 0 and not is_out:
            within[self._option] = True
        if (fits & within).any():
            return fits & within, ""
        if float(money[fits].min()) > spec.max_cost_dollars:
            least = float(money[fits].min())
            return fits & within, (
                f"it may cost {spec.max_cost_dollars:.2f} dollars; to the end it would cost at "
                f"least {least:.2f}, of which {used.dollars:.2f} are spent"
            )
        least = float(time[fits].min())
        return fits & within, (
            f"it may run for {spec.max_duration_seconds / HOUR_SECONDS:.2f} h; within its money "
            f"it needs at least {least / HOUR_SECONDS:.2f} h to the end, of which it has run "
            f"{used.seconds / HOUR_SECONDS:.2f}"
        )

    def seconds_to_limit(self, used: Used) -> float:
        """How long it can go on as it runs now; infinity while it waits."""
        if self._option < 0:
            return math.inf
        rate = float(self._dollars_per_second[self._option])
        money = (self.spec.max_cost_dollars - used.dollars) / rate if rate > 0 else math.inf
        return min(money, self.spec.max_duration_seconds - used.seconds)

    def _money(self, used: Used) -> FloatArray:
        seconds = np.where(self._speeds > 0, self._seconds, 0.0)  # padding takes for ever
        more = self._dollars_per_second * seconds if self._knows_lengths else 0.0
        total: FloatArray = used.dollars + np.zeros(len(self._speeds)) + more
        return total

    def _time(self, used: Used) -> FloatArray:
        more = self._seconds if self._knows_lengths else 0.0
        total: FloatArray = used.seconds + np.zeros(len(self._speeds)) + more
        return total

    def _named(self) -> BoolArray:
        """By type and number of GPUs alone."""
        spec, total = self.spec, self._counts.sum(axis=1)
        fits = (self._speeds > 0) & (total >= spec.min_gpus) & (total <= spec.max_gpus)
        for kind, gpu in enumerate(self._gpu_types):
            if not spec.names(gpu):
                fits &= self._counts[:, kind] == 0
        return np.asarray(fits, dtype=np.bool_)

    def _wish(self) -> str:
        spec = self.spec
        names = _join(sorted(spec.allowed_gpus)) if spec.allowed_gpus else "any GPU"
        if spec.denied_gpus:
            names += f" but {_join(spec.denied_gpus)}"
        return f"{names}, {spec.min_gpus} to {spec.max_gpus} of them"


def _join(names: Sequence[str]) -> str:
    return ", ".join(names)
