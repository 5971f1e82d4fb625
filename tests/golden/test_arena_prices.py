"""`prices` on Arena's traces, all jobs to their end, everyone with the same information."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from drystone.describe.files.cluster import load_cluster
from drystone.describe.traces.speeds import fill_sizes, load_speeds
from drystone.describe.traces.trace import load_trace
from drystone.observe.simulation import Scenario, simulate_policy
from drystone.run.simulate.faults import FaultSpec
from drystone.schedule.decision import POLICIES
from drystone.schedule.options import measured_options
from drystone.schedule.snapshot import StartupCost

TESTS = Path(__file__).resolve().parents[1]
RIVALS = sorted(set(POLICIES) & {"fifo", "shortest", "least-attained"})


def scenario(trace: str, *, most_jobs: int = 0) -> Scenario:
    nodes = load_cluster(TESTS / "golden" / "arena_cluster.yaml")
    steps = fill_sizes(load_speeds(TESTS / "data" / "arena_speeds.csv"))
    path = TESTS / "data" / f"arena_{trace}.csv"
    return Scenario(
        jobs=load_trace(path, divide_work=5, most_jobs=most_jobs),
        nodes=nodes,
        options_of=measured_options(steps, nodes),
        startup=StartupCost(seconds_per_gpu=10, most_seconds=40),
        horizon_seconds=math.inf,
    )


@pytest.mark.parametrize("trace", ["pai", pytest.param("helios", marks=pytest.mark.slow)])
def test_with_room_for_all_it_is_near_the_lower_bound(trace: str):
    given = scenario(trace)

    report, _ = simulate_policy(given, "prices")

    assert report.num_done == report.num_jobs
    assert report.lower_bound_ratio <= 1.03
    for rival in RIVALS:
        other, _ = simulate_policy(given, rival)
        assert report.mean_completion_seconds < 0.5 * other.mean_completion_seconds


@pytest.mark.slow
def test_on_a_crowded_cluster_it_is_ahead_of_every_baseline():
    given = scenario("philly", most_jobs=986)

    report, _ = simulate_policy(given, "prices")

    assert report.num_done == 986
    assert report.lower_bound_ratio <= 1.18
    assert report.num_restarts <= 4 * 986
    for rival in RIVALS:
        other, _ = simulate_policy(given, rival)
        assert report.mean_completion_seconds < 0.5 * other.mean_completion_seconds


@pytest.mark.slow
@pytest.mark.parametrize("trace", ["pai", "helios"])
def test_with_unknown_lengths_and_wrong_speeds_it_is_still_far_ahead(trace: str):
    told = replace(
        scenario(trace), knows_lengths=False, faults=FaultSpec(seed=1, speed_error_share=0.2)
    )

    report, _ = simulate_policy(told, "prices")

    assert report.num_done == report.num_jobs
    assert report.lower_bound_ratio <= 1.15
    for rival in RIVALS:
        other, _ = simulate_policy(told, rival)
        assert report.mean_completion_seconds < 0.6 * other.mean_completion_seconds
