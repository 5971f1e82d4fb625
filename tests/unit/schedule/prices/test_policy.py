"""Prices against brute force: all allocations of tiny cases, the exact greedy, a price grid."""

import itertools
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny import job, node, option_set, snapshot

from drystone.run.events import Finished, Started, Stopped
from drystone.run.loop import drive
from drystone.run.simulate.world import SimulatedWorld
from drystone.schedule.decision import Preempt, Refuse, Resize, Start, Wake
from drystone.schedule.prices.patience import (
    FREE_STARTS,
    KEEP_GROWTH,
    KEEP_SECONDS,
    PATIENCE_SECONDS,
    PROTECTED_SECONDS,
    WIDE_PATIENCE_SHARE,
    overdue,
)
from drystone.schedule.prices.policy import PricesMemory, Settings, make_prices, prices
from drystone.schedule.prices.shadow_prices import Market, choose_options, solve_prices
from drystone.schedule.snapshot import StartupCost


def make(seed: int, *, num_jobs: int, num_options: int, num_types: int, capacity: int) -> Market:
    chance = np.random.default_rng(seed)
    counts = chance.integers(0, 5, (num_jobs, num_options, num_types)).astype(float)
    counts[..., 0] += counts.sum(axis=2) == 0
    values = counts.sum(axis=2) ** 0.6 * chance.uniform(0.5, 2.0, (num_jobs, num_options))
    return Market(
        values=values,
        counts=tuple(counts[:, :, kind] for kind in range(num_types)),
        capacity=np.full(num_types, float(capacity)),
    )


def best_allocation(market: Market) -> float:
    """The most that any choice of options is worth."""
    num_jobs, num_options = market.values.shape
    best = 0.0
    for choice in itertools.product(range(-1, num_options), repeat=num_jobs):
        taken = [(row, one) for row, one in enumerate(choice) if one >= 0]
        used = [sum(counts[cell] for cell in taken) for counts in market.counts]
        if all(u <= c for u, c in zip(used, market.capacity, strict=True)):
            best = max(best, sum(market.values[cell] for cell in taken))
    return best


def dual(market: Market, at: np.ndarray) -> float:
    paid = sum(price * counts for price, counts in zip(at, market.counts, strict=True))
    return float((market.values - paid).max(axis=1).clip(0).sum() + at @ market.capacity)


@pytest.mark.parametrize("seed", range(10))
def test_no_allocation_is_worth_more_than_the_bound(seed: int):
    market = make(seed, num_jobs=4, num_options=3, num_types=2, capacity=5)

    assert solve_prices(market).bound >= best_allocation(market) - 1e-9


def concave_hull(counts: np.ndarray, speeds: np.ndarray) -> np.ndarray:
    """Positions on the upper concave hull of (count, speed), the origin included; counts ascend."""
    points = [(0.0, 0.0), *zip(counts.tolist(), speeds.tolist(), strict=True)]
    kept = [0]
    for index in range(1, len(points)):
        while len(kept) > 1 and _slope(points, kept[-2], kept[-1]) <= _slope(
            points, kept[-1], index
        ):
            kept.pop()
        if points[index][1] > points[kept[-1]][1]:
            kept.append(index)
    return np.array([index - 1 for index in kept[1:]], dtype=np.int64)


def _slope(points: list[tuple[float, float]], left: int, right: int) -> float:
    (x, y), (u, v) = points[left], points[right]
    return (v - y) / (u - x) if u != x else float("inf")


@pytest.mark.parametrize("seed", range(10))
def test_with_one_type_the_bound_is_that_of_the_exact_greedy(seed: int):
    """The relaxed optimum is the steepest pieces of all concave hulls, until GPUs run out."""
    market = make(seed, num_jobs=40, num_options=6, num_types=1, capacity=60)
    pieces = []
    for values, counts in zip(market.values, market.counts[0], strict=True):
        order = np.lexsort((-values, counts))
        count, value = counts[order].astype(np.int64), values[order]
        first = np.unique(count, return_index=True)[1]
        count, value = count[first], value[first]
        hull = concave_hull(count, value)
        x = np.concatenate(([0], count[hull]))
        y = np.concatenate(([0.0], value[hull]))
        pieces += list(zip(np.diff(y) / np.diff(x), np.diff(x), strict=True))
    left, exact = 60.0, 0.0
    for slope, width in sorted(pieces, reverse=True):
        exact += slope * min(width, left)
        left -= min(width, left)

    assert solve_prices(market).bound == pytest.approx(exact, rel=0.005)


