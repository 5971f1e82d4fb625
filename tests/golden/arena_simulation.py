"""Arena's simulation, set up as its authors' code does it (github:sjtu-epcc/arena, `simulator.py`).

Rounds of 300 s. A job joins at the start of the round in which it was submitted. Jobs leave at
round boundaries. After every start a job is tuned: for min(150 s x GPUs, 600 s) under the
baselines, for min(10 s x GPUs, 40 s) under Crius, whose search is pruned. The throughput of a round
leaves tuning out, but progress counts in whole rounds: tuning that ends within the first round
costs none, 600 s cost one.

Its jobs (`job/job.py`, `update_remained_iter_num`) count all the time that they ever ran at the
speed of now. So whoever is sped up is credited with work it never did, whoever is slowed down loses
some, and one that was stopped is credited twice with what it did before. `ArenaWorld` counts so;
with `counts_honestly` every sample is counted once, at the speed at which it was made.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from drystone.describe.cluster import NodeSpec
from drystone.describe.files.cluster import load_cluster
from drystone.describe.job import JobSpec
from drystone.describe.traces.speeds import MeasuredStep, fill_sizes, load_speeds
from drystone.describe.traces.trace import load_trace
from drystone.run.events import Event, Finished, Started, Stopped
from drystone.run.loop import drive
from drystone.run.simulate.world import SimulatedWorld
from drystone.schedule.decision import Policy, find_policy
from drystone.schedule.options import measured_options, types_of
from drystone.schedule.snapshot import Placement, StartupCost

TESTS = Path(__file__).resolve().parents[1]
ROUND_SECONDS = 300.0
GPU_GIGABYTES = {"A100": 40.0, "V100": 32.0, "A40": 48.0, "A10": 24.0}  # its hardware_specs.py
Information = Literal["everything", "data parallel, own count", "data parallel, own type"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What a start costs: by throughput, and by progress in whole rounds."""

    seconds_per_gpu: float
    most_seconds: float
    startup: StartupCost


# Whole rounds lost at a start: none below 4 GPUs, one from there on.
FULL_SEARCH = Tuning(
    seconds_per_gpu=150.0,
    most_seconds=600.0,
    startup=StartupCost(seconds_per_gpu=300.0, most_seconds=300.0, free_gpus=3),
)
PRUNED_SEARCH = Tuning(seconds_per_gpu=10.0, most_seconds=40.0, startup=StartupCost())


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaFigures:
    """What Arena's plots show of one run."""

    num_jobs: int
    num_finished: int
    mean_samples_per_second: float
    mean_completion_hours: float
    mean_starts: float  # of the jobs that ended


class ArenaWorld(SimulatedWorld):
    """The simulator, with Arena's way of counting what a job has done."""

    def __init__(self, **fields: Any) -> None:
        self._ran_seconds: Counter[str] = Counter()
        self._credit_samples: Counter[str] = Counter()
        self._stopped: dict[str, tuple[float, float]] = {}  # when, and its speed
        self._options_of = fields["options_of"]
        super().__init__(**fields)
        true_speed = self._runs._true_speed
        self._runs._true_speed = lambda record, facts, option, placement: (
            true_speed(record, facts, option, placement)
            * _spread_share(self.state.nodes, placement)
        )

    def stop(self, job_id: str, reason: str) -> None:
        record = self.state.jobs[job_id]
        self._ran_seconds[job_id] += max(0.0, self.now_seconds - record.counted_seconds)
        self._stopped[job_id] = (self.now_seconds, record.samples_per_second)
        super().stop(job_id, reason)

    def launch(self, job_id: str, option: int, placement: Placement, reason: str) -> None:
        record = self.state.jobs[job_id]
        if job_id in self._stopped:
            stopped_seconds, old_speed = self._stopped[job_id]
            ran = self._ran_seconds[job_id]
            if self.now_seconds > stopped_seconds:
                self._credit_samples[job_id] += ran * old_speed
            speed = float(self._options_of(record.spec).samples_per_second[option])
            record.done_samples = self._credit_samples[job_id] + ran * speed
        super().launch(job_id, option, placement, reason)


def _spread_share(nodes: Sequence[NodeSpec], placement: Placement) -> float:
    """A tenth less for each time that the GPUs on a node are halved (`db_querier.py`)."""
    least = math.ceil(sum(count for _, count in placement) / nodes[placement[0][0]].num_gpus)
    return 0.9 ** round(math.log2(len(placement) / least))


