"""Can a node be cleared for a job that needs it whole, by moving smaller jobs elsewhere?

The nodes with the fewest GPUs to be moved are tried first. Jobs move only as they are (the same
option, on one other node of the type), and only if all their moves cost less than is gained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from drystone.schedule.packing import Room
from drystone.schedule.snapshot import NodeTable, Placement

_MOST_NODES_TRIED: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Lodger:
    """A job that is on one node only, and what it loses by being moved."""

    row: int
    num_gpus: int
    cost: float


Moves = list[tuple[Lodger, Placement]]


def clear_node(
    room: Room,
    nodes: NodeTable,
    *,
    kind: int,
    number: int,
    lodgers: Callable[[int], list[Lodger] | None],
    most_cost: float,
) -> Moves | None:
    """Moves after which `number` GPUs of a type have a place; they are made in `room`.

    None, and nothing is changed, where no single node can be cleared at that cost.
    """
    rows = nodes.rows_by_type[kind]
    largest = int(nodes.num_gpus[rows].max(initial=0))
    if largest == 0 or number > room.free_by_type[kind]:
        return None
    # Whole nodes that are free already serve; one more is needed, whole or in part.
    num_whole, rest = divmod(number, largest)
    needed = rest or largest
    if int((room.free[rows] >= largest).sum()) < num_whole - (0 if rest else 1):
        return None
    free = room.free[rows]
    able = rows[(nodes.num_gpus[rows] >= needed) & (free < needed) & (free > 0)]
    order = able[np.argsort(-room.free[able], kind="stable")][:_MOST_NODES_TRIED]
    for node in order.tolist():
        there = lodgers(node)
        if there is None:
            continue
        moves = _moves_off(room, node, kind, needed, there, most_cost)
        if moves is not None and room.find(_of_type(kind, number, nodes)) is not None:
            return moves
        if moves is not None:
            _undo(room, node, moves)
    return None


def _moves_off(
    room: Room, node: int, kind: int, needed: int, there: list[Lodger], most_cost: float
) -> Moves | None:
    """Move the cheapest jobs off a node until so many GPUs are free on it."""
    missing = needed - int(room.free[node])
    blocked: Placement = ((node, int(room.free[node])),)
    room.take(blocked)  # nobody moves onto the node that is being cleared
    moves: Moves = []
    cost = 0.0
    for lodger in sorted(there, key=lambda one: (one.cost / one.num_gpus, one.row)):
        if missing <= 0:
            break
        counts = [0] * (kind + 1)
        counts[kind] = lodger.num_gpus
        placement = room.place(counts)
        if placement is None or cost + lodger.cost > most_cost:
            if placement is not None:
                room.give_back(placement)
            continue
        moves.append((lodger, placement))
        missing, cost = missing - lodger.num_gpus, cost + lodger.cost
    room.give_back(blocked)
    for lodger, _ in moves:
        room.give_back(((node, lodger.num_gpus),))
    if missing > 0:
        _undo(room, node, moves)
        return None
    return moves


def _undo(room: Room, node: int, moves: Moves) -> None:
    for lodger, placement in moves:
        room.give_back(placement)
        room.take(((node, lodger.num_gpus),))


def _of_type(kind: int, number: int, nodes: NodeTable) -> list[int]:
    counts = [0] * len(nodes.rows_by_type)
    counts[kind] = number
    return counts
