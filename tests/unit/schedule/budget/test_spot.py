"""The rule for jobs with a deadline on spot nodes, by itself and on a piece of a real trace."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from drystone.describe.traces.spot import SpotTrace, load_spot_trace
from drystone.errors import UnreadableFile
from drystone.observe.spot import SpotTask, least_dollars, replay, rules_for
from drystone.schedule.budget.spot import (
    ON_DEMAND,
    WAIT,
    DeadlineJob,
    PlaceHistory,
    SpotPlace,
    choose_place,
)

TRACE = Path(__file__).parents[4] / "benchmarks/data/spot_v100_aws.csv"
GOOD = PlaceHistory(watched_hours=1000.0, available_hours=950.0, num_losses=20.0)
RARE = PlaceHistory(watched_hours=1000.0, available_hours=50.0, num_losses=20.0)


def _job(slack_hours: float, place: int = WAIT, work_hours: float = 10.0) -> DeadlineJob:
    return DeadlineJob(
        work_hours=work_hours, hours_left=work_hours + slack_hours, restart_hours=0.2, place=place,
        last_place=max(place, WAIT), on_demand_dollars_per_hour=3.0,
    )  # fmt: skip


def _place(dollars: float, *, is_up: bool = True, history: PlaceHistory = GOOD) -> SpotPlace:
    return SpotPlace(dollars_per_hour=dollars, is_available=is_up, history=history)


def test_waits_while_there_is_slack_and_goes_on_demand_when_it_ends() -> None:
    gone = [_place(1.0, is_up=False)]
    assert choose_place(_job(5.0), gone) == WAIT
    assert choose_place(_job(0.3), gone) == ON_DEMAND


def test_leaves_a_spot_node_while_a_restart_still_fits() -> None:
    assert choose_place(_job(1.0, place=0), [_place(1.0)]) == 0
    assert choose_place(_job(0.21, place=0), [_place(1.0)]) == ON_DEMAND


def test_dear_place_is_taken_only_when_the_cheap_one_does_not_suffice() -> None:
    cheap_gone, dear = _place(1.0, is_up=False), _place(2.0)
    assert choose_place(_job(10.0), [cheap_gone, dear]) == WAIT
    rare = _place(1.0, is_up=False, history=RARE)
    assert choose_place(_job(10.0), [rare, dear]) == 1


def test_job_without_a_deadline_waits_for_the_cheapest_and_never_goes_on_demand() -> None:
    job = DeadlineJob(work_hours=10.0, hours_left=math.inf, restart_hours=0.2)
    assert choose_place(job, [_place(1.0, is_up=False), _place(2.0)]) == WAIT
    assert choose_place(job, [_place(1.0), _place(2.0)]) == 0


def test_returns_from_on_demand_only_with_slack_for_the_way_back() -> None:
    assert choose_place(_job(1.0, place=ON_DEMAND), [_place(1.0)]) == 0
    assert choose_place(_job(0.3, place=ON_DEMAND), [_place(1.0)]) == ON_DEMAND


def _every_schedule(task: SpotTask, trace: SpotTrace, restart: int, work: int) -> float:
    """Brute force: each tick nothing, a zone, or on demand (the last number)."""
    zones, ticks = trace.is_available.shape
    best = math.inf
    for schedule in itertools.product(range(-1, zones + 1), repeat=ticks):
        dollars, left, starting, before = 0.0, work, 0, -1
        for tick, place in enumerate(schedule):
            if left == 0:
                break
            if 0 <= place < zones and not trace.is_available[place, tick]:
                left = -1
                break
            if place >= 0:
                starting = restart if place != before else starting
                spot = trace.dollars_per_hour[place, tick] if place < zones else None
                dollars += task.on_demand_dollars_per_hour if spot is None else spot
                starting, left = (starting - 1, left) if starting else (0, left - 1)
            before = place
        best = min(best, dollars) if left == 0 else best
    return best


@pytest.mark.parametrize("seed", range(4))
def test_optimum_is_that_of_every_schedule(seed: int) -> None:
    dice = np.random.default_rng(seed)
    trace = SpotTrace(
        zones=("a", "b"), tick_seconds=3600.0,
        is_available=dice.random((2, 6)) < 0.6, dollars_per_hour=dice.uniform(1, 2, (2, 6)),
    )  # fmt: skip
    task = SpotTask(work_hours=3.0, restart_hours=1.0, on_demand_dollars_per_hour=4.0)
    assert least_dollars(task, trace) == pytest.approx(_every_schedule(task, trace, 1, 3))


@pytest.mark.parametrize("ratio", [1.03, 1.2, 1.6])
def test_no_deadline_is_missed_and_nobody_beats_the_optimum(ratio: float) -> None:
    trace = load_spot_trace(TRACE, tick_seconds=300.0)
    task = SpotTask(work_hours=12.0, restart_hours=0.25, on_demand_dollars_per_hour=3.06)
    spent = dict.fromkeys(("spot", "uniform progress", "on demand"), 0.0)
    for start in range(20, 1000, 140):
        window = trace.window(trace.zones, start * 3600.0, 12.0 * ratio * 3600.0)
        least = least_dollars(task, window)
        rules = rules_for(task, window)
        for name in spent:
            outcome = replay(rules[name], task, window)
            assert outcome.is_done, (name, start)
            assert outcome.dollars >= least - 1e-6
            spent[name] += outcome.dollars
    assert spent["spot"] <= spent["on demand"] + 1e-6
    if ratio > 1.1:
        assert spent["spot"] < spent["uniform progress"]


def test_wrong_trace_says_where(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("zone,seconds,available,spot_dollars_per_hour\na,0,1,cheap\n")
    with pytest.raises(UnreadableFile, match="cheap"):
        load_spot_trace(path)
