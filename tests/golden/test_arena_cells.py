"""`cells` on Arena's traces lands near the runs of Crius that its authors stored.

Philly (2,000 rounds): 828 jobs, 6,771 samples/s, 11.6 h. Helios and PAI (500 rounds): 438 jobs,
1,101 samples/s, 1.53 h and 125 jobs, 140 samples/s, 0.70 h. Crius decides on the measured optima
here, as its authors ran it, and a start costs it min(10 s x GPUs, 40 s).

With room for all, the figures agree to the digits that are known. On the crowded trace one choice
among equals leads to another queue, and the released code counts some changes of a plan twice (see
`baselines/cells/policy.py`); with its way of counting we get 851, 6,894 and 11.48. Hence 5 %.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from arena_simulation import PRUNED_SEARCH, simulate_arena


@pytest.mark.parametrize(
    ("trace", "num_finished", "samples_per_second", "hours"),
    [("helios", 438, 1101, 1.53), ("pai", 125, 140, 0.70)],
)
def test_with_room_for_all_it_gives_the_stored_figures(
    trace: str, num_finished: int, samples_per_second: float, hours: float
):
    figures = simulate_arena(trace, "cells", rounds=500, tuning=PRUNED_SEARCH)

    assert figures.num_finished == num_finished
    assert figures.mean_samples_per_second == pytest.approx(samples_per_second, abs=0.6)
    assert figures.mean_completion_hours == pytest.approx(hours, abs=0.005)


@pytest.mark.slow
def test_on_the_crowded_trace_it_lands_near_the_stored_figures():
    figures = simulate_arena("philly", "cells", rounds=2000, tuning=PRUNED_SEARCH)

    assert figures.num_finished == pytest.approx(828, rel=0.05)
    assert figures.mean_samples_per_second == pytest.approx(6771, rel=0.05)
    assert figures.mean_completion_hours == pytest.approx(11.6, rel=0.05)
    assert figures.mean_starts == pytest.approx(2.3, abs=0.3)  # stored: 2.3 a job


@pytest.mark.slow
def test_counted_honestly_as_many_end_but_more_is_done():
    """Arena's simulator credits jobs with work that they never did; ours does not."""
    figures = simulate_arena(
        "philly", "cells", rounds=2000, tuning=PRUNED_SEARCH, counts_honestly=True
    )

    assert figures.num_finished == pytest.approx(828, rel=0.05)
    assert figures.mean_samples_per_second > 1.05 * 6771
