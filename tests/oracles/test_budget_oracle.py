"""The budget's hull, greedy and recursion against every assignment there is.

Whatever jobs are given, the mean spend and time of a policy that treats all jobs of a class alike,
or mixes such treatments, is a mean of whole assignments. So the best at a budget is the lowest
point, at that budget, of the lines between every two whole assignments.
"""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drystone.schedule.budget.blocks import (
    BlockClasses,
    best_paths,
    path_costs,
    trace_paths,
)
from drystone.schedule.budget.frontier import JobClasses, classes_from_speeds, trace_frontier


def best_mix(points: list[tuple[float, float]], budget: float) -> float:
    """The least time at a mean spend within the budget, over all means of two points."""
    best = math.inf
    for one, two in itertools.combinations_with_replacement(sorted(set(points)), 2):
        (low, slow), (high, fast) = one, two
        if high <= budget:
            best = min(best, slow, fast)
        elif low <= budget:
            share = (budget - low) / (high - low)
            best = min(best, slow, slow + share * (fast - slow))
    return best


def every_assignment(classes: JobClasses) -> list[tuple[float, float]]:
    """(dollars an hour, mean completion seconds) of every choice of every class."""
    choices = [np.flatnonzero(np.isfinite(row)) for row in classes.job_seconds]
    weighted = classes.weights * classes.arrivals_per_second
    rows = np.arange(len(choices))
    points = []
    for chosen in itertools.product(*choices):
        spend = 3600 * (classes.arrivals_per_second @ classes.job_dollars[rows, list(chosen)])
        seconds = weighted @ classes.job_seconds[rows, list(chosen)] / weighted.sum()
        points.append((float(spend), float(seconds)))
    return points


numbers = st.one_of(st.integers(1, 9).map(float), st.floats(0.1, 20))


def table(draw, values, *shape):
    size = math.prod(shape)
    return np.array(draw(st.lists(values, min_size=size, max_size=size))).reshape(shape)


@st.composite
def small_classes(draw) -> JobClasses:
    rows, columns = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    speeds = table(draw, st.one_of(numbers, st.just(0.0)), rows, columns)
    speeds[:, 0] = table(draw, numbers, rows)
    return classes_from_speeds(
        arrivals_per_second=table(draw, numbers, rows) / 100,
        mean_samples=table(draw, numbers, rows),
        price_dollars_per_hour=table(draw, st.one_of(numbers, st.just(0.0)), rows, columns),
        samples_per_second=speeds,
        weights=table(draw, st.sampled_from([1.0, 3.0]), rows),
    )


@st.composite
def small_blocks(draw, most_classes: int = 2) -> BlockClasses:
    rows, blocks, columns = draw(st.integers(1, most_classes)), 3, draw(st.integers(1, 3))
    work = table(draw, st.one_of(numbers, st.just(0.0)), rows, blocks)
    work[:, 0] = table(draw, numbers, rows)
    speeds = table(draw, st.one_of(numbers, st.just(0.0)), rows, blocks, columns)
    speeds[:, :, 0] = table(draw, numbers, rows, blocks)
    return BlockClasses(
        arrivals_per_second=table(draw, numbers, rows) / 100,
        weights=table(draw, st.sampled_from([1.0, 3.0]), rows),
        block_samples=work,
        samples_per_second=speeds,
        price_dollars_per_hour=table(draw, st.one_of(numbers, st.just(0.0)), rows, columns),
        rescaling_seconds=table(draw, st.sampled_from([0.0, 0.2, 1.0, 5.0]), rows, columns),
    )


def path_cost(blocks: BlockClasses, row: int, path: tuple[int, ...]) -> tuple[float, float]:
    """Seconds and dollars of one job, by the definition: (inf, inf) where it cannot run."""
    seconds = dollars = 0.0
    before = -1
    for block, choice in enumerate(path):
        work = blocks.block_samples[row, block]
        speed = blocks.samples_per_second[row, block, choice]
        if work > 0 and speed == 0:
            return math.inf, math.inf
        spent = work / speed if work > 0 else 0.0
        if choice != before:
            spent += blocks.rescaling_seconds[row, choice]
        seconds += spent
        dollars += spent * blocks.price_dollars_per_hour[row, choice] / 3600
        before = choice
    return seconds, dollars


def every_path(blocks: BlockClasses, row: int) -> list[tuple[float, float]]:
    _, num_blocks, num_choices = blocks.samples_per_second.shape
    costs = (
        path_cost(blocks, row, path)
        for path in itertools.product(range(num_choices), repeat=num_blocks)
    )
    return sorted({cost for cost in costs if cost[0] < math.inf})


