"""The hard cap on rent: what an option needs at least, and which options are above the cap.

Whole nodes are rented, so an option costs what its nodes cost, however few of their GPUs it uses.
GPUs of the owner's come first and cost nothing here. Of each GPU type the offer with the cheapest
GPU counts, as policies rent it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from drystone.describe.market import Offer
from drystone.schedule.snapshot import BoolArray, FloatArray, IntArray, OptionSet, Snapshot
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
    least, cap = float(rents[able].min()), hard_cap_dollars_per_hour
    return above, (
        f"the cheapest nodes that suffice cost {format_dollars(least)} an hour, "
        f"and the hard cap is {format_dollars(cap)} an hour"
    )


def gpu_price(offer: Offer) -> float:
    """Dollars an hour of a GPU."""
    return offer.price_dollars_per_hour / offer.num_gpus


def _rank(offer: Offer) -> tuple[bool, float]:
    return offer.is_short, gpu_price(offer)
