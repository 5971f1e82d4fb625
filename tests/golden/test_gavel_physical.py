"""Gavel's objectives on the trace of its physical cluster land near what its own simulator gives.

96 jobs on 8 V100, 16 P100 and 24 K80, rounds of 360 s, starts cost nothing. Its simulator, run with
the solver ECOS, gives mean completion times and makespans of 4.06 h and 17.8 h (max-min fairness),
4.74 h and 17.8 h (sum of throughput), 4.17 h and 18.0 h (finish-time fairness).

Max-min fairness and sum of throughput: within 6 %, since programmes of this kind have many answers.
Breaking ties by the sum of speeds, as we do, gives 3.86 h; without it HiGHS gives 4.11 h.
Finish-time fairness is 14 % slower than theirs: only the worst ratio is made small, and
what that leaves open is handed out otherwise than an inner point of ECOS would.
"""

import csv
from pathlib import Path

import pytest

from drystone.describe.cluster import NodeSpec, make_nodes
from drystone.describe.job import JobSpec
from drystone.describe.traces.speeds import MeasuredStep
from drystone.run.events import Finished
from drystone.run.loop import drive
from drystone.run.simulate.world import SimulatedWorld
from drystone.schedule.decision import find_policy
from drystone.schedule.options import measured_options, types_of

pytest.importorskip("highspy")
DATA = Path(__file__).resolve().parents[1] / "data" / "gavel_physical.csv"
GPUS = {"V100": 8, "P100": 16, "K80": 24}


def load() -> tuple[list[JobSpec], list[MeasuredStep]]:
    jobs, steps = [], {}
    with DATA.open() as lines:
        next(lines)
        for row in csv.DictReader(lines):
            num_gpus = int(row["num_gpus"])
            model = f"{row['model']} {row['batch_size']} on {num_gpus}"
            jobs.append(
                JobSpec(
                    id=row["job_id"],
                    submit_seconds=float(row["submit_seconds"]),
                    model=model,
                    total_samples=float(row["steps"]),
                    requested_gpu="V100",
                    requested_count=num_gpus,
                )
            )
            for gpu in GPUS:
                speed = row[f"{gpu.lower()}_steps_per_second"]
                if speed:
                    steps[model, gpu] = MeasuredStep(
                        model=model,
                        global_batch=1,
                        gpu=gpu,
                        num_gpus=num_gpus,
                        num_nodes=num_gpus,  # Gavel's simulator knows no nodes
                        step_seconds=1 / float(speed),
                    )
    return jobs, list(steps.values())


def simulate(policy: str) -> tuple[float, float]:
    """Mean completion time and makespan, in hours."""
    jobs, steps = load()
    nodes: tuple[NodeSpec, ...] = tuple(
        node
        for gpu, count in GPUS.items()
        for node in make_nodes(gpu, count=count, gpus_per_node=1)
    )
    world = SimulatedWorld(
        jobs=jobs,
        nodes=nodes,
        options_of=measured_options(steps, nodes),
        gpu_types=types_of(nodes),
        round_seconds=360.0,
        decides_every_round=True,
    )
    drive(world, find_policy(policy))
    ends = {one.job_id: one.time_seconds for one in world.log if isinstance(one, Finished)}
    assert len(ends) == len(jobs) == 96
    hours = [(ends[job.id] - job.submit_seconds) / 3600 for job in jobs]
    return sum(hours) / len(hours), max(ends.values()) / 3600


@pytest.mark.parametrize(
    ("policy", "mean_hours", "makespan_hours", "tolerance"),
    [
        ("gavel", 4.06, 17.8, 0.06),
        ("gavel-throughput", 4.74, 17.8, 0.06),
        ("gavel-finish-time", 4.17, 18.0, 0.15),
    ],
)
def test_it_lands_near_gavels_own_simulator(
    policy: str, mean_hours: float, makespan_hours: float, tolerance: float
):
    mean, makespan = simulate(policy)

    assert mean == pytest.approx(mean_hours, rel=tolerance)
    assert makespan == pytest.approx(makespan_hours, rel=0.03)
