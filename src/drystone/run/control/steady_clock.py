"""A clock for the log that no one can set: seconds since 1970 that pass as time passes.

It starts with the clock of the machine, then goes by the monotonic one. Where the two part, since
somebody set the time, it runs up to a tenth faster or slower until they meet again. So a clock that
jumps ten minutes and back changes waiting times and costs by little.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

_MAX_SLEW: Final = 0.1


class SteadyClock:
    """Call it for the time; from any thread."""

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall, self._steady = wall, steady
        self._lock = threading.Lock()
        self._told, self._at = wall(), steady()

    def __call__(self) -> float:
        """Seconds since 1970; never less than before."""
        with self._lock:
            now = self._steady()
            passed = max(0.0, now - self._at)
            ahead = self._told + passed - self._wall()
            most = _MAX_SLEW * passed
            self._told += passed - min(most, max(-most, ahead))
            self._at = now
            return self._told

    def start_after(self, seconds: float) -> None:
        """What was written down before is past, also if the clock was put back since."""
        with self._lock:
            self._told = max(self._told, seconds)
