"""Renting: the cheapest offer of each GPU type, nodes here and on their way, and the hard cap.

Whole nodes are rented, so an option costs what its nodes cost, however few of their GPUs it uses.
GPUs of the owner's come first and cost nothing here. Of each GPU type the offer with the cheapest
GPU counts. How many nodes are wanted is each policy's own question (`budget`, `prices`,
`baselines/pollux/autoscale.py`); whatever they want, `rents_under_cap` cuts it to the hard cap.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from drystone.describe.market import Offer
from drystone.describe.option import OptionSet
from drystone.schedule.decision import Rent
from drystone.schedule.packing import Room
from drystone.schedule.snapshot import BoolArray, FloatArray, IntArray, Snapshot
from drystone.units import format_dollars

_ROUNDING: Final = 5e-10  # share by which sums of prices may be off: half of what is checked for


def rounded_cap(hard_cap_dollars_per_hour: float) -> float:
    """The hard cap with what sums of prices may be off by rounding."""
    return hard_cap_dollars_per_hour * (1 + _ROUNDING)


def cheapest_offers(
    offers: Sequence[Offer], gpu_types: Sequence[str], max_dollars_per_hour: float
) -> dict[int, Offer]:
    """By GPU type: the offer with the cheapest GPU among nodes of at most this price.

    An offer that is in stock comes before any that is not.
    """
    best: dict[int, Offer] = {}
    for offer in offers:
        is_affordable = offer.price_dollars_per_hour <= max_dollars_per_hour
        if offer.gpu not in gpu_types or not is_affordable or not offer.most_nodes:
            continue
        kind = gpu_types.index(offer.gpu)
        if kind not in best or _rank(offer) < _rank(best[kind]):
            best[kind] = offer
    return best


def num_here(snapshot: Snapshot, offer: Offer) -> int:
    """Rented nodes of an offer that are here."""
    return int((snapshot.rentals.offer == snapshot.offers.index(offer)).sum())


def num_coming(snapshot: Snapshot, offer: Offer) -> int:
    """Nodes like those of an offer that are on their way, whatever offer they are of."""
    offers, kind = snapshot.offers, (offer.gpu, offer.num_gpus)
    return sum(
        nodes.num_nodes
        for nodes in snapshot.rentals.coming
        if (offers[nodes.offer].gpu, offers[nodes.offer].num_gpus) == kind
    )


def rented_dollars(snapshot: Snapshot, row: int) -> float:
    """Dollars an hour of a rented node, at the price of now."""
    return snapshot.offers[int(snapshot.node_offer[row])].price_dollars_per_hour


def idle_rentals(snapshot: Snapshot, room: Room) -> dict[int, list[int]]:
    """Rented nodes that nobody uses, by GPU type."""
    idle: dict[int, list[int]] = {}
    for row in snapshot.rentals.nodes.tolist():
        if room.free[row] >= snapshot.nodes.num_gpus[row]:
            idle.setdefault(int(snapshot.nodes.type_index[row]), []).append(row)
    return idle


def rents_under_cap(wanted: Iterable[tuple[Offer, Rent]], cap_left: float) -> list[Rent]:
    """The rents that are wanted, of each as many nodes as so many dollars an hour pay for."""
    found: list[Rent] = []
    for offer, rent in wanted:
        price, number = offer.price_dollars_per_hour, rent.num_nodes
        if price > 0 and math.isfinite(cap_left):
            number = min(number, int(max(cap_left, 0.0) / price))
        if number > 0:
            cap_left -= number * price
            found.append(replace(rent, num_nodes=number))
    return found


def own_gpus(snapshot: Snapshot) -> IntArray:
    """Usable GPUs by type on nodes that are not rented."""
    own, rows = snapshot.capacity.copy(), snapshot.rentals.nodes
    np.subtract.at(own, snapshot.nodes.type_index[rows], snapshot.nodes.num_gpus[rows])
    return own


def option_rents(counts: IntArray, own: IntArray, offers: Mapping[int, Offer]) -> FloatArray:
    """Dollars an hour of the nodes that options need beyond the owner's GPUs.

    The last axis of `counts` is GPU types; infinite where a type cannot be rented.
    """
    lacking = np.maximum(counts - own, 0)
    dollars = np.zeros(counts.shape[:-1])
    for kind in range(len(own)):
        offer = offers.get(kind)
        if offer is None:
            dollars[lacking[..., kind] > 0] = np.inf
        else:
            num_nodes = np.ceil(lacking[..., kind] / offer.num_gpus)
            dollars += num_nodes * offer.price_dollars_per_hour
    return dollars


def options_above_cap(
    options: OptionSet,
    own: IntArray,
    offers: Sequence[Offer],
    gpu_types: Sequence[str],
    hard_cap_dollars_per_hour: float,
) -> tuple[BoolArray, str]:
    """Which options need nodes that cost more than the hard cap; if all do, that in words.

    An option of a type that nobody offers is not above the cap: the owner's nodes may come back.
    """
    usual = cheapest_offers(offers, gpu_types, np.inf)
    rents = option_rents(
        options.counts,
        own,
        # Below the cap the offers that policies would rent, and above it the best there are.
        usual | cheapest_offers(offers, gpu_types, hard_cap_dollars_per_hour),
    )
    above: BoolArray = np.isfinite(rents) & (rents > rounded_cap(hard_cap_dollars_per_hour))
    able = options.samples_per_second > 0
    if not able.any() or not above[able].all():
        return above, ""
    return above, (
        f"the cheapest nodes that suffice cost {format_dollars(float(rents[able].min()))} an hour, "
        f"and the hard cap is {format_dollars(hard_cap_dollars_per_hour)} an hour"
    )


def gpu_price(offer: Offer) -> float:
    """Dollars an hour of a GPU."""
    return offer.price_dollars_per_hour / offer.num_gpus


def _rank(offer: Offer) -> tuple[bool, float]:
    return offer.is_short, gpu_price(offer)
