"""Text and reports that jobs write: bounded, checked and cleaned where they enter the controller.

A job may write anything: control characters, endless lines, numbers of 400 digits, brackets nested
a hundred thousand deep. What passes here is printable text of a known length, and finite numbers in
a range that can be computed with.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any, Final

_MAX_REPORT_CHARS: Final = 65_536
_MAX_STEP: Final = 10**12
# A step that takes less or more than this was not measured but made up; dividing by it overflows.
_MIN_STEP_SECONDS: Final = 1e-6
_MAX_STEP_SECONDS: Final = 1e9
_MAX_MEMORY_BYTES: Final = 2**60
_MAX_TRIALS: Final = 8
_MAX_WORDS: Final = 4096
_TERMINAL_SEQUENCE: Final = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])"  # ECMA-48: CSI, OSC, C1
)
# Control characters other than tab and newline, and halves of surrogate pairs.
_UNPRINTABLE: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


class BadReport(ValueError):
    """A line that looks like a report and cannot be taken as one; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One report of a training process, checked."""

    event: str = ""
    step: int = -1  # -1: it says nothing about steps
    loss: float = math.nan  # nan: none that is finite
    step_seconds: float = math.nan  # nan: none that can be believed
    peak_memory_bytes: int = 0
    batches: tuple[int, ...] = ()  # samples by rank
    compute_seconds: tuple[float, ...] = ()  # by rank; as many, or none
    trials: tuple[tuple[str, float, float], ...] = ()  # plans tried: words, estimated, measured
    kept: str = ""  # the words of the one that was kept


def clean_text(text: str, max_chars: int | None = None) -> str:
    """Lines of printable text: colours dropped, other control characters replaced, cut to length.

    A carriage return begins a new line, as a progress bar means it.
    """
    text = _TERMINAL_SEQUENCE.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    text = _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)
    if max_chars is not None and len(text) > max_chars:
        return text[: max_chars - 4] + " ..."
    return text


def parse_report(line: str) -> Report:
    """The report that a line of JSON says; raises `BadReport`."""
    if len(line) > _MAX_REPORT_CHARS:
        raise BadReport(f"a report of {len(line):,} characters; {_MAX_REPORT_CHARS:,} are read")
    try:
        table = json.loads(line)
    except RecursionError:
        raise BadReport("a report that is nested too deeply") from None
    except ValueError as error:
        raise BadReport(f"a report that is not JSON: {error}") from None
    if not isinstance(table, dict):
        raise BadReport("a report that is not a JSON object")
    event, step = table.get("event"), table.get("step")
    if not isinstance(event, str) or not isinstance(step, int) or isinstance(step, bool):
        return Report()
    if step < 0:
        return Report()
    if step > _MAX_STEP:
        raise BadReport(f"a report of a step beyond {_MAX_STEP:,}")
    seconds = finite_number(table.get("step_seconds"))
    is_possible = _MIN_STEP_SECONDS <= seconds <= _MAX_STEP_SECONDS
    return Report(
        event=event,
        step=step,
        loss=finite_number(table.get("loss")),
        step_seconds=seconds if is_possible else math.nan,
        peak_memory_bytes=_largest(table.get("peak_memory_bytes")),
        **_by_rank(table.get("batches"), table.get("compute_seconds")),
        **_tried(table.get("trials"), table.get("kept")),
    )


def _tried(trials: Any, kept: Any) -> dict[str, Any]:
    """Plans that were tried at the launch, where each has possible times."""
    if not isinstance(trials, list) or not 1 <= len(trials) <= _MAX_TRIALS:
        return {}
    found = []
    for row in trials:
        if not isinstance(row, list) or len(row) != 3 or not isinstance(row[0], str):
            return {}
        times = [finite_number(value) for value in row[1:]]
        if not all(_MIN_STEP_SECONDS <= value <= _MAX_STEP_SECONDS for value in times):
            return {}
        found.append((clean_text(row[0], _MAX_WORDS), *times))
    is_one = isinstance(kept, str) and kept in [words for words, *_ in found]
    return {"trials": tuple(found), "kept": kept} if is_one else {}


def _by_rank(batches: Any, seconds: Any) -> dict[str, Any]:
    """Samples and seconds of each rank, where all of them are possible."""
    if not isinstance(batches, list) or not isinstance(seconds, list):
        return {}
    is_whole = all(isinstance(batch, int) and 0 <= batch <= _MAX_STEP for batch in batches)
    taken = tuple(finite_number(value) for value in seconds)
    is_possible = all(0.0 <= value <= _MAX_STEP_SECONDS for value in taken)
    if not is_whole or not is_possible or len(batches) != len(taken):
        return {}
    return {"batches": tuple(batches), "compute_seconds": taken}


def finite_number(value: Any) -> float:
    """A number from outside as a float; nan for anything else, also for what no float can hold."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def _largest(peaks: Any) -> int:
    """The largest of the ranks' peaks, where all of them are possible."""
    if not isinstance(peaks, list) or not all(isinstance(one, int) for one in peaks):
        return 0
    peak = int(max(peaks, default=0))
    return peak if 0 <= peak <= _MAX_MEMORY_BYTES else 0
