"""`prices` with own and rented GPUs: the smaller of two prices, the budget, what is given back."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny import job, node, option_set, snapshot

from drystone.describe.market import Offer
from drystone.observe.simulation import Scenario, run_policy, simulate_policy
from drystone.run.events import Started
from drystone.schedule.decision import Rent, Start
from drystone.schedule.prices.policy import make_market, prices
from drystone.schedule.prices.rent_or_wait import plan_rent
from drystone.schedule.prices.worth import worth_of_options
from drystone.schedule.snapshot import StartupCost

OFFER = Offer(name="a", gpu="A", num_gpus=4, price_dollars_per_hour=4.0, most_nodes=10)
OPTIONS = option_set(([1], 1.0), ([2], 1.8), ([4], 3.0))


def plan(jobs, *, budget: float, offer: Offer = OFFER):
    seen = snapshot([node("own")], jobs, OPTIONS, offers=(offer,), budget_dollars_per_hour=budget)
    worth = worth_of_options(seen, seen.job_speeds, seen.jobs.weights, np.zeros(1))
    return plan_rent(seen, make_market(seen, worth.values), None)


def jobs_of(number: int, samples: float = 36_000.0):
    return [job(f"j{i}", samples) for i in range(number)]


def test_without_a_queue_nothing_is_rented():
    assert plan(jobs_of(1), budget=100.0).num_wanted == {0: 0}


def test_a_job_that_has_only_to_end_is_worth_a_node():
    """It had done all its steps when its node was lost, and nobody heard that it had finished."""
    seen = snapshot(
        [node("own", num_gpus=1)], [job("long", 1e9), job("done", 1e-9)], option_set(([1], 1.0)),
        {"long": (0, ((0, 1),))}, offers=(OFFER,), budget_dollars_per_hour=5.0,
        startup=StartupCost(seconds_per_gpu=60.0, most_seconds=60.0),
    )  # fmt: skip
    worth = worth_of_options(seen, seen.job_speeds, seen.jobs.weights, np.zeros(1))

    memory = None
    for _ in range(40):
        found = plan_rent(seen, make_market(seen, worth.values), memory)
        memory = found.memory
    assert found.num_wanted == {0: 1}


def test_a_queue_is_worth_more_nodes_the_more_money_there_is():
    few, many = (plan(jobs_of(12), budget=one).num_wanted[0] for one in (4.0, 40.0))

    assert few == 1
    assert few < many <= 10


def test_the_nodes_wanted_cost_no_more_than_the_budget_allows():
    for budget in (3.0, 5.0, 9.0, 21.0):
        wanted = plan(jobs_of(30), budget=budget).num_wanted[0]
        assert wanted * OFFER.price_dollars_per_hour <= budget


def test_unlimited_money_rents_for_everyone_s_fastest_option():
    assert plan(jobs_of(4), budget=math.inf).num_wanted == {0: 3}


def test_a_rent_says_what_a_dollar_must_save():
    seen = snapshot(
        [node("own")], jobs_of(12), OPTIONS, offers=(OFFER,), budget_dollars_per_hour=8.0
    )

    decisions, memory = prices(seen, None)

    [rent] = [one for one in decisions if isinstance(one, Rent)]
    assert rent.numbers["job_hours_per_dollar"] == memory.rent.job_hours_per_dollar > 0
    assert any(isinstance(one, Start) for one in decisions)


def scenario(budget: float) -> Scenario:
    jobs = tuple(
        replace(job(f"j{i}", 7200.0), submit_seconds=60.0 * i + 20_000.0 * (i // 12))
        for i in range(36)
    )
    return Scenario(
        jobs=jobs,
        nodes=(node("own"),),
        options_of=lambda _: OPTIONS,
        startup=StartupCost(seconds_per_gpu=5, most_seconds=20),
        offers=(replace(OFFER, start_delay_seconds=120.0),),
        budget_dollars_per_hour=budget,
    )


@pytest.mark.slow
def test_renting_ends_jobs_earlier_within_the_budget_and_everything_is_given_back():
    alone, _ = simulate_policy(replace(scenario(1.0), offers=()), "prices")
    rented, log = simulate_policy(scenario(6.0), "prices")

    assert rented.num_done == alone.num_done == 36
    assert rented.mean_completion_seconds < 0.8 * alone.mean_completion_seconds
    hours = rented.makespan_seconds / 3600
    assert 0 < rented.spent_dollars <= 6.0 * hours * 1.05
    names = [type(one).__name__ for one in log]
    assert any("Rent" in name for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [2.0, 4.0, 12.0])
def test_more_money_never_makes_it_much_slower(budget: float):
    less, _ = simulate_policy(scenario(budget), "prices")
    more, _ = simulate_policy(scenario(2 * budget), "prices")

    assert more.mean_completion_seconds <= 1.05 * less.mean_completion_seconds


@pytest.mark.slow
@pytest.mark.parametrize("knows_lengths", [True, False])
def test_long_jobs_do_not_keep_what_quiet_days_had_saved_up_for(knows_lengths: bool):
    """Two days without jobs allow many nodes at once; nobody may hold them for ever."""
    budget, hour = 4.0, 3600.0
    first = replace(job("first", 100.0), submit_seconds=0.0)
    late = [
        replace(job(f"j{i}", 200_000.0), submit_seconds=50 * hour + 60.0 * i) for i in range(12)
    ]
    seen = []

    def watch(snapshot, memory):
        seen.append((snapshot.now_seconds / hour, snapshot.spent_dollars))
        return prices(snapshot, memory)

    asked = replace(
        scenario(budget),
        jobs=(first, *late),
        knows_lengths=knows_lengths,
        horizon_seconds=65 * hour,
    )
    report = run_policy(asked, "prices", decide=watch).report

    # At most what 1.25 times the allowance leaves open: 6 h x (1 - 1 / 1.25) of the budget.
    seen.append((65.0, report.spent_dollars))
    assert all(spent <= budget * (hours + 1.3) for hours, spent in seen)
    assert report.spent_dollars > 50 * budget  # what was saved up is used


@pytest.mark.parametrize("apart_seconds", [0.0, 600.0])
def test_a_job_that_waits_for_money_starts_when_a_node_can_be_paid(apart_seconds: float):
    # Half of what a node costs: the other half is saved up in six hours, where nothing happens.
    table = option_set(([1], 1.0), ([8], 6.0))
    offer = replace(OFFER, num_gpus=8, price_dollars_per_hour=16.0)
    jobs = tuple(replace(job(f"j{i}", 3600.0), submit_seconds=i * apart_seconds) for i in range(2))
    rented = Scenario(
        jobs=jobs,
        nodes=(),
        options_of=lambda _: table,
        offers=(offer,),
        budget_dollars_per_hour=8.0,
    )

    _, log = simulate_policy(rented, "prices")
    started = [event.time_seconds / 3600 for event in log if isinstance(event, Started)]
    assert len(started) == 2
    assert max(started) < 7.0
