"""Slurm's short way of writing many node names: `a[1-2,7],b3`, `rack[0-1]n[08-11]`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import product
from typing import Final

from drystone.errors import DrystoneError

_MOST_NAMES: Final = 1_000_000
_BRACKETS: Final = re.compile(r"\[([^\]]*)\]")


def expand(text: str) -> tuple[str, ...]:
    """The names, in the order of the list."""
    names: list[str] = []
    for part in _split(text):
        pieces = _BRACKETS.split(part)  # fixed text and ranges take turns
        choices = [
            (piece,) if index % 2 == 0 else _range(piece) for index, piece in enumerate(pieces)
        ]
        size = 1
        for one in choices:
            size *= len(one)
        if len(names) + size > _MOST_NAMES:
            raise DrystoneError(f"the node list {text[:60]!r} names more than {_MOST_NAMES} nodes")
        names += ["".join(combined) for combined in product(*choices)]
    return tuple(names)


def join(names: Iterable[str]) -> str:
    """The same without brackets, as every command takes it."""
    return ",".join(names)


def _split(text: str) -> list[str]:
    """At commas that are not inside brackets."""
    parts, depth, start = [], 0, 0
    for index, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    parts.append(text[start:])
    if depth:
        raise DrystoneError(f"the node list {text[:60]!r} has a bracket too many or too few")
    return [part for part in parts if part]


def _range(text: str) -> tuple[str, ...]:
    """`8,10-12` with as many digits as are written."""
    found: list[str] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        last = last or first
        if not (first.isdigit() and last.isdigit()) or int(last) - int(first) > _MOST_NAMES:
            raise DrystoneError(f"{text[:60]!r} is no range of node numbers")
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return tuple(found)
