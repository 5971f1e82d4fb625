"""Rentals: nodes that are rented or on their way, and what was paid, folded from events.

A node is billed from the moment it joins until it leaves (released or taken back), for just that
time at the price of its offer; a new price holds from its second on, for nodes that are rented
already too. Asking costs nothing, and neither does a node that never comes. Every line of a bill is
in whole millionths of a dollar, so that the nodes' bills add up to the total, in any order. Where a
provider says in the end what it billed (`BillSettled`), that is what the node cost.

An offer that was out of stock is remembered as short: every failure adds 1 to its shortage, which
halves every `SHORTAGE_HALF_LIFE_SECONDS`; above `SHORT` nothing more is asked of it. One failure
is forgotten after one half-life, eight at once after four; a node that comes ends it at once.

How long nodes of an offer were kept, how often they were taken back, and how long there were none
is counted for policies that choose between spot and on-demand nodes (`histories`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from drystone.errors import DrystoneError
from drystone.run.events import BillSettled, NodeJoined, PriceChanged, RentalAsked, RentalFailed
from drystone.schedule.budget.spot import PlaceHistory
from drystone.units import HOUR_SECONDS

MICRO_DOLLARS: Final = 1_000_000
# Assumptions: spot and on-demand shortages last for minutes to hours, and asking again is cheap.
SHORTAGE_HALF_LIFE_SECONDS: Final = 300.0
SHORT: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedNode:
    """A node that was asked for and is not here yet."""

    offer: str
    asked_seconds: float
    ready_seconds: float


@dataclass(slots=True, kw_only=True)
class RentedNode:
    """A node that is paid for, and its bill so far."""

    offer: str
    rental: int
    since_seconds: float
    price_dollars_per_hour: float
    priced_seconds: float  # from when on it has this price
    billed_micro_dollars: int = 0  # for the time before that

    def bill_micro_dollars(self, now_seconds: float) -> int:
        """What the node has cost by now."""
        hours = max(now_seconds - self.priced_seconds, 0.0) / HOUR_SECONDS
        return self.billed_micro_dollars + round(
            self.price_dollars_per_hour * hours * MICRO_DOLLARS
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """What one node cost from joining to leaving."""

    rental: int
    offer: str
    since_seconds: float
    until_seconds: float
    micro_dollars: int  # by our clock; what was settled since is in `RentalState.settled`


@dataclass(frozen=True, slots=True)
class Shortage:
    """How often an offer failed of late."""

    failures: float  # at `time_seconds`; they count for half after every half-life
    time_seconds: float

    def at(self, now_seconds: float) -> float:
        """What is left of it now."""
        half_lives = max(now_seconds - self.time_seconds, 0.0) / SHORTAGE_HALF_LIFE_SECONDS
        return float(self.failures * 0.5**half_lives)

    @property
    def ends_seconds(self) -> float:
        """When it may be asked again."""
        half_lives = math.log2(self.failures / SHORT)
        return self.time_seconds + SHORTAGE_HALF_LIFE_SECONDS * half_lives


@dataclass(slots=True)
class _Seen:
    """What was seen of an offer's nodes by now."""

    node_seconds: float = 0.0  # of nodes that are gone
    num_losses: int = 0
    out_seconds: float = 0.0  # between signs that there are none
    last_out_seconds: float = math.nan  # the last such sign, with no node since

    def lack(self, now_seconds: float) -> None:
        """There is none now: one was refused, or taken back."""
        if not math.isnan(self.last_out_seconds):
            self.out_seconds += now_seconds - self.last_out_seconds
        self.last_out_seconds = now_seconds


