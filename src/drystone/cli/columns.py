"""Columns of a table that fit, and text that is safe to show; without rich, which loads slowly.

Long lists are written with this alone: importing rich costs more than all else they do.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TextIO

UNKNOWN_WIDTH: Final = 160  # a file or a pipe has no width of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table. When space is short, columns with the largest rank go first."""

    header: str
    rank: int = 0
    justify: Literal["left", "right"] = "right"
    style: str = ""
    style_of: Callable[[str], str] | None = None  # by what a cell says, instead


def has_width(stream: TextIO) -> bool:
    """Whether somebody said how wide the output is."""
    return stream.isatty() or os.environ.get("COLUMNS", "").isdigit()


def output_width() -> int:
    """How many characters of a line standard output has room for."""
    return shutil.get_terminal_size().columns if has_width(sys.stdout) else UNKNOWN_WIDTH


def fit_columns(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], *, width: int
) -> list[int]:
    """The positions of the columns that fit into `width`, those of the smallest rank first."""
    kept: list[int] = []
    for index in sorted(range(len(columns)), key=lambda index: (columns[index].rank, index)):
        cells = [len(row[index]) for row in rows]
        needed = max([len(columns[index].header), *cells]) + 2
        if needed > width and kept:
            break
        width -= needed
        kept.append(index)
    return sorted(kept)


def counted(number: int, noun: str) -> str:
    """`1 job`, `1,200 jobs`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def money(dollars: float) -> str:
    """`$1,234.50`; cents of a cent where there is less than one."""
    from drystone.units import format_dollars

    return format_dollars(dollars)


def printable(text: str) -> str:
    """The text without control characters, which could move the cursor or recolour a terminal."""
    if text.isprintable():  # nearly always, and a hundred times as quick
        return text
    return "".join(
        char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text
    )
