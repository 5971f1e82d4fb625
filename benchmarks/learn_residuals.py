"""How far off are the memory estimates? Learn the range that goes with each from published runs.

Without arguments it compares what it learns with what ships, and fails where they differ; with
`--write` it writes the file. To be run again whenever the memory model or the table changes.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from datetime import UTC, datetime

import numpy as np

from drystone.estimate.learned.residuals import (
    HIGH_QUANTILE,
    LOW_QUANTILE,
    NUM_QUANTILES,
    RESIDUALS_FILE,
    Cell,
    MemoryResiduals,
    memory_residuals,
    residual_cells,
)
from drystone.observe.check.accuracy import MEMORY_TABLE, CheckReport, check_memory
from drystone.observe.check.runs import load_runs
from figures import print_figures

TOLERANCE = 0.001


def learn_cells(report: CheckReport) -> tuple[Cell, ...]:
    """What every source says of each kind of run, by estimates made without it."""
    found: dict[tuple[str, str, str, str], list[float]] = {}
    for run in report.runs:
        key = (run.dataset, run.family, run.tuning, run.reading)
        found.setdefault(key, []).append(float(np.log(run.measured / run.estimated_unseen)))
    places = (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES
    return tuple(
        Cell(
            source=source,
            family=family,
            tuning=tuning,
            reading=reading,
            num_runs=len(ratios),
            log_ratios=tuple(round(float(ratio), 4) for ratio in np.quantile(ratios, places)),
        )
        for (source, family, tuning, reading), ratios in sorted(found.items())
    )


def learn_residuals(report: CheckReport, *, date: str) -> MemoryResiduals:
    """The quantiles of measured over estimated memory in the table that ships."""
    ratios = [run.measured / run.estimated for run in report.first_readings]
    low, high = np.quantile(ratios, [LOW_QUANTILE, HIGH_QUANTILE])
    return MemoryResiduals(
        low=round(float(low), 4),
        high=round(float(high), 4),
        num_runs=len(ratios),
        table=f"observe/check/data/{MEMORY_TABLE.name}",
        date=date,
    )


def differ(one: MemoryResiduals, other: MemoryResiduals) -> bool:
    """Whether the factors differ by more than rounding, or come from another number of runs."""
    far = max(abs(one.low - other.low), abs(one.high - other.high)) > TOLERANCE
    return far or one.num_runs != other.num_runs


def main() -> None:
    """Learn, print, and compare or write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the file that ships")
    arguments = parser.parse_args()
    report = check_memory(load_runs(MEMORY_TABLE, measure="memory"))
    cells = learn_cells(report)
    learnt = learn_residuals(report, date=datetime.now(tz=UTC).date().isoformat())
    print(f"{learnt.num_runs} runs: from {learnt.low} to {learnt.high} times the estimate")
    ships = memory_residuals()
    print_figures(
        {
            "factor_difference": max(abs(learnt.low - ships.low), abs(learnt.high - ships.high)),
            "run_difference": abs(learnt.num_runs - ships.num_runs),
        }
    )
    if arguments.write:
        content = {"memory": asdict(learnt), "cells": [asdict(cell) for cell in cells]}
        RESIDUALS_FILE.parent.mkdir(exist_ok=True)
        RESIDUALS_FILE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    elif differ(learnt, ships) or cells != residual_cells():
        sys.exit(f"{RESIDUALS_FILE.name} holds other factors; run this with --write")


if __name__ == "__main__":
    main()
