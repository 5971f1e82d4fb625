"""Which running jobs have used up what they were given? Money and time."""

from __future__ import annotations

from drystone.run.events import Event, Failed
from drystone.run.journal import Journal
from drystone.run.lifecycle import JobState
from drystone.units import format_seconds


def limits_reached(journal: Journal) -> list[Event]:
    """The end of every job that is beyond a limit; it is asked to leave, with a checkpoint."""
    live, now = journal.live, journal.now()
    events: list[Event] = []
    for job_id, record in live.state.active.items():
        if record.state is not JobState.RUNNING:
            continue
        job = live.jobs[job_id].job
        dollars, seconds = live.dollars_at(job_id, now), live.run_seconds_at(job_id, now)
        reason = ""
        if job.max_cost_dollars is not None and dollars >= job.max_cost_dollars:
            reason = f"it has cost {dollars:.2f} dollars, max_cost is {job.max_cost_dollars:.2f}"
        elif job.max_duration_seconds is not None and seconds >= job.max_duration_seconds:
            most = format_seconds(job.max_duration_seconds)
            reason = f"it has run for {format_seconds(seconds)}, max_duration is {most}"
        if reason:
            reason = f"limit: {reason}; its last checkpoint is kept"
            events.append(Failed(time_seconds=now, job_id=job_id, reason=reason, kind="limit"))
    return events