@pytest.mark.parametrize("seed", range(5))
def test_with_two_types_no_grid_of_prices_is_better(seed: int):
    market = make(seed, num_jobs=30, num_options=5, num_types=2, capacity=25)
    grid = np.linspace(0, 2, 81)
    best = min(dual(market, np.array(at)) for at in itertools.product(grid, grid))

    solution = solve_prices(market)

    assert solution.bound <= best * 1.01
    assert solution.bound == pytest.approx(dual(market, solution.prices))


def test_demand_at_the_prices_is_near_what_there_is():
    market = make(3, num_jobs=200, num_options=6, num_types=1, capacity=200)

    picks, _ = choose_options(market, solve_prices(market).prices)

    rows = np.flatnonzero(picks >= 0)
    assert market.counts[0][rows, picks[rows]].sum() == pytest.approx(200, rel=0.05)


def test_gpus_that_are_plentiful_cost_nothing():
    market = make(0, num_jobs=3, num_options=3, num_types=2, capacity=100)

    assert solve_prices(market).prices.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("start", [None, 1e-9, 1.0, 1e300])
def test_prices_are_found_wherever_the_search_starts(start: float | None):
    """At a start from which every job is sure of its option, the dual has no curvature at all."""
    market = one_option_each(100.0, 100.0, 100.0)

    found = solve_prices(market, None if start is None else np.array([start]))

    assert found.prices.tolist() == pytest.approx([12.5], rel=0.01)
    assert found.bound == pytest.approx(100.0, rel=0.01)


@pytest.mark.parametrize("values", [(1e-200, 1e200), (1e-310, 1.0), (5e-324, 1e300), (1e-300,) * 3])
def test_values_may_differ_by_any_factor(values: tuple[float, ...]):
    """A number that overflows would be a warning, and warnings are errors here."""
    market = one_option_each(*values)

    for start in (None, np.array([1.0]), np.array([max(values)])):
        found = solve_prices(market, start)
        assert np.isfinite(found.prices).all()
        assert max(values) <= found.bound <= sum(values)


def one_option_each(*values: float) -> Market:
    """Jobs that all want eight GPUs, of which there are eight."""
    return Market(
        values=np.array(values)[:, None],
        counts=(np.full((len(values), 1), 8.0),),
        capacity=np.array([8.0]),
    )


NODES = [node("a0"), node("b0", "B", 4)]
OPTIONS = option_set(([1, 0], 1.0), ([2, 0], 1.8), ([4, 0], 3.0), ([0, 4], 1.5))
EACH_SECONDS = 1200.0  # of the jobs in a stream


def test_alone_a_job_gets_its_fastest_option():
    decisions, memory = prices(snapshot(NODES, [job("x")], OPTIONS), None)

    assert [one.option for one in decisions] == [2]
    assert isinstance(memory, PricesMemory)
    assert memory.gap == pytest.approx(0.0, abs=1e-9)


def test_in_a_crowd_jobs_get_narrow():
    jobs = [job(f"j{i}") for i in range(4)]

    decisions, _ = prices(snapshot(NODES[:1], jobs, option_set(([1], 1.0), ([4], 3.0))), None)

    assert sorted(one.job_id for one in decisions) == ["j0", "j1", "j2", "j3"]
    assert {one.option for one in decisions} == {0}


def test_a_restart_that_does_not_pay_is_not_made():
    jobs = [job("x", 200.0)]
    running = {"x": (1, ((0, 2),))}
    dear = StartupCost(seconds_per_gpu=1000, most_seconds=1000)

    cheap_restart = snapshot(NODES, jobs, OPTIONS, running=running, now_seconds=KEEP_SECONDS / 8)
    assert prices(replace(cheap_restart, now_seconds=KEEP_SECONDS), None)[0][0].option == 2
    dear_restart = replace(cheap_restart, now_seconds=KEEP_SECONDS, startup=dear)
    assert prices(dear_restart, None)[0] == []


def test_a_fresh_start_is_left_alone():
    running = {"x": (1, ((0, 2),))}
    seen = snapshot(NODES, [job("x", 1e6)], OPTIONS, running=running, now_seconds=10.0)

    assert prices(seen, None)[0] == []


def test_a_short_job_takes_the_place_of_a_long_one():
    options = option_set(([4, 0], 1.0))
    jobs = [job("long", 1e6), job("short", 100.0)]
    seen = snapshot(
        NODES, jobs, options, running={"long": (0, ((0, 4),))}, now_seconds=2 * KEEP_SECONDS
    )

    decisions, _ = prices(seen, None)

    assert {type(one) for one in decisions} == {Preempt, Start, Wake}


def test_priority_decides_between_equals():
    jobs = [job("first"), job("dear", priority=2.0)]

    decisions, _ = prices(snapshot(NODES, jobs, option_set(([4, 0], 1.0))), None)

    assert [one.job_id for one in decisions if isinstance(one, Start)] == ["dear"]


