"""May these nodes be rented and given back? Offers and their limits, the owner's nodes, the cap."""

from __future__ import annotations

from collections.abc import Sequence

from drystone.schedule.decision import Decision, Release, Rent
from drystone.schedule.snapshot import Snapshot

_ROUNDING = 1e-9  # share by which sums of prices may be off


def check_rentals(snapshot: Snapshot, decisions: Sequence[Decision]) -> list[str]:
    """Everything that is wrong with what a list rents and gives back, in words."""
    releases = [one for one in decisions if isinstance(one, Release)]
    rents = [one for one in decisions if isinstance(one, Rent)]
    problems = _check_releases(snapshot, releases)
    if rents and not problems:
        problems = _check_rents(snapshot, rents, releases)
    return problems


def _check_releases(snapshot: Snapshot, releases: Sequence[Release]) -> list[str]:
    problems: list[str] = []
    seen: set[int] = set()
    for one in releases:
        if not 0 <= one.node < len(snapshot.nodes):
            problems.append(f"Release: there is no node {one.node}")
        elif one.node in seen:
            problems.append(f"Release: node {snapshot.nodes.ids[one.node]} is given back twice")
        elif snapshot.node_offer[one.node] < 0:
            problems.append(f"Release: node {snapshot.nodes.ids[one.node]} is not rented")
        seen.add(one.node)
    return problems


def _check_rents(
    snapshot: Snapshot, rents: Sequence[Rent], releases: Sequence[Release]
) -> list[str]:
    rows = {offer.name: row for row, offer in enumerate(snapshot.offers)}
    prices = [offer.price_dollars_per_hour for offer in snapshot.offers]
    given_back = [int(snapshot.node_offer[one.node]) for one in releases]
    rate = snapshot.committed_dollars_per_hour - sum(prices[row] for row in given_back)
    numbers: dict[int, int] = {}
    problems: list[str] = []
    for one in rents:
        if one.offer not in rows:
            problems.append(f"Rent: there is no offer {one.offer!r}")
        elif one.num_nodes < 1:
            problems.append(f"Rent: {one.num_nodes} nodes of {one.offer}")
        else:
            row = rows[one.offer]
            numbers[row] = numbers.get(row, 0) + one.num_nodes
            rate += one.num_nodes * prices[row]
    for row, number in numbers.items():
        offer = snapshot.offers[row]
        total = number + snapshot.rentals.num_nodes(row) - given_back.count(row)
        if total > offer.most_nodes:
            problems.append(f"Rent: {total} nodes of {offer.name} in all, limit {offer.most_nodes}")
    cap = snapshot.hard_cap_dollars_per_hour
    if rate > cap * (1 + _ROUNDING):
        problems.append(f"Rent: {rate:.2f} dollars an hour in all, the hard cap is {cap:.2f}")
    return problems
