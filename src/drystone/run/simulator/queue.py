"""What will happen next? A heap of times; equal times come out in the order they went in."""

from __future__ import annotations

import heapq
import math
from typing import Generic, TypeVar

Item = TypeVar("Item")


class TimeQueue(Generic[Item]):
    """Items by time."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Item]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, time_seconds: float, item: Item) -> None:
        """Let this happen then."""
        heapq.heappush(self._heap, (time_seconds, self._sequence, item))
        self._sequence += 1

    def next_seconds(self) -> float:
        """When the next thing happens; infinity where nothing will."""
        return self._heap[0][0] if self._heap else math.inf

    def pop(self) -> tuple[float, Item]:
        """The next thing and its time."""
        time_seconds, _, item = heapq.heappop(self._heap)
        return time_seconds, item
