"""Reports of training steps as lines of JSON, and stragglers found in them."""

from __future__ import annotations

import json
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TextIO

WARM_UP_STEPS = 2  # first steps allocate, and measure what emulated sections cost
WINDOW_STEPS = 5  # the median of these counts, so that one slow step does not
LEAST_FACTOR = 1.25


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that takes `factor` times as long for a sample as in its first steps."""

    rank: int
    factor: float


class StragglerWatch:
    """Follows the pace of every rank. `planned`: seconds a sample by rank, if they are known."""

    def __init__(self, num_ranks: int, *, planned: Sequence[float] = ()) -> None:
        self._num_seen = 0
        self._recent: list[deque[float]] = [deque(maxlen=WINDOW_STEPS) for _ in range(num_ranks)]
        self._first: list[float] = list(planned) or [0.0] * num_ranks

    def see(self, batches: Sequence[int], compute_seconds: Sequence[float]) -> None:
        """One more step: samples of each rank, and the seconds that it computed."""
        self._num_seen += 1
        if self._num_seen <= WARM_UP_STEPS:
            return
        for rank, (batch, seconds) in enumerate(zip(batches, compute_seconds, strict=True)):
            if batch:
                self._recent[rank].append(seconds / batch)
        for rank, recent in enumerate(self._recent):
            if not self._first[rank] and len(recent) == WINDOW_STEPS:
                self._first[rank] = statistics.median(recent)

    @property
    def sample_seconds(self) -> list[float]:
        """What a sample takes on each rank now; 0 where that is not known yet."""
        return [statistics.median(one) if len(one) == WINDOW_STEPS else 0.0 for one in self._recent]

    def stragglers(self) -> tuple[Straggler, ...]:
        """Who is slower than planned, with the factor."""
        factors = {
            rank: now / first
            for rank, (now, first) in enumerate(zip(self.sample_seconds, self._first, strict=True))
            if now and first
        }
        found = []
        for rank, factor in factors.items():
            others = [one for other, one in factors.items() if other != rank]
            usual = max(statistics.median(others), 1.0) if others else 1.0
            if factor >= LEAST_FACTOR * usual:
                found.append(Straggler(rank, round(factor, 3)))
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One step. Seconds by part are those of the rank that reports; lists are by rank."""

    step: int  # the first is 1
    loss: float
    gradient_norm: float
    learning_rate: float
    tokens: float  # or samples, where the model counts those
    step_seconds: float
    tokens_per_second: float
    seconds: dict[str, float]
    compute_seconds: tuple[float, ...]
    peak_memory_bytes: tuple[int, ...]
    batches: tuple[int, ...] = ()  # samples by rank
    stragglers: tuple[Straggler, ...] = ()  # slower than in their first steps, with the factor
    is_skipped: bool = False  # a gradient was not finite (fp16): nothing was changed


def write_event(stream: TextIO, event: str, **values: object) -> None:
    """One line: `{"event": ..., ...}`."""
    stream.write(json.dumps({"event": event, **values}) + "\n")
    stream.flush()


def write_report(stream: TextIO, report: StepReport) -> None:
    """The step as a line."""
    write_event(stream, "step", **asdict(report))
