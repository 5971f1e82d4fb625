"""Seconds of the parts of a step: by clocks on a processor, by events on a GPU's own stream.

A GPU computes long after its host has asked for it, so a clock would show launch times. Events are
read when the step's work has been enqueued (`seconds`), which waits for the last of them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class StepTimer(Protocol):
    """Sections of one step, by part; sections of one part add up."""

    def begin(self) -> None:
        """A new step."""

    def section(self, part: str) -> Any:
        """A context: what is done inside belongs to the part."""

    def seconds(self) -> dict[str, float]:
        """So far in this step, by part."""


class HostTimer:
    """Where an operation has ended when its call returns."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def begin(self) -> None:
        """A new step."""
        self._seconds.clear()

    @contextmanager
    def section(self, part: str) -> Iterator[None]:
        """What is done inside belongs to the part."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[part] += time.perf_counter() - started

    def seconds(self) -> dict[str, float]:
        """So far in this step, by part."""
        return dict(self._seconds)


class EventTimer:
    """Where operations are enqueued: events on the current stream, before and after."""

    def __init__(self, make_event: Callable[[], Any]) -> None:
        self._make_event = make_event
        self._spare: list[Any] = []  # events of steps before
        self._pairs: list[tuple[str, Any, Any]] = []

    def begin(self) -> None:
        """A new step."""
        for _, start, end in self._pairs:
            self._spare += (start, end)
        self._pairs.clear()

    @contextmanager
    def section(self, part: str) -> Iterator[None]:
        """What is enqueued inside belongs to the part."""
        start, end = self._event(), self._event()
        start.record()
        try:
            yield
        finally:
            end.record()
            self._pairs.append((part, start, end))

    def seconds(self) -> dict[str, float]:
        """So far in this step, by part; waits until the last section has been computed."""
        found: defaultdict[str, float] = defaultdict(float)
        if self._pairs:
            self._pairs[-1][2].synchronize()
        for part, start, end in self._pairs:
            found[part] += start.elapsed_time(end) / 1e3
        return dict(found)

    def _event(self) -> Any:
        return self._spare.pop() if self._spare else self._make_event()


def make_timer(device: torch.device) -> StepTimer:
    """The timer that tells the truth on that device."""
    if device.type == "cuda":
        return EventTimer(lambda: torch.cuda.Event(enable_timing=True))
    return HostTimer()
