"""What a step came to, as one line of JSON: for the controller, and for people."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TextIO

from drystone.run.train.straggler import Straggler


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One step. Seconds by part are those of the rank that reports; lists are by rank."""

    step: int  # the first is 1
    loss: float
    gradient_norm: float
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
