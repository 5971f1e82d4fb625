"""What is rented, what is on its way, what is idle, and what is to be rented or given back?

A snapshot does not say which nodes are rented, nor what was asked for and has not come yet. Both
are remembered here: a node that becomes usable while nodes of its type are on their way is one of
them; every other node belongs to the owner, and is never given back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from drystone.describe.market import Offer
from drystone.schedule.decision import Release, Rent
from drystone.schedule.packing import Room
from drystone.schedule.snapshot import FloatArray, IntArray, Snapshot

_MOST_DELAYS = 3.0  # what has not come after so many start delays, and an hour, comes no more


@dataclass(frozen=True, slots=True, kw_only=True)
class Rental:
    """What is remembered of rented nodes."""

    usable: frozenset[str] = frozenset()  # nodes of the last look that had GPUs
    rented: Mapping[str, str] = field(default_factory=dict)  # from a node to its offer
    # (offer, when it was asked for), one entry a node, oldest first.
    coming: tuple[tuple[str, float], ...] = ()
    idle_since_seconds: Mapping[str, float] = field(default_factory=dict)


def cheapest_offers(snapshot: Snapshot) -> dict[int, Offer]:
    """By GPU type: the offer with the cheapest GPU that the budget can pay for at all."""
    best: dict[int, Offer] = {}
    for offer in snapshot.offers:
        affordable = offer.price_dollars_per_hour <= snapshot.budget_dollars_per_hour
        if offer.gpu not in snapshot.gpu_types or not affordable or not offer.most_nodes:
            continue
        kind = snapshot.gpu_types.index(offer.gpu)
        if kind not in best or _gpu_price(offer) < _gpu_price(best[kind]):
            best[kind] = offer
    return best


def type_prices(snapshot: Snapshot, offers: Mapping[int, Offer]) -> FloatArray:
    """Dollars an hour of a GPU by type: 0 where there are only own ones, infinite without any."""
    prices = np.where(snapshot.capacity > 0, 0.0, np.inf)
    for kind, offer in offers.items():
        prices[kind] = _gpu_price(offer)
    return prices


def observe_rental(rental: Rental | None, snapshot: Snapshot) -> Rental:
    """Who has come, who has gone, who is idle since when."""
    nodes, now = snapshot.nodes, snapshot.now_seconds
    usable = {nodes.ids[row]: row for row in np.flatnonzero(nodes.num_gpus > 0).tolist()}
    if rental is None:
        return Rental(usable=frozenset(usable))
    by_name = {offer.name: offer for offer in snapshot.offers}
    coming = [
        (name, asked)
        for name, asked in rental.coming
        if name in by_name
        and now - asked <= 3600.0 + _MOST_DELAYS * by_name[name].start_delay_seconds
    ]
    rented = {node: offer for node, offer in rental.rented.items() if node in usable}
    for node, row in usable.items():
        gpu = snapshot.gpu_types[int(nodes.type_index[row])]
        match = next((one for one in coming if by_name[one[0]].gpu == gpu), None)
        if node not in rental.usable and match is not None:
            coming.remove(match)
            rented[node] = match[0]
    idle = {
        node: rental.idle_since_seconds.get(node, now)
        for node in rented
        if nodes.free[usable[node]] == nodes.num_gpus[usable[node]]
    }
    return Rental(
        usable=frozenset(usable), rented=rented, coming=tuple(coming), idle_since_seconds=idle
    )


class Wanted:
    """Nodes that waiting jobs would need beyond those that are here, packed as they would be.

    `most_jobs` is for how many of them nodes may be rented.
    """

    def __init__(
        self, snapshot: Snapshot, rental: Rental, offers: Mapping[int, Offer], most_jobs: float
    ) -> None:
        self._offers, self._jobs_left = offers, most_jobs
        self._free: dict[int, list[int]] = {kind: [] for kind in offers}  # by type, by new node
        # On their way or still to be asked for: how many there may be of each.
        self._limit = {}
        for kind, offer in offers.items():
            here = sum(one == offer.name for one in rental.rented.values())
            of_type = snapshot.nodes.num_gpus[snapshot.nodes.type_index == kind]
            # Larger nodes of the type would make packing ask for whole ones of their size.
            fits = int(of_type.max(initial=0)) <= offer.num_gpus
            self._limit[kind] = offer.most_nodes - here if fits else 0

    def add(self, counts: IntArray) -> bool:
        """Make room for a job on new nodes; False where they cannot be rented."""
        kinds = np.flatnonzero(counts).tolist()
        if self._jobs_left < 1 or any(kind not in self._offers for kind in kinds):
            return False
        plans = {kind: self._pack(kind, int(counts[kind])) for kind in kinds}
        if any(len(free) > self._limit[kind] for kind, free in plans.items()):
            return False
        self._free.update(plans)
        self._jobs_left -= 1
        return True

    def num_nodes(self) -> dict[int, int]:
        """New nodes by type."""
        return {kind: len(free) for kind, free in self._free.items()}

    def _pack(self, kind: int, number: int) -> list[int]:
        size = self._offers[kind].num_gpus
        num_whole, rest = divmod(number, size)
        free = [*self._free[kind], *([0] * num_whole)]
        if rest:
            fitting = [row for row, left in enumerate(free) if left >= rest]
            if fitting:
                free[min(fitting, key=lambda row: free[row])] -= rest
            else:
                free.append(size - rest)
        return free


def rent_and_release(
    snapshot: Snapshot,
    rental: Rental,
    *,
    wanted: Mapping[int, int],
    offers: Mapping[int, Offer],
    room: Room,
) -> tuple[list[Rent | Release], Rental]:
    """Rent what waiting jobs need and is not on its way; give back what has been idle too long."""
    now, budget = snapshot.now_seconds, snapshot.budget_dollars_per_hour
    decisions: list[Rent | Release] = []
    coming = list(rental.coming)
    for kind, offer in sorted(offers.items()):
        on_the_way = sum(name == offer.name for name, _ in coming)
        number = wanted.get(kind, 0) - on_the_way
        price = offer.price_dollars_per_hour
        if price > 0 and math.isfinite(budget):
            number = min(number, int(budget / price))
        if number > 0:
            reason = f"waiting jobs need {wanted[kind]} more nodes, {on_the_way} are on their way"
            numbers = {"price_dollars_per_hour": price}
            decisions.append(
                Rent(offer=offer.name, num_nodes=number, reason=reason, numbers=numbers)
            )
            coming.extend([(offer.name, now)] * number)
    rented = dict(rental.rented)
    by_name = {offer.name: offer for offer in snapshot.offers}
    for row, node in enumerate(snapshot.nodes.ids):
        if node not in rental.idle_since_seconds or room.free[row] < snapshot.nodes.num_gpus[row]:
            continue
        idle = now - rental.idle_since_seconds[node]
        # Only the end of a job is sure to bring another look: without jobs there is no waiting.
        keeps = rented[node] in by_name and len(snapshot.jobs) > 0
        patience = by_name[rented[node]].start_delay_seconds if keeps else 0.0
        if idle >= patience:
            reason = f"idle for {idle:.0f} s, and a new one would take {patience:.0f} s to start"
            decisions.append(Release(node=row, reason=reason, numbers={"idle_seconds": idle}))
            del rented[node]
    after = Rental(
        # What is given back may be rented again, and come back, before the next look.
        usable=rental.usable - (rental.rented.keys() - rented.keys()),
        rented=rented,
        coming=tuple(coming),
        idle_since_seconds={
            node: since for node, since in rental.idle_since_seconds.items() if node in rented
        },
    )
    return decisions, after


def _gpu_price(offer: Offer) -> float:
    return offer.price_dollars_per_hour / offer.num_gpus
