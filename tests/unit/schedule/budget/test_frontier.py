"""The budget's frontier: the published example, its shape, and what it refuses."""

import math
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[3] / "oracles"))
from speedup_laws import AmdahlLaw, LawClass, PowerLaw, solve_widths

from drystone.errors import InvalidSpec, NothingFits
from drystone.schedule.budget.frontier import (
    JobClasses,
    classes_from_speeds,
    lower_hulls,
    trace_frontier,
)

AMDAHL, ROOT = AmdahlLaw(0.8), PowerLaw(0.5)
FIGURE = tuple(
    LawClass(arrivals_per_second=0.4, mean_seconds=1.0, law=law) for law in (AMDAHL, ROOT)
)
# boa.md 2.3: budget in GPUs, widths of both classes, mean completion time. The times there have 3
# digits; here they have 4. The first is 23/34 = 0.67647, which boa.md rounds twice, to 0.677.
FIGURE_ROWS = [
    (1.0, 2.43, 1.47, 0.6765),
    (1.5, 4.21, 4.44, 0.4322),
    (2.0, 6.00, 9.00, 0.3333),
    (2.5, 7.79, 15.15, 0.2798),
    (3.0, 9.57, 22.90, 0.2463),
]


def figure_table(widths: np.ndarray) -> JobClasses:
    """The figure's two classes as a table; a GPU costs one dollar an hour."""
    return classes_from_speeds(
        arrivals_per_second=[0.4, 0.4],
        mean_samples=1.0,
        price_dollars_per_hour=widths,
        samples_per_second=np.array([[law.speedup(k) for k in widths] for law in (AMDAHL, ROOT)]),
    )


@st.composite
def job_classes(draw, most_classes: int = 5, most_choices: int = 7) -> JobClasses:
    """Any speeds at any prices, some choices missing; small whole numbers, so that ties occur."""
    rows = draw(st.integers(1, most_classes))
    columns = draw(st.integers(1, most_choices))
    number = st.one_of(st.integers(1, 12).map(float), st.floats(0.05, 50))

    def table(values, shape):
        size = math.prod(shape)
        return np.array(draw(st.lists(values, min_size=size, max_size=size))).reshape(shape)

    speeds = table(st.one_of(number, st.just(0.0)), (rows, columns))
    speeds[:, 0] = table(number, (rows,))
    return classes_from_speeds(
        arrivals_per_second=table(number, (rows,)) / 100,
        mean_samples=table(number, (rows,)),
        price_dollars_per_hour=table(st.one_of(number, st.just(0.0)), (rows, columns)),
        samples_per_second=speeds,
        startup_seconds=draw(st.sampled_from([0.0, 1.5])),
        weights=table(st.sampled_from([1.0, 1.0, 2.0, 0.3]), (rows,)),
    )


# The published example


@pytest.mark.parametrize(("budget", "first", "second", "seconds"), FIGURE_ROWS)
def test_closed_forms_give_the_figure_of_the_paper(budget, first, second, seconds):
    found = solve_widths(FIGURE, budget)

    assert found.widths == pytest.approx((first, second), abs=0.005)
    assert found.mean_completion_seconds == pytest.approx(seconds, abs=0.00005)
    assert found.mean_num_gpus == pytest.approx(budget, rel=1e-9)


@pytest.mark.parametrize(("budget", "first", "second", "seconds"), FIGURE_ROWS)
def test_hull_and_greedy_give_the_figure_of_the_paper(budget, first, second, seconds):
    widths = np.arange(100, 3001) / 100
    classes = figure_table(widths)
    found = trace_frontier(classes).at_budget(budget)

    mean_widths = widths[found.choice]
    assert mean_widths == pytest.approx([first, second], abs=0.03)
    assert found.mean_completion_seconds == pytest.approx(seconds, abs=0.00005)
    assert found.spend_dollars_per_hour == pytest.approx(budget, rel=1e-9)
    exact = solve_widths(FIGURE, budget)
    assert found.mean_completion_seconds == pytest.approx(exact.mean_completion_seconds, rel=1e-5)
    assert found.job_hours_per_dollar == pytest.approx(exact.multiplier, rel=0.01)


