"""Single keys from a terminal, without waiting for Enter; none where there is no terminal."""

from __future__ import annotations

import os
import select
import sys
import time
from types import MappingProxyType, TracebackType
from typing import Any, Final

# What terminals send for keys that are no character, after Escape.
_NAMES: Final = MappingProxyType(
    {"\x1b[A": "up", "\x1bOA": "up", "\x1b[B": "down", "\x1bOB": "down", "\r": "enter",
     "\n": "enter", "\x1b": "escape", "k": "up", "j": "down"}
)  # fmt: skip


class Keys:
    """While it is open, keys come at once and are not shown; Ctrl-C still interrupts."""

    def __init__(self) -> None:
        self._before: list[Any] | None = None

    @property
    def are_there(self) -> bool:
        """Whether somebody can press them."""
        return sys.stdin.isatty()

    def __enter__(self) -> Keys:
        if self.are_there:
            import termios
            import tty

            self._before = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._before is not None:
            import termios

            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)
            self._before = None

    def read(self, seconds: float) -> str:
        """The next key within so many seconds, by its name; empty: none came."""
        if self._before is None:
            time.sleep(seconds)
            return ""
        file = sys.stdin.fileno()
        if not select.select([file], [], [], seconds)[0]:
            return ""
        text = os.read(file, 8).decode(errors="replace")
        return _NAMES.get(text, text[:1])