def every_path_as_a_choice(blocks: BlockClasses) -> JobClasses:
    paths = [every_path(blocks, row) for row in range(len(blocks.weights))]
    shape = (len(paths), max(len(one) for one in paths))
    seconds, dollars = np.full(shape, np.inf), np.zeros(shape)
    for row, costs in enumerate(paths):
        seconds[row, : len(costs)] = [cost[0] for cost in costs]
        dollars[row, : len(costs)] = [cost[1] for cost in costs]
    return JobClasses(
        arrivals_per_second=blocks.arrivals_per_second,
        job_seconds=seconds,
        job_dollars=dollars,
        weights=blocks.weights,
    )


@given(classes=small_classes(), place=st.floats(0, 1.1))
def test_the_greedy_on_hulls_is_the_best_of_all_mixes_of_all_assignments(classes, place):
    frontier = trace_frontier(classes)
    low, high = frontier.spend_dollars_per_hour[[0, -1]]
    budget = float(low + place * (high - low)) * (1 + 1e-12)

    expected = best_mix(every_assignment(classes), budget)
    found = frontier.at_budget(budget).mean_completion_seconds
    assert found == pytest.approx(expected, rel=1e-6)


@given(classes=small_classes())
def test_at_its_corners_the_frontier_needs_no_mix(classes):
    frontier = trace_frontier(classes)
    points = every_assignment(classes)
    for spend, seconds in zip(
        frontier.spend_dollars_per_hour, frontier.mean_completion_seconds, strict=True
    ):
        within = min(time for cost, time in points if cost <= spend * (1 + 1e-9) + 1e-12)
        assert within == pytest.approx(seconds, rel=1e-6)


@given(classes=small_classes(), share=st.floats(0, 1))
def test_the_least_budget_is_the_least_of_all_mixes(classes, share):
    frontier = trace_frontier(classes)
    slow, fast = frontier.mean_completion_seconds[[0, -1]]
    target = float(fast + share * (slow - fast))
    mirrored = [(seconds, spend) for spend, seconds in every_assignment(classes)]

    expected = best_mix(mirrored, target * (1 + 1e-12))
    found = frontier.least_budget(target)
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)


@given(
    blocks=small_blocks(most_classes=3),
    time_weight=st.sampled_from([0.0, 0.01, 1.0]),
    money_weight=st.sampled_from([0.0, 1.0, 100.0, 3600.0]),
)
def test_the_recursion_finds_the_best_of_all_paths(blocks, time_weight, money_weight):
    rows = np.arange(len(blocks.weights))
    ones = np.ones(len(rows))
    paths = best_paths(blocks, rows, time_weight * ones, money_weight * ones)
    seconds, dollars = path_costs(blocks, rows, paths)

    for row in rows:
        by_hand = path_cost(blocks, row, tuple(paths[row]))
        assert (seconds[row], dollars[row]) == pytest.approx(by_hand)
        least = min(time_weight * one + money_weight * two for one, two in every_path(blocks, row))
        assert time_weight * seconds[row] + money_weight * dollars[row] == pytest.approx(least)


@settings(max_examples=60)
@given(blocks=small_blocks(), place=st.floats(0, 1.1))
def test_the_frontier_of_paths_is_that_of_all_paths(blocks, place):
    whole = every_path_as_a_choice(blocks)
    expected = trace_frontier(whole)
    found = trace_frontier(trace_paths(blocks).classes)

    ends = [0, -1]
    for name in ("spend_dollars_per_hour", "mean_completion_seconds"):
        wanted = getattr(expected, name)[ends]
        # The fastest path may cost a billionth more or less: ties are broken by a tiny weight.
        assert getattr(found, name)[ends] == pytest.approx(wanted, rel=1e-6, abs=1e-9)
    low, high = expected.spend_dollars_per_hour[ends]
    budget = float(low + place * (high - low)) * (1 + 1e-9)
    assert found.at_budget(budget).mean_completion_seconds == pytest.approx(
        expected.at_budget(budget).mean_completion_seconds, rel=1e-6
    )


@settings(max_examples=25)
@given(blocks=small_blocks(most_classes=1), place=st.floats(0, 1))
def test_the_frontier_of_paths_is_the_best_of_all_mixes(blocks, place):
    frontier = trace_frontier(trace_paths(blocks).classes)
    low, high = frontier.spend_dollars_per_hour[[0, -1]]
    budget = float(low + place * (high - low)) * (1 + 1e-9)

    expected = best_mix(every_assignment(every_path_as_a_choice(blocks)), budget)
    found = frontier.at_budget(budget).mean_completion_seconds
    assert found == pytest.approx(expected, rel=1e-6)
