"""Which nodes are rented, which are on their way, and what has been paid? Folded from events.

A node is billed from the moment it joins until it leaves (released or taken back), for just that
time at the price of its offer; a new price holds from its second on, for nodes that are rented
already too. Asking costs nothing, and neither does a node that never comes. Every line of a bill is
in whole millionths of a dollar, so that the nodes' bills add up to the total, in any order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from drystone.errors import DrystoneError
from drystone.run.events import NodeJoined, PriceChanged, RentalAsked, RentalFailed
from drystone.units import HOUR_SECONDS

_MICRO_DOLLARS = 1_000_000


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
            self.price_dollars_per_hour * hours * _MICRO_DOLLARS
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """What one node cost from joining to leaving."""

    rental: int
    offer: str
    since_seconds: float
    until_seconds: float
    micro_dollars: int


@dataclass(slots=True)
class RentalState:
    """The rented nodes by row, those on their way by number, and the bills."""

    rented: dict[int, RentedNode] = field(default_factory=dict)
    asked: dict[int, AskedNode] = field(default_factory=dict)
    prices: dict[str, float] = field(default_factory=dict)  # of offers whose price has changed
    bills: list[Bill] = field(default_factory=list)
    num_asked: int = 0
    _paid_micro_dollars: int = 0

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
        self.num_asked += event.num_nodes

    def fail(self, event: RentalFailed) -> None:
        """A node will not come."""
        self._take_asked(event.rental)

    def join(self, event: NodeJoined) -> None:
        """A node is here, and is paid for from now on."""
        self._take_asked(event.rental)
        self.rented[event.node] = RentedNode(
            offer=event.offer,
            rental=event.rental,
            since_seconds=event.time_seconds,
            price_dollars_per_hour=event.price_dollars_per_hour,
            priced_seconds=event.time_seconds,
        )

    def leave(self, node: int, time_seconds: float) -> None:
        """A node is gone, and its bill is closed."""
        if node not in self.rented:
            raise DrystoneError(f"node {node} is given back, and is not rented")
        one = self.rented.pop(node)
        bill = Bill(
            rental=one.rental,
            offer=one.offer,
            since_seconds=one.since_seconds,
            until_seconds=time_seconds,
            micro_dollars=one.bill_micro_dollars(time_seconds),
        )
        self.bills.append(bill)
        self._paid_micro_dollars += bill.micro_dollars

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
        return (self._paid_micro_dollars + running) / _MICRO_DOLLARS

    def dollars_per_hour(self) -> float:
        """What the rented nodes cost now."""
        return sum(one.price_dollars_per_hour for one in self.rented.values())

    def _take_asked(self, rental: int) -> None:
        if rental not in self.asked:
            raise DrystoneError(f"rental {rental} comes or fails, and is not on its way")
        del self.asked[rental]
