"""What does the provider do? Rented nodes join, fail to come, and are taken back; prices change."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from drystone.describe.market import Offer
from drystone.errors import DrystoneError, UnknownName
from drystone.run.events import (
    NodeJoined,
    NodeReclaimed,
    NodeReleased,
    PriceChanged,
    RentalAsked,
    RentalFailed,
)
from drystone.run.simulate.clock import VirtualTime
from drystone.run.simulate.faults import Dice
from drystone.run.simulate.jobs import JobRuns


class SimulatedMarket:
    """The offers of one simulated run, and the nodes that were rented of them."""

    def __init__(
        self, time: VirtualTime, dice: Dice, runs: JobRuns, offers: Sequence[Offer]
    ) -> None:
        self._time, self._dice, self._runs = time, dice, runs
        self._offers = {offer.name: offer for offer in offers}
        # Rows of nodes that are gone, by offer: the next node of the offer takes the lowest.
        self._rows: dict[str, list[int]] = {name: [] for name in self._offers}
        self.num_changes_to_come = 0
        for offer in offers:
            for change in offer.price_changes:
                self.num_changes_to_come += 1
                time.later(
                    change.at_seconds,
                    self._change_listed_price,
                    offer.name,
                    change.price_dollars_per_hour,
                )
            for outage in offer.outages:
                self.num_changes_to_come += 1
                time.later(outage.from_seconds, self._begin_outage, offer.name)
        self._plan_price_fault(0.0)

    def ask(self, offer_name: str, num_nodes: int, reason: str) -> None:
        """Nodes join after the start delay, unless there is none left."""
        if offer_name not in self._offers:
            raise UnknownName("offer", offer_name, self._offers)
        now, first = self._time.now_seconds, self._time.state.rentals.num_asked
        ready_seconds = now + self._offers[offer_name].start_delay_seconds
        self._time.record(
            RentalAsked(
                time_seconds=now,
                offer=offer_name,
                num_nodes=num_nodes,
                first_rental=first,
                ready_seconds=ready_seconds,
                reason=reason,
            )
        )
        for rental in range(first, first + num_nodes):
            is_out = self._dice.is_out_of_stock() or self._is_out(offer_name, now)
            # Of what there is none is known at once; what is drawn is known when it should come.
            action = self._fail if is_out else self._join
            at_seconds = now if self._is_out(offer_name, now) else ready_seconds
            self._time.later(at_seconds, action, rental, offer_name)

    def release(self, node: int, reason: str) -> None:
        """A rented node is given back."""
        now = self._time.now_seconds
        rented = self._time.state.rentals.rented.get(node)
        if rented is None:
            raise DrystoneError(f"node {node} cannot be given back: it is not rented")
        self._time.record(NodeReleased(time_seconds=now, node=node, reason=reason))
        heapq.heappush(self._rows[rented.offer], node)

    def _is_out(self, offer_name: str, now_seconds: float) -> bool:
        return self._offers[offer_name].is_out_at(now_seconds)

    def _begin_outage(self, time_seconds: float, offer_name: str) -> None:
        """An offer takes back all its nodes."""
        self.num_changes_to_come -= 1
        rented = self._time.state.rentals.rented
        for node in [row for row, one in rented.items() if one.offer == offer_name]:
            self._reclaim(time_seconds, node, rented[node].rental)

    def _join(self, time_seconds: float, rental: int, offer_name: str) -> None:
        if self._is_out(offer_name, time_seconds):
            self._fail(time_seconds, rental, offer_name)
            return
        offer, state = self._offers[offer_name], self._time.state
        rows = self._rows[offer_name]
        node = heapq.heappop(rows) if rows else len(state.nodes)
        price = state.rentals.prices.get(offer_name, offer.price_dollars_per_hour)
        self._time.record(
            NodeJoined(
                time_seconds=time_seconds,
                node=node,
                rental=rental,
                offer=offer_name,
                spec=offer.node(f"rented-{offer_name}-{rental:04d}"),
                price_dollars_per_hour=price,
            )
        )
        if offer.reclaims_per_hour > 0:
            kept_seconds = self._dice.market_seconds_until(offer.reclaims_per_hour)
            self._time.later(time_seconds + kept_seconds, self._reclaim, node, rental)

    def _fail(self, time_seconds: float, rental: int, offer_name: str) -> None:
        self._time.record(
            RentalFailed(
                time_seconds=time_seconds,
                rental=rental,
                offer=offer_name,
                reason="the provider has none left",
            )
        )
        # Nobody asks it again until it is forgotten that it was short: then is time to decide.
        ends_seconds = self._time.state.rentals.shortages[offer_name].ends_seconds
        self.num_changes_to_come += 1
        self._time.later(ends_seconds, self._forget_shortage)

    def _forget_shortage(self, _: float) -> None:
        self.num_changes_to_come -= 1

    def _reclaim(self, time_seconds: float, node: int, rental: int) -> None:
        rented = self._time.state.rentals.rented.get(node)
        if rented is None or rented.rental != rental:
            return
        reason = "the provider took the node back"
        self._runs.interrupt_on(node, time_seconds, reason)
        self._time.record(NodeReclaimed(time_seconds=time_seconds, node=node, reason=reason))
        heapq.heappush(self._rows[rented.offer], node)

    def _change_listed_price(self, time_seconds: float, offer_name: str, price: float) -> None:
        self.num_changes_to_come -= 1
        self._time.record(
            PriceChanged(time_seconds=time_seconds, offer=offer_name, price_dollars_per_hour=price)
        )

    def _plan_price_fault(self, now_seconds: float) -> None:
        per_hour = self._dice.spec.price_changes_per_hour
        if per_hour > 0 and self._offers:
            then = now_seconds + self._dice.market_seconds_until(per_hour)
            self._time.later(then, self._change_drawn_price)

    def _change_drawn_price(self, time_seconds: float) -> None:
        """Some offer's price is another, around what the market file says."""
        names = list(self._offers)
        offer = self._offers[names[self._dice.pick_offer(len(names))]]
        price = offer.price_dollars_per_hour * self._dice.price_factor()
        self._time.record(
            PriceChanged(time_seconds=time_seconds, offer=offer.name, price_dollars_per_hour=price)
        )
        self._plan_price_fault(time_seconds)
