import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "schedule"))
from tiny import job, node, option_set

from drystone.observe.lower_bound import shared_bound_seconds, with_shared_bound
from drystone.observe.simulation import Scenario, run_policy
from drystone.run.simulate.faults import FaultSpec
from drystone.schedule.snapshot import StartupCost

ONE_GPU = option_set(([1, 0], 1.0))
ELASTIC = option_set(*(([n, 0], n**0.7) for n in (1, 2, 4)), *(([0, n], 0.4 * n) for n in (1, 2)))


def on_one_gpu(*lengths: float, **more: float) -> Scenario:
    jobs = tuple(job(f"j{at}", length, **more) for at, length in enumerate(lengths))
    nodes = (node("a0", num_gpus=1), node("b0", "B", num_gpus=1))
    return Scenario(jobs=jobs, nodes=nodes, options_of=lambda _: ONE_GPU)


def bound_of(scenario: Scenario, policy: str = "prices") -> float:
    return shared_bound_seconds(scenario, run_policy(scenario, policy))


def test_jobs_that_queue_for_one_gpu_are_near_their_known_optimum():
    # The shortest first: they end at 100, 300, 600 and 1000 s.
    assert 0.97 * 500 <= bound_of(on_one_gpu(100.0, 200.0, 300.0, 400.0)) <= 500


def test_equal_jobs_do_not_all_end_at_the_end_of_the_first():
    # They end at 100, 200 ... 800 s.
    assert 0.95 * 450 <= bound_of(on_one_gpu(*[100.0] * 8)) <= 450


def test_a_job_alone_needs_what_its_fastest_option_takes_and_its_start():
    scenario = on_one_gpu(300.0)
    assert bound_of(scenario) == pytest.approx(300.0)
    startup = StartupCost(seconds_per_gpu=10.0, most_seconds=60.0)
    assert bound_of(replace(scenario, startup=startup)) == pytest.approx(310.0)
    assert bound_of(on_one_gpu(300.0, startup_seconds=25.0)) == pytest.approx(325.0)


@pytest.mark.parametrize("seed", range(2))
def test_no_policy_is_better_than_the_bound(seed: int):
    draw = np.random.default_rng(seed)
    jobs = tuple(
        replace(
            job(f"j{at}", length, requested_gpu="A", requested_count=2),
            submit_seconds=float(draw.uniform(0, 600)),
        )
        for at, length in enumerate(draw.lognormal(5.0, 1.0, 12).tolist())
    )
    nodes = (node("a0"), node("b0", "B", num_gpus=2))
    scenario = Scenario(jobs=jobs, nodes=nodes, options_of=lambda _: ELASTIC)
    runs = [run_policy(scenario, policy) for policy in ("prices", "shortest")]

    bounds = {shared_bound_seconds(scenario, run) for run in runs}
    least = min(run.report.mean_completion_seconds for run in runs)
    alone = least / min(run.report.lower_bound_ratio for run in runs)
    assert max(bounds) <= least
    assert max(bounds) >= alone * (1 - 1e-9)
    shown = [run.report.shared_bound_ratio for run in with_shared_bound(scenario, runs)]
    assert all(1.0 <= ratio < math.inf for ratio in shown)


def test_phases_are_bounded_by_what_is_fastest_in_each():
    slow_later = replace(ONE_GPU, phase_ends_samples=(100.0,), later_speeds=(np.array([0.5]),))
    scenario = replace(on_one_gpu(200.0), options_of=lambda _: slow_later)
    assert bound_of(scenario) == pytest.approx(300.0)


def test_there_is_no_bound_where_true_speeds_are_not_seen():
    scenario = replace(on_one_gpu(100.0), faults=FaultSpec(speed_error_share=0.2))
    assert math.isnan(bound_of(scenario))


def test_runs_that_finished_fewer_jobs_are_not_compared():
    scenario = replace(on_one_gpu(100.0, 200.0, 300.0), horizon_seconds=350.0)
    most, fewer = run_policy(scenario, "shortest"), run_policy(scenario, "fifo")
    fewer = replace(fewer, log=fewer.log[:2])
    shown = with_shared_bound(scenario, [fewer, most])
    assert math.isnan(shown[0].report.shared_bound_ratio)
    assert shown[1].report.shared_bound_ratio >= 1.0
