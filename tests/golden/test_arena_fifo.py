"""First come, first served on Arena's traces gives the figures that its authors stored.

Philly: 2,000 rounds, from the shipped result files and from running their simulator (590 jobs,
4,367.5 samples/s, 23.11 h). Helios and PAI: 500 rounds, from the shipped result files.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from arena_simulation import simulate_arena


def test_philly_finishes_590_jobs_at_4367_samples_a_second():
    figures = simulate_arena("philly", "fifo", rounds=2000)

    assert (figures.num_jobs, figures.num_finished) == (986, 590)
    assert figures.mean_samples_per_second == pytest.approx(4367.5, abs=0.05)
    assert figures.mean_completion_hours == pytest.approx(23.11, abs=0.005)


@pytest.mark.parametrize(
    ("trace", "num_finished", "samples_per_second", "hours"),
    [("helios", 437, 1027, 3.95), ("pai", 124, 121, 1.72)],
)
def test_helios_and_pai_give_the_stored_figures(
    trace: str, num_finished: int, samples_per_second: float, hours: float
):
    figures = simulate_arena(trace, "fifo", rounds=500)

    assert figures.num_finished == num_finished
    assert figures.mean_samples_per_second == pytest.approx(samples_per_second, abs=0.5)
    assert figures.mean_completion_hours == pytest.approx(hours, abs=0.005)
