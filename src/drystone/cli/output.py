"""How commands show results: tables for people, JSON for programs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from drystone.cli.columns import (
    UNKNOWN_WIDTH,
    Column,
    counted,
    fit_columns,
    has_width,
    printable,
)
from drystone.errors import UnreadableFile

__all__ = [
    "Column",
    "HeadedTable",
    "check_writable",
    "counted",
    "fit_columns",
    "make_console",
    "make_table",
    "print_json",
    "print_table",
    "printable",
    "say_made",
    "track",
]

Item = TypeVar("Item")


class HeadedTable(Table):
    """A table without lines under a heading that may be wider than the table."""

    def __init__(self, heading: str) -> None:
        super().__init__(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        self.heading = heading
        self.header_style = "bold cyan"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The heading, then the table."""
        yield Text(self.heading, style="bold")
        yield from super().__rich_console__(console, options)


def make_console(*, stderr: bool = False) -> Console:
    """A console in colour where a person looks; plain in pipes and files, and with NO_COLOR."""
    knows_width = has_width(sys.stderr if stderr else sys.stdout)
    return Console(
        stderr=stderr,
        highlight=False,
        markup=False,  # brackets are what they are: pip install 'drystone[runtime]', a job's name
        width=None if knows_width else UNKNOWN_WIDTH,
        color_system=None if os.environ.get("NO_COLOR") else "auto",
    )


def say_made(what: str, path: Path) -> None:
    """That a file was written: for the person who looks, not for the pipe."""
    make_console(stderr=True).print(f"{what}: {path}", style="dim", soft_wrap=True)


def check_writable(path: Path) -> None:
    """Refuse a file that cannot be written before minutes are spent on what it should hold."""
    if path.is_dir():
        raise UnreadableFile("is a folder, not a file to write", where=str(path))
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        why = "it may not be written" if path.parent.is_dir() else "there is no such folder"
        raise UnreadableFile(f"cannot be written: {why}", where=str(path))


def print_json(payload: Any) -> None:
    """One JSON document on standard output. NaN and infinity are no JSON, and an error."""
    print(json.dumps(payload, indent=2, ensure_ascii=False, allow_nan=False))


def track(items: Sequence[Item], what: str) -> Iterable[Item]:
    """The same items, with a bar of progress where a person looks; it goes away at the end."""
    from rich.progress import track as rich_track

    console = make_console(stderr=True)
    if not console.is_terminal:
        return items
    return rich_track(items, description=what, console=console, transient=True)


def make_table(
    title: str, columns: Sequence[Column], rows: Sequence[Sequence[str]], *, width: int
) -> tuple[HeadedTable, list[str]]:
    """A table of the columns that fit into `width`, and the headers of those that do not."""
    kept = fit_columns(columns, rows, width=width)
    table = HeadedTable(title)
    for index in kept:
        column = columns[index]
        table.add_column(column.header, justify=column.justify, style=column.style, no_wrap=True)
    for row in rows:
        table.add_row(*(_cell(columns[index], row[index]) for index in kept))
    hidden = [column.header for index, column in enumerate(columns) if index not in kept]
    return table, hidden


def _cell(column: Column, text: str) -> Text:
    return Text(printable(text), style=column.style_of(text) if column.style_of else "")


def print_table(title: str, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """A table as wide as there is room, saying which columns were left out."""
    console = make_console()
    table, hidden = make_table(title, columns, rows, width=console.width)
    console.print(table if rows else Text(title, style="bold"))
    if hidden and rows:
        told = f"Not shown: {', '.join(hidden)}. Widen the terminal, or use --json."
        console.print(Text(told, style="dim italic"))
