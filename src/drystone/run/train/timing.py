"""Seconds of the parts of a step: by clocks on a processor, by events on a GPU's own stream.

A GPU computes long after its host has asked for it, so a clock would show launch times. Events are
read when the step's work has been enqueued (`seconds`), which waits for the last of them. What is
done after that, the update, is known a step later: nobody waits for it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from drystone.run.train.device import is_accelerator


class StepTimer(Protocol):
    """Sections of one step, by part; sections of one part add up."""

    def begin(self) -> None:
        """A new step."""

    def section(self, part: str) -> Any:
        """A context: what is done inside belongs to the part."""

    def seconds(self) -> dict[str, float]:
        """So far in this step, by part."""

    def last_seconds(self, part: str) -> float:
        """Of a part after `seconds` was asked for: the last that is known."""


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

    def last_seconds(self, part: str) -> float:
        """Of this step."""
        return self._seconds[part]


class EventTimer:
    """Where operations are enqueued: events on the current stream, before and after."""

    def __init__(self, make_event: Callable[[], Any]) -> None:
        self._make_event = make_event
        self._spare: list[Any] = []  # events of steps before
        self._pairs: list[tuple[str, Any, Any]] = []
        self._num_read = self._num_late = 0
        self._late: dict[str, float] = {}

    def begin(self) -> None:
        """A new step; what was done since `seconds` was asked for is still to be read."""
        for _, start, end in self._pairs[: self._num_read]:
            self._spare += (start, end)
        self._pairs, self._num_read = self._pairs[self._num_read :], 0
        self._num_late = len(self._pairs)

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
        late: defaultdict[str, float] = defaultdict(float)
        for index, (part, start, end) in enumerate(self._pairs):
            (late if index < self._num_late else found)[part] += start.elapsed_time(end) / 1e3
        self._late |= late
        self._num_read = len(self._pairs)
        return dict(found)

    def last_seconds(self, part: str) -> float:
        """Of the step before."""
        return self._late.get(part, 0.0)

    def _event(self) -> Any:
        return self._spare.pop() if self._spare else self._make_event()


def make_timer(device: torch.device) -> StepTimer:
    """The timer that tells the truth on that device."""
    if is_accelerator(device):
        module = torch.get_device_module(device)
        return EventTimer(lambda: module.Event(enable_timing=True))
    return HostTimer()
