"""What has happened, and what will? The log and its state behind, a list of calls ahead.

What is due at one time happens in the order in which it was planned, jobs that come in first.

What comes soon is sorted, all that comes later is not: most of what is planned is far away, and to
put it at the end of a list takes no comparison. When all that was near has happened, the next part
of the rest is sorted, together with the jobs that come in meanwhile.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect, insort
from collections.abc import Callable, Sequence
from typing import Any, Final

from drystone.describe.job import JobSpec
from drystone.run.events import Event
from drystone.run.snapshots import SnapshotMaker
from drystone.run.state import ClusterState, JobRecord

_SAME_SECONDS: Final = 1e-9  # times this near are one time
_LAST_SECONDS: Final = sys.float_info.max
_LEAST_SORTED: Final = 64  # of what comes, at a time
_PARTS: Final = 4  # in which the rest is sorted, if that is more

# Called with the time at which it happens, then with its own arguments.
Action = Callable[..., None]
# When, which number in the order of planning, what, and to whom. If it is a job that runs: only as
# long as this is the number of its changes. Else the last field is -1.
_Planned = tuple[float, float, Action, Any, int]


class VirtualTime:
    """One run: everything that happens goes through `record`, everything that will, `later`."""

    def __init__(self, state: ClusterState, maker: SnapshotMaker) -> None:
        self.log: list[Event] = []
        state.log, state.changed = self.log, maker.changed
        self.state, self.maker = state, maker
        maker.watch(state)
        self.record = state.record  # takes notice of something that happens now
        # What is near, read from `_next` on; its last entry sorts more, or never comes.
        self._soon: list[_Planned] = [_END]
        self._next = 0
        self._soon_ends_seconds = math.inf
        self._rest: list[_Planned] = []
        self._num_planned = 0
        # Read from its end. Their numbers are below 0, so that they are before all else.
        self._jobs: list[JobSpec] = []
        self._submit: Callable[[float, JobSpec], None] = _never

    @property
    def now_seconds(self) -> float:
        """What time it is."""
        return self.state.now_seconds

    def expect(self, jobs: Sequence[JobSpec], submit: Callable[[float, JobSpec], None]) -> None:
        """Let `submit` be called with every job at its time."""
        self._jobs = sorted(jobs, key=lambda job: job.submit_seconds)
        self._jobs.reverse()
        self._submit = submit
        self._rest = self._soon[self._next : -1] + self._rest
        self._sort_more(0.0, None)

    def later(self, time_seconds: float, action: Action, *args: object) -> None:
        """Let this happen then."""
        number = self._num_planned = self._num_planned + 1
        planned = (time_seconds, number, _call, (action, args), -1)
        if time_seconds > self._soon_ends_seconds:
            self._rest.append(planned)
        else:
            insort(self._soon, planned, self._next)

    def later_in_run(
        self, time_seconds: float, action: Callable[[float, JobRecord], None], job: JobRecord
    ) -> None:
        """Let this happen to a running job then, unless it stops or changes before."""
        number = self._num_planned = self._num_planned + 1
        planned = (time_seconds, number, action, job, job.num_changes)
        if time_seconds > self._soon_ends_seconds:
            self._rest.append(planned)
        else:
            insort(self._soon, planned, self._next)

    def next_seconds(self) -> float:
        """When the next thing happens; infinity where nothing will."""
        return self._soon[self._next][0]

    def run_until(self, then_seconds: float) -> None:
        """Let everything happen that is due by then."""
        self.step(then_seconds, then_seconds)

    def step(self, least_seconds: float, most_seconds: float) -> None:
        """Let happen what is due next, and go on to its time, or to the nearest of these two."""
        state = self.state
        before, then = state.now_seconds, self._soon[self._next][0]
        due = then
        if then < least_seconds:
            then = least_seconds
        if then > most_seconds:
            then = most_seconds
        until = then + _SAME_SECONDS if then < _LAST_SECONDS else _LAST_SECONDS
        while due <= until:
            number = self._next
            _, _, action, about, num_changes = self._soon[number]
            self._next = number + 1
            if num_changes < 0 or about.num_changes == num_changes:
                now = state.now_seconds
                action(due if due > now else now, about)
            due = self._soon[self._next][0]
        if then < before:
            then = before
        # Where nothing happened, the passing of time alone makes a present that was looked at past.
        if state.before_change is not None and then > before:
            state.before_change()
        state.now_seconds = then

    def _sort_more(self, _: float, __: object) -> None:
        """Sort the next part of what comes: of the jobs, and of all else."""
        rest, jobs, submit = self._rest, self._jobs, self._submit
        rest.sort()
        number = max(_LEAST_SORTED, len(rest) // _PARTS)
        # As far as the last one of so many, and all that happens at that time.
        ends_seconds = rest[number - 1][0] if number < len(rest) else math.inf
        if number < len(jobs):
            ends_seconds = min(ends_seconds, jobs[-number].submit_seconds)
        num_near = bisect(rest, (ends_seconds, math.inf))
        soon = rest[:num_near]
        del rest[:num_near]
        while jobs and jobs[-1].submit_seconds <= ends_seconds:
            soon.append((jobs[-1].submit_seconds, -len(jobs), submit, jobs.pop(), -1))
        soon.sort()
        soon.append(
            _END
            if ends_seconds == math.inf
            else (ends_seconds, math.inf, self._sort_more, None, -1)
        )
        self._soon, self._next, self._soon_ends_seconds = soon, 0, ends_seconds


def _call(time_seconds: float, call: tuple[Action, tuple[object, ...]]) -> None:
    action, args = call
    action(time_seconds, *args)


def _never(*_: object) -> None:
    raise AssertionError("this was not to happen")


_END: Final[_Planned] = (math.inf, math.inf, _never, None, -1)
