"""How a simulation looks in a terminal: a bar while it runs, then the policies side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from drystone.cli.output import Column, make_console, print_table
from drystone.observe.metrics import RunReport
from drystone.units import format_seconds


@contextmanager
def follow(policy: str, num_jobs: int) -> Iterator[Callable[[float, int], None] | None]:
    """A bar of jobs settled, where a person looks; it goes away at the end."""
    console = make_console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("jobs, day {task.fields[day]:.1f}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(policy, total=num_jobs, day=0.0)
        yield lambda now, left: progress.update(task, completed=num_jobs - left, day=now / 86400)


def print_reports(title: str, reports: Sequence[RunReport]) -> None:
    """The policies, one a row."""
    types = list(reports[0].utilisation) if reports else []
    columns = [
        Column(header="policy", justify="left", style="bold"),
        Column(header="done", rank=0),
        Column(header="unfinished", rank=1),
        Column(header="refused", rank=3),
        Column(header="mean", rank=0),
        Column(header="median", rank=2),
        Column(header="p99", rank=2),
        Column(header="x bound", rank=1),
        Column(header="queued", rank=5),
        Column(header="makespan", rank=4),
        *(Column(header=f"{gpu} used", rank=6) for gpu in types),
        Column(header="restarts", rank=3),
        Column(header="decision", rank=3),
        Column(header="longest", rank=7),
    ]
    print_table(title, columns, [_row(report) for report in reports])


def _row(report: RunReport) -> list[str]:
    ratio = report.lower_bound_ratio
    return [
        report.policy,
        f"{report.num_done}/{report.num_jobs}",
        str(report.num_unfinished),
        str(report.num_refused),
        _seconds(report.mean_completion_seconds),
        _seconds(report.median_completion_seconds),
        _seconds(report.p99_completion_seconds),
        "-" if math.isnan(ratio) else f"{ratio:.3f}",
        _seconds(report.mean_queue_seconds),
        _seconds(report.makespan_seconds),
        *(f"{share:.0%}" for share in report.utilisation.values()),
        str(report.num_restarts),
        _seconds(report.mean_decision_seconds),
        _seconds(report.most_decision_seconds),
    ]


def _seconds(seconds: float) -> str:
    return "-" if math.isnan(seconds) else format_seconds(seconds)
