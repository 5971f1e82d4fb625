"""Durations, counts, spans and times as people write them: `6h`, `2B`, `3%`, `2026-11-20 18:00`."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime

from drystone.errors import InvalidSpec
from drystone.units import HOUR_SECONDS

_UNIT_SECONDS = {
    "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": HOUR_SECONDS, "hour": HOUR_SECONDS,
    "hours": HOUR_SECONDS, "d": 24 * HOUR_SECONDS, "day": 24 * HOUR_SECONDS,
    "days": 24 * HOUR_SECONDS, "w": 168 * HOUR_SECONDS, "week": 168 * HOUR_SECONDS,
    "weeks": 168 * HOUR_SECONDS,
}  # fmt: skip
_DURATION_PART = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)\s*([a-z]+)")
_COUNT = re.compile(r"(\d{1,18}(?:\.\d{1,9})?(?:[eE]\+?\d{1,2})?)\s*([kKMBT]?)")
_COUNT_UNITS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_SPAN = re.compile(r"(\d{1,3}(?:\.\d{1,9})?)\s*%|(\d{1,15})")
_MOST_SECONDS = 100 * 365 * 24 * HOUR_SECONDS
_MOST_COUNT = 10**18


def parse_duration(value: str | int | float) -> float:
    """Seconds from `90s`, `1h 30m`, `2 days`, or a plain number of seconds."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = _as_float(value)
    else:
        text = str(value).strip().lower()
        parts = _DURATION_PART.findall(text)
        known = all(unit in _UNIT_SECONDS for _, unit in parts)
        if not parts or not known or _DURATION_PART.sub("", text).strip():
            raise InvalidSpec(
                f"{str(value)[:60]!r} is not a duration",
                hint="Write it like 90s, 30m, 6h or 1d 12h",
            )
        seconds = sum(float(number) * _UNIT_SECONDS[unit] for number, unit in parts)
    if not 0 < seconds <= _MOST_SECONDS:
        raise InvalidSpec(f"a duration of {str(value)[:60]} must be above 0 and below 100 years")
    return seconds


def parse_count(value: str | int | float) -> int:
    """A whole number from `500`, `1e9`, `500M` or `2B`."""
    if isinstance(value, str):
        match = _COUNT.fullmatch(value.strip())
        if match is None:
            raise InvalidSpec(
                f"{value[:60]!r} is not a count", hint="Write it like 500, 1e9, 500M or 2B"
            )
        number = float(match.group(1)) * _COUNT_UNITS[match.group(2)]
    else:
        number = _as_float(value)
    if not 1 <= number <= _MOST_COUNT:
        raise InvalidSpec(f"a count of {str(value)[:60]} must be 1 to {_MOST_COUNT:.0e}")
    if number != int(number):
        raise InvalidSpec(f"a count of {str(value)[:60]} must be a whole number")
    return int(number)


def _as_float(value: float) -> float:
    """Also of whole numbers that no float holds: JSON has no limit."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def parse_span(value: str | int | float) -> str:
    """A part of a training, checked: a number of steps such as `100`, or a share such as `3%`."""
    text = f"{value:.0f}" if isinstance(value, float) and value.is_integer() else str(value)
    match = _SPAN.fullmatch(text.strip())
    if match is None or (match.group(1) and float(match.group(1)) > 100):
        raise InvalidSpec(
            f"{str(value)[:60]!r} is not a part of a training",
            hint="Write it like 100 (steps) or 3%",
        )
    return f"{match.group(1)}%" if match.group(1) else match.group(2)


def span_steps(span: str, num_steps: int) -> int:
    """Steps that a span of `parse_span` has in a training of so many; at most all of them."""
    if span.endswith("%"):
        return round(num_steps * float(span[:-1]) / 100)
    return min(int(span), num_steps)


def parse_instant(text: str) -> float | None:
    """Seconds since 1970 of an ISO date or time (UTC where no zone is named); None: it is none."""
    try:
        instant = datetime.fromisoformat(text.strip())
        if instant.tzinfo is None:
            instant = instant.replace(tzinfo=UTC)
        return instant.timestamp()
    except (ValueError, OverflowError):
        return None
