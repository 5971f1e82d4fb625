"""Series of single jobs and GPUs for Prometheus, as many as a database bears."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from drystone.run.control.controller import Controller
from drystone.run.lifecycle import JobState
from drystone.service.views import Cluster, Job
from drystone.service.waste import find_waste, speed_share

# Jobs that have series of their own: those that run, then those that wait longest.
MAX_JOBS: Final = 500
MAX_GPUS: Final = 5000
Sample = tuple[Mapping[str, str], float]
Series = tuple[str, str, str, list[Sample]]  # name, kind, help, samples

_OF_JOB: Final[tuple[tuple[str, str, str, Callable[[Job], float | None]], ...]] = (
    ("progress_ratio", "gauge", "Done, of 1.", lambda job: job.progress),
    ("samples_per_second", "gauge", "Measured speed.", lambda job: job.samples_per_second),
    ("loss", "gauge", "The last that was reported.", lambda job: job.loss),
    ("gpus", "gauge", "GPUs that it holds.", lambda job: sum(job.gpus.values())),
    ("starts_total", "counter", "How often it was started.", lambda job: job.num_starts),
    ("interruptions_total", "counter", "Its faults.", lambda job: job.num_faults),
    ("spent_dollars_total", "counter", "What it has cost.", lambda job: job.dollars),
    ("spending_dollars_per_hour", "gauge", "What it costs now.", lambda job: job.dollars_per_hour),
    ("eta_timestamp_seconds", "gauge", "When it should end.", lambda job: job.eta_seconds),
    ("deadline_timestamp_seconds", "gauge", "When it must end.", lambda job: job.deadline_seconds),
)


def job_series(controller: Controller) -> Iterator[Series]:
    """Of the jobs that run or wait, and of GPUs; the caller holds the journal's lock."""
    journal = controller.journal
    now, live = journal.now(), journal.live
    records = sorted(live.state.active.values(), key=lambda record: not record.num_gpus)
    shown = records[:MAX_JOBS]
    jobs = [Job.of(controller, record, now) for record in shown]
    labels = {job.id: {"job_id": job.id, "name": job.name, "team": job.team} for job in jobs}
    for name, kind, told, value in _OF_JOB:
        pairs = ((labels[job.id], value(job)) for job in jobs)
        samples: list[Sample] = [(label, number) for label, number in pairs if number is not None]
        yield f"drystone_job_{name}", kind, told, samples
    more: dict[str, list[Sample]] = {"waiting_seconds": [], "speed_ratio": [], "memory": []}
    for record in shown:
        label = labels[record.spec.id]
        waits = record.state is JobState.QUEUED
        more["waiting_seconds"].append((label, now - record.waiting_seconds if waits else 0.0))
        share = speed_share(controller, record)
        if share is not None:
            more["speed_ratio"].append((label, share))
        run = controller.reconciler.progress(record.spec.id)
        if run is not None and run.peak_memory_bytes:
            more["memory"].append((label, float(run.peak_memory_bytes)))
    told = "Since it waits; 0 while it runs."
    yield "drystone_job_waiting_seconds", "gauge", told, more["waiting_seconds"]
    told = "Measured over estimated speed."
    yield "drystone_job_speed_ratio", "gauge", told, more["speed_ratio"]
    told = "The most that a rank reported."
    yield "drystone_job_peak_memory_bytes", "gauge", told, more["memory"]
    left = float(len(records) - len(shown))
    yield "drystone_jobs_without_series", "gauge", "Beyond those with series.", [({}, left)]
    yield from _gpu_series(controller, now)


def _gpu_series(controller: Controller, now: float) -> Iterator[Series]:
    nodes = Cluster.of(controller, now).nodes
    held: list[Sample] = []
    for node in nodes:
        for index, holder in enumerate(node.devices):
            label = {"node": node.id, "index": str(index), "gpu": node.gpu}
            held.append((label, float(holder is not None)))
    yield "drystone_gpu_held", "gauge", "1 while a job holds it.", held[:MAX_GPUS]
    lost: list[Sample] = [({"node": node.id}, float(node.is_lost)) for node in nodes]
    yield "drystone_node_lost", "gauge", "1 while it does not answer.", lost[:MAX_GPUS]
    told = "Of GPUs that are paid for and not used."
    dollars = find_waste(controller).dollars_per_hour
    yield "drystone_wasted_dollars_per_hour", "gauge", told, [({}, dollars)]
    renting = controller.settings.renting
    budget = renting.budget_dollars_per_hour if renting is not None else math.inf
    limits: list[Sample] = [({}, budget)] if math.isfinite(budget) else []
    yield "drystone_budget_dollars_per_hour", "gauge", "For renting, on average.", limits
    by_team: list[Sample] = [
        ({"team": team.name}, team.budget_dollars)
        for team in controller.journal.live.access.teams.values()
        if team.budget_dollars is not None
    ]
    yield "drystone_team_budget_dollars", "gauge", "Of a team, in its period.", by_team
