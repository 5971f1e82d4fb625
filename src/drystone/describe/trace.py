"""Which jobs arrived when? Loads traces: a documented CSV of our own, and Arena's.

Our own CSV has one row a job and these columns; only the first four are needed:

id, submit_seconds, model, total_samples, global_batch, owner, priority, deadline_seconds,
max_cost_dollars, allowed_gpus (names joined by "+"), min_gpus, max_gpus, requested_gpu,
requested_count

Arena's (github:sjtu-epcc/arena, Apache-2.0) has source, trace, job_id, submit_time_s, model,
batch_size, num_gpus, gpu_type, total_work (iterations) and more.

A table of durations (Philly's job table, or what `sacct` gives) has job_id, submit_time_s, num_gpus
and duration_s: the work of a job is then GPUs x seconds, on just that many GPUs.

Times start at the first job.
"""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from drystone.describe.job import JobSpec
from drystone.errors import InvalidSpec, UnknownName, UnreadableFile

_OWN: Final = (
    "id", "submit_seconds", "model", "total_samples", "global_batch", "owner", "priority",
    "deadline_seconds", "max_cost_dollars", "allowed_gpus", "min_gpus", "max_gpus",
    "requested_gpu", "requested_count",
)  # fmt: skip
_NEEDED: Final = _OWN[:4]
_ARENA: Final = (
    "job_id", "submit_time_s", "model", "batch_size", "num_gpus", "gpu_type", "total_work",
)  # fmt: skip
_DURATIONS: Final = ("job_id", "submit_time_s", "num_gpus", "duration_s")


def load_trace(path: Path, *, divide_work: float = 1.0, most_jobs: int = 0) -> tuple[JobSpec, ...]:
    """The jobs of a trace file, by submission; the first at 0 s.

    `divide_work` shortens every job; Arena's own simulations divide the iterations by 5.
    """
    rows, columns = _read(path)
    if set(_NEEDED) <= set(columns):
        for column in columns:
            if column not in _OWN:
                raise UnknownName("column", column, _OWN, where=str(path))
        parse = _parse_own
    elif set(_ARENA) <= set(columns):
        parse = _parse_arena
    elif set(_DURATIONS) <= set(columns):
        parse = _parse_duration
    else:
        raise UnreadableFile(
            "the columns are of no known trace", where=str(path), hint=f"Give {', '.join(_NEEDED)}"
        )
    jobs = [
        parse(row, divide_work, f"{path}: line {number}")
        for number, row in enumerate(rows, start=2)
    ]
    return settle_trace(jobs, most_jobs=most_jobs, where=str(path))


def settle_trace(
    jobs: Sequence[JobSpec], *, most_jobs: int = 0, where: str = ""
) -> tuple[JobSpec, ...]:
    """The same jobs by submission, counted from the first; ids must differ."""
    if not jobs:
        raise InvalidSpec("the trace has no jobs", where=where)
    ids = [job.id for job in jobs]
    if len(set(ids)) != len(ids):
        twice = Counter(ids).most_common(1)[0][0]
        raise InvalidSpec(f"job {twice!r} is in the trace twice", where=where)
    first = min(job.submit_seconds for job in jobs)
    # Python's sort is stable: jobs of one instant stay in the order of the file.
    ordered = sorted(jobs, key=lambda job: job.submit_seconds)
    shifted = [
        replace(
            job,
            submit_seconds=job.submit_seconds - first,
            deadline_seconds=job.deadline_seconds - first,
        )
        for job in ordered
    ]
    return tuple(shifted[:most_jobs] if most_jobs else shifted)


def _read(path: Path) -> tuple[list[dict[str, str]], list[str]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
        reader = csv.DictReader(io.StringIO(text), strict=True)
        rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UnreadableFile(f"no trace can be read: {error}", where=str(path)) from error
    return rows, list(reader.fieldnames or [])


def _parse_own(row: Mapping[str, str], divide_work: float, where: str) -> JobSpec:
    return _checked(
        where,
        id=row["id"],
        submit_seconds=_number(row, "submit_seconds", where),
        model=row["model"],
        total_samples=_number(row, "total_samples", where) / divide_work,
        global_batch=int(_number(row, "global_batch", where, default=1)),
        owner=row.get("owner") or "",
        priority=_number(row, "priority", where, default=1),
        deadline_seconds=_number(row, "deadline_seconds", where, default=math.inf),
        max_cost_dollars=_number(row, "max_cost_dollars", where, default=math.inf),
        allowed_gpus=frozenset(filter(None, (row.get("allowed_gpus") or "").split("+"))),
        min_gpus=int(_number(row, "min_gpus", where, default=1)),
        max_gpus=int(_number(row, "max_gpus", where, default=1_000_000)),
        requested_gpu=row.get("requested_gpu") or "",
        requested_count=int(_number(row, "requested_count", where, default=0)),
    )


def _parse_arena(row: Mapping[str, str], divide_work: float, where: str) -> JobSpec:
    batch = int(_number(row, "batch_size", where))
    # Whole iterations, rounded down, as Arena's simulator does.
    iterations = _number(row, "total_work", where) // divide_work
    return _checked(
        where,
        id=row["job_id"],
        submit_seconds=_number(row, "submit_time_s", where),
        model=row["model"],
        total_samples=iterations * batch,
        global_batch=batch,
        deadline_seconds=_number(row, "deadline_s", where, default=math.inf),
        requested_gpu=row["gpu_type"].upper(),
        requested_count=int(_number(row, "num_gpus", where)),
    )


def _parse_duration(row: Mapping[str, str], divide_work: float, where: str) -> JobSpec:
    num_gpus = int(_number(row, "num_gpus", where))
    return _checked(
        where,
        id=row["job_id"],
        submit_seconds=_number(row, "submit_time_s", where),
        model="",
        total_samples=num_gpus * _number(row, "duration_s", where) / divide_work,
        owner=row.get("vc") or "",
        min_gpus=num_gpus,
        max_gpus=num_gpus,
    )


def _checked(where: str, **fields: object) -> JobSpec:
    try:
        return JobSpec(**fields)  # type: ignore[arg-type]
    except InvalidSpec as error:
        raise InvalidSpec(error.message, where=where) from error


def _number(
    row: Mapping[str, str], column: str, where: str, *, default: float | None = None
) -> float:
    text = (row.get(column) or "").strip()
    if not text and default is not None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise InvalidSpec(f"{column} is {text!r}, not a number", where=where)
    return value
