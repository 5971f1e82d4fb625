"""Nodes that join, leave for good, fall silent, are lost, and come back."""

from __future__ import annotations

import time
from collections.abc import Callable

from drystone.describe.files.cluster import ClusterSpec
from drystone.run.control.journal import Journal
from drystone.run.engines.contract import Poll
from drystone.run.events import NodeBack, NodeLost


class NodeWatch:
    """Keeps the nodes of the log in step with what the engine says.

    `end_jobs_on(row, reason)` ends what runs on a node, and tells whether all of it has ended.
    """

    def __init__(
        self, journal: Journal, silence_seconds: float, end_jobs_on: Callable[[int, str], bool]
    ) -> None:
        self._journal, self._silence_seconds = journal, silence_seconds
        self._end_jobs_on = end_jobs_on
        self._silent_since: dict[str, float] = {}
        # An engine tells of other nodes only once: kept here until the log has them.
        self._changed: ClusterSpec | None = None
        self._left: dict[str, str] = {}  # why nodes are not in it any more

    def update(self, poll: Poll) -> None:
        """Write down what has changed since the last round."""
        self._adopt_changes(poll)
        self._note_silence(poll)
        self._journal.take_away(poll.taken)

    def _adopt_changes(self, poll: Poll) -> None:
        """Nodes joined, or left for good; what ran on those that left is ended first."""
        self._changed = poll.cluster or self._changed
        self._left.update(poll.left)
        if self._changed is None:
            return
        nodes = self._journal.live.state.nodes
        for row in self._journal.live.missing_rows(self._changed):
            name = nodes[row].id
            why = self._left.get(name, "it is not there any more")
            self._end_jobs_on(row, f"{name} left the cluster: {why}")
            self._silent_since.pop(name, None)
        self._journal.adopt(self._changed, reason="it left the cluster", left=self._left)
        self._changed, self._left = None, {}

    def _note_silence(self, poll: Poll) -> None:
        """A node that the engine gives up, or that is silent for long, is lost; others are back."""
        state, now = self._journal.live.state, time.monotonic()
        for row, node in enumerate(state.nodes):
            if row in state.gone:
                continue
            reason = poll.lost.get(node.id, "")
            if node.id not in poll.silent and not reason:
                self._silent_since.pop(node.id, None)
                if row in state.lost:
                    self._journal.commit([NodeBack(time_seconds=self._journal.now(), node=row)])
                continue
            silent_seconds = now - self._silent_since.setdefault(node.id, now)
            if row in state.lost or not (reason or silent_seconds >= self._silence_seconds):
                continue
            reason = reason or f"its agent has not answered for {silent_seconds:.0f} s"
            if self._end_jobs_on(row, f"{node.id} is lost: {reason}"):
                self._journal.commit([NodeLost(time_seconds=self._journal.now(), node=row)])