def test_the_figure_is_exact_where_its_widths_are_in_the_table():
    found = trace_frontier(figure_table(np.array([1.0, 2, 3, 6, 9, 16]))).at_budget(2.0)

    # (6, 9) at 2 GPUs: both are three times as fast (boa.md 2.3).
    assert found.choice.tolist() == [3, 4]
    assert found.mean_completion_seconds == pytest.approx(1 / 3, rel=1e-12)


@given(
    power=st.floats(0.05, 0.95),
    share=st.floats(0.05, 0.99),
    multiplier=st.floats(1e-3, 10),
    other=st.floats(1, 1000),
)
def test_closed_form_widths_are_least_in_the_lagrangian(power, share, multiplier, other):
    for law in (PowerLaw(power), AmdahlLaw(share)):

        def value(width, law=law):
            return (1 + multiplier * width) / law.speedup(width)

        assert value(law.width(multiplier)) <= value(other) * (1 + 1e-12)


# Hulls


def test_the_hull_drops_measured_widths_that_only_cost():
    # cifar10 epoch 0 and bert epoch 0 on T4 GPUs (boa.md 2.4, measured goodput).
    gpus = np.array([1.0, 2, 4, 8, 12, 16])
    speeds = np.array([[999, 943, 1622, 1399, 2593, 2309], [14.8, 21.4, 24.5, 16.7, 13.2, 16.5]])
    hulls = lower_hulls(gpus / speeds, 1 / speeds)

    assert [gpus[row[row >= 0]].tolist() for row in hulls] == [[1, 4, 12], [1, 2, 4]]


@given(classes=job_classes())
def test_no_choice_lies_below_the_hull(classes):
    hulls = lower_hulls(classes.job_dollars, classes.job_seconds)
    for row, hull in enumerate(hulls):
        dollars, seconds = classes.job_dollars[row], classes.job_seconds[row]
        hull = hull[hull >= 0]
        assert (np.diff(dollars[hull]) > 0).all()
        assert (np.diff(seconds[hull]) < 0).all()
        for choice in np.flatnonzero(np.isfinite(seconds)):
            assert dollars[choice] >= dollars[hull[0]]
            least = np.interp(dollars[choice], dollars[hull], seconds[hull])
            assert seconds[choice] >= least * (1 - 1e-9)


@given(
    speeds=st.lists(st.floats(0.1, 50), min_size=2, max_size=9),
    prices=st.lists(st.floats(0.1, 50), min_size=9, max_size=9),
)
def test_the_hull_is_the_upper_concave_hull_of_speed_against_price(speeds, prices):
    speed, price = np.array(speeds), np.array(prices[: len(speeds)])
    hull = lower_hulls((price / speed)[None], (1 / speed)[None])[0]

    corner_prices = np.concatenate([[0], price[hull]])
    corner_speeds = np.concatenate([[0], speed[hull]])
    assert (np.diff(corner_speeds) > 0).all()
    assert (np.diff(corner_prices) > -1e-9 * price.max()).all()
    assert (speed <= np.interp(price, corner_prices, corner_speeds) * (1 + 1e-6)).all()


# The shape of the frontier


@given(classes=job_classes())
def test_the_frontier_falls_and_is_convex(classes):
    frontier = trace_frontier(classes)

    assert (np.diff(frontier.spend_dollars_per_hour) >= 0).all()
    assert (np.diff(frontier.mean_completion_seconds) <= 0).all()
    assert (np.diff(frontier.job_hours_per_dollar) <= 0).all()


@given(classes=job_classes(), places=st.lists(st.floats(0, 1.2), min_size=2, max_size=6))
def test_spend_is_never_above_the_budget_and_more_budget_is_never_slower(classes, places):
    frontier = trace_frontier(classes)
    low, high = frontier.spend_dollars_per_hour[[0, -1]]
    before = math.inf
    for place in sorted(places):
        budget = low + place * (high - low)
        found = frontier.at_budget(budget)
        assert found.spend_dollars_per_hour <= budget * (1 + 1e-12)
        assert found.mean_completion_seconds <= before * (1 + 1e-12)
        assert (found.larger_share > 0).sum() <= 1
        before = found.mean_completion_seconds


