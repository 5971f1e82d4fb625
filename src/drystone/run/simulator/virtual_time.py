"""What has happened, and what will? The log and its state behind, a queue of calls ahead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from drystone.describe.job import JobSpec
from drystone.run.events import Event
from drystone.run.simulator.queue import TimeQueue
from drystone.run.snapshots import SnapshotMaker
from drystone.run.state import ClusterState

_SAME_SECONDS = 1e-9  # times this near are one time

# Called with the time at which it happens, then with its own arguments.
Action = Callable[..., None]


class VirtualTime:
    """One run: everything that happens goes through `record`, everything that will, `later`."""

    def __init__(self, state: ClusterState, maker: SnapshotMaker) -> None:
        self.log: list[Event] = []
        self.state, self.maker = state, maker
        self.now_seconds = 0.0
        self._coming: TimeQueue[tuple[Action, tuple[object, ...]]] = TimeQueue()
        self.next_seconds = self._coming.next_seconds

    def expect(self, jobs: Sequence[JobSpec], submit: Action) -> None:
        """Let `submit` be called with every job at its time: before anything else is planned."""
        self._coming = TimeQueue([(job.submit_seconds, (submit, (job,))) for job in jobs])
        self.next_seconds = self._coming.next_seconds

    def later(self, time_seconds: float, action: Action, *args: object) -> None:
        """Let this happen then."""
        coming = self._coming
        heappush(coming.heap, (time_seconds, coming.sequence, (action, args)))
        coming.sequence += 1

    def record(self, event: Event) -> None:
        """Take notice of something that happens now."""
        maker = self.maker
        if maker.is_held:
            maker.keep()
        touched = self.state.record(event)
        self.log.append(event)
        if touched is not None:
            maker.changed[touched.spec.id] = touched

    def run_until(self, then_seconds: float) -> None:
        """Let everything happen that is due by then."""
        state, until = self.state, then_seconds + _SAME_SECONDS
        known, heap = self._coming.known, self._coming.heap
        while True:  # as `TimeQueue.pop_by` does, without a call for each
            if known and (not heap or known[-1][0] <= heap[0][0]):
                if known[-1][0] > until:
                    break
                time_seconds, (action, args) = known.pop()
            elif heap and heap[0][0] <= until:
                time_seconds, _, (action, args) = heappop(heap)
            else:
                break
            now = state.now_seconds
            action(time_seconds if time_seconds > now else now, *args)
        if then_seconds > self.now_seconds:
            self.now_seconds = then_seconds
        state.now_seconds = self.now_seconds