@dataclass(slots=True)
class RentalState:
    """The rented nodes by row, those on their way by number, and the bills."""

    rented: dict[int, RentedNode] = field(default_factory=dict)
    asked: dict[int, AskedNode] = field(default_factory=dict)
    prices: dict[str, float] = field(default_factory=dict)  # of offers whose price has changed
    bills: list[Bill] = field(default_factory=list)
    settled: dict[int, int] = field(default_factory=dict)  # by rental: the provider's own bill
    shortages: dict[str, Shortage] = field(default_factory=dict)  # by offer
    offers: list[str] = field(default_factory=list)  # by rental
    _seen: dict[str, _Seen] = field(default_factory=dict)  # by offer
    _paid_micro_dollars: int = 0
    _billed: dict[int, int] = field(default_factory=dict)  # by rental that is over

    @property
    def num_asked(self) -> int:
        """Nodes that were ever asked for."""
        return len(self.offers)

    def ask(self, event: RentalAsked) -> None:
        """Nodes are on their way."""
        if event.first_rental != self.num_asked:
            raise DrystoneError(
                f"rental {event.first_rental} is asked for, {self.num_asked} were before"
            )
        one = AskedNode(
            offer=event.offer,
            asked_seconds=event.time_seconds,
            ready_seconds=event.ready_seconds,
        )
        for rental in range(event.first_rental, event.first_rental + event.num_nodes):
            self.asked[rental] = one
            self.offers.append(event.offer)

    def fail(self, event: RentalFailed) -> None:
        """A node will not come, and its offer is short."""
        self._take_asked(event.rental)
        before = self.shortages.get(event.offer, Shortage(0.0, event.time_seconds))
        failures = before.at(event.time_seconds) + 1.0
        self.shortages[event.offer] = Shortage(failures, event.time_seconds)
        self._seen.setdefault(event.offer, _Seen()).lack(event.time_seconds)

    def join(self, event: NodeJoined) -> None:
        """A node is here, and is paid for from now on, or since the provider says so."""
        self._take_asked(event.rental)
        self.shortages.pop(event.offer, None)
        self._seen.setdefault(event.offer, _Seen()).last_out_seconds = math.nan
        since = event.billed_since_seconds or event.time_seconds
        self.rented[event.node] = RentedNode(
            offer=event.offer,
            rental=event.rental,
            since_seconds=since,
            price_dollars_per_hour=event.price_dollars_per_hour,
            priced_seconds=since,
        )

    def leave(self, node: int, time_seconds: float, *, is_reclaimed: bool = False) -> None:
        """A node is gone, and its bill is closed."""
        self.check_rented(node)
        one = self.rented.pop(node)
        seen = self._seen.setdefault(one.offer, _Seen())
        seen.node_seconds += max(time_seconds - one.since_seconds, 0.0)
        if is_reclaimed:
            seen.num_losses += 1
            seen.lack(time_seconds)
        bill = Bill(
            rental=one.rental,
            offer=one.offer,
            since_seconds=one.since_seconds,
            until_seconds=time_seconds,
            micro_dollars=one.bill_micro_dollars(time_seconds),
        )
        self.bills.append(bill)
        self._billed[bill.rental] = bill.micro_dollars
        self._paid_micro_dollars += bill.micro_dollars

    def settle(self, event: BillSettled) -> int:
        """What the provider billed is what was paid; by how much that differs, in millionths."""
        if event.rental in self.settled or event.rental in self.asked:
            raise DrystoneError(f"rental {event.rental} is settled twice, or before it is over")
        difference = event.micro_dollars - self._billed.get(event.rental, 0)
        self.settled[event.rental] = event.micro_dollars
        self._paid_micro_dollars += difference
        return difference

    def check_rented(self, node: int) -> None:
        """Raise unless a node is rented."""
        if node not in self.rented:
            raise DrystoneError(f"node {node} is given back, and is not rented")

    def is_short(self, offer: str, now_seconds: float) -> bool:
        """Whether an offer was out of stock of late, so that others should be asked."""
        shortage = self.shortages.get(offer)
        return shortage is not None and shortage.at(now_seconds) > SHORT * (1 + 1e-9)

    def histories(self, now_seconds: float) -> dict[str, PlaceHistory]:
        """By offer: how long its nodes were kept, and how often they were lost."""
        held = dict.fromkeys(self._seen, 0.0)
        for one in self.rented.values():
            held[one.offer] += max(now_seconds - one.since_seconds, 0.0)
        found: dict[str, PlaceHistory] = {}
        for offer, seen in self._seen.items():
            kept_hours = (seen.node_seconds + held[offer]) / HOUR_SECONDS
            found[offer] = PlaceHistory(
                watched_hours=kept_hours + seen.out_seconds / HOUR_SECONDS,
                available_hours=kept_hours,
                num_losses=seen.num_losses,
            )
        return found

    def move_rows(self, rows: Mapping[int, int]) -> None:
        """The rented nodes have other rows: by old row, the new one."""
        self.rented = {rows[row]: one for row, one in self.rented.items()}

    def reprice(self, event: PriceChanged) -> None:
        """An offer has another price, and so have its nodes."""
        self.prices[event.offer] = event.price_dollars_per_hour
        for one in self.rented.values():
            if one.offer == event.offer:
                one.billed_micro_dollars = one.bill_micro_dollars(event.time_seconds)
                one.priced_seconds = event.time_seconds
                one.price_dollars_per_hour = event.price_dollars_per_hour

    def spent_dollars(self, now_seconds: float) -> float:
        """All that was paid by now."""
        running = sum(one.bill_micro_dollars(now_seconds) for one in self.rented.values())
        return (self._paid_micro_dollars + running) / MICRO_DOLLARS

    def dollars_per_hour(self) -> float:
        """What the rented nodes cost now."""
        return sum(one.price_dollars_per_hour for one in self.rented.values())

    def _take_asked(self, rental: int) -> None:
        if rental not in self.asked:
            raise DrystoneError(f"rental {rental} comes or fails, and is not on its way")
        del self.asked[rental]