def simulate_arena(
    trace: str,
    policy: str | Policy,
    *,
    rounds: int,
    tuning: Tuning = FULL_SEARCH,
    loosen_deadlines: float = 0.0,
    counts_honestly: bool = False,
    knows: Information = "everything",
    decides_every_round: bool = False,
) -> ArenaFigures:
    """One run of so many rounds; deadlines count from submission, times `loosen_deadlines`.

    Arena's baselines hold a job for impossible where plain data parallelism would not fit. With
    such `knows` it has no such option, and only those of its own type or of its own count; a job
    without options is left out: in Arena it waits for ever.
    """
    nodes = load_cluster(TESTS / "golden" / "arena_cluster.yaml")
    steps = fill_sizes(load_speeds(TESTS / "data" / "arena_speeds.csv"))
    jobs = [
        replace(
            job,
            submit_seconds=_joins_seconds(job.submit_seconds),
            deadline_seconds=_deadline(job, loosen_deadlines),
        )
        for job in load_trace(TESTS / "data" / f"arena_{trace}.csv", divide_work=5)
    ]
    jobs = [job for job in jobs if job.submit_seconds < rounds * ROUND_SECONDS]
    num_jobs = len(jobs)
    if knows != "everything":
        steps = tuple(step for step in steps if _fits_data_parallel(step))
        jobs = [_restricted(job, knows) for job in jobs]
        works = [(step.model, step.global_batch, step) for step in steps if step.succeeded]
        jobs = [
            job
            for job in jobs
            if any(
                (model, batch) == (job.model, job.global_batch)
                and job.allows(step.gpu, step.num_gpus)
                for model, batch, step in works
            )
        ]
    world = (SimulatedWorld if counts_honestly else ArenaWorld)(
        jobs=jobs,
        nodes=nodes,
        options_of=measured_options(steps, nodes),
        gpu_types=types_of(nodes),
        startup=tuning.startup,
        round_seconds=ROUND_SECONDS,
        decides_every_round=decides_every_round,
        # Whatever ends in the last round would leave at the start of the next.
        horizon_seconds=(rounds - 1) * ROUND_SECONDS,
    )
    drive(world, find_policy(policy) if isinstance(policy, str) else policy)
    submits = {job.id: job.submit_seconds for job in jobs}
    figures = _figures(world.log, submits, rounds * ROUND_SECONDS, tuning)
    return replace(figures, num_jobs=num_jobs)


def _restricted(job: JobSpec, knows: Information) -> JobSpec:
    if knows == "data parallel, own type":
        return replace(job, allowed_gpus=frozenset({job.requested_gpu}))
    return replace(job, min_gpus=job.requested_count, max_gpus=job.requested_count)


def _fits_data_parallel(step: MeasuredStep) -> bool:
    """Whether 1.2 times the memory of data parallelism is within 0.8 of the GPU's."""
    memory = _data_parallel_memory().get((step.model, step.global_batch, step.num_gpus), -1.0)
    return 0 <= 1.2 * memory <= 0.8 * GPU_GIGABYTES[step.gpu]


@cache
def _data_parallel_memory() -> dict[tuple[str, int, int], float]:
    with (TESTS / "data" / "arena_dp_memory.csv").open() as lines:
        next(lines)
        return {
            (row["model"], int(row["global_batch"]), count): float(row[f"gpus_{count}"])
            for row in csv.DictReader(lines)
            for count in (1, 2, 4, 8, 16)
        }


def _joins_seconds(submit_seconds: float) -> float:
    return ROUND_SECONDS * max(0, math.ceil(submit_seconds / ROUND_SECONDS) - 1)


def _deadline(job: JobSpec, loosen: float) -> float:
    if loosen <= 0:
        return math.inf
    return job.submit_seconds + loosen * (job.deadline_seconds - job.submit_seconds)


def _figures(
    log: list[Event], submits: dict[str, float], end_seconds: float, tuning: Tuning
) -> ArenaFigures:
    leaves = {
        event.job_id: ROUND_SECONDS * math.ceil(event.time_seconds / ROUND_SECONDS - 1e-9)
        for event in log
        if isinstance(event, Finished)
    }
    samples, runs, starts = 0.0, {}, Counter()
    for event in log:
        if isinstance(event, Started):
            runs[event.job_id] = event
            starts[event.job_id] += 1
        elif isinstance(event, Stopped):
            samples += _samples(runs.pop(event.job_id), event.time_seconds, tuning)
    for job_id, run in runs.items():
        samples += _samples(run, leaves.get(job_id, end_seconds), tuning)
    hours = [(leaves[one] - submits[one]) / 3600 for one in leaves]
    return ArenaFigures(
        num_jobs=len(submits),
        num_finished=len(leaves),
        mean_samples_per_second=samples / end_seconds,
        mean_completion_hours=sum(hours) / len(hours),
        mean_starts=sum(starts[one] for one in leaves) / len(leaves),
    )


def _samples(run: Started, end_seconds: float, tuning: Tuning) -> float:
    num_gpus = sum(count for _, count in run.placement)
    tuned = min(tuning.seconds_per_gpu * num_gpus, tuning.most_seconds)
    return run.samples_per_second * max(0.0, end_seconds - run.time_seconds - tuned)
