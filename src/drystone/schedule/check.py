"""Checks of a list of decisions: no GPU twice, nothing unknown, memory and the hard cap kept.

The list is judged as a whole: what it takes away is free for what it gives out, and what it gives
back may be rented again. The budget itself is an average over time, which no single list can break;
what a list can break is the hard cap on dollars an hour.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from drystone.describe.option import OptionRow
from drystone.schedule.decision import (
    Decision,
    Move,
    Preempt,
    Refuse,
    Release,
    Rent,
    Resize,
    Start,
    Wake,
)
from drystone.schedule.snapshot import Snapshot

_ROUNDING = 1e-9  # share by which sums of prices may be off


def check_rentals(snapshot: Snapshot, decisions: Sequence[Decision]) -> list[str]:
    """Everything that is wrong with what a list rents and gives back, in words."""
    releases = [decision for decision in decisions if isinstance(decision, Release)]
    rents = [decision for decision in decisions if isinstance(decision, Rent)]
    problems = _check_releases(snapshot, releases)
    if rents and not problems:
        problems = _check_rents(snapshot, rents, releases)
    return problems


def _check_releases(snapshot: Snapshot, releases: Sequence[Release]) -> list[str]:
    problems: list[str] = []
    seen: set[int] = set()
    for release in releases:
        if not 0 <= release.node < len(snapshot.nodes):
            problems.append(f"Release: there is no node {release.node}")
        elif release.node in seen:
            problems.append(f"Release: node {snapshot.nodes.ids[release.node]} is given back twice")
        elif snapshot.node_offer[release.node] < 0:
            problems.append(f"Release: node {snapshot.nodes.ids[release.node]} is not rented")
        seen.add(release.node)
    return problems


def _check_rents(
    snapshot: Snapshot, rents: Sequence[Rent], releases: Sequence[Release]
) -> list[str]:
    rows = {offer.name: row for row, offer in enumerate(snapshot.offers)}
    prices = [offer.price_dollars_per_hour for offer in snapshot.offers]
    given_back = [int(snapshot.node_offer[release.node]) for release in releases]
    rate = snapshot.committed_dollars_per_hour - sum(prices[row] for row in given_back)
    numbers: dict[int, int] = {}
    problems: list[str] = []
    for rent in rents:
        if rent.offer not in rows:
            problems.append(f"Rent: there is no offer {rent.offer!r}")
        elif rent.num_nodes < 1:
            problems.append(f"Rent: {rent.num_nodes} nodes of {rent.offer}")
        else:
            row = rows[rent.offer]
            numbers[row] = numbers.get(row, 0) + rent.num_nodes
            rate += rent.num_nodes * prices[row]
    for row, number in numbers.items():
        offer = snapshot.offers[row]
        total = number + snapshot.rentals.num_nodes(row) - given_back.count(row)
        if total > offer.most_nodes:
            problems.append(f"Rent: {total} nodes of {offer.name} in all, limit {offer.most_nodes}")
    cap = snapshot.hard_cap_dollars_per_hour
    if rate > cap * (1 + _ROUNDING):
        problems.append(f"Rent: {rate:.2f} dollars an hour in all, the hard cap is {cap:.2f}")
    return problems


# Spelt out once: to join types with | at every decision takes longer than the check.
_ON_JOBS: Final = (Start, Resize, Move, Preempt, Refuse)
_WITHOUT_PLACEMENT: Final = (Preempt, Refuse)


def check_decisions(snapshot: Snapshot, decisions: Sequence[Decision]) -> list[str]:
    """Everything that is wrong with the list, in words; empty where it may be carried out.

    It looks only at the jobs and nodes that the list names.
    """
    problems: list[str] = []
    touched: set[str] = set()
    changes: dict[int, int] = {}  # by node: free GPUs that the list makes, or takes
    kinds = snapshot.node_kinds()
    num_nodes, start_facts, has_rentals = len(kinds), snapshot.start_facts, False
    for decision in decisions:
        if type(decision) is Start:
            job_id, placement = decision.job_id, decision.placement
            facts = start_facts(job_id, decision.option)
            if facts is not None and len(placement) == 1 and job_id not in touched:
                # All GPUs on one node: most lists have nothing else, and this is all there is.
                node, count = placement[0]
                if (
                    0 < count == facts.num_gpus
                    and 0 <= node < num_nodes
                    and facts.counts[kinds[node]] == count
                    and not facts.memory_bytes
                ):
                    touched.add(job_id)
                    changes[node] = changes.get(node, 0) - count
                    continue
        if isinstance(decision, _ON_JOBS):
            if decision.job_id in touched:
                problems.append(f"{_name(decision)}: job {decision.job_id} is decided on twice")
            touched.add(decision.job_id)
            found = _check_job(snapshot, decision, changes, kinds)
            if found is not None:
                problems.append(found)
        elif isinstance(decision, Wake):
            problems.extend(_check_wake(snapshot, decision))
        else:
            has_rentals = True
    if has_rentals:
        problems.extend(check_rentals(snapshot, decisions))
    return problems or _check_room(snapshot, decisions, changes, has_rentals)


def _check_job(
    snapshot: Snapshot,
    decision: Start | Resize | Move | Preempt | Refuse,
    changes: dict[int, int],
    kinds: Sequence[int],
) -> str | None:
    """Whether the job is there, in the right state, and well placed; notes what it takes where."""
    status = snapshot.job_status(decision.job_id)
    if status is None:
        return f"{_name(decision)}: there is no job {decision.job_id!r}"
    option = status.option
    if isinstance(decision, Start):
        if option >= 0:
            return f"{_who(decision)} runs"
        option = decision.option
    else:
        if isinstance(decision, Refuse) != (option < 0):
            return f"{_who(decision)} {'runs' if option >= 0 else 'waits'}"
        for node, count in status.placement:
            changes[node] = changes.get(node, 0) + count
        if isinstance(decision, _WITHOUT_PLACEMENT):
            return None
        option = option if isinstance(decision, Move) else decision.option
    facts = snapshot.option_facts(status.option_set, option)
    if facts is None:
        return f"{_who(decision)} has no option {option}"
    return _check_placement(snapshot, decision, facts, changes, kinds)


def _check_placement(
    snapshot: Snapshot,
    decision: Start | Resize | Move,
    facts: OptionRow,
    changes: dict[int, int],
    kinds: Sequence[int],
) -> str | None:
    """It must be the option: as many GPUs of each type, and enough memory on each."""
    num_nodes = len(kinds)
    for node, count in decision.placement:
        if count < 1 or not 0 <= node < num_nodes:
            what = "is placed on a node that does not exist, or on less than one GPU"
            return f"{_who(decision)} {what}"
        changes[node] = changes.get(node, 0) - count
    problem = _check_types(decision, facts.counts, kinds)
    if problem is None and facts.memory_bytes > 0:
        return _check_memory(snapshot, decision, facts.memory_bytes)
    return problem


def _check_types(
    decision: Start | Resize | Move, counts: tuple[int, ...], kinds: Sequence[int]
) -> str | None:
    """Whether no node is named twice, and there are as many GPUs of each type as there should."""
    placement = decision.placement
    if len(dict(placement)) < len(placement):
        return f"{_who(decision)} names a node twice"
    placed = [0] * len(counts)
    for node, count in placement:
        placed[kinds[node]] += count
    if tuple(placed) == counts:
        return None
    what = f"is placed on {placed} GPUs by type, but needs {list(counts)}"
    return f"{_who(decision)} {what}"


def _check_memory(
    snapshot: Snapshot, decision: Start | Resize | Move, memory_bytes: float
) -> str | None:
    room = [float(snapshot.nodes.memory_bytes[node]) for node, _ in decision.placement]
    least = min((size for size in room if size > 0), default=math.inf)
    if least >= memory_bytes:
        return None
    return f"{_who(decision)} needs {memory_bytes:.0f} bytes on a GPU that has {least:.0f}"


def _check_room(
    snapshot: Snapshot,
    decisions: Sequence[Decision],
    changes: Mapping[int, int],
    has_rentals: bool,
) -> list[str]:
    """No node gives out more GPUs than it has, once all that is taken away is free."""
    free_by_node = snapshot.free_by_node()
    problems: list[str] = []
    for node, change in changes.items():
        if free_by_node[node] + change < 0:
            more = -(free_by_node[node] + change)
            name = snapshot.nodes.ids[node]
            problems.append(f"node {name} gives out {more} GPUs more than it has")
    if not has_rentals:
        return problems
    for decision in decisions:
        if isinstance(decision, Release):
            free = free_by_node[decision.node] + changes.get(decision.node, 0)
            if free < snapshot.nodes.num_gpus[decision.node]:
                name = snapshot.nodes.ids[decision.node]
                problems.append(f"Release: jobs run on node {name}")
    return problems


def _check_wake(snapshot: Snapshot, decision: Wake) -> list[str]:
    if snapshot.now_seconds < decision.at_seconds < math.inf:
        return []
    return [f"Wake: at {decision.at_seconds} s, but it is {snapshot.now_seconds} s already"]


def _who(decision: Start | Resize | Move | Preempt | Refuse) -> str:
    return f"{_name(decision)}: job {decision.job_id}"


def _name(decision: Decision) -> str:
    return type(decision).__name__
