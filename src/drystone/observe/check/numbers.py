"""What number stands in a cell of a table of runs? Read, or refused in words."""

from __future__ import annotations

import math
from collections.abc import Mapping

from drystone.errors import RequestError

Row = Mapping[str, str]

# Larger numbers are slips of a pen: no model has as many heads, no job as many GPUs.
_LARGEST = 10**9


def whole_number_of(row: Row, name: str, default: int | None = None) -> int:
    """The whole number in a column; `default` where it is empty."""
    text = row.get(name, "")
    if not text:
        if default is None:
            raise RequestError(f"column {name} is empty")
        return default
    value = number_of(row, name)
    if value != round(value) or value > _LARGEST:
        raise RequestError(f"column {name}: {text!r} is not a whole number up to {_LARGEST:,}")
    return round(value)


def number_of(row: Row, name: str) -> float:
    """The number in a column; 0 where it is empty."""
    text = row.get(name, "")
    try:
        value = float(text) if text else 0.0
    except ValueError:
        raise RequestError(f"column {name}: {text!r} is not a number") from None
    if not 0 <= value < math.inf:
        raise RequestError(f"column {name}: {text!r} is not a number from 0 on")
    return value
