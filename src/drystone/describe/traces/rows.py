"""Rows of a CSV table: cells by column, and every bad line of a file named at once."""

from __future__ import annotations

import csv
import gzip
import io
import lzma
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

from drystone.errors import InvalidSpec, UnreadableFile, reason_of

Item = TypeVar("Item")

_MOST_SHOWN: Final = 5


class Row:
    """One line of a table."""

    __slots__ = ("_cells", "line", "problem")

    def __init__(self, cells: Mapping[str, str], line: int, problem: str = "") -> None:
        self._cells, self.line, self.problem = cells, line, problem

    def text(self, column: str) -> str:
        """What stands there, or nothing."""
        return (self._cells.get(column) or "").strip()

    def number(self, column: str, default: float | None = None) -> float:
        """A number; `default` where the cell is empty."""
        text = (self._cells.get(column) or "").strip()
        if not text and default is not None:
            return default
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if math.isnan(value):
            raise InvalidSpec(f"{column} is {text!r}, not a number")
        return value

    def count(self, column: str, default: int | None = None) -> int:
        """A whole number; `default` where the cell is empty."""
        value = self.number(column, default)
        if not math.isfinite(value) or value != int(value):
            raise InvalidSpec(f"{column} is {value:g}, not a whole number")
        return int(value)


def read_table(path: Path, what: str) -> tuple[list[Row], list[str]]:
    """The lines and the columns of a file with a header; cells end at commas, or at bars."""
    try:
        text = _read_bytes(path).decode("utf-8-sig")
        header = text.partition("\n")[0]
        delimiter = "|" if header.count("|") > header.count(",") else ","
        reader = csv.reader(io.StringIO(text), strict=delimiter == ",", delimiter=delimiter)
        columns = [header.strip() for header in next(reader, [])]
        lines = [line for line in reader if line]
    except (OSError, EOFError, ValueError, csv.Error, lzma.LZMAError, zlib.error) as error:
        reason = reason_of(error)
        raise UnreadableFile(f"no {what} can be read: {reason}", where=str(path)) from error
    return [_row(columns, line, number) for number, line in enumerate(lines, start=2)], columns


def _read_bytes(path: Path) -> bytes:
    """A file as it is, or what was packed in it: `.gz`, `.xz`."""
    packed = path.read_bytes()
    match path.suffix.lower():
        case ".gz":
            return gzip.decompress(packed)
        case ".xz":
            return lzma.decompress(packed)
    return packed


def _row(columns: list[str], cells: list[str], line: int) -> Row:
    if len(cells) == len(columns):
        return Row(dict(zip(columns, cells, strict=True)), line)
    return Row({}, line, problem=f"{len(cells)} cells under {len(columns)} columns")


def parse_rows(
    rows: Sequence[Row], parse: Callable[[Row], Item | None], *, where: str
) -> list[Item]:
    """What the lines say, without those that say nothing; one bad line refuses the whole file."""
    found: list[Item] = []
    problems: list[str] = []
    for row in rows:
        try:
            if row.problem:
                raise InvalidSpec(row.problem)
            item = parse(row)
        except InvalidSpec as error:
            problems.append(f"line {row.line}: {error.message}")
            continue
        if item is not None:
            found.append(item)
    if problems:
        shown = "; ".join(problems[:_MOST_SHOWN])
        more = f"; and {len(problems) - _MOST_SHOWN} more" if len(problems) > _MOST_SHOWN else ""
        raise InvalidSpec(shown + more, where=where, hint="Nothing of the file was taken")
    return found