@given(classes=job_classes(), place=st.floats(0, 1))
def test_time_and_money_of_an_allocation_are_those_of_its_jobs(classes, place):
    frontier = trace_frontier(classes)
    low, high = frontier.spend_dollars_per_hour[[0, -1]]
    found = frontier.at_budget(low + place * (high - low))

    rows = np.arange(len(found.choice))
    share = found.larger_share
    rates, weights = classes.arrivals_per_second, classes.weights

    def mixed(values):
        return values[rows, found.choice] * (1 - share) + values[rows, found.larger] * share

    seconds, dollars = mixed(classes.job_seconds), mixed(classes.job_dollars)
    mean = (weights * rates * seconds).sum() / (weights * rates).sum()
    assert found.mean_completion_seconds == pytest.approx(mean, rel=1e-9)
    assert found.spend_dollars_per_hour == pytest.approx(3600 * (rates * dollars).sum(), rel=1e-9)


@given(classes=job_classes(), place=st.floats(0.01, 0.99))
def test_the_frontier_read_the_other_way_gives_the_same_point(classes, place):
    frontier = trace_frontier(classes)
    low, high = frontier.spend_dollars_per_hour[[0, -1]]
    budget = low + place * (high - low)
    seconds = frontier.at_budget(budget).mean_completion_seconds

    least = frontier.least_budget(max(seconds, frontier.mean_completion_seconds[-1]))
    again = frontier.at_budget(max(least, low)).mean_completion_seconds
    assert least <= budget + 1e-6 * high
    assert again == pytest.approx(seconds, rel=1e-9)


@given(classes=job_classes(), multiplier=st.floats(1e-4, 1e3))
def test_at_a_multiplier_every_class_picks_what_is_best_for_itself(classes, multiplier):
    found = trace_frontier(classes).at_multiplier(multiplier)

    value = classes.weights[:, None] * classes.job_seconds / 3600
    value = value + multiplier * classes.job_dollars
    picked = value[np.arange(len(value)), found.choice]
    assert picked == pytest.approx(value.min(axis=1), rel=1e-9)
    assert (found.larger_share == 0).all()


@given(classes=job_classes(), places=st.lists(st.floats(-0.5, 1.5), min_size=2, max_size=6))
def test_the_multiplier_falls_as_the_budget_grows_and_is_the_step_s_own_in_its_middle(
    classes, places
):
    frontier = trace_frontier(classes)
    spend, slopes = frontier.spend_dollars_per_hour, frontier.job_hours_per_dollar
    budgets = sorted(spend[0] + place * (spend[-1] - spend[0]) for place in places)
    found = [frontier.multiplier_at(one) for one in budgets]

    assert all(one >= other * (1 - 1e-9) for one, other in pairwise(found))
    if len(slopes) and slopes[-1] > 0:
        assert frontier.multiplier_at(-1.0) == pytest.approx(2 * slopes[0])
        assert frontier.multiplier_at(2 * spend[-1] + 1) == pytest.approx(slopes[-1] / 2)
        if spend[1] > spend[0] * (1 + 1e-6):
            middle = frontier.multiplier_at((spend[0] + spend[1]) / 2)
            assert middle == pytest.approx(slopes[0], rel=1e-3)


@given(classes=job_classes(), seed=st.integers(0, 99), place=st.floats(0, 1))
def test_the_order_of_classes_does_not_matter(classes, seed, place):
    order = np.random.default_rng(seed).permutation(len(classes.weights))
    other = JobClasses(
        arrivals_per_second=classes.arrivals_per_second[order],
        job_seconds=classes.job_seconds[order],
        job_dollars=classes.job_dollars[order],
        weights=classes.weights[order],
    )
    one, two = trace_frontier(classes), trace_frontier(other)
    low, high = one.spend_dollars_per_hour[[0, -1]]
    budget = (low + place * (high - low)) * (1 + 1e-9)

    expected = one.at_budget(budget).mean_completion_seconds
    assert two.at_budget(budget).mean_completion_seconds == pytest.approx(expected, rel=1e-6)


