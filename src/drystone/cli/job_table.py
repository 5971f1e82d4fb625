"""Jobs as rows of a table. Without typer and rich, which take longer than all the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from drystone.cli.columns import Column, fit_columns, money, output_width, printable

Table = Mapping[str, Any]

JOB_COLUMNS: Final = (
    Column(header="id", justify="right", style="bold green"),
    Column(header="name", rank=1, justify="left"),
    Column(header="owner", rank=3, justify="left"),
    Column(header="state", justify="left", style="cyan"),
    Column(header="GPUs", rank=1, justify="left"),
    Column(header="plan", rank=5, justify="left", style="dim"),
    Column(header="progress", rank=1, style="yellow"),
    Column(header="loss", rank=4),
    Column(header="ends", rank=2),
    Column(header="cost", rank=2),
    Column(header="reason", rank=3, justify="left", style="dim"),
)
_LONGEST_REASON: Final = 60
_MOST_DRAWN: Final = 100


def state_word(job: Table) -> str:
    """Its state, or more closely what a job that waits or runs does just now."""
    state, phase = str(job["state"]), str(job["phase"])
    return state if phase == "training" else phase


def job_row(job: Table, now: float) -> tuple[str, ...]:
    """One job as text, in the order of `JOB_COLUMNS`."""
    return (
        job["id"],
        job["name"],
        job["owner"] or "-",
        state_word(job),
        format_gpus(job["gpus"]) or "-",
        job["plan"] or "-",
        f"{job['step']}/{job['num_steps']} {job['progress']:.0%}",
        "-" if job["loss"] is None else f"{job['loss']:.3f}",
        format_end(job, now),
        money(job["dollars"]),
        shorten(job["reason"]),
    )


def print_jobs(title: str, jobs: Sequence[Table], now: float) -> None:
    """A table of jobs; long ones as plain text, since drawing a row takes a millisecond."""
    rows = [job_row(job, now) for job in jobs]
    if len(rows) <= _MOST_DRAWN:
        from drystone.cli.output import print_table

        print_table(title, JOB_COLUMNS, rows)
        return
    kept = fit_columns(JOB_COLUMNS, rows, width=output_width())
    lines = [tuple(JOB_COLUMNS[index].header for index in kept)]
    lines += [tuple(printable(row[index]) for index in kept) for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    is_left = [JOB_COLUMNS[index].justify == "left" for index in kept]
    print(title)
    for line in lines:
        cells = (
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(line, widths, is_left, strict=True)
        )
        print("  ".join(cells).rstrip())


def format_end(job: Table, now: float) -> str:
    """How long until it is done, or how long it took in all."""
    from drystone.units import format_seconds

    if job["end_seconds"] is not None:
        return f"took {format_seconds(max(job['end_seconds'] - job['submit_seconds'], 0.0))}"
    if job["eta_seconds"] is None:
        return "-"
    left = f"in {format_seconds(max(job['eta_seconds'] - now, 0.0))}"
    is_late = job["deadline_seconds"] is not None and job["eta_seconds"] > job["deadline_seconds"]
    return f"{left} (late)" if is_late else left


def format_gpus(gpus: Mapping[str, int]) -> str:
    """`2 A100-80GB-SXM + 1 T4-16GB`."""
    return " + ".join(f"{count} {gpu}" for gpu, count in gpus.items())


def shorten(text: str) -> str:
    """The first line, and not all of it if it is long."""
    line = text.splitlines()[0] if text else ""
    return line if len(line) <= _LONGEST_REASON else line[: _LONGEST_REASON - 3] + "..."
