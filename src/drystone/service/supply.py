"""What a job could get where: GPUs that are free, on their way, to be rented, or taken."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from drystone.run.control.controller import Controller
from drystone.schedule.renting import cheapest_offers, gpu_price
from drystone.service.shapes import Counts

FREE: Final = "free"
COMING: Final = "on its way"
TO_RENT: Final = "to rent"
TAKEN: Final = "taken"


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """GPUs by type, and what one costs an hour."""

    free: Counts
    coming: Mapping[str, int]  # on their way
    rentable: Mapping[str, float]  # beyond those
    prices: Mapping[str, float]  # of the owner's and of rented nodes; else of the cheapest offer

    @classmethod
    def of(cls, controller: Controller, free: Counts) -> Supply:
        """As things are now; whoever calls holds the journal's lock."""
        journal, renting = controller.journal, controller.journal.renting
        prices = dict(controller.cluster.dollars_per_gpu_hour)
        coming, rentable = dict[str, int](), dict[str, float]()
        if renting is not None:
            rentals, offers = journal.live.state.rentals, journal.offers()
            by_name = {offer.name: offer for offer in offers}
            for asked in rentals.asked.values():
                offer = by_name.get(asked.offer)
                if offer is not None:
                    coming[offer.gpu] = coming.get(offer.gpu, 0) + offer.num_gpus
            held = [asked.offer for asked in rentals.asked.values()]
            held += [rented.offer for rented in rentals.rented.values()]
            for offer in offers:
                left = max(offer.most_nodes - held.count(offer.name), 0) * offer.num_gpus
                rentable[offer.gpu] = rentable.get(offer.gpu, 0) + left
            cap = renting.hard_cap_dollars_per_hour
            for kind, offer in cheapest_offers(offers, journal.gpu_types, cap).items():
                prices.setdefault(journal.gpu_types[kind], gpu_price(offer))
        return cls(free=free, coming=coming, rentable=rentable, prices=prices)

    def where(self, counts: Sequence[tuple[str, int]]) -> str:
        """Where so many GPUs of each type would come from."""
        lacking = {gpu: count - self.free[gpu] for gpu, count in counts}
        if all(number <= 0 for number in lacking.values()):
            return FREE
        lacking = {gpu: number - self.coming.get(gpu, 0) for gpu, number in lacking.items()}
        if all(number <= 0 for number in lacking.values()):
            return COMING
        if all(number <= self.rentable.get(gpu, 0) for gpu, number in lacking.items()):
            return TO_RENT
        return TAKEN

    def dollars_per_hour(self, counts: Sequence[tuple[str, int]]) -> float:
        """What a job pays for so many; nan where a type has no price."""
        return sum(count * self.prices.get(gpu, math.nan) for gpu, count in counts)
