"""Spare places: Erlang's formula, and what the money that is left pays for."""

from __future__ import annotations

import heapq
import math
from itertools import product

import numpy as np
import pytest

from drystone.describe.market import Offer
from drystone.schedule.budget.spares import (
    MIN_USE,
    Starts,
    place_steps,
    plan_spares,
    worth_of_places,
)


def erlang_b(num_places: int, load: float) -> float:
    """By its definition, a^s / s! over the sum of such terms."""
    terms = [load**n / math.factorial(n) for n in range(num_places + 1)]
    return terms[-1] / sum(terms)


@pytest.mark.parametrize("load", [0.05, 0.5, 3.0, 12.0])
def test_places_are_taken_as_often_as_erlang_says(load):
    steps = place_steps(load)
    for number in range(1, len(steps) + 1):
        taken = sum(taken for taken, _ in steps[:number])
        assert taken == pytest.approx(load * (1 - erlang_b(number, load)), rel=1e-9)
        assert sum(idle for _, idle in steps[:number]) == pytest.approx(number - taken)
    assert [taken for taken, _ in steps] == sorted((one for one, _ in steps), reverse=True)
    assert all(taken >= MIN_USE for taken, _ in steps)


def test_no_arrivals_need_no_places():
    assert place_steps(0.0) == []


@pytest.mark.parametrize("num_places", [1, 2])
def test_arrivals_find_a_place_as_often_as_is_reckoned(num_places):
    """Places that are replaced after the delay, in virtual time."""
    generator, delay, found, num_jobs = np.random.default_rng(3), 120.0, 0, 40_000
    here, coming = num_places, []
    for now in np.cumsum(generator.exponential(200.0, num_jobs)).tolist():
        while coming and coming[0] <= now:
            heapq.heappop(coming)
            here += 1
        if here:
            here, found = here - 1, found + 1
            heapq.heappush(coming, now + delay)
    load = delay / 200.0
    saved = sum(taken for taken, _ in place_steps(load)[:num_places])
    assert found / num_jobs == pytest.approx(saved / load, abs=0.01)


def offer(gpu: str, price: float, delay: float) -> Offer:
    return Offer(
        name=gpu, gpu=gpu, num_gpus=4, price_dollars_per_hour=price, start_delay_seconds=delay
    )


NOW = 1000.0
RATE = 60 / 3600.0


STARTS = Starts(num_jobs={0: 75, 1: 25}, num_nodes={0: 75, 1: 50}, last_arrival_seconds=990.0)
OFFERS = {0: offer("A", 8.0, 120.0), 1: offer("B", 3.0, 300.0)}


def worth(places: dict[int, int]) -> tuple[float, float]:
    """Jobs that are spared their wait, weighed by it, and dollars an hour for idle nodes."""
    seconds = dollars = 0.0
    for kind, size in ((0, 1), (1, 2)):
        rate = 60 / 3600.0 * STARTS.num_jobs[kind] / 100
        steps = place_steps(rate * OFFERS[kind].start_delay_seconds)[: places[kind]]
        seconds += sum(taken for taken, _ in steps)
        dollars += sum(idle for _, idle in steps) * size * OFFERS[kind].price_dollars_per_hour
    return seconds, dollars


def plan(starts: Starts, offers: dict[int, Offer], multiplier: float):
    places = worth_of_places(starts, offers, RATE)
    return plan_spares(NOW, starts, places, RATE, multiplier)


@pytest.mark.parametrize("multiplier", [0.3, 0.1, 0.03, 0.01, 0.001])
def test_places_are_kept_where_they_save_more_than_a_dollar_is_worth(multiplier):
    """No other number of places has a better sum of time saved and money, at that multiplier."""
    spares = plan(STARTS, OFFERS, multiplier)
    seconds, dollars = worth({0: spares.num_nodes.get(0, 0), 1: spares.num_nodes.get(1, 0) // 2})

    for first, second in product(range(6), range(6)):
        other, price = worth({0: first, 1: second})
        assert other - multiplier * price <= seconds - multiplier * dollars + 1e-9


def test_nobody_is_waited_for_when_jobs_have_stopped_coming():
    late = Starts(num_jobs={0: 10}, num_nodes={0: 10}, last_arrival_seconds=1000.0 - 241.0)
    early = Starts(num_jobs={0: 10}, num_nodes={0: 10}, last_arrival_seconds=1000.0 - 239.0)

    assert plan(late, OFFERS, 0.0).num_nodes == {}
    kept = plan(early, OFFERS, 0.0)
    assert kept.num_nodes[0] > 0
    assert kept.until_seconds == pytest.approx(1001.0)


def test_nodes_that_cost_nothing_are_kept_first():
    free = {0: offer("A", 8.0, 120.0), 1: offer("B", 0.0, 300.0)}
    spares = plan(STARTS, free, 1000.0)
    assert spares.num_nodes == {1: 2 * len(place_steps(RATE * 0.25 * 300.0))}