def test_a_job_may_take_two_types_at_once():
    mixed = option_set(([4, 0], 1.0), ([4, 4], 1.8))

    decisions, _ = prices(snapshot(NODES, [job("x")], mixed), None)

    assert decisions[0].placement == ((0, 4), (1, 4))


def test_every_decision_has_a_reason_and_its_numbers():
    jobs = [job("a", 1e6), job("b", 100.0), job("c", 50.0)]
    seen = snapshot(NODES, jobs, OPTIONS, running={"a": (2, ((0, 4),))}, now_seconds=1e4)

    for one in prices(seen, None)[0]:
        assert one.reason
        assert "price_A" in one.numbers
        assert not isinstance(one, Resize) or one.numbers["value"] > 0


def test_a_job_without_options_is_refused():
    options = {"x": OPTIONS, "none": option_set(([1, 0], 0.0))}

    decisions, _ = prices(snapshot(NODES, [job("x"), job("none")], options), None)

    assert [type(one) for one in decisions] == [Start, Refuse]
    assert decisions[1].job_id == "none"


def test_the_longest_waiting_comes_first():
    seen = snapshot(NODES, [job("a"), job("b")], OPTIONS, now_seconds=PATIENCE_SECONDS)

    patience = np.full(2, PATIENCE_SECONDS)
    assert overdue(seen, patience) == [0, 1]
    assert overdue(replace(seen, now_seconds=PATIENCE_SECONDS - 1), patience) == []
    assert overdue(seen, patience - [0.0, 1.0]) == [1, 0]


def test_a_job_that_needs_whole_nodes_waits_for_a_part_of_its_length_only():
    """Sixteen GPUs, always full of jobs of a few minutes; alone it would take four hours."""
    sets = {"m": option_set(([1], 1.0)), "whole": option_set(([8], 8.0))}
    tiny = [replace(job(f"t{at}", 600.0), submit_seconds=30.0 * at) for at in range(400)]
    length = 4 * 3600.0
    wide = replace(job("wide", 8 * length), submit_seconds=1000.0, model="whole")
    world = SimulatedWorld(
        jobs=[*tiny, wide],
        nodes=[node("a0", num_gpus=8), node("a1", num_gpus=8)],
        options_of=lambda one: sets[one.model],
        gpu_types=("A",),
    )
    drive(world, prices)

    mine = [event for event in world.log if getattr(event, "job_id", "") == "wide"]
    started = [event.time_seconds for event in mine if isinstance(event, Started)]
    ended = [event.time_seconds for event in mine if isinstance(event, Finished)]
    patience = WIDE_PATIENCE_SHARE * length
    assert len(started) == 1
    assert started[0] <= 1000.0 + patience + KEEP_SECONDS
    assert ended[0] <= 1000.0 + patience + KEEP_SECONDS + length


