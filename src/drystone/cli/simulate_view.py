"""How a simulation looks in a terminal: a bar while it runs, then the policies side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from rich.text import Text

from drystone.cli.output import HeadedTable, make_console, printable
from drystone.observe.metrics import RunReport
from drystone.observe.reports.lines import report_lines

_LABEL_WIDTH: Final = 22


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


def print_reports(title: str, reports: Sequence[RunReport], remarks: Sequence[str] = ()) -> None:
    """The policies side by side, a measure a line; as many tables as the width needs."""
    console = make_console()
    width = max(12, *(len(report.policy) + 2 for report in reports))
    per_table = max(1, (console.width - _LABEL_WIDTH) // width)
    for first in range(0, len(reports), per_table):
        chosen = range(first, min(first + per_table, len(reports)))
        table = HeadedTable(printable(title) if first == 0 else "")
        table.add_column("", style="cyan", no_wrap=True)
        for index in chosen:
            table.add_column(reports[index].policy, justify="right", no_wrap=True)
        for line in report_lines(reports):
            best = line.best()
            cells = [
                Text(line.texts[index], style="bold green" if index in best else "")
                for index in chosen
            ]
            table.add_row(line.label, *cells)
        console.print(table)
    if remarks:
        console.print()
    for remark in remarks:
        console.print(Text(printable(remark), style="dim"), soft_wrap=True)
