import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "schedule"))
from tiny import job, node, option_set

from drystone.observe.metrics import samples_by_job
from drystone.observe.simulation import Scenario, alone_seconds, report_table, simulate_policy
from drystone.run.simulate.faults import FaultSpec

OPTIONS = option_set(([2, 0], 2.0), ([4, 0], 4.0), ([0, 4], 1.0))
JOBS = tuple(
    replace(job(f"j{i}", 400.0, requested_gpu="A", requested_count=4), submit_seconds=10.0 * i)
    for i in range(3)
)
SCENARIO = Scenario(jobs=JOBS, nodes=(node("a0"), node("b0", "B")), options_of=lambda _: OPTIONS)


def test_times_are_counted_from_submission():
    report, _ = simulate_policy(SCENARIO, "fifo")

    # Ends at 100, 200 and 300 s.
    assert report.mean_completion_seconds == pytest.approx((100 + 190 + 280) / 3)
    assert report.median_completion_seconds == 190
    assert report.mean_queue_seconds == pytest.approx((0 + 90 + 180) / 3)
    assert report.makespan_seconds == 300
    assert report.lower_bound_ratio == pytest.approx(570 / 300)
    assert report.utilisation == {"A": pytest.approx(1.0), "B": 0.0}
    assert (report.num_done, report.num_unfinished, report.num_restarts) == (3, 0, 0)


def test_unfinished_jobs_are_counted_and_not_dropped():
    report, _ = simulate_policy(replace(SCENARIO, horizon_seconds=150.0), "fifo")

    assert (report.num_done, report.num_unfinished) == (1, 2)
    assert report.mean_completion_seconds == 100
    assert report.least_mean_completion_seconds == pytest.approx((100 + 140 + 130) / 3)
    assert report.utilisation["A"] == pytest.approx(1.0)


def test_refused_jobs_are_counted():
    odd = replace(JOBS[0], requested_count=3)
    report, _ = simulate_policy(replace(SCENARIO, jobs=(odd,)), "fifo")

    assert (report.num_refused, report.num_done, report.num_unfinished) == (1, 0, 0)
    assert report_table([report])[0]["mean_completion_seconds"] is None


def test_the_lower_bound_is_the_fastest_option_alone():
    assert alone_seconds(SCENARIO) == {"j0": 100.0, "j1": 100.0, "j2": 100.0}


def test_samples_are_those_that_the_jobs_did():
    faults = FaultSpec(
        seed=3, node_losses_per_hour=30, repair_seconds=30, node_slowdowns_per_hour=30,
        checkpoint_seconds=20,
    )  # fmt: skip
    whole, log = simulate_policy(replace(SCENARIO, faults=faults), "fifo")
    cut, _ = simulate_policy(replace(SCENARIO, horizon_seconds=150.0), "fifo")

    assert whole.num_interruptions > 0
    assert sum(samples_by_job(log, whole.makespan_seconds).values()) == pytest.approx(3 * 400.0)
    assert cut.mean_samples_per_second == pytest.approx(4.0)
