"""Virtual time: the log of what has happened, and a heap of what will.

What is due at one time happens in the order in which it was planned, jobs that come in first.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from operator import attrgetter
from typing import Any, Final

import msgspec

from drystone.describe.job import JobSpec
from drystone.run.events import Event, Finished
from drystone.run.snapshots import SnapshotMaker
from drystone.run.state import ClusterState, JobRecord

_SAME_SECONDS: Final = 1e-9  # times this near are one time
_LAST_SECONDS: Final = sys.float_info.max

Action = Callable[..., None]  # called with the time at which it happens, then its own arguments
RunAction = Callable[[float, JobRecord], None]


class PlannedCall(msgspec.Struct, frozen=True, gc=False):
    """A call that happens in any case."""

    action: Action
    args: tuple[Any, ...]

    def happen(self, now_seconds: float) -> None:
        """Call it."""
        self.action(now_seconds, *self.args)


class PlannedInRun(msgspec.Struct, frozen=True, gc=False):
    """What happens to a running job, unless the job stops or changes its speed before."""

    action: RunAction
    job: JobRecord
    num_changes: int  # of the job, when this was planned

    def happen(self, now_seconds: float) -> None:
        """Call it, if the job still runs as it did."""
        if self.job.num_changes == self.num_changes:
            self.action(now_seconds, self.job)


class VirtualTime:
    """One run: everything that happens goes through `record`, everything that will, `later`."""

    def __init__(self, state: ClusterState, maker: SnapshotMaker) -> None:
        self.log: list[Event] = []
        state.log, state.changed = self.log, maker.changed
        self.state, self.maker = state, maker
        self.record = state.record  # takes notice of something that happens now
        # When, and as which in the order of planning: no two are equal, so heaps compare no more.
        self._planned: list[tuple[float, int, PlannedCall | PlannedInRun]] = []
        self._num_planned = 0
        self._jobs: deque[JobSpec] = deque()  # to come, by time
        self._submit: Callable[[float, JobSpec], None]

    @property
    def now_seconds(self) -> float:
        """What time it is."""
        return self.state.now_seconds

    def expect(self, jobs: Sequence[JobSpec], submit: Callable[[float, JobSpec], None]) -> None:
        """Let every job come in at its time, by this call."""
        self._jobs = deque(sorted(jobs, key=attrgetter("submit_seconds")))
        self._submit = submit

    def later(self, time_seconds: float, action: Action, *args: object) -> None:
        """Let this happen then."""
        self._num_planned += 1
        heappush(self._planned, (time_seconds, self._num_planned, PlannedCall(action, args)))

    def later_in_run(self, time_seconds: float, action: RunAction, job: JobRecord) -> None:
        """Let this happen to a running job then, unless it stops or changes before."""
        self._num_planned += 1
        planned = PlannedInRun(action, job, job.num_changes)
        heappush(self._planned, (time_seconds, self._num_planned, planned))

    def when_done(self, samples: float, action: RunAction, job: JobRecord) -> None:
        """The same, once it has done so many samples if it goes on like this."""
        left, time_seconds = samples - job.done_samples, job.counted_seconds
        if left > 0.0:
            time_seconds += left / job.samples_per_second
        self.later_in_run(time_seconds, action, job)

    def finish_when_done(self, job: JobRecord) -> None:
        """Let a running job finish once all its work is done."""
        self.when_done(job.spec.total_samples, self._finish, job)

    def next_seconds(self) -> float:
        """When the next thing happens; infinity where nothing will."""
        planned, jobs = self._planned, self._jobs
        due = planned[0][0] if planned else math.inf
        if jobs and jobs[0].submit_seconds < due:
            due = jobs[0].submit_seconds
        return due

    def run_until(self, then_seconds: float) -> None:
        """Let everything happen that is due by then."""
        until = min(then_seconds + _SAME_SECONDS, _LAST_SECONDS)
        while self.next_seconds() <= until:
            self.step()
        self.state.now_seconds = max(self.state.now_seconds, then_seconds)

    def step(self) -> None:
        """Let happen what is due next, which there must be, and go on to its time."""
        state, jobs, now = self.state, self._jobs, self.state.now_seconds
        due = self.next_seconds()
        then, until = max(due, now), due + _SAME_SECONDS
        while due <= until:
            if due > now:
                now = due
            state.now_seconds = now
            if jobs and jobs[0].submit_seconds == due:
                self._submit(now, jobs.popleft())
            else:
                heappop(self._planned)[2].happen(now)
            due = self.next_seconds()
        state.now_seconds = then

    def _finish(self, now_seconds: float, job: JobRecord) -> None:
        self.state.finish(Finished(now_seconds, job.spec.id))
