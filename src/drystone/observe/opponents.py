"""Opponents known in hindsight: the best constant width, and the best constant multiplier.

A policy that is worth its name beats the stupid one, and comes close to one that knew all jobs in
advance. `constant` gives every job the same number of GPUs of one type; `steady` gives each what it
is worth at one multiplier. Both heed no budget, so each is run at many settings; at a budget counts
the earliest of those that cost no more, or the cheapest where all cost more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from drystone.observe.metrics import RunReport
from drystone.observe.simulation import PolicyRun, Scenario, run_policy
from drystone.units import HOUR_SECONDS

HINDSIGHT: Final = frozenset({"constant", "steady"})
_MAX_WIDTH: Final = 256
_MULTIPLIERS: Final = tuple(float(f"{value:.2g}") for value in np.geomspace(0.001, 10.0, 17))
_WITHIN: Final = 1.005  # of the budget: what a policy may cost to be within it


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One setting of an opponent, and what came of it."""

    name: str  # such as constant:8xL40S
    report: RunReport
    dollars_per_hour: float  # over the hours in which jobs arrived


def try_settings(
    scenario: Scenario,
    opponent: str,
    watch: Callable[[Sequence[str]], Sequence[str]] = list,
) -> list[Tried]:
    """An opponent at all its settings; `watch` is told the names that are to be run."""
    last = max((job.submit_seconds for job in scenario.jobs), default=0.0) or HOUR_SECONDS
    tried: list[Tried] = []
    for name in watch(settings(scenario, opponent)):
        report = run_policy(scenario, name).report
        dollars = report.spent_dollars / last * HOUR_SECONDS
        tried.append(Tried(name=name, report=report, dollars_per_hour=dollars))
    return tried


def settings(scenario: Scenario, opponent: str) -> list[str]:
    """The names under which an opponent is tried."""
    if opponent == "steady":
        return [f"steady:{value:g}" for value in _MULTIPLIERS]
    types = ["", *(f"x{gpu}" for gpu in scenario.gpu_types)]
    sets = {id(found): found for found in map(scenario.options_of, scenario.jobs)}.values()
    widest = max((int(found.counts.sum(axis=1).max(initial=1)) for found in sets), default=1)
    powers = range(min(widest, _MAX_WIDTH).bit_length())
    names = types if len(types) > 2 else types[:1]
    return [f"constant:{1 << power}{gpu}" for power in powers for gpu in names]


def best_within(tried: Sequence[Tried], budget_dollars_per_hour: float) -> Tried:
    """The earliest of those that do all jobs within the budget; else the cheapest."""
    most_done = max(setting.report.num_done for setting in tried)
    able = [setting for setting in tried if setting.report.num_done == most_done]
    limit = _WITHIN * budget_dollars_per_hour
    within = [setting for setting in able if setting.dollars_per_hour <= limit]
    if within:
        return min(within, key=lambda setting: setting.report.mean_completion_seconds)
    return min(able, key=lambda setting: setting.dollars_per_hour)


def run_in_hindsight(scenario: Scenario, opponent: str) -> PolicyRun:
    """The best setting of an opponent at the scenario's budget, run once more with its log."""
    best = best_within(try_settings(scenario, opponent), scenario.budget_dollars_per_hour)
    return run_policy(scenario, best.name)


def interpolated_seconds(tried: Sequence[Tried], dollars_per_hour: float) -> float:
    """The mean completion time between the settings around a spend; nan below all of them.

    What costs more and ends later is left out.
    """
    points: list[tuple[float, float]] = []
    for setting in sorted(tried, key=lambda setting: setting.dollars_per_hour):
        seconds = setting.report.mean_completion_seconds
        if not points or seconds < points[-1][1]:
            points.append((setting.dollars_per_hour, seconds))
    spends, times = (np.log(np.array(column)) for column in zip(*points, strict=True))
    wanted = math.log(dollars_per_hour)
    if wanted < spends[0] - math.log(_WITHIN):
        return math.nan
    return float(np.exp(np.interp(wanted, spends, times)))
