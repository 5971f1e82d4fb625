"""The list of choices says what the table of options says."""

import numpy as np
import pytest

from drystone.schedule.prices.integral import choose
from drystone.schedule.prices.shadow_prices import (
    Market,
    choose_options,
    inner_products,
    make_menu,
    solve_prices,
    weighted_sum,
)

VALUES = np.array([[3.0, 0.0, 2.0], [0.0, 0.0, 0.0], [1.0, 4.0, 4.0]])
COUNTS = (
    np.array([[1.0, 9.0, 0.0], [5.0, 5.0, 5.0], [2.0, 0.0, 0.0]]),
    np.array([[0.0, 9.0, 2.0], [5.0, 5.0, 5.0], [0.0, 3.0, 3.0]]),
)


def test_a_menu_has_every_option_that_there_is_and_nothing_for_every_job():
    menu = make_menu(VALUES, COUNTS)

    assert menu.row.tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    assert menu.option.tolist() == [0, 2, -1, -1, 0, 1, 2, -1]
    assert menu.starts.tolist() == [0, 3, 4]
    assert menu.values.tolist() == [3, 2, 0, 0, 1, 4, 4, 0]
    assert menu.counts.tolist() == [[1, 0, 0, 0, 2, 0, 0, 0], [0, 2, 0, 0, 0, 3, 3, 0]]


def test_of_equal_choices_the_first_is_the_best():
    menu = make_menu(VALUES, COUNTS)

    assert menu.best_at(menu.values).tolist() == [0, 3, 5]


def test_jobs_without_any_option_have_a_menu_too():
    menu = make_menu(np.zeros((2, 0)), (np.zeros((2, 0)),))

    assert menu.option.tolist() == [-1, -1]
    assert menu.counts.tolist() == [[0, 0]]


@pytest.mark.parametrize("length", [10, 10_000])
def test_sums_of_few_and_of_many_numbers_are_the_same_sums(length: int):
    chance = np.random.default_rng(length)
    rows, weights = chance.random((3, length)), chance.random(3)

    assert weighted_sum(weights, rows) == pytest.approx((weights[:, None] * rows).sum(axis=0))
    products = (rows[:, None] * rows).sum(axis=2)
    assert inner_products(rows, rows) == pytest.approx(products)


def test_of_prices_with_the_same_bound_the_last_stay():
    # Both get what they want at any price up to 1.
    counts = (np.array([[1.0], [1.0]]),)
    market = Market(values=np.ones((2, 1)), counts=counts, capacity=np.array([2.0]))

    for price in (0.1, 1 / 3, 0.7):
        solution = solve_prices(market, np.array([price]))

        assert solution.prices.tolist() == [price]
        assert solution.bound == pytest.approx(2.0)


@pytest.mark.parametrize("seed", range(20))
def test_nobody_could_gain_more_by_numbers_than_a_choice_says(seed: int):
    chance = np.random.default_rng(seed)
    values = chance.random((12, 5)) * (chance.random((12, 5)) < 0.7)
    counts = tuple(chance.integers(0, 5, (12, 5)).astype(float) for _ in range(2))
    market = Market(values=values, counts=counts, capacity=np.array([9.0, 14.0]))

    picks = choose(market, solve_prices(market))

    rows = np.flatnonzero(picks.options >= 0)
    own, taken = np.zeros(12), np.zeros((2, 12))
    own[rows] = values[rows, picks.options[rows]]
    assert picks.max_gain <= 2e-9 * own.sum()
    for kind in range(2):
        taken[kind, rows] = counts[kind][rows, picks.options[rows]]
    left = market.capacity - taken.sum(axis=1)
    assert (left >= 0).all()
    gains = values - own[:, None]
    for kind in range(2):
        gains[counts[kind] > (taken[kind] + left[kind])[:, None]] = 0.0
    assert gains.max() <= picks.max_gain


def test_with_room_for_all_everybody_gets_what_it_picks():
    market = Market(values=VALUES, counts=COUNTS, capacity=np.array([100.0, 100.0]))
    solution = solve_prices(market)

    assert choose(market, solution).options.tolist() == [0, -1, 1]
    assert choose_options(market, solution.prices)[0].tolist() == [0, -1, 1]
