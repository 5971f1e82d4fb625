"""Units: base units inside (bytes, seconds, dollars), words for people at the edges."""

from __future__ import annotations

import re
from collections.abc import Iterable

from drystone.errors import InvalidSpec

KiB = 1024
MiB = 1024**2
GiB = 1024**3
GB = 10**9
TERA = 10**12
HOUR_SECONDS = 3600.0

_BYTE_UNITS = {
    "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": KiB, "mib": MiB, "gib": GiB, "tib": 1024**4,
}  # fmt: skip
_QUANTITY = re.compile(r"^\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*$")


def parse_bytes(text: str) -> int:
    """`80GiB`, `24 GB` or plain bytes, as a number of bytes."""
    match = _QUANTITY.match(text)
    unit = (match.group(2).lower() or "b") if match else ""
    if match is None or unit not in _BYTE_UNITS:
        raise InvalidSpec(
            f"{text!r} is not an amount of memory", hint="Write it like 80GiB or 24GB"
        )
    return round(float(match.group(1)) * _BYTE_UNITS[unit])


def format_bytes(num_bytes: float) -> str:
    """Bytes as people read them: `23.4 GiB`, `512 MiB`."""
    units = (("TiB", 1024**4), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB), ("B", 1))
    return _in_largest_unit(num_bytes, units)


def format_seconds(seconds: float) -> str:
    """Seconds as people read them: `3.2 h`, `41 ms`."""
    units = (("h", HOUR_SECONDS), ("min", 60.0), ("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
    return _in_largest_unit(seconds, (*units, ("ns", 1e-9))) if seconds else "0 s"


def format_dollars(dollars: float) -> str:
    """`$1,234.50`; cents of a cent where there is less than one."""
    if 0 < dollars < 0.00005:
        return "<$0.0001"
    return f"${dollars:,.2f}" if dollars >= 0.01 or dollars == 0 else f"${dollars:.4f}"


def format_count(number: float) -> str:
    """A large count as people read it: `8.03 B`, `125 M`."""
    return _in_largest_unit(number, (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3), ("", 1)))


def _in_largest_unit(number: float, units: Iterable[tuple[str, float]]) -> str:
    """Three digits in the largest unit of which there is at least one, rounding included."""
    text = f"{number:.3g}"
    for unit, size in units:
        value = number / size
        rounded = abs(float(f"{value:.3g}"))
        text = (f"{value:.0f} {unit}" if rounded >= 1000 else f"{value:.3g} {unit}").rstrip()
        if rounded >= 1:
            break
    return text
