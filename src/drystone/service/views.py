"""What people see of a running system: jobs, nodes and options as plain tables for JSON.

The shapes are those of docs/api.md. Whoever calls holds the journal's lock.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from drystone.describe.files.json_shapes import to_plain
from drystone.describe.job import TrainingJob, count_steps, make_spec
from drystone.describe.option import OptionSet
from drystone.run.control.admission import check_hard_cap, under_hard_cap
from drystone.run.control.controller import Controller
from drystone.run.control.live_state import Lesson
from drystone.run.lifecycle import JobState
from drystone.run.state import JobRecord
from drystone.schedule.limits import options_within
from drystone.schedule.snapshot import BoolArray
from drystone.service.auth.callers import check_touch
from drystone.units import HOUR_SECONDS

Table = dict[str, Any]


def job_view(controller: Controller, record: JobRecord, now: float) -> Table:
    """One job, as lists of jobs show it: nothing in it is only for its team to see."""
    live_state = controller.journal.live
    job_id = record.spec.id
    live = live_state.jobs[job_id]
    run = controller.reconciler.progress(job_id)
    loss = run.loss if run is not None else math.nan
    if record.state is not JobState.RUNNING:
        run = None  # what the last launch reported is no more than its loss
    batch = record.spec.global_batch
    done = record.spec.total_samples if record.state is JobState.DONE else record.done_samples
    step = int(done // batch)
    if run is not None and run.step >= 0:
        step, done = run.step, float(run.step * batch)
    is_training = run is not None and run.step >= 0
    speed = record.samples_per_second if is_training else 0.0
    left = record.spec.total_samples - done
    held = controller.admission.held.get(job_id, "") if record.state is JobState.QUEUED else ""
    trouble = controller.reconciler.troubles.by_job.get(job_id)
    aside = f"put aside: {trouble.text}" if trouble is not None else ""
    return {
        "id": job_id,
        "name": live.job.name,
        "owner": live.job.owner,
        "team": live.job.team,
        "state": record.state.value,
        "phase": _phase(record, live.retry_seconds, now, held, is_training=is_training),
        "model": live.job.model,
        "priority": record.spec.priority,
        "gpus": gpus_of(controller, record),
        "devices": [list(one) for one in live.devices] if record.num_gpus else [],
        "plan": live.plan if record.num_gpus else "",
        "step": step,
        "num_steps": round(record.spec.total_samples / batch),
        "progress": min(1.0, done / record.spec.total_samples),
        "loss": _finite(loss),
        "step_seconds": _finite(batch / speed if speed > 0 else math.nan),
        "samples_per_second": speed or None,
        "eta_seconds": _finite(now + left / speed if speed > 0 else math.nan),
        "deadline_seconds": _finite(record.spec.deadline_seconds),
        "submit_seconds": record.spec.submit_seconds,
        "first_start_seconds": _finite(record.first_start_seconds),
        "end_seconds": _finite(record.end_seconds),
        "run_seconds": live_state.run_seconds_at(job_id, now),
        "dollars": live_state.dollars_at(job_id, now),
        "dollars_per_hour": live.dollars_per_hour,
        # The first line says what; the end of the log follows it, and is not for everybody.
        "reason": (aside or held or live.reason).partition("\n")[0],
        "num_starts": record.num_starts,
        "num_faults": live.num_faults,
        "retry_seconds": live.retry_seconds if live.retry_seconds > now else None,
    }


def job_details(controller: Controller, record: JobRecord, now: float) -> Table:
    """One job with its description, its launches and its curve; for its team alone."""
    job_id = record.spec.id
    live = controller.journal.live.jobs[job_id]
    check_touch(live.job, job_id)
    launches: list[Table] = [
        {
            "epoch": event.epoch,
            "plan": event.plan,
            "devices": [list(one) for one in event.devices],
            "time_seconds": event.time_seconds,
        }
        for event in controller.launches_of(job_id)
    ]
    epochs = [int(one["epoch"]) for one in launches]
    points = controller.curves.curve(job_id, epochs, controller.reconciler.progress(job_id))
    curve = [[step, _finite(loss), _finite(took)] for step, loss, took in points]
    shown = job_view(controller, record, now)
    heard = controller.reconciler.progress(job_id)
    is_ours = shown["phase"] == "held" or job_id in controller.reconciler.troubles.by_job
    return shown | {
        "reason": shown["reason"] if is_ours else live.reason,
        "num_bad_reports": heard.num_bad_reports if heard is not None else 0,
        "bad_report": heard.bad_report if heard is not None else "",
        "description": description_of(live.job),
        "launches": launches,
        "curve": curve,
    }


def description_of(job: TrainingJob) -> Table:
    """What was submitted. A job's variables may hold secrets; people see their names."""
    described: Table = to_plain(job)
    described |= described.pop("train")
    described["environment"] = [name for name, _ in described["environment"]]
    return described


def gpus_of(controller: Controller, record: JobRecord) -> dict[str, int]:
    """GPUs that a job has, by type."""
    counts: dict[str, int] = {}
    for row, count in record.placement:
        gpu = controller.journal.live.state.nodes[row].gpu
        counts[gpu] = counts.get(gpu, 0) + count
    return counts


