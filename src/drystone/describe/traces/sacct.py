r"""Jobs that Slurm ran, from the output of `sacct`.

    sacct --allusers --parsable2 --starttime 2026-10-01 \
      --format=JobID,User,Submit,Start,End,ElapsedRaw,State,AllocTRES,ReqTRES

Needed are JobID, Submit, AllocTRES or ReqTRES, and ElapsedRaw, Elapsed, or Start and End; User and
State help. A job's work is what it took: GPUs x seconds. Steps (`12.batch`) belong to their job.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from drystone.describe.job import JobSpec
from drystone.describe.traces.reading import Reading, duration_job
from drystone.describe.traces.rows import Row
from drystone.errors import InvalidSpec

_RESOURCES: Final = ("AllocTRES", "ReqTRES", "AllocGRES", "ReqGRES")
_TYPED = re.compile(r"^(?:gres/)?gpu:([^=:,]+)[=:](\d+)$")
_UNTYPED = re.compile(r"^(?:gres/)?gpu[=:](\d+)$")
_ELAPSED = re.compile(r"^(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)(?:\.\d+)?$")


def is_sacct(columns: Sequence[str]) -> bool:
    """Whether these are columns of `sacct`."""
    has = set(columns)
    timed = has & {"ElapsedRaw", "Elapsed"} or {"Start", "End"} <= has
    return {"JobID", "Submit"} <= has and bool(has & set(_RESOURCES)) and bool(timed)


def parse_sacct(row: Row, reading: Reading) -> JobSpec | None:
    """The job of a line; None for steps, jobs without GPUs and jobs that never ran."""
    job_id = row.text("JobID")
    if "." in job_id:
        return reading.leave_out("steps of jobs")
    gpu, num_gpus = _gpus(row)
    if not num_gpus:
        return reading.leave_out("jobs without GPUs")
    seconds = _elapsed_seconds(row)
    if seconds <= 0:
        return reading.leave_out("jobs that never ran")
    if row.text("State").startswith(("RUNNING", "SUSPENDED")):
        reading.note("jobs still ran: their length is what they had run by then")
    return duration_job(
        reading,
        id=job_id,
        submit_seconds=_instant(row, "Submit"),
        num_gpus=num_gpus,
        duration_seconds=seconds,
        owner=row.text("User") or row.text("Account"),
        requested_gpu=gpu,
    )


def _gpus(row: Row) -> tuple[str, int]:
    """The type, if there is just one, and the number of GPUs; what was given before what was asked.

    `gres/gpu=4,gres/gpu:a100=4` says the same four GPUs twice.
    """
    for column in _RESOURCES:
        parts = row.text(column).split(",")
        typed = [found.groups() for part in parts if (found := _TYPED.match(part))]
        untyped = [int(found.group(1)) for part in parts if (found := _UNTYPED.match(part))]
        if typed:
            total = max(sum(int(count) for _, count in typed), *untyped, 0)
            names = {name for name, _ in typed}
            return (names.pop() if len(names) == 1 else ""), total
        if untyped:
            return "", max(untyped)
    return "", 0


def _elapsed_seconds(row: Row) -> float:
    if row.text("ElapsedRaw"):
        return row.number("ElapsedRaw")
    if text := row.text("Elapsed"):
        match = _ELAPSED.match(text)
        if match is None:
            raise InvalidSpec(f"Elapsed is {text!r}, not [days-]hours:minutes:seconds")
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + float(seconds)
    if any(row.text(name) in ("", "Unknown", "None") for name in ("Start", "End")):
        return 0.0
    return _instant(row, "End") - _instant(row, "Start")


def _instant(row: Row, column: str) -> float:
    """Seconds since 1970 of `2026-10-01T12:00:00`, or of a number (`SLURM_TIME_FORMAT=%s`)."""
    text = row.text(column)
    if text.isdigit():
        return float(text)
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise InvalidSpec(f"{column} is {text!r}, not a time like 2026-10-01T12:00:00") from None
