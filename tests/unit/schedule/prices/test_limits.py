"""Limits, deadlines, shares and corrections in `prices`: what each changes, and what it says."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny import job, node, option_set, snapshot

from drystone.describe.job import JobSpec
from drystone.errors import InvalidSpec
from drystone.run.events import Refused, Started, Stopped, Submitted, parse_event, render_event
from drystone.run.loop import drive
from drystone.run.simulate.faults import FaultSpec
from drystone.run.simulate.world import SimulatedWorld
from drystone.schedule.belief import corrected_speeds, update_ratios
from drystone.schedule.decision import Preempt, Refuse, Resize, Start, Wake
from drystone.schedule.prices.policy import KEEP_SECONDS, Settings, make_prices, prices
from drystone.schedule.prices.worth import worth_of_options
from drystone.schedule.snapshot import StartupCost
from drystone.schedule.teams import owner_weights, type_values, update_usage

NODES = [node("a0"), node("b0", "B", 4)]
OPTIONS = option_set(([1, 0], 1.0), ([2, 0], 1.8), ([4, 0], 3.0), ([0, 4], 1.5))
HOURLY = Settings(dollars_per_gpu_hour={"A": 3.0, "B": 1.0})


def decide(jobs, options=OPTIONS, settings=HOURLY, **fields):
    found = make_prices(settings)(snapshot(NODES, jobs, options, **fields), None)[0]
    return [one for one in found if not isinstance(one, Wake)]


# What a job allows


@pytest.mark.parametrize(
    ("fields", "option"),
    [
        ({}, 2),
        ({"denied_gpus": ("A",)}, 3),
        ({"allowed_gpus": frozenset({"B"})}, 3),
        ({"max_gpus": 2}, 1),
        ({"min_gpus": 4, "denied_gpus": ("B",)}, 2),
    ],
)
def test_only_what_a_job_allows_is_given(fields, option):
    """Even where whoever lists the options does not look at it."""
    assert [one.option for one in decide([job("x", **fields)])] == [option]


def test_a_job_that_allows_nothing_here_is_refused_with_the_reason():
    [refusal] = decide([job("x", allowed_gpus=frozenset({"C"}))])

    assert isinstance(refusal, Refuse)
    assert "C" in refusal.reason


def test_a_type_is_not_both_allowed_and_denied():
    with pytest.raises(InvalidSpec, match="both allowed and denied"):
        job("x", allowed_gpus=frozenset({"A"}), denied_gpus=("A",))


def test_denied_types_and_limits_read_back_from_the_log():
    event = Submitted(
        time_seconds=0.0, job=job("x", denied_gpus=("A", "B"), max_duration_seconds=60.0)
    )

    assert parse_event(render_event(event)) == event


# Money and time

HOUR_OF_WORK = 3600.0  # samples, at a speed of 1


def test_money_rules_out_options_that_end_too_dear():
    """An hour of work: 3.00 dollars on one A, 3.33 on two, 4.00 on four, 2.67 on four B."""
    work = 3600.0

    assert [one.option for one in decide([job("x", work, max_cost_dollars=3.5)])] == [1]
    assert [one.option for one in decide([job("x", work, max_cost_dollars=2.9)])] == [3]


def test_who_cannot_end_within_its_money_is_refused():
    [refusal] = decide([job("x", HOUR_OF_WORK, max_cost_dollars=2.0)])

    assert isinstance(refusal, Refuse)
    assert "it may cost $2.00" in refusal.reason
    assert "2.67" in refusal.reason


def test_time_rules_out_options_that_are_too_slow():
    others = [job(f"o{i}", 1e5) for i in range(3)]

    decisions = decide([*others, job("x", HOUR_OF_WORK, max_duration_seconds=1300.0)])

    assert {one.job_id: one.option for one in decisions}.get("x") in (None, 2)
    [refusal] = decide([job("x", HOUR_OF_WORK, max_duration_seconds=1000.0)])
    assert isinstance(refusal, Refuse)


def test_a_job_whose_length_is_wrong_is_stopped_when_its_time_is_over():
    """Its speed turns out to be a fifth lower; it runs to its limit, and no longer."""
    options = option_set(([1], 1.0))
    world = SimulatedWorld(
        jobs=[job("x", 3000.0, max_duration_seconds=3100.0), *ticks(100.0, 60)],
        nodes=[node("a0", num_gpus=1), node("c0", "C", 1)],
        options_of=lambda one: options_for_ticks(one, options),
        gpu_types=("A", "C"),
        faults=FaultSpec(seed=3, speed_error_share=0.5),
    )
    drive(world, prices)

    started = [one for one in world.log if isinstance(one, Started) and one.job_id == "x"]
    assert started[0].samples_per_second < 0.9
    stopped = next(one for one in world.log if isinstance(one, Stopped) and one.job_id == "x")
    assert 3100.0 <= stopped.time_seconds <= 3300.0
    refused = next(one for one in world.log if isinstance(one, Refused))
    assert "it may run for" in refused.reason


def ticks(every: float, number: int) -> list[JobSpec]:
    """Short jobs on a type of their own, so that decisions are made."""
    return [
        JobSpec(id=f"tick{i}", submit_seconds=every * i, model="tick", total_samples=1.0)
        for i in range(number)
    ]


def options_for_ticks(one: JobSpec, options):
    counts = [0, 1] if one.model == "tick" else [1, 0]
    return option_set((counts, float(options.samples_per_second[0])))


# Deadlines


def test_an_option_that_keeps_the_deadline_is_worth_more():
    """At 3 samples a second it ends in time, at 1.8 it does not."""
    plain = snapshot(NODES, [job("x", 300.0)], OPTIONS)
    hurried = snapshot(NODES, [job("x", 300.0, deadline_seconds=120.0)], OPTIONS)
    free = np.zeros(2)

    def values(seen):
        return worth_of_options(seen, seen.job_speeds, seen.jobs.weights, free).values[0]

    ratio = values(hurried) / values(plain)
    assert ratio[2] > 5
    assert ratio[[0, 1, 3]] == pytest.approx(1.0)


def test_a_deadline_decides_who_comes_first():
    only = option_set(([4, 0], 1.0))

    decisions = decide([job("first", 100.0), job("x", 200.0, deadline_seconds=250.0)], only)

    assert [one.job_id for one in decisions] == ["x"]


def test_a_deadline_that_cannot_be_met_is_said_at_the_start_and_is_no_refusal():
    [start] = decide([job("x", 7200.0, deadline_seconds=60.0)])

    assert isinstance(start, Start)
    assert "deadline cannot be met" in start.reason
    assert start.numbers["late_seconds"] == pytest.approx(7200 / 3 - 60)


# Shares


def test_a_gpu_counts_what_it_costs_or_how_fast_jobs_are_on_it():
    seen = snapshot(NODES, [job("x")], option_set(([2, 0], 4.0), ([0, 4], 2.0)))

    assert type_values(seen, seen.job_speeds, {"A": 3.0, "B": 1.0}) == pytest.approx([1, 1 / 3])
    assert type_values(seen, seen.job_speeds, {"A": 3.0}) == pytest.approx([1, 0.25])


def test_who_had_more_than_its_share_weighs_less():
    jobs = [job("a", owner="big"), job("b", owner="small")]
    seen = snapshot(NODES, jobs, OPTIONS)

    even = owner_weights(seen, {"big": 3.0, "small": 1.0}, {"big": 300.0, "small": 100.0})
    turned = owner_weights(seen, {"big": 3.0, "small": 1.0}, {"big": 100.0, "small": 300.0})

    assert even == pytest.approx([1.0, 1.0])
    assert turned == pytest.approx([2 ** (1 - 1 / 3), 0.25])


def test_a_dear_gpu_uses_up_more_of_a_share():
    jobs = [job("a", owner="x"), job("b", owner="y")]
    running = {"a": (2, ((0, 4),)), "b": (3, ((1, 4),))}
    seen = snapshot(NODES, jobs, OPTIONS, running=running, now_seconds=100.0)

    used = update_usage(seen, np.array([1.0, 0.25]), {}, 100.0)

    assert used == {"x": 400.0, "y": 100.0}


def test_shares_turn_to_the_owner_who_had_less():
    only = option_set(([4, 0], 1.0))
    settings = Settings(shares={"x": 1.0, "y": 1.0})
    jobs = [job("a", 1e6, owner="x"), job("b", 1e6, owner="y")]
    policy = make_prices(settings)
    first = snapshot(NODES, jobs, only, running={"a": (0, ((0, 4),))}, now_seconds=0.0)
    _, memory = policy(first, None)
    later = snapshot(NODES, jobs, only, running={"a": (0, ((0, 4),))}, now_seconds=7200.0)

    decisions, memory = policy(later, memory)

    assert {type(one) for one in decisions} == {Preempt, Start, Wake}
    assert memory.usage["x"] == pytest.approx(4 * 7200.0)


# Speeds that turn out otherwise


def test_speeds_are_corrected_by_what_is_seen():
    seen = snapshot(NODES, [job("x"), job("y")], OPTIONS, running={"x": (1, ((0, 2),))})
    measured = replace(seen.jobs, measured_speeds=np.array([0.9, 0.0]))
    seen = replace(seen, jobs=measured)

    ratios = update_ratios(seen, {})
    speeds = corrected_speeds(seen, ratios)

    assert speeds[0] == pytest.approx([0.5, 0.9, 1.5, 1.5 * math.sqrt(0.5)])
    assert speeds[1] == pytest.approx(OPTIONS.samples_per_second)


def test_a_job_that_is_slow_where_it_runs_changes_the_type():
    options = option_set(([4, 0], 1.0), ([0, 4], 0.9))
    seen = snapshot(NODES, [job("x", 1e6)], options, running={"x": (0, ((0, 4),))}, now_seconds=1e4)
    slow = replace(seen, jobs=replace(seen.jobs, measured_speeds=np.array([0.5])))

    assert (
        prices(replace(seen, jobs=replace(seen.jobs, measured_speeds=np.array([1.0]))), None)[0]
        == []
    )
    [change] = prices(slow, None)[0]
    assert isinstance(change, Resize)
    assert change.option == 1


def test_wrong_speeds_do_not_make_a_job_wander():
    """Every type is tried at most once or twice, then it stays."""
    options = option_set(([4, 0], 1.0), ([0, 4], 0.95))
    others = ticks(200.0, 200)
    nodes = [*NODES, node("c0", "C", 1)]
    both = {
        "m": option_set(([4, 0, 0], 1.0), ([0, 4, 0], 0.95)),
        "tick": option_set(([0, 0, 1], 1.0)),
    }
    for seed in range(5):
        world = SimulatedWorld(
            jobs=[job("x", 40_000.0), *others],
            nodes=nodes,
            options_of=lambda one: both[one.model],
            gpu_types=("A", "B", "C"),
            startup=StartupCost(seconds_per_gpu=10, most_seconds=40),
            faults=FaultSpec(seed=seed, speed_error_share=0.2),
        )
        drive(world, prices)
        starts = [one for one in world.log if isinstance(one, Started) and one.job_id == "x"]
        assert len(starts) <= 3
    assert len(options) == 2


# Nodes


def test_a_job_goes_on_elsewhere_when_its_node_is_gone():
    seen = snapshot(NODES, [job("x")], OPTIONS)
    gone = replace(seen.nodes, num_gpus=np.array([0, 4]), free=np.array([0, 4]))

    [start] = prices(replace(seen, nodes=gone), None)[0]

    assert start.option == 3


def test_smaller_jobs_are_moved_off_a_node_that_is_needed_whole():
    """Two nodes of 4, a job of 1 on each; a job that needs 4 gets one after a single move."""
    nodes = [node("a0"), node("a1")]
    options = {
        "s": option_set(([1], 1.0)),
        "t": option_set(([1], 1.0)),
        "w": option_set(([4], 1.0)),
    }
    jobs = [job("s", 1e5), job("t", 1e5), job("w", 1e4)]
    running = {"s": (0, ((0, 1),)), "t": (0, ((1, 1),))}
    startup = StartupCost(seconds_per_gpu=10, most_seconds=40)
    seen = snapshot(
        nodes, jobs, options, running=running, startup=startup, now_seconds=KEEP_SECONDS
    )

    decisions, _ = prices(seen, None)

    assert sorted(type(one).__name__ for one in decisions) == ["Move", "Start"]


def test_a_move_that_costs_more_than_it_gains_is_not_made():
    nodes = [node("a0"), node("a1")]
    options = {
        "s": option_set(([1], 1.0)),
        "t": option_set(([1], 1.0)),
        "w": option_set(([3], 0.99), ([4], 1.0)),
    }
    jobs = [job("s", 1e5), job("t", 1e5), job("w", 1e4)]
    running = {"s": (0, ((0, 1),)), "t": (0, ((1, 1),))}
    startup = StartupCost(seconds_per_gpu=1e4, most_seconds=1e4, free_gpus=0)
    seen = snapshot(
        nodes, jobs, options, running=running, startup=startup, now_seconds=KEEP_SECONDS
    )

    decisions, _ = prices(seen, None)

    assert [(one.job_id, one.option) for one in decisions] == [("w", 0)]


def test_a_job_is_spread_only_where_its_owner_says_what_that_costs():
    nodes = [node("a0"), node("a1")]
    options = {
        "s": option_set(([3], 1.0)),
        "t": option_set(([3], 1.0)),
        "w": option_set(([2], 1.0)),
    }
    jobs = [job("s", 1e5), job("t", 1e5), job("w", 1e4)]
    running = {"s": (0, ((0, 3),)), "t": (0, ((1, 3),))}
    seen = snapshot(nodes, jobs, options, running=running, now_seconds=0.0)

    assert not any(isinstance(one, Start) for one in prices(seen, None)[0])
    [start] = make_prices(Settings(spread_speed_share=0.8))(seen, None)[0]
    assert start.placement == ((0, 1), (1, 1))
    assert "80%" in start.reason
