"""Units: base units inside (bytes, seconds, dollars), words for people at the edges."""

from __future__ import annotations

import re

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
    for unit, size in (("TiB", 1024**4), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if abs(num_bytes) >= size:
            value = num_bytes / size
            return f"{value:.0f} {unit}" if value >= 1000 else f"{value:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """Seconds as people read them: `3.2 h`, `41 ms`."""
    if seconds >= HOUR_SECONDS:
        return f"{seconds / HOUR_SECONDS:.3g} h"
    if seconds >= 60:
        return f"{seconds / 60:.3g} min"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def format_count(number: float) -> str:
    """A large count as people read it: `8.03 B`, `125 M`."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}"
