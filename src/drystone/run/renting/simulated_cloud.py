"""A simulated cloud: seeded prices, start delays, stock-outs and reclaims, kept in a file.

What happens to a node is drawn from the seed and its token when it is asked for, and what an offer
costs and whether it is in stock from the seed and the time. So a cloud that is opened again says
what it would have said, and its nodes outlive whoever rented them, as they do elsewhere. Money is
counted by this cloud's own clock, to the millionth of a dollar.
"""

from __future__ import annotations

import json
import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Final

from drystone.describe.market import Offer
from drystone.errors import UnknownName, UnreadableFile
from drystone.run.rentals import MICRO_DOLLARS
from drystone.run.renting.provider import Rental, Stage
from drystone.units import HOUR_SECONDS

_FORMAT: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudConditions:
    """How unkind the cloud is. Shares are of time: stock and price stay for a whole spell."""

    seed: int = 0
    stockout_share: float = 0.0  # of spells in which an offer has none
    price_swing: float = 0.0  # prices are within 1 / (1 + swing) and 1 + swing of the listed ones
    delay_spread: float = 0.0  # a start takes the listed delay times 1 to 1 + spread
    spell_seconds: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """One request, and all that will become of it if nobody gives it back."""

    token: str
    offer: str
    asked_seconds: float
    ready_seconds: float
    is_failed: bool
    reclaim_seconds: float  # since when it is taken back; -1: never
    released_seconds: float = -1.0

    @property
    def end_seconds(self) -> float:
        """When it was or will be over."""
        ends = [end for end in (self.reclaim_seconds, self.released_seconds) if end >= 0]
        return min(ends, default=math.inf)


