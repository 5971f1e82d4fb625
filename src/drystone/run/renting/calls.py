"""Calls to a provider of rented nodes: in threads of their own, paced, each for itself.

A slow call delays no decision, and one that fails delays no other: it is tried again later, each
time after a longer wait. A rental that is missing from one listing is not gone: listings lag. It is
kept as it was last seen for a few looks, and then asked for by its own token.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from drystone.describe.market import Offer
from drystone.run.engines.agents_on_nodes import ClusterWatch
from drystone.run.renting.provider import OVER, Provider, ProviderStatus, Rental

_MAX_CALLS: Final = 4  # at the same time
_MAX_WAIT_SECONDS: Final = 60.0
# A rental that so many looks, and for so long, do not show is asked for by itself.
_MIN_MISSES: Final = 3
_MISSING_SECONDS: Final = 10.0
_RENT: Final = "rent "
_RELEASE: Final = "release "


@dataclass(slots=True)
class _Call:
    """One thing that is asked of the provider, perhaps several times."""

    is_running: bool = True
    ended_at: float = 0.0  # by the monotonic clock
    num_failures: int = 0  # in a row
    error: str = ""


class ProviderCalls(ClusterWatch[ProviderStatus]):
    """What is wanted of a provider, and what it showed last.

    What is wanted may be said as often as one likes: what was requested since the last look is not
    requested again.
    """

    def __init__(self, provider: Provider, *, family: str, look_seconds: float) -> None:
        self._provider, self._family = provider, family
        self._wanted: frozenset[str] = frozenset()
        self._made: dict[str, _Call] = {}  # by what is asked
        self._misses: dict[str, tuple[int, float]] = {}  # by token: looks in a row, since when
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(_MAX_CALLS, thread_name_prefix="provider")
        self._pace_seconds = min(1.0, look_seconds / 5)  # between two looks, and two tries
        self._looked = -self._pace_seconds
        super().__init__(
            "Provider",
            self._status,
            ProviderStatus(),
            look_seconds=look_seconds,
            retry_seconds=look_seconds,
            passing=Exception,
        )

    @property
    def call_trouble(self) -> str:
        """Which calls fail, and why; empty where none does."""
        with self._lock:
            failing = {tag: call.error for tag, call in self._made.items() if call.error}
        return "; ".join(f"{tag}: {error}" for tag, error in list(failing.items())[:3])

    @property
    def requested(self) -> frozenset[str]:
        """Tokens that were asked for: whatever the answer was, they might exist."""
        with self._lock:
            return frozenset(tag.removeprefix(_RENT) for tag in self._made if tag.startswith(_RENT))

    def want(self, rents: Mapping[str, Offer], releases: Iterable[str]) -> None:
        """Everything that is to be rented and given back; what is not named any more is not."""
        calls: dict[str, Callable[[], None]] = {
            _RELEASE + token: partial(self._provider.release, token) for token in releases
        }
        for token, offer in rents.items():
            calls[_RENT + token] = partial(self._provider.rent, token, offer)
        self._wanted = frozenset(calls)
        with self._lock:
            for tag, made in list(self._made.items()):
                if tag not in calls and not made.is_running:
                    del self._made[tag]
            due = [tag for tag in calls if self._is_due(self._made.get(tag))]
            for tag in due:
                self._made.setdefault(tag, _Call()).is_running = True
        for tag in due:
            self._pool.submit(self._call, tag, calls[tag])

    def stop(self) -> None:
        """End; calls that are under way are waited for."""
        self._wanted = frozenset()
        self._pool.shutdown(cancel_futures=True)
        self.close(wait_seconds=None)

    def expect(self, rentals: Iterable[Rental]) -> None:
        """These were there when somebody looked last: one list without them proves nothing."""
        self.view = replace(self.view, rentals={rental.token: rental for rental in rentals})

    def find(self, token: str) -> Rental | None:
        """Ask for one rental by itself."""
        found = [rental for rental in self._provider.status(token) if rental.token == token]
        return found[0] if found else None

    def _is_due(self, call: _Call | None) -> bool:
        if call is None:
            return True
        passed = time.monotonic() - call.ended_at
        if call.is_running or passed < self._pace_seconds:
            return False
        if call.num_failures:
            wait = self._look_seconds * 2.0 ** min(call.num_failures - 1, 10)
            return passed >= min(wait, _MAX_WAIT_SECONDS)
        return self.view.asked > call.ended_at  # a look since then does not show it

    def _call(self, tag: str, action: Callable[[], None]) -> None:
        error = ""
        try:
            if tag in self._wanted:
                action()
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}".splitlines()[0][:200]
        with self._lock:
            made = self._made[tag]
            if error and error != made.error:
                self._log.warning("%s: %s", tag, error)
            made.is_running, made.ended_at, made.error = False, time.monotonic(), error
            made.num_failures = made.num_failures + 1 if error else 0
            ended_at = made.ended_at
        self.look_soon(ended_at)

    def _status(self, asked: float) -> ProviderStatus:
        self._closing.wait(max(0.0, self._looked + self._pace_seconds - asked))
        asked = self._looked = time.monotonic()
        rentals = {rental.token: rental for rental in self._provider.status(self._family)}
        for token in self._misses.keys() & rentals.keys():
            del self._misses[token]
        for token, known in self.view.rentals.items():
            if token not in rentals and known.stage not in OVER:
                found = self._missing(token, known, asked)
                if found is not None:
                    rentals[token] = found
        return ProviderStatus(asked=asked, rentals=rentals, prices=dict(self._provider.quote()))

    def _missing(self, token: str, known: Rental, now: float) -> Rental | None:
        """A rental that the listing does not have: as it was, until it is surely gone."""
        number, since = self._misses.get(token, (0, now))
        self._misses[token] = number + 1, since
        if number + 1 < _MIN_MISSES or now - since < _MISSING_SECONDS:
            return known
        del self._misses[token]
        return self.find(token)
