"""How much do readings of one's own help? Choose the spreads of pooled corrections, and judge them.

    python benchmarks/pooled_corrections.py [--write]

Each source of published runs plays a site that nobody has seen: its estimates are made by constants
chosen without it, a few of its readings are given, and the others are estimated again with what
those say (`estimate/learned/pooled.py`). The spreads are chosen one after the other so that the
error after 1, 3 and 10 readings is least over all sources, of all other runs and of those that do
the same work as a given one; without arguments those that ship are judged.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from statistics import mean, median

import numpy as np

from drystone.errors import DrystoneError
from drystone.estimate.learned.pooled import (
    POOLED_FILE,
    Kind,
    Spreads,
    correct,
    kind_of,
    shipped_spreads,
)
from drystone.observe.check.accuracy import MEMORY_TABLE, SPEED_TABLE, estimate_run
from drystone.observe.check.runs import PublishedRun, load_runs
from figures import print_figures

_CANDIDATES = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.14, 0.2)
_CHANCE = 0.03  # of one reading: what steps of one run differ by
# Not chosen, since tables hardly ever state a run twice: the spread of single runs of one work.
_RUN = 0.07
_GIVEN = (1, 3, 10)
_MOST_JUDGED = 25


@dataclass(frozen=True)
class Reading:
    """One published reading, by an estimate made without its source."""

    kind: Kind
    ratio: float


def site_readings(measure: str) -> dict[str, list[Reading]]:
    """Every source's readings."""
    found: dict[str, list[Reading]] = {}
    table = MEMORY_TABLE if measure == "memory" else SPEED_TABLE
    for run in load_runs(table, measure=measure):
        if not isinstance(run, PublishedRun) or run.ran_out_of_memory:
            continue
        try:
            estimated, measured = estimate_run(run, measure=measure, without=run.dataset)
        except DrystoneError:
            continue
        ratio = measured / estimated if measure == "memory" else estimated / measured
        kind = kind_of(run.model, run.recipe, run.layout, run.gpu_name)
        kind = kind._replace(run=f"{kind.run}, {run.kind}")
        found.setdefault(run.dataset, []).append(Reading(kind, ratio))
    return found


def errors_after(
    sites: dict[str, list[Reading]],
    spreads: Spreads,
    *,
    num_given: int,
    num_draws: int,
    same_work: bool = False,
) -> list[tuple[float, float]]:
    """Of every source the median error of other runs, before and after some readings.

    `same_work`: only of runs that do the work of a given one.
    """
    errors = []
    for readings in sites.values():
        if len(readings) < num_given + 3:
            continue
        draw = np.random.default_rng(0)
        before, after = [], []
        for _ in range(num_draws):
            order = draw.permutation(len(readings))
            given = [readings[at] for at in order[:num_given]]
            works = {reading.kind.work for reading in given}
            for at in order[num_given : num_given + _MOST_JUDGED]:
                other = readings[at]
                if same_work and other.kind.work not in works:
                    continue
                before.append(abs(1 / other.ratio - 1))
                factor = correct(given, other.kind, spreads).factor
                after.append(abs(factor / other.ratio - 1))
        if before:
            errors.append((median(before), median(after)))
    return errors


def choose(sites: dict[str, list[Reading]]) -> Spreads:
    """The spreads with the least error, one after the other."""

    def error(spreads: Spreads) -> float:
        total = 0.0
        for given in _GIVEN:
            for same in (False, True):
                errors = errors_after(sites, spreads, num_given=given, num_draws=2, same_work=same)
                total += mean(last for _, last in errors)
        return total

    chosen = Spreads(*([0.05] * 4), run=_RUN, chance=_CHANCE)
    for _ in range(2):
        for field in Kind._fields[:-1]:
            trials = [chosen._replace(**{field: value}) for value in _CANDIDATES]
            chosen = min(trials, key=error)
    return chosen


def main() -> None:
    """Choose or take what ships, judge, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="choose anew and write the file")
    arguments = parser.parse_args()
    chosen, figures = {}, {}
    for measure in ("memory", "speed"):
        sites = site_readings(measure)
        spreads = choose(sites) if arguments.write else shipped_spreads(measure)
        chosen[measure] = spreads._asdict()
        print(f"{measure}: spreads {chosen[measure]}")
        for given in _GIVEN:
            errors = errors_after(sites, spreads, num_given=given, num_draws=10)
            before, after = (median(some) for some in zip(*errors, strict=True))
            alike = errors_after(sites, spreads, num_given=given, num_draws=10, same_work=True)
            first, then = (median(some) for some in zip(*alike, strict=True))
            worse = sum(last > 1.02 * first for first, last in errors)
            print(
                f"  {given:2d} readings: {before:.1%} -> {after:.1%} in the median over "
                f"{len(errors)} sources, worse by more than 2 % of it on {worse}; "
                f"of runs that do the same work {first:.1%} -> {then:.1%}"
            )
            figures |= {
                f"{measure}_error_before_{given}": before,
                f"{measure}_error_after_{given}": after,
                f"{measure}_same_work_error_before_{given}": first,
                f"{measure}_same_work_error_after_{given}": then,
            }
    print_figures(figures)
    if arguments.write:
        POOLED_FILE.write_text(json.dumps(chosen, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
