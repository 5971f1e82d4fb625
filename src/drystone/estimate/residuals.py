"""How far off are memory estimates, by the record? The range that goes with every estimate."""

from __future__ import annotations


def memory_range() -> tuple[float, float]:
    """Factors from an estimate to the low and the high end of what the run will take."""
    return 0.94, 1.10
