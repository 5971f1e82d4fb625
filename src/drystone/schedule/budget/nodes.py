"""Nodes to rent and to give back for the policy `budget`.

A node is rented when a job is to run on it, and given back at the first decision at which nobody
uses it or waits for the rest of its nodes: they come one by one, and the first ones are not idle.
Idle nodes are kept for jobs to come only with money that is left (`spares.py`).

Under a hard cap nodes are rented for a job only if all that it lacks can be: part of a job's nodes
would be paid for and never used. Idle nodes of other types make way for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from drystone.describe.market import Offer
from drystone.schedule.decision import Release, Rent
from drystone.schedule.packing import Room
from drystone.schedule.renting import (
    gpu_price,
    idle_rentals,
    num_coming,
    num_here,
    rented_dollars,
    rents_under_cap,
    rounded_cap,
)
from drystone.schedule.snapshot import FloatArray, IntArray, Snapshot


def type_prices(snapshot: Snapshot, offers: Mapping[int, Offer]) -> FloatArray:
    """Dollars an hour of a GPU by type: 0 where there are only own ones, infinite without any."""
    prices = np.where(snapshot.capacity > 0, 0.0, np.inf)
    for kind, offer in offers.items():
        prices[kind] = gpu_price(offer)
    return prices


class Wanted:
    """Nodes that waiting jobs would need beyond those that are here, packed as they would be.

    In order of the jobs, each counts on nodes that are on their way; what these do not suffice for
    is taken of the idle nodes that are here, which are kept for it (in `room`), and then rented,
    if the hard cap has room for all of it. Nodes are rented for at most `max_jobs` of them.
    """

    def __init__(
        self, snapshot: Snapshot, offers: Mapping[int, Offer], room: Room, max_jobs: float
    ) -> None:
        self._snapshot, self.offers, self._room = snapshot, offers, room
        self._jobs_left = max_jobs
        self._free: dict[int, list[int]] = {kind: [] for kind in offers}  # by type, by node
        self._num_kept = dict.fromkeys(offers, 0)  # of those, by type: idle ones that are here
        # On their way or still to be asked for: how many there may be of each.
        self._limit, self._coming = {}, {}
        for kind, offer in offers.items():
            of_type = snapshot.nodes.num_gpus[snapshot.nodes.type_index == kind]
            # Larger nodes of the type would make packing ask for whole ones of their size.
            fits = int(of_type.max(initial=0)) <= offer.num_gpus
            self._limit[kind] = (
                offer.most_nodes - num_here(snapshot, offer) if fits and not offer.is_short else 0
            )
            self._coming[kind] = num_coming(snapshot, offer)
        self._cap_left = rounded_cap(snapshot.hard_cap_dollars_per_hour) - _staying_dollars(
            snapshot
        )
        self.is_capped = False  # whether somebody lacks nodes that the hard cap does not allow
        self.making_way: list[int] = []  # idle nodes to be given back, so that others can be rented

    def add(self, counts: IntArray) -> bool:
        """Make room for a job on other nodes; False where they cannot be rented."""
        kinds = np.flatnonzero(counts).tolist()
        if self._jobs_left < 1 or any(kind not in self.offers for kind in kinds):
            return False
        plans = {kind: self._pack(kind, int(counts[kind])) for kind in kinds}
        kept = {kind: self._idle(kind, len(free)) for kind, free in plans.items()}
        for kind, free in plans.items():
            if len(free) - self._num_kept[kind] - len(kept[kind]) > self._limit[kind]:
                return False
        if not self._make_way(plans, kept):
            self.is_capped = True
            return False
        self._free.update(plans)
        for kind, rows in kept.items():
            self._num_kept[kind] += len(rows)
            self._room.take(tuple((row, self.offers[kind].num_gpus) for row in rows))
        self._jobs_left -= 1
        return True

    def num_nodes(self) -> dict[int, int]:
        """Nodes by type that are not here."""
        return {kind: len(free) - self._num_kept[kind] for kind, free in self._free.items()}

    def _make_way(
        self, plans: Mapping[int, Sequence[int]], kept: Mapping[int, Sequence[int]]
    ) -> bool:
        """Whether all that is wanted can be rented under the hard cap.

        Idle nodes that are not `kept` are given up for it where that helps, the dearest first.
        """
        lacking_dollars = -self._cap_left
        for kind, offer in self.offers.items():
            number = len(plans.get(kind, self._free[kind])) - self._num_kept[kind]
            number -= len(kept.get(kind, ())) + self._coming[kind]
            lacking_dollars += max(number, 0) * offer.price_dollars_per_hour
        if lacking_dollars <= 0:
            return True
        spoken_for = {row for rows in kept.values() for row in rows} | {*self.making_way}
        idle = idle_rentals(self._snapshot, self._room)
        prices = {
            row: rented_dollars(self._snapshot, row)
            for rows in idle.values()
            for row in rows
            if row not in spoken_for
        }
        if lacking_dollars > sum(prices.values()):
            return False
        for row in sorted(prices, key=lambda row: (-prices[row], row)):
            if lacking_dollars <= 0:
                break
            lacking_dollars -= prices[row]
            self._cap_left += prices[row]
            self.making_way.append(row)
            self._room.take(((row, int(self._room.free[row])),))
        return True

    def _idle(self, kind: int, number: int) -> list[int]:
        """Idle nodes for those of so many that are neither on their way nor kept already."""
        lacking = max(number - self._num_kept[kind] - self._coming[kind], 0)
        nodes, size = self._snapshot.nodes, self.offers[kind].num_gpus
        rows = nodes.rows_by_type[kind]
        is_idle = (self._room.free[rows] == size) & (nodes.num_gpus[rows] == size)
        idle: list[int] = rows[is_idle][:lacking].tolist()
        return idle

    def _pack(self, kind: int, number: int) -> list[int]:
        size = self.offers[kind].num_gpus
        num_whole, rest = divmod(number, size)
        free = [*self._free[kind], *([0] * num_whole)]
        if rest:
            fitting = [row for row, left in enumerate(free) if left >= rest]
            if fitting:
                free[min(fitting, key=lambda row: free[row])] -= rest
            else:
                free.append(size - rest)
        return free


def _staying_dollars(snapshot: Snapshot) -> float:
    """What nodes cost an hour, here or on their way, without those that are being given back."""
    rows: list[int] = snapshot.rentals.offer.tolist()
    held = sum(snapshot.offers[row].price_dollars_per_hour for row in rows)
    leaving = snapshot.rentals.dollars_per_hour - held
    return snapshot.committed_dollars_per_hour - max(leaving, 0.0)


def rent_and_release(
    snapshot: Snapshot,
    *,
    wanted: Wanted,
    room: Room,
    spares: Mapping[int, int],
) -> tuple[list[Rent | Release], dict[int, int]]:
    """Rent what jobs need and is not on its way; give back what nobody uses or is to have soon.

    Also how many idle nodes are kept, by type. Under a hard cap who waits comes before who may
    come: nothing is rented ahead meanwhile, and nothing kept that stands in the way of a job.
    """
    cap_left = rounded_cap(snapshot.hard_cap_dollars_per_hour) - snapshot.committed_dollars_per_hour
    cap_left += sum(rented_dollars(snapshot, row) for row in wanted.making_way)
    num_wanted, offers = wanted.num_nodes(), wanted.offers
    idle = idle_rentals(snapshot, room)
    needs_dollars = sum(
        max(num_wanted.get(kind, 0) - num_coming(snapshot, offer), 0) * offer.price_dollars_per_hour
        for kind, offer in offers.items()
    )
    is_capped = wanted.is_capped or needs_dollars > cap_left
    if is_capped:
        spares = {}
    rents_ahead = not math.isfinite(cap_left) or (needs_dollars == 0 and not is_capped)
    rents: list[tuple[Offer, Rent]] = []
    for kind, offer in sorted(offers.items()):
        coming = num_coming(snapshot, offer)
        needed, spare = num_wanted.get(kind, 0), spares.get(kind, 0)
        most = offer.most_nodes - num_here(snapshot, offer) - needed
        ahead = max(min(spare - len(idle.get(kind, ())), most), 0) if rents_ahead else 0
        number = 0 if offer.is_short else needed + ahead - coming
        reason = f"jobs need {needed} more nodes, {coming} are on their way"
        if spare:
            reason += f", and the budget pays for {spare} that wait for the next jobs"
        numbers = {"price_dollars_per_hour": offer.price_dollars_per_hour}
        rent = Rent(offer=offer.name, num_nodes=number, reason=reason, numbers=numbers)
        rents.append((offer, rent))
    num_kept = {kind: min(spares[kind], len(idle.get(kind, ()))) for kind in spares}
    unused = [row for kind, rows in idle.items() for row in rows[num_kept.get(kind, 0) :]]
    releases = dict.fromkeys(unused, "nobody uses it, and it costs money")
    releases |= dict.fromkeys(
        wanted.making_way, "the hard cap has no room for it beside the nodes that a job waits for"
    )
    decisions: list[Rent | Release] = [*rents_under_cap(rents, cap_left)]
    decisions += [Release(node=row, reason=reason) for row, reason in releases.items()]
    return decisions, num_kept
