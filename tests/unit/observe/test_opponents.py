"""Opponents known in hindsight."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "schedule"))
from tiny import job, option_set

from drystone.describe.market import Offer
from drystone.errors import InvalidSpec
from drystone.observe.frontier import hindsight_points, theoretical_frontier
from drystone.observe.opponents import (
    best_within,
    interpolated_seconds,
    run_in_hindsight,
    settings,
    try_settings,
)
from drystone.observe.simulation import Scenario
from drystone.schedule.decision import find_policy

OPTIONS = option_set(([1, 0], 1.0), ([2, 0], 1.6), ([0, 1], 0.5))
OFFERS = (
    Offer(name="a", gpu="A", num_gpus=1, price_dollars_per_hour=4.0),
    Offer(name="b", gpu="B", num_gpus=1, price_dollars_per_hour=1.0),
)
JOBS = tuple(
    replace(job(f"j{i}", 3600.0), submit_seconds=1800.0 * i, min_gpus=1) for i in range(11)
)
SCENARIO = Scenario(jobs=JOBS, nodes=(), options_of=lambda _: OPTIONS, offers=OFFERS)


def test_all_widths_and_types_are_tried():
    assert settings(SCENARIO, "constant") == [
        "constant:1", "constant:1xA", "constant:1xB",
        "constant:2", "constant:2xA", "constant:2xB",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("budget", "name", "hours"),
    [(100.0, "constant:2", 0.625), (9.0, "constant:1xA", 1.0), (5.0, "constant:1", 2.0)],
)
def test_the_earliest_within_the_budget_counts(budget, name, hours):
    """11 jobs in 5 h: on one B 2 h and $2 each, on one A 1 h and $4, on two A 0.625 h and $5."""
    best = best_within(try_settings(SCENARIO, "constant"), budget)

    assert best.name == name
    assert best.report.mean_completion_seconds == pytest.approx(3600 * hours)


def test_where_nothing_is_within_the_budget_the_cheapest_counts():
    tried = try_settings(SCENARIO, "constant")
    assert best_within(tried, 0.1).name == "constant:1"
    assert math.isnan(interpolated_seconds(tried, 0.1))
    assert 3600.0 < interpolated_seconds(tried, 6.0) < 7200.0


def test_a_steady_multiplier_gets_what_each_budget_buys():
    theory = theoretical_frontier(SCENARIO)
    points = hindsight_points(SCENARIO, theory, "steady", [5.0, 100.0])

    hours = [point.mean_completion_seconds / 3600 for point in points]
    assert hours == pytest.approx([2.0, 0.625])
    assert all(point.setting.startswith("steady:") for point in points)


def test_a_run_in_hindsight_says_its_setting():
    run = run_in_hindsight(replace(SCENARIO, budget_dollars_per_hour=9.0), "constant")
    assert run.report.policy == "constant:1xA"


@pytest.mark.parametrize("name", ["constant:0", "constant:wide", "steady:much", "steady:-1"])
def test_a_setting_that_is_none_is_refused(name):
    with pytest.raises(InvalidSpec, match="names no"):
        find_policy(name)