def test_a_second_gpu_type_is_one_more_choice():
    def frontier(prices, speeds):
        return trace_frontier(
            classes_from_speeds(
                arrivals_per_second=[0.001],
                mean_samples=1000.0,
                price_dollars_per_hour=prices,
                samples_per_second=[speeds],
            )
        )

    # 1, 2 or 4 cheap GPUs; 1 or 2 dear ones, which are the better buy once four would be wanted.
    both = frontier([1.0, 2, 4, 3, 6], [1.0, 1.8, 2.0, 2.4, 4.5])
    cheap = frontier([1.0, 2, 4], [1.0, 1.8, 2.0])

    assert cheap.hulls.tolist() == [[0, 1, 2]]
    assert both.hulls.tolist() == [[0, 1, 4]]
    # One unit of load, so a choice costs price / speed: 10/9 and 4/3 dollars; 1.2 is 0.4 between.
    found = both.at_budget(1.2)
    assert found.larger_share == pytest.approx([0.4])
    assert found.mean_completion_seconds == pytest.approx(1000 * (0.6 / 1.8 + 0.4 / 4.5))
    assert found.mean_completion_seconds < 0.9 * cheap.at_budget(1.2).mean_completion_seconds


def test_a_weight_draws_money_to_its_class():
    def found(weights):
        classes = classes_from_speeds(
            arrivals_per_second=[0.01, 0.01],
            mean_samples=100.0,
            price_dollars_per_hour=[1.0, 2, 4, 8],
            samples_per_second=[[1.0, 1.7, 2.8, 4.0]] * 2,
            weights=weights,
        )
        return trace_frontier(classes).at_budget(2.5)

    assert found([1.0, 1.0]).choice.tolist() == [1, 1]
    assert found([1.0, 10.0]).choice.tolist() == [0, 2]
    assert found([10.0, 1.0]).choice.tolist() == [2, 0]


def test_more_money_than_helps_is_not_spent():
    found = trace_frontier(figure_table(np.array([1.0, 2, 4]))).at_budget(1000.0)

    assert found.job_hours_per_dollar == 0
    assert found.spend_dollars_per_hour < 3


# What is refused


def test_a_budget_below_the_load_is_refused_with_the_least_one():
    frontier = trace_frontier(figure_table(np.array([1.0, 2, 4])))

    with pytest.raises(NothingFits, match=r"cheapest options they take \$0\.8 an hour"):
        frontier.at_budget(0.79)
    with pytest.raises(NothingFits):
        frontier.at_budget(math.nan)
    with pytest.raises(NothingFits, match=r"which need 0\.8"):
        solve_widths(FIGURE, 0.7)


def test_a_time_that_no_money_buys_is_refused():
    frontier = trace_frontier(figure_table(np.array([1.0, 2, 4])))

    with pytest.raises(NothingFits, match="out of reach"):
        frontier.least_budget(0.1)
    assert frontier.least_budget(100.0) == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arrivals_per_second": [0.0]}, "not all 0"),
        ({"arrivals_per_second": [math.nan]}, "finite"),
        ({"arrivals_per_second": [1.0, 1.0], "mean_samples": [1.0, 1.0]}, "each class"),
        ({"weights": [0.0]}, "weights"),
        ({"mean_samples": [-1.0]}, "job_seconds"),
        ({"price_dollars_per_hour": [[-1.0, 2.0]]}, "job_dollars"),
        ({"samples_per_second": [[0.0, 0.0]]}, "no choice"),
        ({"samples_per_second": [[math.inf, 1.0]]}, "finite"),
        ({"samples_per_second": [1.0]}, "table"),
    ],
)
def test_nonsense_is_refused(change, message):
    fields = {
        "arrivals_per_second": [1.0],
        "mean_samples": [1.0],
        "price_dollars_per_hour": [[1.0, 2.0]],
        "samples_per_second": [[1.0, 2.0]],
    }
    with pytest.raises(InvalidSpec, match=message):
        classes_from_speeds(**{**fields, **change})


@pytest.mark.parametrize("law", [PowerLaw, AmdahlLaw])
@pytest.mark.parametrize("share", [0.0, 1.0, math.nan])
def test_laws_without_an_optimum_are_refused(law, share):
    with pytest.raises(InvalidSpec):
        law(share)
