"""Garbage collection during a simulation: rarely, because it takes a share of the time.

A simulation makes events and records by the hundred thousand, keeps them all, and makes no cycles
worth looking for; looking through them again and again only takes time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

NEW_OBJECTS: Final = 200_000  # between two looks at those that are new


@contextmanager
def rare_collection() -> Iterator[None]:
    """Within, garbage in cycles is looked for rarely; afterwards as often as before."""
    before = gc.get_threshold()
    gc.set_threshold(max(NEW_OBJECTS, before[0]) if before[0] > 0 else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
