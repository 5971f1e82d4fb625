"""Prices and choices against HiGHS: the exact linear and the exact integer programme."""

import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from exact_prices import choose_exactly, solve_exact_prices, value_of
from odd_markets import make_odd_market
from price_markets import make_market

from drystone.schedule.prices.integral import choose
from drystone.schedule.prices.shadow_prices import Market, dual_bound, solve_prices

pytest.importorskip("highspy", reason="exact prices need the `solver` extra")
DATA = Path(__file__).resolve().parents[1] / "data"


@pytest.mark.parametrize("mixed", [0, 8])
@pytest.mark.parametrize("seed", range(3))
def test_the_bound_is_that_of_the_linear_programme(seed: int, mixed: int):
    market = make_market(seed, 100, mixed=mixed)

    exact = solve_exact_prices(market)
    own = solve_prices(market)

    assert exact.bound * (1 - 1e-9) <= own.bound <= exact.bound * 1.002
    assert dual_bound(market, exact.prices) == pytest.approx(exact.bound)


@pytest.mark.slow
@pytest.mark.parametrize("mixed", [0, 8])
@pytest.mark.parametrize("seed", range(3))
def test_the_choice_is_within_one_percent_of_the_best(seed: int, mixed: int):
    market = make_market(seed, 100, mixed=mixed)

    exact = choose_exactly(market, most_gap=2e-3, most_seconds=600.0)
    solution = solve_prices(market)
    picks = choose(market, solution).options

    assert value_of(market, picks) >= 0.99 * exact.value
    assert exact.value <= solution.bound * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(2))
def test_a_small_choice_is_within_one_percent_of_the_best(seed: int):
    market = make_market(seed, 40)

    exact = choose_exactly(market, most_gap=1e-3, most_seconds=600.0)

    assert value_of(market, choose(market, solve_prices(market)).options) >= 0.99 * exact.value


@pytest.mark.parametrize("seed", range(12))
def test_small_markets_are_exact_and_say_so(seed: int):
    """Options in powers of two on three types, with which prices alone were up to 7.5 % off."""
    draw = np.random.default_rng(seed)
    num_jobs, widths = int(draw.integers(2, 25)), 2.0 ** np.arange(6)
    counts, values = np.zeros((3, num_jobs, 18)), np.zeros((num_jobs, 18))
    speed, bend = draw.lognormal(0, 0.6, (num_jobs, 3)), draw.uniform(0.5, 0.95, (num_jobs, 3))
    for kind in range(3):
        part = slice(6 * kind, 6 * kind + 6)
        counts[kind, :, part] = widths
        values[:, part] = speed[:, kind, None] * widths ** bend[:, kind, None]
    values *= draw.lognormal(0, 1, (num_jobs, 1))
    market = Market(values=values, counts=tuple(counts), capacity=np.array([24.0, 16.0, 24.0]))

    exact = choose_exactly(market, most_gap=1e-6)
    picks = choose(market, solve_prices(market))

    found = value_of(market, picks.options)
    assert exact.value <= picks.bound * (1 + 1e-9)
    assert found >= 0.99 * picks.bound
    rows = np.flatnonzero(picks.options >= 0)
    taken = [one[rows, picks.options[rows]].sum() for one in market.counts]
    assert (np.array(taken) <= market.capacity).all()


@pytest.mark.slow
@pytest.mark.parametrize("num_jobs", [200, 500, 2000])
def test_with_many_jobs_the_bound_itself_proves_it(num_jobs: int):
    """What the integer programme could give is at most the bound, so it need not be solved."""
    market = make_market(1, num_jobs)

    solution = solve_prices(market)

    assert solution.bound <= solve_exact_prices(market).bound * 1.002
    assert value_of(market, choose(market, solution).options) >= 0.99 * solution.bound


@pytest.mark.parametrize("seed", range(5))
def test_a_choice_takes_no_more_than_there_is(seed: int):
    market = make_market(seed, 60, mixed=6)

    picks = choose(market, solve_prices(market)).options

    rows = np.flatnonzero(picks >= 0)
    taken = [counts[rows, picks[rows]].sum() for counts in market.counts]
    assert (np.array(taken) <= market.capacity).all()
    assert (market.values[rows, picks[rows]] > 0).all()


def test_no_odd_market_makes_the_solver_fail():
    """A hundred thousand of them pass, too: `range(100_000)` takes some minutes."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(500):
            market, start = make_odd_market(seed)
            solution = solve_prices(market, start)
            chosen = choose(market, solution)
            picks = chosen.options
            rows = np.flatnonzero(picks >= 0)
            taken = [counts[rows, picks[rows]].sum() for counts in market.counts]

            assert np.isfinite(solution.prices).all(), seed
            assert (solution.prices >= 0).all(), seed
            assert (np.array(taken) <= market.capacity + 1e-6).all(), seed
            assert value_of(market, picks) <= solution.bound * (1 + 1e-9), seed
            assert value_of(market, picks) <= chosen.bound * (1 + 1e-9), seed


def test_prices_are_found_where_rounding_leaves_no_curvature():
    """4 jobs, 1 to 24, 16 and 24 GPUs of three types: elimination met an exact zero here."""
    values = np.loadtxt(DATA / "flat_price_market.csv", delimiter=",")
    most = (24, 16, 24)
    rows = [
        np.pad(np.arange(1.0, n + 1), (sum(most[:at]), sum(most[at + 1 :])))
        for at, n in enumerate(most)
    ]
    market = Market(
        values=values,
        counts=tuple(np.repeat(row[None], len(values), axis=0) for row in rows),
        capacity=np.array(most, dtype=np.float64),
    )
    start = np.array([0.0001813014470426253, 0.01702967973867647, 0.004025141518850394])

    found = solve_prices(market, start)

    assert found.bound <= 1.01 * solve_exact_prices(market).bound
