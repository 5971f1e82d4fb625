"""When will a waiting job start? The loop goes on in virtual time, from a copy of what is the case.

The same policy decides over the same jobs, nodes and options as in the controller; jobs run at the
speeds that are known now, nothing fails and nobody submits anything. So it is an estimate. What the
policy remembers between rounds is not copied, and lost or drained nodes stay away.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Final

from drystone.describe.option import OptionSet
from drystone.errors import DrystoneError
from drystone.run.control.journal import Journal
from drystone.run.events import Refused, Started, Stopped
from drystone.run.lifecycle import JobState
from drystone.run.loop import drive
from drystone.run.simulate.clock import VirtualTime
from drystone.run.snapshots import PresentSnapshot, SnapshotMaker
from drystone.run.state import ClusterState, JobRecord
from drystone.schedule.decision import Policy
from drystone.schedule.snapshot import Placement, Snapshot, StartupCost

MOST_JOBS: Final = 2000  # more are not looked at: one round would take too long already
MOST_CPU_SECONDS: Final = 0.4  # an answer that nobody waits for
_MOST_IDLE_ROUNDS: Final = 3  # while nothing runs and nothing comes: more calls change nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Present:
    """A copy of all that the forecast depends on; the controller may go on meanwhile."""

    now_seconds: float
    state: ClusterState
    held: tuple[tuple[float, JobRecord], ...]  # not to be tried before these times
    options: Mapping[str, OptionSet]  # by job
    gpu_types: tuple[str, ...]
    startup: StartupCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What should happen until a job starts."""

    start_seconds: float | None  # None: it is not known
    earlier: tuple[str, ...] = ()  # jobs that wait now and should start before it
    not_before_seconds: float | None = None  # as far as was looked, where that was not far enough


def copy_present(journal: Journal, startup: StartupCost) -> Present | None:
    """What is the case, copied under the journal's lock; None where there is too much of it."""
    with journal.lock:
        if len(journal.live.state.active) > MOST_JOBS:
            return None
        now = journal.snapshot().now_seconds  # it brings the options of running jobs up to date
        live = journal.live
        state = ClusterState(list(live.state.nodes), now_seconds=live.state.now_seconds)
        state.free, state.lost = list(live.state.free), live.state.lost | live.state.gone
        for row, node in enumerate(state.nodes):
            if node.id in live.drained:
                state.free[row] = 0
                state.lost.add(row)
        held = []
        for job_id, record in live.state.active.items():
            retry_seconds = live.jobs[job_id].retry_seconds
            if record.state is JobState.QUEUED and retry_seconds > now:
                held.append((retry_seconds, copy(record)))
            elif not journal.is_held_back(job_id, now):
                state.jobs[job_id] = state.active[job_id] = copy(record)
                state.num_running += record.state is JobState.RUNNING
        specs = [one.spec for one in (*state.jobs.values(), *(record for _, record in held))]
        return Present(
            now_seconds=now,
            state=state,
            held=tuple(held),
            options={spec.id: journal.options_of(spec) for spec in specs},
            gpu_types=journal.gpu_types,
            startup=startup,
        )


def forecast_start(
    present: Present,
    policy: Policy,
    job_id: str,
    *,
    most_cpu_seconds: float = MOST_CPU_SECONDS,
) -> Forecast:
    """When a job should start. Uses the copy up; gives up after so much computing."""
    world = _World(present, job_id, most_cpu_seconds=most_cpu_seconds)
    try:
        drive(world, policy)
    except DrystoneError:  # a policy that cannot go on: then nobody knows
        return Forecast(start_seconds=None)
    return Forecast(
        start_seconds=world.start_seconds,
        earlier=tuple(world.earlier),
        not_before_seconds=world.not_before_seconds,
    )


