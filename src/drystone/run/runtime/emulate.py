"""Unequal devices on a machine without any: each rank is as slow as it is told to be.

Every section of work really runs, then the rank sleeps until the time at which a device of its
speed would have ended: the end of the section before, or the beginning of this one if that is
later, plus the cost of the section. Collectives go on meanwhile, as they do beside a GPU. Ratios
repeat as long as the real work is a small part of the cost (an eighth, say); `overruns` counts
where it was not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from drystone.errors import InvalidSpec


class Pacer:
    """A device of a given speed: `seconds` is what one sample costs at speed 1, by kind of section.

    Kinds are those of the engine: `forward` and `backward` (of one block, with recomputation), and
    `head`. What is left out costs nothing.
    """

    def __init__(self, *, speed: float, seconds: Mapping[str, float]) -> None:
        if speed <= 0:
            raise InvalidSpec(f"an emulated device of speed {speed}, must be > 0")
        self._speed, self._seconds = speed, dict(seconds)
        self._end = 0.0
        self.num_sections = self.overruns = 0

    @contextmanager
    def section(self, kind: str, num_samples: int) -> Iterator[None]:
        """Work that takes this long on the emulated device."""
        started = time.perf_counter()
        yield
        self.wait_until_done(kind, num_samples, started=started)

    def wait_until_done(self, kind: str, num_samples: int, *, started: float) -> None:
        """Sleep until work that began at `started` would have ended on the emulated device."""
        cost = self._seconds.get(kind, 0.0) * num_samples / self._speed
        self._end = max(self._end, started) + cost
        self.num_sections += 1
        self.overruns += cost > 0 and time.perf_counter() > self._end
        while (left := self._end - time.perf_counter()) > 0:
            time.sleep(left)