def options_view(
    controller: Controller,
    job: TrainingJob,
    left_samples: float,
    *,
    most: int = 12,
    allowed: BoolArray | None = None,
) -> list[Table]:
    """What a job can choose from, the fastest first; with `allowed` of these options only.

    Options above the hard cap cannot be chosen.
    """
    lesson = controller.journal.book.lesson(job)
    options, _ = under_hard_cap(controller.journal, controller.journal.book.options(job))
    order = np.argsort(-options.samples_per_second, kind="stable")
    free = free_by_type(controller)
    rows: list[Table] = []
    for row in order.tolist():
        may = allowed is None or allowed[row]
        if may and options.samples_per_second[row] > 0 and len(rows) < most:
            rows.append(_option(controller, options, row, lesson, left_samples, free))
    return rows


def _option(
    controller: Controller,
    options: OptionSet,
    row: int,
    lesson: Lesson,
    left_samples: float,
    free: dict[str, int],
) -> Table:
    named = controller.journal.book.named(tuple(int(one) for one in options.counts[row]))
    prices = controller.cluster.dollars_per_gpu_hour
    per_hour = sum(count * prices.get(gpu, math.nan) for gpu, count in named)
    speed = float(options.samples_per_second[row])
    seconds = left_samples / speed
    return {
        "gpus": dict(named),
        "samples_per_second": speed,
        "seconds": seconds,
        "dollars": _finite(per_hour * seconds / HOUR_SECONDS),
        "dollars_per_hour": _finite(per_hour),
        "is_free": all(free[gpu] >= count for gpu, count in named),
        "is_measured": named in lesson.speeds,
    }


def free_by_type(controller: Controller) -> dict[str, int]:
    """GPUs that nobody has, by type, without drained nodes."""
    live = controller.journal.live
    free = dict.fromkeys(controller.journal.gpu_types, 0)  # also those still to be rented
    for row, node in enumerate(live.state.nodes):
        free[node.gpu] += 0 if node.id in live.drained else controller.journal.free_gpus(row)
    return free


def plan_view(controller: Controller, job: TrainingJob) -> Table:
    """What submitting a job would do."""
    journal = controller.journal
    journal.book.check(job)
    shape = journal.book.shape(job)
    steps = count_steps(job, shape)
    left_samples = float(steps * job.global_batch)
    options = journal.book.options(job)
    # What the cap, its money or its time does not allow is said now, not when it waits.
    options = check_hard_cap(journal, job.name, options)
    shown = options_view(controller, job, left_samples)
    chosen = None
    if shown:
        within = options_within(
            make_spec(job, shape, job_id="planned", submit_seconds=0.0),
            options,
            journal.gpu_types,
            controller.cluster.dollars_per_gpu_hour,
        )
        usable = options_view(controller, job, left_samples, most=len(within), allowed=within)
        chosen = next((one for one in usable if one["is_free"]), usable[0])
    waiting = [
        one for one in controller.journal.live.state.active.values()
        if one.state is JobState.QUEUED
    ]  # fmt: skip
    return {
        "job": description_of(job),
        "steps": steps,
        "options": shown,
        "chosen": chosen,
        "num_waiting": len(waiting),
    }


def cluster_view(controller: Controller, now: float) -> Table:
    """Nodes, types, and what all of it costs."""
    live, cluster = controller.journal.live, controller.cluster
    holders: dict[tuple[str, int], str] = {}
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
            {
                "id": node.id,
                "gpu": node.gpu,
                "num_gpus": node.num_gpus,
                "free": controller.journal.free_gpus(row),
                "is_emulated": emulation is not None,
                "is_drained": node.id in live.drained,
                "is_lost": row in live.state.lost,
                "speed": emulation.speed if emulation else None,
                "memory_bytes": node.memory_bytes,
                "jobs": on_node.get(row, []),
                "devices": [holders.get((node.id, one)) for one in range(node.num_gpus)],
            }
        )
    free = free_by_type(controller)
    gpus = [
        {
            "gpu": gpu,
            "total": sum(one.num_gpus for one in cluster.nodes if one.gpu == gpu),
            "free": free.get(gpu, 0),
            "dollars_per_hour": cluster.dollars_per_gpu_hour.get(gpu),
            "value": controller.admission.values.get(gpu, 1.0),
            "is_emulated": gpu in cluster.emulations,
            "is_own": cluster.gpu(gpu).is_own,
        }
        for gpu in cluster.gpu_types
    ]
    return {
        "nodes": nodes,
        "gpus": gpus,
        "is_emulated": cluster.is_emulated,
        **money_view(controller, now),
    }


def money_view(controller: Controller, now: float) -> Table:
    """What everything cost and costs: from what ended by the hour, and what runs."""
    live = controller.journal.live
    running = [live.jobs[one] for one, job in live.state.active.items() if job.num_gpus]
    ended = sum(sum(hours.values()) for hours in live.spending.by_hour.values())
    since = sum(
        one.dollars_per_hour * max(0.0, now - one.priced_seconds) / HOUR_SECONDS for one in running
    )
    return {
        "dollars_per_hour": sum(one.dollars_per_hour for one in running),
        "dollars": ended + since,
    }


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


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
