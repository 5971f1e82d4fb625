"""Metrics of a run, as pure folds over its events: completion, waiting, use, money, fairness.

Unfinished jobs are counted, never padded and never dropped: means and percentiles are over the jobs
that were done, and `least_mean_completion_seconds` counts all that were not refused, the unfinished
ones with the time they had been there when the run ended.

Fairness is Jain's index, (sum x)^2 / (n sum x^2), of the service that owners got: 1 where all got
the same, 1/n where one got everything. The service of a job is the share of the work that it did in
its time which it would have done alone on its fastest option; that of an owner is the mean over the
jobs that were not refused. Where fewer than two owners are named, it is taken over jobs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from drystone.describe.cluster import NodeSpec
from drystone.describe.job import JobSpec
from drystone.run.events import (
    Cancelled,
    Event,
    Failed,
    Finished,
    Interrupted,
    NodeJoined,
    NodeReclaimed,
    NodeReleased,
    Paused,
    Refused,
    SpeedChanged,
    Started,
    StartFailed,
    Stopped,
)


def held_intervals(log: Sequence[Event], end_seconds: float) -> list[tuple[Started, float]]:
    """Every start, and until when its GPUs were held."""
    open_starts: dict[str, Started] = {}
    found = []
    for event in log:
        if isinstance(event, Started):
            open_starts[event.job_id] = event
        elif isinstance(event, _ENDS) and event.job_id in open_starts:
            found.append((open_starts.pop(event.job_id), event.time_seconds))
    return found + [(start, end_seconds) for start in open_starts.values()]


def rows_of_nodes(nodes: Sequence[NodeSpec], log: Sequence[Event]) -> list[NodeSpec]:
    """The node of every row that a placement may name: those of the start, then rented ones.

    A row may have had several rented nodes, one after the other, all of one type and size.
    """
    rows = list(nodes)
    for event in log:
        if isinstance(event, NodeJoined) and event.node >= len(rows):
            rows.append(event.spec)
    return rows


@dataclass(frozen=True, slots=True)
class Stay:
    """A node, and from when until when it was there."""

    row: int
    node: NodeSpec
    since_seconds: float
    until_seconds: float


def node_stays(nodes: Sequence[NodeSpec], log: Sequence[Event], end_seconds: float) -> list[Stay]:
    """Every node's time; lost ones count as there, since they are owned."""
    found = [Stay(row, node, 0.0, end_seconds) for row, node in enumerate(nodes)]
    rented: dict[int, NodeJoined] = {}
    for event in log:
        if isinstance(event, NodeJoined):
            rented[event.node] = event
        elif isinstance(event, NodeReleased | NodeReclaimed):
            joined = rented.pop(event.node)
            found.append(Stay(event.node, joined.spec, joined.time_seconds, event.time_seconds))
    left = [
        Stay(row, rental.spec, rental.time_seconds, end_seconds) for row, rental in rented.items()
    ]
    return found + left


def provided_gpu_seconds(
    nodes: Sequence[NodeSpec], log: Sequence[Event], end_seconds: float
) -> dict[str, float]:
    """GPU time that was there, by type."""
    total: dict[str, float] = defaultdict(float)
    for stay in node_stays(nodes, log, end_seconds):
        seconds = stay.until_seconds - stay.since_seconds
        total[stay.node.gpu] += stay.node.num_gpus * seconds
    return dict(total)


_ENDS = (Stopped, Interrupted, StartFailed, Finished, Cancelled, Paused, Failed)


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
    utilisation: Mapping[str, float]  # by GPU type: share of the GPU time there was that was held
    mean_samples_per_second: float  # of all jobs, unfinished ones too; what faults lost is left out
    num_restarts: int
    num_interruptions: int
    num_decisions: int
    mean_decision_seconds: float
    most_decision_seconds: float
    fairness: float = math.nan  # Jain's index of the service of owners, or of jobs
    fairness_over: str = "jobs"
    num_deadlines: int = 0
    num_deadlines_met: int = 0
    spent_dollars: float = 0.0
    spent_dollars_per_hour: float = 0.0  # over the makespan
    budget_dollars_per_hour: float = math.inf
    gpu_hours: Mapping[str, float] | None = None  # held, by GPU type
    # Mean completion over a bound that knows that jobs share the GPUs; nan where nobody asked.
    shared_bound_ratio: float = math.nan


