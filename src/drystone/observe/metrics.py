"""What did a run amount to? Pure folds over its events: completion, waiting, use, restarts.

Unfinished jobs are counted, never padded and never dropped: means and percentiles are over the jobs
that were done, and `least_mean_completion_seconds` counts all that were not refused, the unfinished
ones with the time they had been there when the run ended.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from drystone.describe.job import JobSpec
from drystone.describe.trace_cluster import NodeSpec
from drystone.run.events import (
    Event,
    Finished,
    Interrupted,
    Refused,
    SpeedChanged,
    Started,
    StartFailed,
    Stopped,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """One policy on one trace. Times are nan where no job was done."""

    policy: str
    num_jobs: int
    num_done: int
    num_refused: int
    num_unfinished: int
    mean_completion_seconds: float
    median_completion_seconds: float
    p99_completion_seconds: float
    least_mean_completion_seconds: float
    lower_bound_ratio: float  # mean completion over that of each job alone on its fastest option
    mean_queue_seconds: float  # from submission to the first start
    makespan_seconds: float  # from the first submission to the end of the run
    utilisation: Mapping[str, float]  # by GPU type: share of GPU time that was held
    mean_samples_per_second: float  # of all jobs, unfinished ones too; what faults lost is left out
    num_restarts: int
    num_interruptions: int
    num_decisions: int
    mean_decision_seconds: float
    most_decision_seconds: float


def summarise_run(
    *,
    policy: str,
    jobs: Sequence[JobSpec],
    nodes: Sequence[NodeSpec],
    log: Sequence[Event],
    end_seconds: float,
    alone_seconds: Mapping[str, float],
    decision_seconds: Sequence[float] = (),
) -> RunReport:
    """Fold a log; `alone_seconds` is what each job would take alone on its fastest option."""
    ends = {one.job_id: one.time_seconds for one in log if isinstance(one, Finished)}
    refused = {one.job_id for one in log if isinstance(one, Refused)}
    submits = {job.id: job.submit_seconds for job in jobs}
    completion = np.array([ends[one] - submits[one] for one in ends])
    first_starts: dict[str, float] = {}
    for event in log:
        if isinstance(event, Started):
            first_starts.setdefault(event.job_id, event.time_seconds)
    num_starts = sum(isinstance(event, Started) for event in log)
    stayed = [
        ends.get(job.id, end_seconds) - job.submit_seconds
        for job in jobs
        if job.id not in refused and job.submit_seconds <= end_seconds
    ]
    alone = sum(alone_seconds[one] for one in ends)
    return RunReport(
        policy=policy,
        num_jobs=len(jobs),
        num_done=len(ends),
        num_refused=len(refused),
        num_unfinished=len(jobs) - len(ends) - len(refused),
        mean_completion_seconds=_mean(completion),
        median_completion_seconds=_percentile(completion, 50),
        p99_completion_seconds=_percentile(completion, 99),
        least_mean_completion_seconds=_mean(np.array(stayed)),
        lower_bound_ratio=float(completion.sum()) / alone if alone > 0 else math.nan,
        mean_queue_seconds=_mean(
            np.array([start - submits[one] for one, start in first_starts.items()])
        ),
        makespan_seconds=end_seconds - min(submits.values(), default=0.0),
        utilisation=_utilisation(nodes, log, end_seconds),
        mean_samples_per_second=samples_done(log, end_seconds) / max(end_seconds, 1e-9),
        num_restarts=num_starts - len(first_starts),
        num_interruptions=sum(isinstance(one, Interrupted | StartFailed) for one in log),
        num_decisions=len(decision_seconds),
        mean_decision_seconds=_mean(np.array(decision_seconds)),
        most_decision_seconds=max(decision_seconds, default=math.nan),
    )


def held_intervals(log: Sequence[Event], end_seconds: float) -> list[tuple[Started, float]]:
    """Every start, and until when its GPUs were held."""
    open_starts: dict[str, Started] = {}
    found = []
    for event in log:
        if isinstance(event, Started):
            open_starts[event.job_id] = event
        elif isinstance(event, Stopped | Interrupted | StartFailed | Finished):
            found.append((open_starts.pop(event.job_id), event.time_seconds))
    return found + [(start, end_seconds) for start in open_starts.values()]


def samples_done(log: Sequence[Event], end_seconds: float) -> float:
    """Samples that all jobs did by the end, without those that faults lost."""
    total = 0.0
    running: dict[str, tuple[float, float]] = {}  # job: its speed, and since when it counts

    def count(job_id: str, until_seconds: float) -> float:
        speed, since = running.pop(job_id)
        return speed * max(0.0, until_seconds - since)

    for event in log:
        if isinstance(event, Started):
            running[event.job_id] = (event.samples_per_second, event.productive_seconds)
        elif isinstance(event, SpeedChanged):
            since = max(running[event.job_id][1], event.time_seconds)
            total += count(event.job_id, event.time_seconds)
            running[event.job_id] = (event.samples_per_second, since)
        elif isinstance(event, Stopped | Interrupted | StartFailed | Finished):
            total += count(event.job_id, event.time_seconds)
            total -= event.lost_samples if isinstance(event, Interrupted) else 0.0
    return total + sum(count(job_id, end_seconds) for job_id in list(running))


def _utilisation(
    nodes: Sequence[NodeSpec], log: Sequence[Event], end_seconds: float
) -> dict[str, float]:
    total: dict[str, float] = {}
    held: dict[str, float] = {}
    for node in nodes:
        total[node.gpu] = total.get(node.gpu, 0.0) + node.num_gpus * end_seconds
    for start, until in held_intervals(log, end_seconds):
        for node_row, count in start.placement:
            gpu = nodes[node_row].gpu
            held[gpu] = held.get(gpu, 0.0) + count * (until - start.time_seconds)
    return {gpu: held.get(gpu, 0.0) / amount if amount else 0.0 for gpu, amount in total.items()}


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else math.nan


def _percentile(values: np.ndarray, percent: float) -> float:
    return float(np.percentile(values, percent)) if len(values) else math.nan
