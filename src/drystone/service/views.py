"""Answers about jobs and the cluster: each model makes itself from the controller's state.

The models are what OpenAPI describes and docs/api.md explains. Whoever calls `of` holds the
journal's lock.
"""

from __future__ import annotations

import math
from typing import Any, Self

import numpy as np

from drystone.describe.files.json_shapes import to_plain
from drystone.describe.job import TrainingJob
from drystone.describe.option import OptionSet
from drystone.run.control.admission import under_hard_cap
from drystone.run.control.controller import Controller
from drystone.run.control.lesson import Lesson
from drystone.run.lifecycle import JobState
from drystone.run.state import JobRecord
from drystone.schedule.snapshot import BoolArray
from drystone.service.auth.callers import check_touch
from drystone.service.shapes import Counts, Shape, finite_or_none
from drystone.service.supply import FREE, Supply
from drystone.units import HOUR_SECONDS

Device = tuple[str, int]  # the node, and the GPU's index on it


class Job(Shape):
    """One job."""

    id: str
    name: str
    owner: str
    team: str
    state: JobState
    phase: str
    model: str
    priority: float
    gpus: Counts
    devices: list[Device]
    plan: str
    step: int
    num_steps: int
    progress: float
    loss: float | None
    step_seconds: float | None
    samples_per_second: float | None
    eta_seconds: float | None
    deadline_seconds: float | None
    submit_seconds: float
    first_start_seconds: float | None
    end_seconds: float | None
    run_seconds: float
    dollars: float
    dollars_per_hour: float
    reason: str
    num_starts: int
    num_faults: int
    retry_seconds: float | None

    @classmethod
    def of(cls, controller: Controller, record: JobRecord, now: float) -> Job:
        """One job, as lists of jobs show it: nothing in it is only for its team to see."""
        live_state, spec = controller.journal.live, record.spec
        live = live_state.jobs[spec.id]
        run = controller.reconciler.progress(spec.id)
        loss = run.loss if run is not None else math.nan
        if record.state is not JobState.RUNNING:
            run = None  # of the last launch's report, only its loss is still of interest
        done = spec.total_samples if record.state is JobState.DONE else record.done_samples
        step = int(done // spec.global_batch)
        is_training = run is not None and run.step >= 0
        if run is not None and run.step >= 0:
            step, done = run.step, float(run.step * spec.global_batch)
        speed = record.samples_per_second if is_training else 0.0
        left = spec.total_samples - done
        held = controller.admission.held.get(spec.id, "") if record.state is JobState.QUEUED else ""
        trouble = controller.reconciler.troubles.by_job.get(spec.id)
        aside = f"put aside: {trouble.text}" if trouble is not None else ""
        return Job(
            id=spec.id,
            name=live.job.name,
            owner=live.job.owner,
            team=live.job.team,
            state=record.state,
            phase=_phase(record, live.retry_seconds, now, held, is_training=is_training),
            model=live.job.model,
            priority=spec.priority,
            gpus=_gpus_of(controller, record),
            devices=list(live.devices) if record.num_gpus else [],
            plan=live.plan if record.num_gpus else "",
            step=step,
            num_steps=round(spec.total_samples / spec.global_batch),
            progress=min(1.0, done / spec.total_samples),
            loss=finite_or_none(loss),
            step_seconds=finite_or_none(spec.global_batch / speed if speed > 0 else math.nan),
            samples_per_second=speed or None,
            eta_seconds=finite_or_none(now + left / speed if speed > 0 else math.nan),
            deadline_seconds=finite_or_none(spec.deadline_seconds),
            submit_seconds=spec.submit_seconds,
            first_start_seconds=finite_or_none(record.first_start_seconds),
            end_seconds=finite_or_none(record.end_seconds),
            run_seconds=live_state.run_seconds_at(spec.id, now),
            dollars=live_state.dollars_at(spec.id, now),
            dollars_per_hour=live.dollars_per_hour,
            # The first line says what happened; the end of the log may follow, and is not public.
            reason=(aside or held or live.reason).partition("\n")[0],
            num_starts=record.num_starts,
            num_faults=live.num_faults,
            retry_seconds=live.retry_seconds if live.retry_seconds > now else None,
        )


class Launch(Shape):
    """One launch of a job."""

    epoch: int
    plan: str
    devices: list[Device]
    time_seconds: float


class JobDetails(Job):
    """One job in full."""

    num_bad_reports: int  # of the last launch: lines that look like reports and cannot be read
    bad_report: str  # what was wrong with the last of them
    description: dict[str, Any]
    launches: list[Launch]
    curve: list[tuple[int, float | None, float | None]]

    @classmethod
    def of(cls, controller: Controller, record: JobRecord, now: float) -> JobDetails:
        """One job with its description, its launches and its curve; for its team alone."""
        job_id = record.spec.id
        live = controller.journal.live.jobs[job_id]
        check_touch(live.job, job_id)
        launches = [
            Launch(
                epoch=event.epoch,
                plan=event.plan,
                devices=list(event.devices),
                time_seconds=event.time_seconds,
            )
            for event in controller.launches_of(job_id)
        ]
        run = controller.reconciler.progress(job_id)
        points = controller.curves.curve(job_id, [launch.epoch for launch in launches], run)
        shown = Job.of(controller, record, now)
        is_ours = shown.phase == "held" or job_id in controller.reconciler.troubles.by_job
        public = vars(shown) | {"reason": shown.reason if is_ours else live.reason}
        return JobDetails(
            **public,
            num_bad_reports=run.num_bad_reports if run is not None else 0,
            bad_report=run.bad_report if run is not None else "",
            description=description_of(live.job),
            launches=launches,
            curve=[
                (step, finite_or_none(loss), finite_or_none(seconds))
                for step, loss, seconds in points
            ],
        )


class JobPage(Shape):
    """One page of jobs."""

    jobs: list[Job]
    total: int
    next_skip: int | None
    now_seconds: float
    sequence: int
    is_emulated: bool


class Option(Shape):
    """One way to run what is left of a job."""

    gpus: Counts
    samples_per_second: float
    seconds: float
    dollars: float | None
    dollars_per_hour: float | None
    is_free: bool
    where: str  # free, on its way, to rent, or taken
    is_measured: bool

    @classmethod
    def of(
        cls,
        controller: Controller,
        options: OptionSet,
        row: int,
        lesson: Lesson,
        left_samples: float,
        supply: Supply,
    ) -> Self:
        """One row of a job's options."""
        named = controller.journal.book.named(tuple(int(count) for count in options.counts[row]))
        per_hour, where = supply.dollars_per_hour(named), supply.where(named)
        speed = float(options.samples_per_second[row])
        seconds = left_samples / speed
        return cls(
            gpus=dict(named),
            samples_per_second=speed,
            seconds=seconds,
            dollars=finite_or_none(per_hour * seconds / HOUR_SECONDS),
            dollars_per_hour=finite_or_none(per_hour),
            is_free=where == FREE,
            where=where,
            is_measured=named in lesson.speeds,
        )


def options_of(
    controller: Controller,
    job: TrainingJob,
    left_samples: float,
    *,
    limit: int = 12,
    allowed: BoolArray | None = None,
) -> list[Option]:
    """What a job can choose from, the fastest first; with `allowed` of these options only.

    Options above the hard cap cannot be chosen. Of more than `limit` the cheapest is shown last.
    """
    lesson = controller.journal.book.lesson(job)
    options, _ = under_hard_cap(controller.journal, controller.journal.book.options(job))
    supply = Supply.of(controller, free_by_type(controller))
    rows = [
        row
        for row in np.argsort(-options.samples_per_second, kind="stable").tolist()
        if options.samples_per_second[row] > 0 and (allowed is None or allowed[row])
    ]
    found = [Option.of(controller, options, row, lesson, left_samples, supply) for row in rows]
    cheapest = min(found, key=lambda option: _cost(option.dollars), default=None)
    if len(found) <= limit or cheapest is None or cheapest in found[:limit]:
        return found[:limit]
    return [*found[: limit - 1], cheapest]


def _cost(dollars: float | None) -> float:
    return math.inf if dollars is None else dollars


class Node(Shape):
    """One node."""

    id: str
    gpu: str
    num_gpus: int
    free: int
    is_emulated: bool
    is_drained: bool
    drained_reason: str  # empty: somebody drained it by hand, or it is not drained
    is_lost: bool
    speed: float | None
    memory_bytes: float | None
    jobs: list[str]
    devices: list[str | None]


class GpuType(Shape):
    """One GPU type of the cluster."""

    gpu: str
    total: int
    free: int
    dollars_per_hour: float | None
    value: float
    is_emulated: bool
    is_own: bool  # described by the service's own file, not by the catalogue


class Cluster(Shape):
    """Nodes, types and money."""

    nodes: list[Node]
    gpus: list[GpuType]
    is_emulated: bool
    dollars_per_hour: float
    dollars: float
    coming: Counts  # GPUs by type on rented nodes that are on their way

    @classmethod
    def of(cls, controller: Controller, now: float) -> Self:
        """Nodes, types, and what all of it costs."""
        return cls(
            nodes=_nodes(controller),
            gpus=_gpu_types(controller),
            is_emulated=controller.cluster.is_emulated,
            coming=dict(Supply.of(controller, {}).coming),
            **money_now(controller, now),
        )


def _nodes(controller: Controller) -> list[Node]:
    live, cluster = controller.journal.live, controller.cluster
    holders: dict[Device, str] = {}
    on_node: dict[int, list[str]] = {}
    for job_id, record in live.state.active.items():
        if record.num_gpus:
            holders |= dict.fromkeys(live.jobs[job_id].devices, job_id)
            for row, _ in record.placement:
                on_node.setdefault(row, []).append(job_id)
    nodes = []
    for row, node in enumerate(live.state.nodes):
        if row in live.state.gone:
            continue
        emulation = cluster.emulations.get(node.gpu)
        nodes.append(
            Node(
                id=node.id,
                gpu=node.gpu,
                num_gpus=node.num_gpus,
                free=controller.journal.free_gpus(row),
                is_emulated=emulation is not None,
                is_drained=node.id in live.drained,
                drained_reason=live.drained.get(node.id, ""),
                is_lost=row in live.state.lost,
                speed=emulation.speed if emulation else None,
                memory_bytes=node.memory_bytes,
                jobs=on_node.get(row, []),
                devices=[holders.get((node.id, index)) for index in range(node.num_gpus)],
            )
        )
    return nodes


def _gpu_types(controller: Controller) -> list[GpuType]:
    cluster, free = controller.cluster, free_by_type(controller)
    return [
        GpuType(
            gpu=gpu,
            total=sum(node.num_gpus for node in cluster.nodes if node.gpu == gpu),
            free=free.get(gpu, 0),
            dollars_per_hour=cluster.dollars_per_gpu_hour.get(gpu),
            value=controller.admission.values.get(gpu, 1.0),
            is_emulated=gpu in cluster.emulations,
            is_own=cluster.gpu(gpu).is_own,
        )
        for gpu in cluster.gpu_types
    ]


def money_now(controller: Controller, now: float) -> dict[str, float]:
    """What everything cost and costs: from what ended by the hour, and what runs."""
    live = controller.journal.live
    running = [live.jobs[job_id] for job_id, job in live.state.active.items() if job.num_gpus]
    ended = sum(sum(hours.values()) for hours in live.spending.by_hour.values())
    since = sum(
        job.dollars_per_hour * max(0.0, now - job.priced_seconds) / HOUR_SECONDS for job in running
    )
    return {
        "dollars_per_hour": sum(job.dollars_per_hour for job in running),
        "dollars": ended + since,
    }


def free_by_type(controller: Controller) -> Counts:
    """GPUs that nobody has, by type, without drained nodes."""
    live = controller.journal.live
    free = dict.fromkeys(controller.journal.gpu_types, 0)  # also those still to be rented
    for row, node in enumerate(live.state.nodes):
        free[node.gpu] += 0 if node.id in live.drained else controller.journal.free_gpus(row)
    return free


def description_of(job: TrainingJob) -> dict[str, Any]:
    """What was submitted. A job's variables may hold secrets; people see their names."""
    described: dict[str, Any] = to_plain(job)
    described |= described.pop("train")
    described["environment"] = [name for name, _ in described["environment"]]
    return described


def _gpus_of(controller: Controller, record: JobRecord) -> Counts:
    counts: Counts = {}
    for row, count in record.placement:
        gpu = controller.journal.live.state.nodes[row].gpu
        counts[gpu] = counts.get(gpu, 0) + count
    return counts


def _phase(
    record: JobRecord, retry_seconds: float, now: float, held: str, *, is_training: bool
) -> str:
    if record.state is JobState.RUNNING:
        return "training" if is_training else "starting"
    if held:
        return "held"
    if record.state is JobState.QUEUED:
        return "backing off" if retry_seconds > now else "waiting"
    return record.state.value
