"""How far off are memory estimates, by the record? The range that goes with every estimate.

The factors are quantiles of measured over estimated memory, each published run counted once. They
live in `data/residuals.json`, which `benchmarks/learn_residuals.py` writes from the table of runs:
what was measured comes back through a file, never through an import.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

RESIDUALS_FILE: Final = Path(__file__).parent / "data" / "residuals.json"

# The low end is rarely of use; the high end decides whether a run fits. Below it lie four of five
# runs, which refuses few of those that fit and lets few pass that do not.
LOW_QUANTILE: Final = 0.1
HIGH_QUANTILE: Final = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryResiduals:
    """Factors from an estimate to the ends of its range, and where they come from."""

    low: float  # LOW_QUANTILE of measured / estimated
    high: float  # HIGH_QUANTILE of the same
    num_runs: int
    table: str
    date: str  # year-month-day on which they were learnt


@cache
def memory_residuals() -> MemoryResiduals:
    """The factors that ship with the package."""
    read: dict[str, Any] = json.loads(RESIDUALS_FILE.read_text(encoding="utf-8"))
    return MemoryResiduals(**read["memory"])


def memory_range() -> tuple[float, float]:
    """Factors from an estimate to the low and the high end of what the run will take."""
    residuals = memory_residuals()
    return residuals.low, residuals.high
