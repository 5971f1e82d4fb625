"""What has happened, and what will? The log and its state behind, a heap of calls ahead.

What is due at one time happens in the order in which it was planned, jobs that come in first.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import Final

from drystone.describe.job import JobSpec
from drystone.run.events import Event
from drystone.run.lifecycle import JobState
from drystone.run.snapshots import SnapshotMaker
from drystone.run.state import ClusterState, JobRecord

_SAME_SECONDS = 1e-9  # times this near are one time
_LAST_SECONDS = sys.float_info.max

# Called with the time at which it happens, then with its own arguments.
Action = Callable[..., None]
_RUNNING: Final = JobState.RUNNING


class VirtualTime:
    """One run: everything that happens goes through `record`, everything that will, `later`."""

    def __init__(self, state: ClusterState, maker: SnapshotMaker) -> None:
        self.log: list[Event] = []
        state.log, state.changed = self.log, maker.changed
        self.state, self.maker = state, maker
        self.record = state.record  # takes notice of something that happens now
        self.now_seconds = 0.0
        # The last entry is never due, so that there is always a first one to look at.
        self._coming: list[tuple[float, int, Action, JobRecord | None, int]] = [
            (math.inf, 0, _never, None, 0)
        ]
        self._num_planned = 0
        # Kept apart, read from its end: a heap of all jobs to come would make all else slow.
        self._jobs: list[JobSpec] = []
        self._job_seconds = math.inf  # when the next of them comes
        self._submit: Callable[[float, JobSpec], None] = _never

    def expect(self, jobs: Sequence[JobSpec], submit: Callable[[float, JobSpec], None]) -> None:
        """Let `submit` be called with every job at its time."""
        self._jobs = sorted(jobs, key=lambda job: job.submit_seconds)
        self._jobs.reverse()
        self._submit = submit
        self._job_seconds = self._jobs[-1].submit_seconds if jobs else math.inf

    def later(self, time_seconds: float, action: Action, *args: object) -> None:
        """Let this happen then."""
        number = self._num_planned = self._num_planned + 1
        call = partial(_call, action, args) if args else action
        heappush(self._coming, (time_seconds, number, call, None, 0))

    def later_in_run(
        self, time_seconds: float, action: Callable[[float, JobRecord], None], job: JobRecord
    ) -> None:
        """Let this happen to a running job then, unless it stops or changes before."""
        number = self._num_planned = self._num_planned + 1
        heappush(self._coming, (time_seconds, number, action, job, job.num_changes))

    def next_seconds(self) -> float:
        """When the next thing happens; infinity where nothing will."""
        first, due = self._job_seconds, self._coming[0][0]
        return first if first < due else due

    def run_until(self, then_seconds: float) -> None:
        """Let everything happen that is due by then."""
        self.step(then_seconds, then_seconds)

    def step(self, least_seconds: float, most_seconds: float) -> None:
        """Let happen what is due next, and go on to its time, or to the nearest of these two."""
        state, coming, jobs = self.state, self._coming, self._jobs
        due, come = coming[0][0], self._job_seconds
        then = come if come < due else due
        if then < least_seconds:
            then = least_seconds
        if then > most_seconds:
            then = most_seconds
        until = then + _SAME_SECONDS if then < _LAST_SECONDS else _LAST_SECONDS
        while True:
            now = state.now_seconds
            if come <= due:
                if come > until:
                    break
                at, job = come if come > now else now, jobs.pop()
                come = self._job_seconds = jobs[-1].submit_seconds if jobs else math.inf
                self._submit(at, job)
            else:
                if due > until:
                    break
                _, _, action, record, num_changes = heappop(coming)
                if record is None:
                    action(due if due > now else now)
                elif record.num_changes == num_changes and record.state is _RUNNING:
                    action(due if due > now else now, record)
            due = coming[0][0]
        if then > self.now_seconds:
            self.now_seconds = then
        state.now_seconds = self.now_seconds


def _call(action: Action, args: tuple[object, ...], time_seconds: float) -> None:
    action(time_seconds, *args)


def _never(*_: object) -> None:
    raise AssertionError("this was not to happen")
