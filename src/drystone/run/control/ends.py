"""What follows from the end of a run that did not finish? Another try, another plan, or the end."""

from __future__ import annotations

from contextlib import suppress

from drystone.run.control.failures import Fault, FaultKind, is_hopeless, wait_seconds
from drystone.run.control.journal import Journal
from drystone.run.control.launches import LaunchOrder
from drystone.run.control.lessons import memory_lesson
from drystone.run.control.progress import RunProgress
from drystone.run.engines.agent.client import AgentGone, AgentRefused
from drystone.run.engines.contract import Engine
from drystone.run.events import Event, Failed, Interrupted, Progressed
from drystone.run.state import JobRecord


def ending_events(
    journal: Journal, record: JobRecord, fault: Fault, progress: RunProgress | None
) -> list[Event]:
    """How far it came, what was learned, and whether it is tried again."""
    job_id, now = record.spec.id, journal.now()
    events: list[Event] = []
    if fault.kind is FaultKind.OUT_OF_MEMORY and progress is not None:
        events += memory_lesson(journal, job_id, record)
    number = journal.live.jobs[job_id].faults.get(fault.kind.value, 0) + 1
    if is_hopeless(fault.kind, number):
        tries = f" (tried {number} times)" if number > 1 else ""
        reason = f"{fault.kind.value}{tries}: {fault.reason}"
        return [
            *events,
            Failed(time_seconds=now, job_id=job_id, reason=reason, kind=fault.kind.value),
        ]
    done, saved = record.done_samples, record.done_samples
    if progress is not None and progress.step >= 0:
        batch = record.spec.global_batch
        done = float(progress.step * batch)
        saved = float(max(progress.checkpoint_step, progress.first_step) * batch)
    return [
        *events,
        Progressed(time_seconds=now, job_id=job_id, done_samples=done),
        Interrupted(
            time_seconds=now,
            job_id=job_id,
            lost_samples=max(0.0, done - saved),
            reason=f"{fault.kind.value}: {fault.reason}",
            kind=fault.kind.value,
            retry_seconds=now + wait_seconds(fault.kind, number),
        ),
    ]


def read_log_ends(engine: Engine, order: LaunchOrder) -> dict[int, str]:
    """The end of what each rank wrote, without reports."""
    logs: dict[int, str] = {}
    for rank, seat in enumerate(order.seats):
        is_command = order.requests[seat.node].get("is_command")
        endings = ("out", "log") if is_command else ("log",)
        for name in [f"rank-{rank}.{ending}" for ending in endings]:
            with suppress(AgentGone, AgentRefused):
                found = engine.ask(
                    seat.node, "read_end", job_id=order.job_id, epoch=order.epoch, name=name
                )
                logs[rank] = logs.get(rank, "") + str(found["text"])
    return logs
