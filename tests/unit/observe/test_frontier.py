import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "schedule"))
from tiny import job, option_set

from drystone.describe.market import Offer
from drystone.errors import RequestError
from drystone.observe.frontier import (
    cheapest_for_the_work,
    cheapest_meeting,
    fixed_nodes,
    gpu_prices,
    meets,
    simulate_point,
    theoretical_frontier,
    usual_budgets,
)
from drystone.observe.simulation import Scenario
from drystone.schedule.options import types_of

# One GPU does a sample a second, two do 1.6; of B, half of that for a quarter of the price.
OPTIONS = option_set(([1, 0], 1.0), ([2, 0], 1.6), ([0, 1], 0.5))
OFFERS = (
    Offer(name="a", gpu="A", num_gpus=2, price_dollars_per_hour=8.0),
    Offer(name="b", gpu="B", num_gpus=1, price_dollars_per_hour=1.0),
)
JOBS = tuple(
    replace(job(f"j{i}", 3600.0), submit_seconds=1800.0 * i, min_gpus=1) for i in range(11)
)
SCENARIO = Scenario(jobs=JOBS, nodes=(), options_of=lambda _: OPTIONS, offers=OFFERS)


def on_nodes(nodes: tuple) -> Scenario:
    kinds = types_of(nodes)
    options = option_set(([1], 0.5)) if kinds == ("B",) else option_set(([1], 1.0), ([2], 1.6))
    return replace(SCENARIO, nodes=nodes, offers=(), options_of=lambda _: options)


def test_prices_are_those_of_one_gpu():
    assert gpu_prices(SCENARIO).tolist() == [4.0, 1.0]


def test_the_theoretical_frontier_has_the_corners_that_one_can_work_out():
    frontier = theoretical_frontier(SCENARIO)

    # 11 jobs in 5 h. On one B: 2 h and 2 dollars a job; on one A: 1 h, 4; on two A: 0.625 h, 5.
    rate = 11 / 5
    spend = [2 * rate, 4 * rate, 5 * rate]
    assert frontier.spend_dollars_per_hour.tolist() == pytest.approx(spend)
    assert frontier.mean_completion_seconds.tolist() == pytest.approx([7200.0, 3600.0, 2250.0])
    assert frontier.least_budget(3600.0) == pytest.approx(4 * rate)


def test_a_policy_that_rents_is_judged_by_all_its_money():
    frontier = theoretical_frontier(SCENARIO)

    point = simulate_point(SCENARIO, on_nodes, frontier, "budget", 1000.0)

    assert point is not None
    assert (point.num_done, point.num_jobs) == (11, 11)
    assert point.arrival_dollars_per_hour == pytest.approx(point.spent_dollars / 5)
    # Money beyond the last corner buys nothing: nobody is faster than theory.
    assert point.theory_seconds == pytest.approx(2250.0)
    assert point.mean_completion_seconds >= point.theory_seconds - 1e-6


def test_a_policy_that_does_not_rent_gets_what_the_budget_pays_for():
    nodes, price = fixed_nodes(SCENARIO, 4.5)

    assert cheapest_for_the_work(SCENARIO).name == "b"
    assert ([one.gpu for one in nodes], price) == (["B"] * 4, 4.0)
    point = simulate_point(SCENARIO, on_nodes, theoretical_frontier(SCENARIO), "fifo", 4.5)
    assert point is not None
    assert point.spent_dollars_per_hour == pytest.approx(4.0)
    assert simulate_point(SCENARIO, on_nodes, theoretical_frontier(SCENARIO), "fifo", 0.5) is None


def test_a_target_is_met_only_with_every_job_done():
    frontier = theoretical_frontier(SCENARIO)
    point = simulate_point(SCENARIO, on_nodes, frontier, "fifo", 20.0)
    assert point is not None

    assert meets(point, 7300.0)
    assert not meets(replace(point, num_done=10), 7300.0)
    assert not meets(replace(point, mean_completion_seconds=math.nan), 7300.0)
    assert cheapest_meeting([point], "fifo", 7300.0) is point
    assert cheapest_meeting([point], "fifo", 7000.0) is None
    assert cheapest_meeting([point], "budget", 7300.0) is None


def test_budgets_that_nobody_named_begin_just_above_the_least():
    found = usual_budgets(theoretical_frontier(SCENARIO))

    assert found[0] == pytest.approx(1.1 * 4.4, rel=0.01)
    assert found == sorted(found)
    assert found[-1] < 11


def test_without_a_market_there_is_no_frontier():
    with pytest.raises(RequestError, match="market"):
        theoretical_frontier(replace(SCENARIO, offers=()))


def test_a_policy_that_could_rent_may_be_held_to_fixed_nodes():
    point = simulate_point(SCENARIO, on_nodes, theoretical_frontier(SCENARIO), "fixed:budget", 4.5)

    assert point is not None
    assert point.policy == "fixed:budget"
    assert point.spent_dollars_per_hour == pytest.approx(4.0)
