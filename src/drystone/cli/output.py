"""How commands show results: tables for people, JSON for programs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

Item = TypeVar("Item")

# A file or a pipe has no width of its own.
_UNKNOWN_WIDTH: Final = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table. When space is short, columns with the largest rank go first."""

    header: str
    rank: int = 0
    justify: Literal["left", "right"] = "right"
    style: str = ""


class HeadedTable(Table):
    """A table without lines under a heading that may be wider than the table."""

    def __init__(self, heading: str, *, caption: str | None = None) -> None:
        super().__init__(caption=caption, box=None, pad_edge=False, padding=(0, 2, 0, 0))
        self.heading = heading
        self.header_style = "bold cyan"
        self.caption_justify = "left"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The heading, then the table."""
        yield Text(self.heading, style="bold")
        yield from super().__rich_console__(console, options)


def make_console(*, stderr: bool = False) -> Console:
    """A console in colour where a person looks, without colour in pipes and files."""
    stream = sys.stderr if stderr else sys.stdout
    knows_width = stream.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(stderr=stderr, highlight=False, width=None if knows_width else _UNKNOWN_WIDTH)


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


def print_table(title: str, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """A table as wide as there is room, saying which columns were left out."""
    console = make_console()
    kept = fit_columns(columns, rows, width=console.width)
    hidden = [column.header for index, column in enumerate(columns) if index not in kept]
    caption = (
        f"Not shown: {', '.join(hidden)}. Widen the terminal, or use --json." if hidden else None
    )
    table = HeadedTable(title, caption=caption)
    for index in kept:
        column = columns[index]
        table.add_column(column.header, justify=column.justify, style=column.style, no_wrap=True)
    for row in rows:
        table.add_row(*(Text(printable(row[index])) for index in kept))
    console.print(table)


def fit_columns(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], *, width: int
) -> list[int]:
    """The positions of the columns that fit into `width`, those of the smallest rank first."""
    kept: list[int] = []
    for index in sorted(range(len(columns)), key=lambda one: (columns[one].rank, one)):
        cells = [len(row[index]) for row in rows]
        needed = max([len(columns[index].header), *cells]) + 2
        if needed > width and kept:
            break
        width -= needed
        kept.append(index)
    return sorted(kept)


def printable(text: str) -> str:
    """The text without control characters, which could move the cursor or recolour a terminal."""
    if text.isprintable():  # nearly always, and a hundred times as quick
        return text
    return "".join(
        char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text
    )
