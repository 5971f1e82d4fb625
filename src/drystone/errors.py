"""What can go wrong, as one tree. Each error knows the exit code that a command ends with.

DrystoneError              exit 1: the work failed
|-- RequestError           exit 2: what was asked for is wrong; says what, where, and what to try
|   |-- InvalidSpec        a value is out of range, or two values contradict each other
|   |-- UnknownName        no model, GPU, key or column has that name; says which are close
|   |-- UnreadableFile     a file is missing, truncated, hostile, or not what it should be
|   `-- MissingExtra       packages are not installed; says which extra of Drystone has them
`-- NothingFits            exit 3: the request is sound, but no resources suffice
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DrystoneError(Exception):
    """The root of everything Drystone raises on purpose."""

    exit_code = 1

    def __init__(self, message: str, *, where: str = "", hint: str = "") -> None:
        self.message = message
        self.where = where
        self.hint = hint
        super().__init__(message)

    def __str__(self) -> str:
        """One text: where it happened, what was wrong, what to try."""
        text = f"{self.where}: {self.message}" if self.where else self.message
        return f"{text}. {self.hint}" if self.hint else text


class RequestError(DrystoneError):
    """The request is wrong, and the person who made it can mend it."""

    exit_code = 2


class InvalidSpec(RequestError):
    """A value is out of range, or two values contradict each other."""


class UnreadableFile(RequestError):
    """A file is missing, truncated, hostile, or not what it should be."""


class UnknownName(RequestError):
    """Nothing has this name; the message offers the close ones."""

    def __init__(self, kind: str, name: str, known: Iterable[str], *, where: str = "") -> None:
        names = sorted(known)
        near = close_names(name, names)
        if near:
            hint = "Did you mean " + " or ".join(repr(one) for one in near) + "?"
        elif not names:
            hint = f"There is no {kind} yet"
        else:
            is_short = len(names) <= 20  # a list is shown whole where that helps, else its start
            shown = ", ".join(names if is_short else [*names[:12], "..."])
            hint = f"Known: {shown}"
        super().__init__(f"unknown {kind} {name!r}", where=where, hint=hint)


class MissingExtra(RequestError):
    """What was asked for needs packages that are not installed."""

    def __init__(self, message: str, extra: str, *, where: str = "") -> None:
        hint = f"Install it with: pip install 'drystone[{extra}]'"
        super().__init__(message, where=where, hint=hint)


class NothingFits(DrystoneError):
    """The request is sound, but no resources suffice."""

    exit_code = 3


def reason_of(error: Exception) -> str:
    """Why a file could not be read: without the path, which the message names anyway."""
    return getattr(error, "strerror", None) or str(error)


def close_names(name: str, known: Iterable[str], *, most: int = 3) -> list[str]:
    """The known names most like `name`, ignoring case, spaces and punctuation; likeliest first."""
    by_plain: dict[str, str] = {}
    for one in known:
        by_plain.setdefault(_plain(one), one)
    wanted = _plain(name)
    near = difflib.get_close_matches(wanted, by_plain, n=most, cutoff=0.6)
    if len(near) < most and wanted:
        near += [one for one in by_plain if wanted in one and one not in near][: most - len(near)]
    return [by_plain[one] for one in near]


def _plain(name: str) -> str:
    return "".join(char for char in name.lower() if char.isalnum())
