"""What went wrong in the user's module, said so that the user can mend it."""

from __future__ import annotations

import traceback
from pathlib import Path


class TraceFailure(Exception):
    """The module cannot be traced; it is the user's file that has to change."""

    def __init__(
        self, message: str, *, where: str = "", hint: str = "", is_certain: bool = False
    ) -> None:
        self.message = message
        self.is_certain = is_certain  # no second attempt could go better
        self.where = where
        self.hint = hint
        super().__init__(message)


def user_line(error: BaseException, path: str) -> str:
    """`file:line` of the deepest frame in the user's file, else of the deepest frame beside it."""
    frames = traceback.extract_tb(error.__traceback__)
    file = Path(path).resolve()
    own = [one for one in frames if Path(one.filename).resolve() == file]
    beside = [one for one in frames if file.parent in Path(one.filename).resolve().parents]
    for one in reversed(own or beside):
        return f"{one.filename}:{one.lineno}"
    return path


def last_line(error: BaseException) -> str:
    """The line that Python would print last, without its further lines."""
    text = traceback.format_exception_only(error)[-1].strip().splitlines()
    return text[0] if text else type(error).__name__