@pytest.mark.parametrize("knows_lengths", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_starts_are_bounded_by_the_logarithm_of_time(seed: int, knows_lengths: bool):
    """Free starts and jobs that come all the time: what makes a policy change its mind most."""
    draw = np.random.default_rng(seed)
    options = option_set(*(([count], count**0.9) for count in range(1, 9)))
    times, lengths = np.cumsum(draw.exponential(120.0, 120)), draw.lognormal(5.5, 1.5, 120)
    jobs = [
        replace(job(f"j{at}", float(length)), submit_seconds=float(when))
        for at, (when, length) in enumerate(zip(times, lengths, strict=True))
    ]
    jobs.append(job("long", 60_000.0))
    world = SimulatedWorld(
        jobs=jobs,
        nodes=[node("a0", num_gpus=8)],
        options_of=lambda _: options,
        gpu_types=("A",),
        knows_lengths=knows_lengths,
    )
    drive(world, prices)

    starts, ran, since = {}, {}, {}
    for event in world.log:
        if isinstance(event, Started):
            starts[event.job_id] = starts.get(event.job_id, 0) + 1
            since[event.job_id] = event.time_seconds
        elif isinstance(event, Stopped | Finished):
            seconds = event.time_seconds - since[event.job_id]
            ran[event.job_id] = ran.get(event.job_id, 0.0) + seconds
    # What was kept after the starts from the eighth on: 60 s, 90 s, 135 s ...
    slowed = KEEP_SECONDS / (KEEP_GROWTH - 1.0)
    bound = {
        name: FREE_STARTS + math.log(1.0 + seconds / slowed, KEEP_GROWTH)
        for name, seconds in ran.items()
    }
    assert len(ran) == len(jobs)
    assert all(starts[name] <= bound[name] + 1e-9 for name in starts)
    assert max(starts.values()) > 5  # it is not for want of changes


def test_the_more_starts_a_job_had_the_longer_it_keeps_what_it_has():
    jobs = [job("much", 1e6), job("new", 10.0)]
    options = option_set(*(([count, 0], float(count)) for count in range(1, 5)))
    running = {"much": (3, ((0, 4),))}
    seen = snapshot(NODES, jobs, options, running=running, now_seconds=2 * KEEP_SECONDS)
    assert [one.job_id for one in prices(seen, None)[0] if isinstance(one, Preempt | Resize)]

    often = replace(seen, jobs=replace(seen.jobs, num_starts=np.array([FREE_STARTS + 2, 0])))
    decisions = prices(often, None)[0]
    assert all(one.job_id != "much" for one in decisions if not isinstance(one, Wake))
    [wake] = [one for one in decisions if isinstance(one, Wake)]
    assert wake.at_seconds == pytest.approx(KEEP_SECONDS * KEEP_GROWTH**2)


@pytest.mark.parametrize(
    ("policy", "fields"),
    [
        (prices, {}),
        (make_prices(Settings(shares={"dear": 9.0})), {"priority": 10.0, "owner": "dear"}),
        (prices, {"deadline_after": 1.1 * EACH_SECONDS}),
        (prices, {"knows_lengths": False}),
    ],
)
def test_nobody_starves_behind_a_stream_of_short_jobs(policy, fields):
    """Nor if they have priority, an owner with a great share or a deadline, or are not known."""
    fields = dict(fields)
    after, knows = fields.pop("deadline_after", math.inf), fields.pop("knows_lengths", True)
    stream = [
        replace(
            job(f"s{i}", EACH_SECONDS, **fields),
            submit_seconds=EACH_SECONDS * i,
            deadline_seconds=EACH_SECONDS * i + after,
        )
        for i in range(int(1.2 * PATIENCE_SECONDS / EACH_SECONDS))
    ]
    long = replace(job("long", 1e5, owner="cheap"), submit_seconds=0.5, model="long")
    options = option_set(([1], 1.0))
    world = SimulatedWorld(
        jobs=[*stream, long],
        nodes=[node("a0", num_gpus=1)],
        options_of=lambda _: options,
        gpu_types=("A",),
        horizon_seconds=1.1 * PATIENCE_SECONDS,
        knows_lengths=knows,
    )
    drive(world, policy)

    first = next(
        one.time_seconds for one in world.log if isinstance(one, Started) and one.job_id == "long"
    )
    assert first <= PATIENCE_SECONDS + KEEP_SECONDS + EACH_SECONDS


def test_nobody_starves_where_nothing_else_happens():
    """A policy is asked when something happens; so it asks to be asked when patience ends."""
    options = option_set(([1], 1.0))
    late = replace(job("late", 2e6), submit_seconds=10.0)
    world = SimulatedWorld(
        jobs=[job("first", 1e6), late],
        nodes=[node("a0", num_gpus=1)],
        options_of=lambda _: options,
        gpu_types=("A",),
        horizon_seconds=3 * PATIENCE_SECONDS,
    )
    drive(world, prices)

    starts = [(one.job_id, one.time_seconds) for one in world.log if isinstance(one, Started)]
    assert starts[:2] == [("first", 0.0), ("late", 10.0 + PATIENCE_SECONDS)]
    assert starts[2][0] == "first"
    assert starts[2][1] <= starts[1][1] + PROTECTED_SECONDS + KEEP_SECONDS


@pytest.mark.parametrize("power", [0.7, 0.9])
def test_equal_jobs_queue_where_sharing_is_worse(power: float):
    """At most 1.03 of heSRPT, the proven optimum for equal jobs whose speed is GPUs^power."""
    num_jobs, num_gpus = 16, 128
    options = option_set(*(([count], count**power) for count in range(1, num_gpus + 1)))
    world = SimulatedWorld(
        jobs=[job(f"j{at}", 360_000.0) for at in range(num_jobs)],
        nodes=[node("n", num_gpus=num_gpus)],
        options_of=lambda _: options,
        gpu_types=("A",),
    )
    drive(world, prices)
    ends = [event.time_seconds for event in world.log if isinstance(event, Finished)]
    best, done, left = 0.0, 0.0, np.full(num_jobs, 360_000.0)
    while len(left):
        parts = (np.arange(len(left) + 1) / len(left)) ** (1 / (1 - power))
        speeds = (np.diff(parts) * num_gpus) ** power
        done += left[-1] / speeds[-1]
        left = (left - left[-1] / speeds[-1] * speeds)[:-1]
        best += done

    assert sum(ends) <= 1.03 * best