class _World:
    """The near future, until one job starts."""

    def __init__(self, present: Present, wanted: str, *, most_cpu_seconds: float) -> None:
        self.start_seconds: float | None = None
        self.earlier: dict[str, None] = {}  # in order
        self._wanted = wanted
        self._stop_at = time.thread_time() + most_cpu_seconds
        state = present.state
        self._waits = {
            one.spec.id for one in state.active.values() if one.state is JobState.QUEUED
        } | {record.spec.id for _, record in present.held}
        self._options, self._startup = present.options, present.startup
        self._maker = SnapshotMaker(
            present.gpu_types,
            lambda spec: present.options[spec.id],
            present.startup,
        )
        self._time = VirtualTime(state, self._maker)
        state.now_seconds = present.now_seconds
        for record in state.active.values():
            self._maker.update(record)
            if record.state is JobState.RUNNING and record.samples_per_second > 0:
                self._time.finish_when_done(record)
        for retry_seconds, record in present.held:
            self._time.later(retry_seconds, self._come_back, record)
        self._wakes: set[float] = set()
        self._num_held, self._num_idle = len(present.held), 0
        self._is_done = False

    @property
    def is_over(self) -> bool:
        """Once the job starts, nothing more can happen, or it takes too long to find out."""
        is_late = time.thread_time() > self._stop_at
        return self.start_seconds is not None or self._is_done or is_late

    @property
    def not_before_seconds(self) -> float | None:
        """Until when the job waits for certain, where it took too long to look further."""
        is_known = self.start_seconds is not None or self._is_done
        return None if is_known else self._time.now_seconds

    def observe(self) -> Snapshot:
        """What will be the case."""
        return PresentSnapshot(self._maker, self._time.state, self._time.now_seconds)

    def launch(self, job_id: str, option: int, placement: Placement, reason: str) -> None:
        """Start a waiting job."""
        if job_id == self._wanted:
            self.start_seconds = self._time.now_seconds
        elif self.start_seconds is None and job_id in self._waits:
            self.earlier[job_id] = None
        record = self._time.state.jobs[job_id]
        now = self._time.now_seconds
        num_gpus = sum(count for _, count in placement)
        self._time.record(
            Started(
                time_seconds=now,
                job_id=job_id,
                option=option,
                placement=placement,
                samples_per_second=float(self._options[job_id].samples_per_second[option]),
                productive_seconds=now + self._startup.seconds_on(num_gpus),
                reason=reason,
            )
        )
        self._time.finish_when_done(record)

    def stop(self, job_id: str, reason: str) -> None:
        """Take a running job's GPUs."""
        now = self._time.now_seconds
        self._time.record(Stopped(time_seconds=now, job_id=job_id, reason=reason))

    def refuse(self, job_id: str, reason: str) -> None:
        """Turn a waiting job away."""
        self._is_done = self._is_done or job_id == self._wanted
        now = self._time.now_seconds
        self._time.record(Refused(time_seconds=now, job_id=job_id, reason=reason))

    def rent(self, offer: str, num_nodes: int, reason: str) -> None:
        """Nothing can be rented here."""
        raise DrystoneError(f"nothing can be rented ({num_nodes} of {offer}: {reason})")

    def release(self, node: int, reason: str) -> None:
        """Nothing was rented here."""
        raise DrystoneError(f"nothing was rented ({node}: {reason})")

    def wake(self, at_seconds: float, reason: str) -> None:
        """Let `advance` return at this time at the latest."""
        if at_seconds not in self._wakes:
            self._wakes.add(at_seconds)
            self._time.later(at_seconds, _nothing)

    def advance(self) -> None:
        """Jump to the next thing that happens."""
        then = self._time.next_seconds()
        is_idle = self._time.state.num_running == 0 and self._num_held == 0
        self._num_idle = self._num_idle + 1 if is_idle else 0
        if then == float("inf") or self._num_idle > _MOST_IDLE_ROUNDS:
            self._is_done = True
        else:
            self._time.run_until(then)

    def _come_back(self, _: float, record: JobRecord) -> None:
        self._num_held -= 1
        state = self._time.state
        state.jobs[record.spec.id] = state.active[record.spec.id] = record
        self._maker.update(record)


def _nothing(_: float) -> None:
    """Time has come; that is all."""
