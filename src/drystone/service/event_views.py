"""Events as people see them: lines of the log without secrets, and without what is not theirs."""

from __future__ import annotations

from typing import Any, Final

from drystone.run.control.controller import Controller
from drystone.run.control.store import LogLine
from drystone.run.events import load_line
from drystone.service.auth.callers import Caller, may_touch

Table = dict[str, Any]
_PUBLIC_KEYS: Final = ("name", "owner", "team", "model", "priority", "num_steps")


def event_view(line: LogLine, *, is_open: bool) -> Table:
    """One event. `is_open`: for those who may read the job's logs and its description."""
    event: Table = load_line(line.body)
    job, reason = event.get("job"), event.get("reason")
    event.pop("secret_sha256", None)
    event.pop("client_key", None)
    if isinstance(job, dict) and "environment" in job:
        # A job's variables may hold secrets; its team sees their names.
        names = [name for name, _ in job["environment"]]
        shown = {key: job[key] for key in _PUBLIC_KEYS if key in job}
        event["job"] = job | {"environment": names} if is_open else shown
    if isinstance(reason, str) and not is_open:
        event["reason"] = reason.partition("\n")[0]  # the end of a log may follow
    return {"sequence": line.sequence, "actor": line.actor, **event}


def events_for(controller: Controller, caller: Caller, lines: list[LogLine]) -> list[Table]:
    """Events as one caller may see them."""
    jobs = controller.journal.live.jobs
    rows = []
    for line in lines:
        job = jobs.get(line.job_id)
        team = job.job.team if job is not None else ""
        rows.append(event_view(line, is_open=may_touch(caller, team)))
    return rows
