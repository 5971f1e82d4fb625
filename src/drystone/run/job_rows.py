"""What events did to jobs, as rows of the table for reading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from drystone.run.control.live_state import LiveState
from drystone.run.control.notes import Described, Note, job_of
from drystone.run.control.store import JobRow
from drystone.run.events import Event, Progressed, Submitted
from drystone.run.job_output import clean_text
from drystone.run.lifecycle import TERMINAL, JobState

_MAX_NAME_CHARS: Final = 200  # as the columns have it


def job_rows(
    live: LiveState, events: Sequence[Event], states: Mapping[str, JobState]
) -> list[JobRow]:
    """Every job that these events change, given the state that each will be in."""
    described = {one.job_id: one.job for one in events if isinstance(one, Described)}
    rows: dict[str, JobRow] = {}
    for event in events:
        job_id = job_of(event)
        if isinstance(event, Note | Progressed) or not job_id:
            continue
        state = states[job_id]
        if isinstance(event, Submitted):
            job, submit = described.get(job_id), event.job.submit_seconds
        else:
            job = described.get(job_id) or live.jobs[job_id].job
            known = rows.get(job_id)
            submit = known.submit_seconds if known else live.state.jobs[job_id].spec.submit_seconds
        # Unlike JSON, a column of text does not take every character: PostgreSQL no NUL.
        rows[job_id] = JobRow(
            id=job_id,
            name=clean_text(job.name if job else job_id, _MAX_NAME_CHARS),
            owner=clean_text(job.owner if job else "", _MAX_NAME_CHARS),
            state=state.value,
            submit_seconds=submit,
            end_seconds=event.time_seconds if state in TERMINAL else None,
            reason=clean_text(str(getattr(event, "reason", ""))),
        )
    return list(rows.values())
