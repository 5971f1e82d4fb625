"""`gavel-admission` on Arena's traces lands near the runs of Gavel that its authors stored.

Philly (2,000 rounds): 642 jobs, 5,039 samples/s, 18.0 h; their simulator run again with HiGHS in
place of CPLEX gives 608 jobs, 5,143 samples/s, 15.6 h, so its own answers differ that much. Jobs
keep their count, a start costs min(150 s x GPUs, 600 s), and an option is one only if plain data
parallelism fits its memory.

Which of equally good answers HiGHS gives depends on the processor and its seed, and one answer
leads to the next: two processors and four more settings of the solver gave 643 to 653 jobs, 5,425
to 5,543 samples/s and 14.4 to 14.9 h. That is 5 to 8 % more samples than theirs with HiGHS; what is
not modelled, that a job which is spread over more nodes is slower, goes in that direction.

Helios and PAI (500 rounds): 401 jobs, 908 samples/s and 117 jobs, 109 samples/s are stored. Just
340 and 94 jobs have an option of their own count by the memory rule, and all 438 and 125 without
it. So the stored runs let some impossible jobs in; which ones, the released code does not explain.
They must lie between the two.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from arena_simulation import simulate_arena

pytest.importorskip("highspy")
KNOWS = "data parallel, own count"


@pytest.mark.slow
def test_on_the_crowded_trace_it_lands_near_the_stored_figures():
    figures = simulate_arena("philly", "gavel-admission", rounds=2000, knows=KNOWS)

    assert figures.num_finished == pytest.approx(642, rel=0.03)
    assert figures.mean_samples_per_second == pytest.approx(5143, rel=0.10)  # as run again
    assert figures.mean_completion_hours == pytest.approx(15.6, rel=0.10)  # as run again
    assert figures.mean_starts == pytest.approx(1.3, abs=0.3)


@pytest.mark.parametrize(
    ("trace", "num_finished", "samples_per_second"), [("helios", 401, 908), ("pai", 117, 109)]
)
def test_with_room_for_all_the_stored_figures_lie_between(
    trace: str, num_finished: int, samples_per_second: float
):
    few = simulate_arena(trace, "gavel-admission", rounds=500, knows=KNOWS)
    all_jobs = simulate_arena(trace, "gavel-admission", rounds=500)

    assert few.num_finished < num_finished < all_jobs.num_finished == all_jobs.num_jobs
    assert few.mean_samples_per_second < samples_per_second < all_jobs.mean_samples_per_second
