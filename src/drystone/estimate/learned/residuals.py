"""How far off are memory estimates, by the record? Ranges and risks that go with every estimate.

Theory of operation. Each published reading leaves log(measured / estimated), the estimate made by
what is known without the reading's source. They are kept by source, family of launchers, kind of
tuning and kind of reading, twenty quantiles each (`data/residuals.json`, which
`benchmarks/learn_residuals.py` writes: what was measured comes back through a file, never through
an import). A new run is another source. Its range is made of all known ones: each source counts
once, less where its family, tuning or reading is another, and a part of a source that nobody knows
lies half below and half above all others, so that the range is wide where little is known.

The planner's own margin is another number: what it proposes shall run, so it leaves room for four
of five runs, each counted once (`memory_range`; docs/decisions/0012-ranges-and-refusals.md).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from drystone.describe.chosen import split_name

FloatArray = npt.NDArray[np.float64]

RESIDUALS_FILE: Final = Path(__file__).parent / "data" / "residuals.json"

# Of the planner's margin: below the high end lie four of five runs, which refuses few of those that
# fit and lets few pass that do not.
LOW_QUANTILE: Final = 0.1
HIGH_QUANTILE: Final = 0.8
# The range that is stated: nine of ten readings lie below its upper end, as many above its lower.
RANGE_TAIL: Final = 0.1
NUM_QUANTILES: Final = 20
# What a source says about a run of another family, tuning or reading; and how much of a source is
# unknown. Chosen so that four of five readings of a left-out source lie inside (`drystone check`).
_OTHER_FAMILY: Final = 0.3
_OTHER_TUNING: Final = 0.3
_OTHER_READING: Final = 0.5
_UNKNOWN_SOURCE: Final = 0.25
# Beyond all that was ever read: the unknown source's factor, either way.
_UNKNOWN_FACTOR: Final = 2.0

_FAMILIES: Final[Mapping[str, tuple[str, ...]]] = {
    "megatron": (
        "megatron-te", "megatron-local", "nemo", "megatron-deepspeed", "nanotron", "galvatron",
        "alpa",
    ),
    "hugging-face": ("accelerate", "hf-trainer", "fsdp-qlora", "deepspeed"),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryResiduals:
    """Factors from an estimate to the ends of its range, and where they come from."""

    low: float  # LOW_QUANTILE of measured / estimated
    high: float  # HIGH_QUANTILE of the same
    num_runs: int
    table: str
    date: str  # year-month-day on which they were learnt


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What one source says about one kind of run."""

    source: str
    family: str  # of launchers
    tuning: str  # full or adapters
    reading: str  # allocated, reserved or device
    num_runs: int
    log_ratios: tuple[float, ...]  # quantiles of log(measured / estimated), equally spaced


@cache
def _read() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(RESIDUALS_FILE.read_text(encoding="utf-8"))
    return read


@cache
def memory_residuals() -> MemoryResiduals:
    """The factors of the planner's margin that ship with the package."""
    return MemoryResiduals(**_read()["memory"])


@cache
def residual_cells() -> tuple[Cell, ...]:
    """What every source says."""
    return tuple(
        Cell(**entry | {"log_ratios": tuple(entry["log_ratios"])}) for entry in _read()["cells"]
    )


def memory_range() -> tuple[float, float]:
    """Factors from an estimate to the ends of the margin that the planner leaves."""
    residuals = memory_residuals()
    return residuals.low, residuals.high


def family_of(launcher: str) -> str:
    """The family of launchers whose habits are alike; a family is its own."""
    plain, _ = split_name(launcher)
    if plain in _FAMILIES:
        return plain
    return next((family for family, names in _FAMILIES.items() if plain in names), "torch")


@cache
def likely_range(
    launcher: str, *, is_full: bool, reading: str, without: str = ""
) -> tuple[float, float]:
    """Factors from an estimate to the ends between which four of five readings lie.

    `without`: as if nobody had seen that source.
    """
    ratios, weights = _known(launcher, is_full=is_full, reading=reading, without=without)
    unknown = np.log(_UNKNOWN_FACTOR)
    half = _UNKNOWN_SOURCE / 2
    ratios = np.concatenate([[-unknown], ratios, [unknown]])
    places = np.cumsum(np.concatenate([[half], weights, [half]]))
    low, high = np.searchsorted(places, [RANGE_TAIL * places[-1], (1 - RANGE_TAIL) * places[-1]])
    return float(np.exp(ratios[low])), float(np.exp(ratios[high]))


def range_basis(launcher: str, *, is_full: bool, reading: str) -> tuple[tuple[str, float], ...]:
    """Which sources a stated range is made of, by what each counts in it; the last is unknown."""
    counts = {
        source: max(alike for alike, _ in cells)
        for source, cells in _cells_by_source(
            launcher, is_full=is_full, reading=reading, without=""
        ).items()
    } | {"a source that nobody knows": _UNKNOWN_SOURCE}
    total = sum(counts.values())
    return tuple((source, count / total) for source, count in counts.items())


def exceeds_share(launcher: str, *, is_full: bool, reading: str, room: float) -> float:
    """The share of runs that take more than `room` times their estimate."""
    ratios, weights = _known(launcher, is_full=is_full, reading=reading, without="")
    above = float(weights[ratios > np.log(max(room, 1e-9))].sum())
    return (above + _UNKNOWN_SOURCE / 2) / (float(weights.sum()) + _UNKNOWN_SOURCE)


@cache
def _known(
    launcher: str, *, is_full: bool, reading: str, without: str
) -> tuple[FloatArray, FloatArray]:
    """Log ratios in ascending order, and what each counts; a source counts once altogether."""
    by_source = _cells_by_source(launcher, is_full=is_full, reading=reading, without=without)
    ratios, weights = [], []
    for cells in by_source.values():
        counts = max(alike for alike, _ in cells)
        total = sum(alike for alike, _ in cells)
        for alike, cell in cells:
            ratios += list(cell.log_ratios)
            weights += [counts * alike / total / len(cell.log_ratios)] * len(cell.log_ratios)
    order = np.argsort(ratios, kind="stable")
    return np.array(ratios)[order], np.array(weights)[order]


def _cells_by_source(
    launcher: str, *, is_full: bool, reading: str, without: str
) -> dict[str, list[tuple[float, Cell]]]:
    """What each source says, and how much of it counts for such a run."""
    family, tuning = family_of(launcher), "full" if is_full else "adapters"
    by_source: dict[str, list[tuple[float, Cell]]] = {}
    for cell in residual_cells():
        if cell.source != without:
            alike = 1.0 if cell.family == family else _OTHER_FAMILY
            alike *= 1.0 if cell.tuning == tuning else _OTHER_TUNING
            alike *= 1.0 if cell.reading == reading else _OTHER_READING
            by_source.setdefault(cell.source, []).append((alike, cell))
    return by_source
