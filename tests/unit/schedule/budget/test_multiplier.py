"""The multiplier's feedback: whatever was misjudged, the mean spend becomes the budget."""

import heapq

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drystone.errors import InvalidSpec
from drystone.schedule.budget.frontier import classes_from_speeds, trace_frontier
from drystone.schedule.budget.multiplier import (
    ELBOW,
    MAX_CREDIT_HORIZONS,
    STEADY_JOBS,
    BudgetBalance,
    steady_level,
    update_balance,
)

HOUR = 3600.0


def balance(**fields) -> BudgetBalance:
    return BudgetBalance(**{"budget_dollars_per_hour": 100.0, "horizon_seconds": HOUR, **fields})


def test_on_the_budget_nothing_is_corrected():
    after = update_balance(balance(), now_seconds=7200.0, spent_dollars=200.0)

    assert after.balance_dollars == pytest.approx(0)
    assert after.target_dollars_per_hour() == pytest.approx(100.0)


def test_overspending_lowers_the_target_and_saving_raises_it():
    over = update_balance(balance(), now_seconds=HOUR, spent_dollars=150.0)
    under = update_balance(balance(), now_seconds=HOUR, spent_dollars=50.0)

    assert over.target_dollars_per_hour() == pytest.approx(50.0)
    assert under.target_dollars_per_hour() == pytest.approx(150.0)


def test_what_is_promised_counts_as_spent():
    state = update_balance(balance(), now_seconds=HOUR, spent_dollars=80.0)

    assert state.target_dollars_per_hour(20.0) == pytest.approx(100.0)


def test_a_balance_is_to_be_made_good_within_the_horizon():
    over = update_balance(balance(horizon_seconds=2 * HOUR), now_seconds=HOUR, spent_dollars=150.0)

    assert over.target_dollars_per_hour() == pytest.approx(100 - 50 / 2)


def test_debt_is_never_forgiven_and_credit_is_kept_for_a_while_only():
    deep = update_balance(balance(), now_seconds=HOUR, spent_dollars=1e9)
    rich = update_balance(balance(), now_seconds=1e9, spent_dollars=0.0)

    assert deep.balance_dollars == pytest.approx(100 - 1e9)
    assert rich.balance_dollars == MAX_CREDIT_HORIZONS * 100


def level(before: float, least: float, owed: float = 0.0, num_new: int = 1) -> float:
    return steady_level(
        before,
        balance(balance_dollars=-owed, horizon_seconds=10 * HOUR),
        promised_dollars=0.0,
        least_dollars_per_hour=least,
        arrivals_per_second=10 / HOUR,
        num_jobs=1000.0,
        num_new=num_new,
    )


def test_the_level_is_what_the_money_allows_over_what_keeps_up():
    assert level(0.0, least=50.0) == pytest.approx(2.0)
    assert level(0.0, least=50.0, owed=500.0) == pytest.approx(1.0 + ELBOW / 2)
    assert level(0.0, least=0.0) == 1.0


@pytest.mark.parametrize(("owed", "lowest"), [(0.0, 1 + ELBOW), (500.0, 1.1), (1000.0, 1.0)])
def test_the_last_tenth_is_saved_only_by_who_owes_much(owed, lowest):
    """A hundred jobs come in ten hours, in which the budget is a thousand dollars."""
    assert level(0.0, least=99.0, owed=owed) == pytest.approx(lowest)


def test_one_job_moves_the_level_little_and_many_move_it_all_the_way():
    assert level(8.0, least=50.0) == pytest.approx(8.0 * (2.0 / 8.0) ** (1 / STEADY_JOBS))
    assert level(8.0, least=50.0, num_new=1000) == pytest.approx(2.0)


@given(
    spends=st.lists(st.floats(0, 300), min_size=1, max_size=30),
    seconds=st.floats(1, 5000),
)
def test_spend_over_any_history_exceeds_the_budget_by_the_debt_at_most(spends, seconds):
    now = spent = 0.0
    state = balance()
    for spend in spends:
        now, spent = now + seconds, spent + spend
        state = update_balance(state, now_seconds=now, spent_dollars=spent)
        assert spent <= 100 * now / HOUR - state.balance_dollars + 1e-6


