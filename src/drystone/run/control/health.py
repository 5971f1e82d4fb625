"""Health of a controller: does its loop turn, and can it use what it depends on?

Liveness is that of the loop: rounds are completed, or at least everything that runs is held while
nothing can be written. Readiness is that of store, disk, engine and provider.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

FAILING_SECONDS: Final = 8.0  # rounds that fail for so long are more than one bad round
STUCK_SECONDS: Final = 60.0  # a round may compute, and wait for agents, but not for so long
_MIN_FREE_BYTES: Final = 16 * 2**20


class Health:
    """What the loop says of its rounds, and what follows from it; read from any thread."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._turned_at = clock()  # when a round was completed, or all that runs was held
        self._good_at = clock()  # when a round was completed
        self._error = ""  # why the last round failed
        self._store = ""  # why nothing can be written
        self.is_watched = False  # whether a loop runs that says how its rounds go

    def round_done(self) -> None:
        """A round was completed."""
        self._turned_at = self._good_at = self._clock()
        self._error = self._store = ""

    def round_held(self, reason: str) -> None:
        """Nothing could be written; what runs was told to go on."""
        self._turned_at = self._clock()
        self._store = reason

    def round_failed(self, reason: str) -> None:
        """A round ended early for another reason than the store."""
        self._error = reason

    @property
    def error(self) -> str:
        """Why the last round was not completed; empty where it was."""
        return self._error or self._store

    @property
    def round_age_seconds(self) -> float:
        """How long ago the last round was completed."""
        return self._clock() - self._good_at

    def why_dead(self) -> str:
        """Why the loop cannot be said to turn; empty where it does."""
        if not self.is_watched:
            return ""
        silent = self._clock() - self._turned_at
        if self._error and silent > FAILING_SECONDS:
            return f"no round was completed for {silent:.0f} s: {self._error}"
        if silent > STUCK_SECONDS:
            return f"no round was completed for {silent:.0f} s"
        return ""

    def troubles(self) -> dict[str, str]:
        """By part that the controller depends on: what is wrong with it."""
        found = {"store": self._store, "disk": self._disk_trouble()}
        return {part: reason for part, reason in found.items() if reason}

    def _disk_trouble(self) -> str:
        try:
            disk = os.statvfs(self._folder)
        except OSError as error:
            return f"{self._folder} cannot be read: {error.strerror}"
        free = disk.f_bavail * disk.f_frsize
        if free >= _MIN_FREE_BYTES:
            return ""
        return f"the disk of {self._folder} is full ({free // 2**20} MiB left)"
