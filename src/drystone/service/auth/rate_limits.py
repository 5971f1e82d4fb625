"""How much may one caller ask? A bucket of requests each, filled at a steady rate."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from drystone.service.answers import TooMany

_MOST_BUCKETS: Final = 10_000  # the one that was used longest ago goes first


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one process reads and answers."""

    requests_per_second: float = 50.0  # by token
    burst: float = 200.0
    unknown_per_second: float = 2.0  # by address, of requests that nobody vouches for
    unknown_burst: float = 40.0
    most_body_bytes: int = 1 << 20
    most_file_bytes: int = 64 << 20
    most_bundle_bytes: int = 256 << 20
    most_bundle_files: int = 500
    most_streams: int = 512


class Buckets:
    """Buckets by name."""

    def __init__(
        self, per_second: float, burst: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_second, self._burst, self._clock = per_second, burst, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # level, when

    def take(self, name: str, *, message: str = "too many requests") -> None:
        """One request; `TooMany` when the bucket is empty."""
        now = self._clock()
        level, at = self._buckets.pop(name, (self._burst, now))
        level = min(self._burst, level + (now - at) * self._per_second)
        if level < 1.0:
            self._buckets[name] = (level, now)
            raise TooMany(message, retry_seconds=(1.0 - level) / self._per_second)
        self._buckets[name] = (level - 1.0, now)
        if len(self._buckets) > _MOST_BUCKETS:
            self._buckets.popitem(last=False)