@given(times=st.lists(st.floats(0.1, 1000), min_size=2, max_size=8))
def test_how_often_it_is_updated_does_not_matter_while_no_credit_is_lost(times):
    now = spent = 0.0
    state = balance()
    for seconds in times:
        now, spent = now + seconds, spent + 110 * seconds / HOUR
        state = update_balance(state, now_seconds=now, spent_dollars=spent)

    once = update_balance(balance(), now_seconds=now, spent_dollars=spent)
    assert state.balance_dollars == pytest.approx(once.balance_dollars, abs=1e-9)


@pytest.mark.parametrize("error", [0.5, 0.8, 1.25, 2.0])
def test_a_wrong_belief_still_meets_the_budget(error):
    # What is spent is `error` times the target.
    state, spent, step = balance(horizon_seconds=4 * HOUR), 0.0, 60.0
    for number in range(1, 6001):
        spend = error * max(state.target_dollars_per_hour(), 0.0)
        spent += spend * step / HOUR
        state = update_balance(state, now_seconds=number * step, spent_dollars=spent)

    assert spend == pytest.approx(100.0, rel=0.001)
    assert spent / (6000 * step / HOUR) == pytest.approx(100.0, rel=0.05)


@pytest.mark.parametrize("error", [0.7, 1.0, 1.4])
def test_random_arrivals_with_wrong_sizes_meet_the_budget(error):
    """An infinite-server queue: jobs start at once at the choice of the target's multiplier."""
    generator = np.random.default_rng(3)
    gpus = np.array([1.0, 2, 4, 8, 16, 32])
    speeds = np.array([gpus**0.8, gpus**0.6])
    rates, believed_size, budget = np.array([0.02, 0.03]), 1000.0, 90.0
    frontier = trace_frontier(
        classes_from_speeds(
            arrivals_per_second=rates,
            mean_samples=believed_size,
            price_dollars_per_hour=gpus,
            samples_per_second=speeds,
        )
    )
    state = balance(budget_dollars_per_hour=budget, horizon_seconds=4 * HOUR)
    now = spent = price = 0.0
    running: list[tuple[float, float]] = []
    for _ in range(40_000):
        arrival = now + generator.exponential(1 / rates.sum())
        while running and running[0][0] <= arrival:
            end, paid = heapq.heappop(running)
            spent += price * (end - now) / HOUR
            now, price = end, price - paid
        spent += price * (arrival - now) / HOUR
        now = arrival
        state = update_balance(state, now_seconds=now, spent_dollars=max(spent, 0.0))
        row = int(generator.random() < rates[1] / rates.sum())
        multiplier = frontier.multiplier_at(state.target_dollars_per_hour())
        choice = frontier.at_multiplier(multiplier).choice[row]
        seconds = generator.exponential(error * believed_size) / speeds[row, choice]
        heapq.heappush(running, (now + seconds, gpus[choice]))
        price += gpus[choice]

    assert spent / (now / HOUR) == pytest.approx(budget, rel=0.03)


def test_time_does_not_run_backwards_and_money_may_be_given_back():
    state = update_balance(balance(), now_seconds=10.0, spent_dollars=5.0)

    with pytest.raises(InvalidSpec):
        update_balance(state, now_seconds=9.0, spent_dollars=5.0)
    refunded = update_balance(state, now_seconds=10.0, spent_dollars=4.0)
    assert refunded.balance_dollars == pytest.approx(state.balance_dollars + 1.0)


@pytest.mark.parametrize("change", [{"budget_dollars_per_hour": 0.0}, {"horizon_seconds": 0.0}])
def test_a_budget_or_horizon_of_nothing_is_refused(change):
    with pytest.raises(InvalidSpec):
        balance(**change)