class SimulatedCloud:
    """Offers, and the nodes that were rented of them. `clock` gives seconds since 1970."""

    def __init__(
        self,
        path: Path,
        offers: Sequence[Offer],
        conditions: CloudConditions | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path, self._clock = path, clock
        self._conditions = conditions or CloudConditions()
        self._offers = {offer.name: offer for offer in offers}
        self._lock = threading.Lock()
        self._opened_seconds, self._made = self._load()
        self._save()  # prices go by when it was opened

    def quote(self) -> dict[str, float]:
        """The prices of now."""
        now = self._clock()
        return {name: self.price(name, now) for name in self._offers}

    def rent(self, token: str, offer: Offer) -> None:
        """Ask for a node."""
        if offer.name not in self._offers:
            raise UnknownName("offer", offer.name, self._offers)
        with self._lock:
            if token not in self._made:
                self._made[token] = self._draw(token, self._offers[offer.name])
                self._save()

    def status(self, fleet: str) -> list[Rental]:
        """Every node that was ever asked for under these tokens."""
        now = self._clock()
        with self._lock:
            made = [request for request in self._made.values() if request.token.startswith(fleet)]
        return [self._rental(request, now) for request in made]

    def release(self, token: str) -> None:
        """Take a node or a request back."""
        with self._lock:
            request = self._made.get(token)
            now = self._clock()
            if request is not None and now < request.end_seconds:
                self._made[token] = replace(request, released_seconds=now)
                self._save()

    def price(self, offer_name: str, at_seconds: float) -> float:
        """Dollars an hour of a node at a time."""
        offer = self._offers[offer_name]
        price = offer.price_dollars_per_hour
        for change in offer.price_changes:
            if at_seconds - self._opened_seconds >= change.at_seconds:
                price = change.price_dollars_per_hour
        swing = math.log1p(self._conditions.price_swing)
        if swing > 0:
            price *= math.exp(self._dice("price", offer_name, at_seconds).uniform(-swing, swing))
        return round(price, 6)

    def billed_micro_dollars(self, token: str) -> int:
        """What a node has cost by now."""
        with self._lock:
            return self._bill(self._made[token], self._clock())

    def _draw(self, token: str, offer: Offer) -> _Request:
        now, conditions = self._clock(), self._conditions
        dice = random.Random(f"{conditions.seed}:node:{token}")
        delay = offer.start_delay_seconds * (1 + dice.uniform(0, conditions.delay_spread))
        here = sum(
            request.offer == offer.name and not request.is_failed and now < request.end_seconds
            for request in self._made.values()
        )
        is_out = self._dice("stock", offer.name, now).random() < conditions.stockout_share
        reclaim = -1.0
        if offer.reclaims_per_hour > 0:
            kept_hours = dice.expovariate(offer.reclaims_per_hour)
            reclaim = now + delay + kept_hours * HOUR_SECONDS
        since_opened = now - self._opened_seconds
        is_out = is_out or offer.is_out_at(since_opened) or offer.is_out_at(since_opened + delay)
        begins = [
            self._opened_seconds + outage.from_seconds
            for outage in offer.outages
            if outage.from_seconds > since_opened + delay
        ]
        if begins:
            reclaim = min(begins[0], reclaim) if reclaim >= 0 else begins[0]
        return _Request(
            token=token,
            offer=offer.name,
            asked_seconds=now,
            ready_seconds=now + delay,
            is_failed=is_out or here >= offer.most_nodes,
            reclaim_seconds=reclaim,
        )

    def _dice(self, what: str, offer: str, at_seconds: float) -> random.Random:
        """What is drawn for an offer in the spell of a time."""
        spell = int((at_seconds - self._opened_seconds) // self._conditions.spell_seconds)
        return random.Random(f"{self._conditions.seed}:{what}:{offer}:{spell}")

    def _rental(self, request: _Request, now: float) -> Rental:
        stage, reason, billed = Stage.RUNNING, "", None
        if request.is_failed:
            stage, reason, billed = Stage.FAILED, f"{request.offer} is out of stock", 0
        elif now >= request.end_seconds:
            stage, billed = Stage.ENDED, self._bill(request, now)
            is_ours = request.released_seconds == request.end_seconds
            reason = "given back" if is_ours else "the provider took the node back"
        elif now < request.ready_seconds:
            stage = Stage.STARTING
        return Rental(
            token=request.token,
            offer=request.offer,
            stage=stage,
            reason=reason,
            price_dollars_per_hour=self.price(request.offer, now),
            since_seconds=request.ready_seconds,
            billed_micro_dollars=billed,
        )

    def _bill(self, request: _Request, now: float) -> int:
        if request.is_failed:
            return 0
        end = min(now, request.end_seconds)
        return sum(
            round(self.price(request.offer, since) * (until - since) / HOUR_SECONDS * MICRO_DOLLARS)
            for since, until in self._spells(request.offer, request.ready_seconds, end)
        )

    def _spells(self, offer: str, since: float, until: float) -> Iterator[tuple[float, float]]:
        """A stretch of time, cut where the price may change."""
        length, opened = self._conditions.spell_seconds, self._opened_seconds
        changes = [opened + change.at_seconds for change in self._offers[offer].price_changes]
        if self._conditions.price_swing > 0 and until > since:
            first, last = int((since - opened) // length), int((until - opened) // length)
            changes += [opened + number * length for number in range(first + 1, last + 1)]
        times = [since, *sorted(change for change in changes if since < change < until), until]
        for start, end in pairwise(times):
            if end > start:
                yield start, end

    def _load(self) -> tuple[float, dict[str, _Request]]:
        try:
            table = json.loads(self._path.read_text(encoding="utf-8"))
            made = {request["token"]: _Request(**request) for request in table["made"]}
            return float(table["opened_seconds"]), made
        except FileNotFoundError:
            return self._clock(), {}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UnreadableFile(
                f"is not a simulated cloud: {error}", where=str(self._path)
            ) from None

    def _save(self) -> None:
        """Whole or not at all, and on the disk before anybody hears of it."""
        made = [asdict(request) for request in self._made.values()]
        table = {"format": _FORMAT, "opened_seconds": self._opened_seconds, "made": made}
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        scratch = self._path.with_name(f".{self._path.name}.part")
        with scratch.open("w", encoding="utf-8") as file:
            json.dump(table, file)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(self._path)
