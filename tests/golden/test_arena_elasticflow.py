"""`elasticflow` on Arena's traces lands near the runs of ElasticFlow-LS that its authors stored.

Philly (2,000 rounds): 573 jobs, 4,623 samples/s, 15.4 h; run again, their simulator gives 565 jobs
and 4,592 samples/s. Helios and PAI (500 rounds): 321 jobs, 563 samples/s, 1.94 h and 95 jobs,
78 samples/s, 0.87 h. As there, deadlines are loosened, a start costs min(150 s x GPUs, 600 s), jobs
stay on their type, and an option is one only if plain data parallelism fits its memory.

Arena places all jobs of a type anew at every change, so that each is started 15 times on average;
its throughput is to be compared with `elasticflow_moving`. The policy itself leaves jobs where they
are; its throughput is higher for that.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from arena_simulation import simulate_arena

from drystone.schedule.baselines.elasticflow import elasticflow_moving

KNOWS = "data parallel, own type"


@pytest.mark.parametrize(
    ("trace", "num_finished", "samples_per_second", "hours"),
    [("helios", 321, 563, 1.94), ("pai", 95, 78, 0.87)],
)
def test_with_room_for_all_just_the_same_jobs_end(
    trace: str, num_finished: int, samples_per_second: float, hours: float
):
    moving = simulate_arena(trace, elasticflow_moving, rounds=500, knows=KNOWS)
    figures = simulate_arena(trace, "elasticflow", rounds=500, knows=KNOWS)

    assert moving.num_finished == figures.num_finished == num_finished
    assert moving.mean_samples_per_second == pytest.approx(samples_per_second, rel=0.07)
    assert figures.mean_samples_per_second > samples_per_second
    assert figures.mean_completion_hours == pytest.approx(hours, rel=0.09)


@pytest.mark.slow
def test_on_the_crowded_trace_it_lands_near_the_stored_figures():
    moving = simulate_arena("philly", elasticflow_moving, rounds=2000, knows=KNOWS)
    figures = simulate_arena("philly", "elasticflow", rounds=2000, knows=KNOWS)

    assert moving.num_finished == pytest.approx(573, rel=0.03)
    assert moving.mean_samples_per_second == pytest.approx(4623, rel=0.03)
    assert moving.mean_starts == pytest.approx(15, rel=0.15)
    assert figures.num_finished == pytest.approx(573, rel=0.03)
    assert figures.mean_samples_per_second == pytest.approx(4623, rel=0.08)
    assert figures.mean_completion_hours == pytest.approx(15.4, rel=0.06)
