"""How far is a run? Reads the lines that training processes report."""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

_KEPT: Final = 32  # steps whose times are remembered
_FIRST: Final = 2  # the first steps of a run are slow, and say nothing about the others
MOST_POINTS: Final = 2000  # of a curve


@dataclass(slots=True)
class RunProgress:
    """What one launch has reported so far."""

    step: int = -1  # -1: it has not started yet
    first_step: int = -1
    checkpoint_step: int = -1
    is_finished: bool = False
    has_left: bool = False
    heard_seconds: float = math.nan  # when the last line came
    offset: int = 0  # of what was read
    peak_memory_bytes: int = 0
    loss: float = math.nan
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    curve: list[tuple[int, float, float]] = field(default_factory=list)  # step, loss, seconds

    @property
    def step_seconds(self) -> float:
        """The median of the last steps; nan until there are some."""
        return statistics.median(self.seconds) if len(self.seconds) >= _FIRST + 1 else math.nan

    def read(self, text: str, now_seconds: float) -> None:
        """Take in whole lines of reports; what is no report is passed over."""
        for line in text.splitlines():
            if not line.startswith("{"):
                continue
            try:
                report = json.loads(line)
            except ValueError:
                continue
            if isinstance(report, dict):
                self._take(report)
                self.heard_seconds = now_seconds

    def _take(self, report: dict[str, Any]) -> None:
        step = report.get("step")
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            return
        match report.get("event"):
            case "started":
                self.step = self.first_step = step
            case "step":
                self._take_step(step, report)
            case "checkpoint":
                self.checkpoint_step = max(self.checkpoint_step, step)
            case "left":
                self.has_left, self.step = True, step
            case "finished":
                self.is_finished, self.step = True, step

    def _take_step(self, step: int, report: dict[str, Any]) -> None:
        if self.first_step < 0:
            self.first_step = step - 1
        self.step = step
        seconds, loss = _number(report.get("step_seconds")), _number(report.get("loss"))
        self.loss = loss
        if seconds > 0 and step - self.first_step > _FIRST:
            self.seconds.append(seconds)
        peaks = report.get("peak_memory_bytes")
        if isinstance(peaks, list) and all(isinstance(one, int) for one in peaks):
            self.peak_memory_bytes = max([self.peak_memory_bytes, *peaks])
        self.curve.append((step, loss, seconds))
        if len(self.curve) > MOST_POINTS:
            del self.curve[1::2]  # every second point will do


def _number(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else math.nan