def summarise_run(
    *,
    policy: str,
    jobs: Sequence[JobSpec],
    nodes: Sequence[NodeSpec],
    log: Sequence[Event],
    end_seconds: float,
    alone_seconds: Mapping[str, float],
    decision_seconds: Sequence[float] = (),
    spent_dollars: float = 0.0,
    budget_dollars_per_hour: float = math.inf,
) -> RunReport:
    """Fold a log; `alone_seconds` is what each job would take alone on its fastest option."""
    ends = {event.job_id: event.time_seconds for event in log if isinstance(event, Finished)}
    refused = {event.job_id for event in log if isinstance(event, Refused)}
    submits = {job.id: job.submit_seconds for job in jobs}
    completion = np.array([ends[job_id] - submits[job_id] for job_id in ends])
    first_starts: dict[str, float] = {}
    for event in log:
        if isinstance(event, Started):
            first_starts.setdefault(event.job_id, event.time_seconds)
    num_starts = sum(isinstance(event, Started) for event in log)
    there = [job for job in jobs if job.id not in refused and job.submit_seconds <= end_seconds]
    stayed = [ends.get(job.id, end_seconds) - job.submit_seconds for job in there]
    alone = sum(alone_seconds[job_id] for job_id in ends)
    makespan = end_seconds - min(submits.values(), default=0.0)
    done_samples = samples_by_job(log, end_seconds)
    fairness, over = _fairness(there, stayed, done_samples, alone_seconds)
    due = [job for job in jobs if job.deadline_seconds < math.inf]
    utilisation, gpu_hours = _use(nodes, log, end_seconds)
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
        makespan_seconds=makespan,
        utilisation=utilisation,
        mean_samples_per_second=sum(done_samples.values()) / max(end_seconds, 1e-9),
        num_restarts=num_starts - len(first_starts),
        num_interruptions=sum(isinstance(event, Interrupted | StartFailed) for event in log),
        num_decisions=len(decision_seconds),
        mean_decision_seconds=_mean(np.array(decision_seconds)),
        most_decision_seconds=max(decision_seconds, default=math.nan),
        fairness=fairness,
        fairness_over=over,
        num_deadlines=len(due),
        num_deadlines_met=sum(ends.get(job.id, math.inf) <= job.deadline_seconds for job in due),
        spent_dollars=spent_dollars,
        spent_dollars_per_hour=spent_dollars / makespan * 3600 if makespan > 0 else 0.0,
        budget_dollars_per_hour=budget_dollars_per_hour,
        gpu_hours=gpu_hours,
    )


def samples_by_job(log: Sequence[Event], end_seconds: float) -> dict[str, float]:
    """Samples that each job did by the end, without those that faults lost."""
    done: dict[str, float] = defaultdict(float)
    running: dict[str, tuple[float, float]] = {}  # job: its speed, and since when it counts

    def count(job_id: str, until_seconds: float) -> None:
        speed, since = running.pop(job_id, (0.0, until_seconds))
        done[job_id] += speed * max(0.0, until_seconds - since)

    for event in log:
        if isinstance(event, Started):
            running[event.job_id] = (event.samples_per_second, event.productive_seconds)
        elif isinstance(event, SpeedChanged):
            since = max(running[event.job_id][1], event.time_seconds)
            count(event.job_id, event.time_seconds)
            running[event.job_id] = (event.samples_per_second, since)
        elif isinstance(event, _ENDS):
            count(event.job_id, event.time_seconds)
            done[event.job_id] -= event.lost_samples if isinstance(event, Interrupted) else 0.0
    for job_id in list(running):
        count(job_id, end_seconds)
    return dict(done)


def _fairness(
    jobs: Sequence[JobSpec],
    stayed_seconds: Sequence[float],
    done_samples: Mapping[str, float],
    alone_seconds: Mapping[str, float],
) -> tuple[float, str]:
    """Jain's index of the service, and over whom it was taken."""
    by_owner: dict[str, list[float]] = defaultdict(list)
    services = []
    for job, stayed in zip(jobs, stayed_seconds, strict=True):
        if stayed > 0 and math.isfinite(alone_seconds[job.id]):
            share = min(done_samples.get(job.id, 0.0) / job.total_samples, 1.0)
            service = min(share * alone_seconds[job.id] / stayed, 1.0)
            by_owner[job.owner].append(service)
            services.append(service)
    if len(by_owner) > 1:
        return _jain(np.array([np.mean(slowdowns) for slowdowns in by_owner.values()])), "owners"
    return _jain(np.array(services)), "jobs"


def _jain(values: np.ndarray) -> float:
    squares = float((values**2).sum())
    return float(values.sum()) ** 2 / (len(values) * squares) if squares > 0 else math.nan


def _use(
    nodes: Sequence[NodeSpec], log: Sequence[Event], end_seconds: float
) -> tuple[dict[str, float], dict[str, float]]:
    """By GPU type: the share of what there was that was held, and the GPU hours held."""
    rows = rows_of_nodes(nodes, log)
    held: dict[str, float] = defaultdict(float)
    for start, until in held_intervals(log, end_seconds):
        for row, count in start.placement:
            held[rows[row].gpu] += count * (until - start.time_seconds)
    total = provided_gpu_seconds(nodes, log, end_seconds)
    shares = {gpu: held[gpu] / amount if amount else 0.0 for gpu, amount in total.items()}
    return shares, {gpu: held[gpu] / 3600 for gpu in total}


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else math.nan


def _percentile(values: np.ndarray, percent: float) -> float:
    return float(np.percentile(values, percent)) if len(values) else math.nan
