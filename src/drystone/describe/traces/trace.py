"""Traces of jobs: a documented CSV of our own, `sacct`, and public formats.

Our own CSV has one row a job; the first four columns are needed, the rest may be left out:

id, submit_seconds, model, total_samples, global_batch, seq_len, tuning, owner, priority,
deadline_seconds, max_cost_dollars, allowed_gpus (names joined by "+"), min_gpus, max_gpus,
requested_gpu, requested_count

A job without a model counts its work in GPU seconds. The other formats are in
`formats.py`; a file is recognised by its header. Times start at the first job.
"""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from drystone.describe.job import JobSpec
from drystone.describe.traces.formats import FORMATS, OWN_COLUMNS, TraceFormat
from drystone.describe.traces.reading import Reading
from drystone.describe.traces.rows import Row, parse_rows, read_table
from drystone.errors import InvalidSpec, UnknownName, UnreadableFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The jobs of a file, and what has to be said about how they were read."""

    jobs: tuple[JobSpec, ...]
    format: str  # its name in `FORMATS`
    source: str = ""  # of an artifact: whose; empty where the file does not say
    notes: tuple[str, ...] = ()

    @property
    def counts_gpu_seconds(self) -> bool:
        """Whether some jobs have no model, only GPUs and a length."""
        return any(not job.model for job in self.jobs)


def load_trace(path: Path, *, divide_work: float = 1.0, most_jobs: int = 0) -> tuple[JobSpec, ...]:
    """The jobs of a trace file, by submission; the first at 0 s."""
    return read_trace(path, Reading(divide_work=divide_work), most_jobs=most_jobs).jobs


def read_trace(
    path: Path, reading: Reading | None = None, *, part: str = "", most_jobs: int = 0
) -> Trace:
    """The jobs of a trace file; `part` names one of several traces in it (its column `trace`)."""
    reading = reading or Reading()
    rows, columns = read_table(path, "trace")
    found = _recognise(columns, path)
    rows = _part_of(rows, columns, part, path)
    jobs = parse_rows(rows, lambda row: found.parse(row, reading), where=str(path))
    return Trace(
        jobs=settle_trace(jobs, most_jobs=most_jobs, where=str(path)),
        format=found.name,
        source=rows[0].text("source") if rows else "",
        notes=reading.notes(),
    )


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
    if most_jobs:
        ordered = ordered[:most_jobs]
    if first == 0:
        return tuple(ordered)
    return tuple(
        replace(
            job,
            submit_seconds=job.submit_seconds - first,
            deadline_seconds=job.deadline_seconds - first,
        )
        for job in ordered
    )


def render_trace(jobs: Sequence[JobSpec]) -> str:
    """Jobs as our own CSV, without the columns in which every job has the usual."""
    usual = {field.name: field.default for field in fields(JobSpec)}
    columns = [
        name
        for position, name in enumerate(OWN_COLUMNS)
        if position < 4 or any(getattr(job, name) != usual[name] for job in jobs)
    ]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_cell(getattr(job, name)) for name in columns] for job in jobs)
    return text.getvalue()


def _cell(value: object) -> str:
    if isinstance(value, frozenset):
        return "+".join(sorted(value))
    if isinstance(value, float):
        return "" if math.isinf(value) else f"{value:.12g}"
    return str(value)


def _recognise(columns: Sequence[str], path: Path) -> TraceFormat:
    found = next((trace_format for trace_format in FORMATS if trace_format.knows(columns)), None)
    if found is None:
        known = "; ".join(f"{known.name} ({known.says})" for known in FORMATS)
        told = f"the columns {', '.join(columns[:8])} are of no known trace"
        raise UnreadableFile(
            told if columns else "the file is empty: a trace begins with a line of column names",
            where=str(path),
            hint=f"Known formats: {known}",
        )
    if found.name == "drystone":
        for column in columns:
            if column not in OWN_COLUMNS:
                raise UnknownName("column", column, OWN_COLUMNS, where=str(path))
    return found


def _part_of(rows: list[Row], columns: Sequence[str], part: str, path: Path) -> list[Row]:
    parts = (
        list(dict.fromkeys(row.text("trace") for row in rows if not row.problem))
        if "trace" in columns
        else []
    )
    if part:
        if part not in parts:
            raise UnknownName("part of the trace", part, parts, where=str(path))
        return [row for row in rows if row.problem or row.text("trace") == part]
    if len(parts) > 1:
        raise InvalidSpec(
            f"the file holds {len(parts)} traces",
            where=str(path),
            hint=f"Name one with --part: {', '.join(parts[:12])}",
        )
    return rows
