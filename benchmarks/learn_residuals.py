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
    RESIDUALS_FILE,
    MemoryResiduals,
    memory_residuals,
)
from drystone.observe.check.accuracy import MEMORY_TABLE, check_memory
from drystone.observe.check.runs import load_runs
from figures import print_figures

TOLERANCE = 0.001


def learn_residuals(*, date: str) -> MemoryResiduals:
    """The quantiles of measured over estimated memory in the table that ships."""
    report = check_memory(load_runs(MEMORY_TABLE, measure="memory"))
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
    learnt = learn_residuals(date=datetime.now(tz=UTC).date().isoformat())
    print(f"{learnt.num_runs} runs: from {learnt.low} to {learnt.high} times the estimate")
    ships = memory_residuals()
    print_figures(
        {
            "factor_difference": max(abs(learnt.low - ships.low), abs(learnt.high - ships.high)),
            "run_difference": abs(learnt.num_runs - ships.num_runs),
        }
    )
    if arguments.write:
        content = {"memory": asdict(learnt)}
        RESIDUALS_FILE.parent.mkdir(exist_ok=True)
        RESIDUALS_FILE.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    elif differ(learnt, ships):
        sys.exit(f"{RESIDUALS_FILE.name} holds other factors; run this with --write")


if __name__ == "__main__":
    main()
