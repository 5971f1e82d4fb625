"""Arena's simulation, set up as its authors' code does it (github:sjtu-epcc/arena, `simulator.py`).

Rounds of 300 s. A job joins at the start of the round in which it was submitted. Progress counts in
whole rounds: starting on 1 or 2 GPUs costs none, on more GPUs one round. The throughput of a round
leaves out min(150 s x GPUs, 600 s) of tuning after every start. Jobs leave at round boundaries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from drystone.describe.trace import load_trace
from drystone.describe.trace_cluster import load_cluster
from drystone.describe.trace_speeds import fill_sizes, load_speeds
from drystone.run.events import Event, Finished, Started
from drystone.run.loop import drive
from drystone.run.simulator.world import SimulatedWorld
from drystone.schedule.measured import measured_options, types_of
from drystone.schedule.policy import find_policy
from drystone.schedule.snapshot import StartupCost

TESTS = Path(__file__).resolve().parents[1]
ROUND_SECONDS = 300.0
# Whole rounds lost at a start: none below 4 GPUs, one from there on.
ROUNDED_STARTUP = StartupCost(seconds_per_gpu=300.0, most_seconds=300.0, free_gpus=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaFigures:
    """What Arena's plots show of one run."""

    num_jobs: int
    num_finished: int
    mean_samples_per_second: float
    mean_completion_hours: float


def simulate_arena(trace: str, policy: str, *, rounds: int) -> ArenaFigures:
    """One run of so many rounds."""
    nodes = load_cluster(TESTS / "golden" / "arena_cluster.yaml")
    steps = fill_sizes(load_speeds(TESTS / "data" / "arena_speeds.csv"))
    jobs = [
        replace(job, submit_seconds=_joins_seconds(job.submit_seconds))
        for job in load_trace(TESTS / "data" / f"arena_{trace}.csv", divide_work=5)
    ]
    jobs = [job for job in jobs if job.submit_seconds < rounds * ROUND_SECONDS]
    world = SimulatedWorld(
        jobs=jobs,
        nodes=nodes,
        options_of=measured_options(steps, nodes),
        gpu_types=types_of(nodes),
        startup=ROUNDED_STARTUP,
        round_seconds=ROUND_SECONDS,
        # Whatever ends in the last round would leave at the start of the next.
        horizon_seconds=(rounds - 1) * ROUND_SECONDS,
    )
    drive(world, find_policy(policy))
    submits = {job.id: job.submit_seconds for job in jobs}
    return _figures(world.log, submits, rounds * ROUND_SECONDS)


def _joins_seconds(submit_seconds: float) -> float:
    return ROUND_SECONDS * max(0, math.ceil(submit_seconds / ROUND_SECONDS) - 1)


def _figures(log: list[Event], submits: dict[str, float], end_seconds: float) -> ArenaFigures:
    leaves = {
        event.job_id: ROUND_SECONDS * math.ceil(event.time_seconds / ROUND_SECONDS - 1e-9)
        for event in log
        if isinstance(event, Finished)
    }
    samples = 0.0
    for event in log:
        if isinstance(event, Started):  # once a job: first come, first served preempts nobody
            tuning = min(150.0 * sum(count for _, count in event.placement), 600.0)
            held = leaves.get(event.job_id, end_seconds) - event.time_seconds
            samples += event.samples_per_second * max(0.0, held - tuning)
    hours = [(leaves[one] - submits[one]) / 3600 for one in leaves]
    return ArenaFigures(
        num_jobs=len(submits),
        num_finished=len(leaves),
        mean_samples_per_second=samples / end_seconds,
        mean_completion_hours=sum(hours) / len(hours),
    )
