"""What will happen next? A heap of times; equal times come out in the order they went in."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")


class TimeQueue(Generic[Item]):
    """Items by time. What is known from the beginning comes before what is pushed later."""

    def __init__(self, known: Sequence[tuple[float, Item]] = ()) -> None:
        # Kept apart, sorted and read from its end: a heap of all arrivals would make all else slow.
        self.known = sorted(known, key=lambda one: one[0])
        self.known.reverse()
        self.heap: list[tuple[float, int, Item]] = []
        self.sequence = 0

    def __len__(self) -> int:
        return len(self.heap) + len(self.known)

    def push(self, time_seconds: float, item: Item) -> None:
        """Let this happen then."""
        heapq.heappush(self.heap, (time_seconds, self.sequence, item))
        self.sequence += 1

    def next_seconds(self) -> float:
        """When the next thing happens; infinity where nothing will."""
        known, heap = self.known, self.heap
        if not known:
            return heap[0][0] if heap else math.inf
        first = known[-1][0]
        return heap[0][0] if heap and heap[0][0] < first else first

    def pop_by(self, then_seconds: float) -> tuple[float, Item] | None:
        """The next thing, if it happens by then."""
        known, heap = self.known, self.heap
        if known:
            first = known[-1][0]
            if not heap or first <= heap[0][0]:
                return known.pop() if first <= then_seconds else None
        if heap and heap[0][0] <= then_seconds:
            time_seconds, _, item = heapq.heappop(heap)
            return time_seconds, item
        return None

    def pop(self) -> tuple[float, Item]:
        """The next thing and its time."""
        found = self.pop_by(math.inf)
        if found is None:
            raise IndexError("nothing will happen any more")
        return found
