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
from operator import attrgetter
from typing import Any, Final

from drystone.describe.job import JobSpec
from drystone.run.events import Event, Finished, Submitted
from drystone.run.snapshots.maker import SnapshotMaker
from drystone.run.state import ClusterState, JobRecord

_SAME_SECONDS: Final = 1e-9  # times this near are one time
_LAST_SECONDS: Final = sys.float_info.max
_LEAST_SORTED: Final = 64  # of what comes, at a time
_PARTS: Final = 4  # in which the rest is sorted, if that is more

_submit_seconds = attrgetter("submit_seconds")
# Called with the time at which it happens, then with its own arguments.
Action = Callable[..., None]
RunAction = Callable[[float, JobRecord], None]
# When, which number in the order of planning, what, and to whom. If it is a job that runs: only as
# long as this is the number of its changes. What every job does has no call of its own: without one
# a job that runs finishes, and another one comes in.
_Planned = tuple[float, float, Action | None, Any, int | None]


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
        # By time, with numbers below 0, so that they are before all else that is due with them.
        self._jobs: list[JobSpec] = []
        self._num_come = 0  # or are near
        self._submit: Callable[[float, JobSpec], None] | None = None

    @property
    def now_seconds(self) -> float:
        """What time it is."""
        return self.state.now_seconds

    def expect(
        self, jobs: Sequence[JobSpec], submit: Callable[[float, JobSpec], None] | None = None
    ) -> None:
        """Let every job come in at its time, by this call if there is one."""
        self._jobs = sorted(jobs, key=_submit_seconds)
        self._submit = submit
        self._rest = self._soon[self._next : -1] + self._rest
        self._sort_more(0.0, None)

    def later(self, time_seconds: float, action: Action, *args: object) -> None:
        """Let this happen then."""
        number = self._num_planned = self._num_planned + 1
        planned = (time_seconds, number, _call, (action, args), None)
        if time_seconds > self._soon_ends_seconds:
            self._rest.append(planned)
        else:
            insort(self._soon, planned, self._next)

    def later_in_run(self, time_seconds: float, action: RunAction | None, job: JobRecord) -> None:
        """Let this happen to a running job then, unless it stops or changes before.

        None: it finishes.
        """
        number = self._num_planned = self._num_planned + 1
        planned = (time_seconds, number, action, job, job.num_changes)
        if time_seconds > self._soon_ends_seconds:
            self._rest.append(planned)
        else:
            insort(self._soon, planned, self._next)

    def when_done(self, samples: float, action: RunAction | None, job: JobRecord) -> None:
        """The same, once it has done so many samples if it goes on like this."""
        left, time_seconds = samples - job.done_samples, job.counted_seconds
        if left > 0.0:
            time_seconds += left / job.samples_per_second
        self.later_in_run(time_seconds, action, job)

    def next_seconds(self) -> float:
        """When the next thing happens; infinity where nothing will."""
        return self._soon[self._next][0]

    def run_until(self, then_seconds: float) -> None:
        """Let everything happen that is due by then."""
        until = min(then_seconds + _SAME_SECONDS, _LAST_SECONDS)
        while self.next_seconds() <= until:
            self.step()
        state = self.state
        if then_seconds > state.now_seconds:
            state.now_seconds = then_seconds
            if state.before_change is not None:
                state.before_change()

    def step(self) -> None:
        """Let happen what is due next, which there must be, and go on to its time."""
        state, number = self.state, self._next
        due, now = self._soon[number][0], state.now_seconds
        if due > now:
            now = due
        then, until = now, due + _SAME_SECONDS
        while True:
            state.now_seconds = now
            _, _, action, about, num_changes = self._soon[number]
            self._next = number + 1
            if action is not None:
                if num_changes is None or about.num_changes == num_changes:
                    action(now, about)
            elif num_changes is None:
                state.submit(Submitted(now, about))
            elif about.num_changes == num_changes:
                state.finish(Finished(now, about.spec.id))
            number = self._next
            due = self._soon[number][0]
            if due > until:
                break
            if due > now:
                now = due
        state.now_seconds = then
        # Where nothing happened, the passing of time alone makes a present that was looked at past.
        if state.before_change is not None:
            state.before_change()

    def _sort_more(self, _: float, __: object) -> None:
        """Sort the next part of what comes: of the jobs, and of all else."""
        rest, jobs, first = self._rest, self._jobs, self._num_come
        rest.sort()
        number = max(_LEAST_SORTED, len(rest) // _PARTS)
        # As far as the last one of so many, and all that happens at that time.
        ends_seconds = rest[number - 1][0] if number < len(rest) else math.inf
        if first + number < len(jobs):
            ends_seconds = min(ends_seconds, jobs[first + number - 1].submit_seconds)
        num_near = bisect(rest, (ends_seconds, math.inf))
        soon = rest[:num_near]
        del rest[:num_near]
        last = bisect(jobs, ends_seconds, first, key=_submit_seconds)
        submit, coming = self._submit, enumerate(jobs[first:last], first - len(jobs))
        soon += [(job.submit_seconds, order, submit, job, None) for order, job in coming]
        soon.sort()
        more = (ends_seconds, math.inf, self._sort_more, None, None)
        soon.append(more if ends_seconds < math.inf else _END)
        self._soon, self._next, self._num_come = soon, 0, last
        self._soon_ends_seconds = ends_seconds


def _call(time_seconds: float, call: tuple[Action, tuple[object, ...]]) -> None:
    action, args = call
    action(time_seconds, *args)


def _never(*_: object) -> None:
    raise AssertionError("this was not to happen")


_END: Final[_Planned] = (math.inf, math.inf, _never, None, None)
