"""Requests to a provider, in a thread of their own: a slow one delays no decision.

The desk says what it wishes, as often as it likes; the thread asks, looks how all rentals stand,
and leaves the news. What was asked since the last look is not asked again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from drystone.describe.market import Offer
from drystone.errors import DrystoneError
from drystone.run.renting.provider import Provider, Rental


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """One look at a provider."""

    number: int
    rentals: Mapping[str, Rental]  # by token
    prices: Mapping[str, float]  # by offer


@dataclass(slots=True)
class _Wish:
    rents: dict[str, Offer] = field(default_factory=dict)
    releases: set[str] = field(default_factory=set)


class Errands:
    """The only one who talks to the provider, once it is started."""

    def __init__(self, provider: Provider, *, family: str, look_seconds: float) -> None:
        self._provider, self._family, self._look_seconds = provider, family, look_seconds
        self._wish, self._done = _Wish(), _Wish()
        self._news: News | None = None
        self._number = 0
        self.trouble = ""  # why the last errand failed; empty: it did not
        self._changed = threading.Condition()
        self._is_leaving = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to look."""
        self._thread = threading.Thread(target=self._run, name="renting", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End; a request that is under way is waited for."""
        with self._changed:
            self._is_leaving = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def order(self, rents: Mapping[str, Offer], releases: Iterable[str]) -> None:
        """What is to be asked for and given back, all of it; what is not named any more is not."""
        with self._changed:
            self._wish = _Wish(dict(rents), set(releases))
            if self._next() is not None:
                self._changed.notify_all()

    def news(self) -> News | None:
        """The last look; None before the first."""
        with self._changed:
            return self._news

    def look(self) -> News:
        """See how everything stands; raises what the provider raises."""
        self._number += 1
        rentals = {one.token: one for one in self._provider.status(self._family)}
        news = News(number=self._number, rentals=rentals, prices=dict(self._provider.quote()))
        with self._changed:
            self._news, self._done = news, _Wish()
        return news

    def _next(self) -> tuple[str, Offer | None] | None:
        """A token to be rented with its offer, or to be released; whoever calls holds the lock."""
        for token in self._wish.releases - self._done.releases:
            return token, None
        for token, offer in self._wish.rents.items():
            if token not in self._done.rents:
                return token, offer
        return None

    def _run(self) -> None:
        while not self._is_leaving:
            try:
                self._run_errands()
                self.look()
                self.trouble = ""
            except DrystoneError as error:
                self.trouble = str(error)
            except Exception as error:  # a fault of a provider's library must not end the looking
                self.trouble = f"{type(error).__name__}: {error}"
            with self._changed:
                if not self._is_leaving and (self.trouble or self._next() is None):
                    self._changed.wait(self._look_seconds)

    def _run_errands(self) -> None:
        while True:
            with self._changed:
                errand = None if self._is_leaving else self._next()
            if errand is None:
                return
            token, offer = errand
            if offer is None:
                self._provider.release(token)
                self._done.releases.add(token)
            else:
                self._provider.rent(token, offer)
                self._done.rents[token] = offer
