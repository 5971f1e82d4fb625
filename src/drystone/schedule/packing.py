"""Packing of GPUs onto nodes: as few nodes as a count needs, and no GPU twice.

A job of n GPUs of a type whose largest node has c goes on ceil(n / c) nodes, never on more: a job
that is spread thinner runs at another speed than its option says. Who can bear that asks for it.

For more than a few places of a type nodes are kept in heaps by the number of GPUs that they have
free, so that the time to find one does not grow with the cluster. An entry of a heap holds only
while the node still has so many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final, Literal

import numpy as np

from drystone.schedule.snapshot import IntArray, NodeTable, Placement, Snapshot

# tight: the fullest node that has room, so that whole nodes stay whole;
# scatter: the emptiest node, as Arena's first-come baseline does.
Style = Literal["tight", "scatter"]
_MAX_WITHOUT_HEAPS: Final = 3  # places found by a scan before heaps are made


class Room:
    """Free GPUs while decisions are being made; the snapshot itself never changes."""

    def __init__(self, nodes: NodeTable, free: IntArray | None = None) -> None:
        self.free = (nodes.free if free is None else free).copy()
        self._rows = nodes.rows_by_type
        self._num_gpus, self._type_index = nodes.num_gpus, nodes.type_index
        self.free_by_type = np.bincount(
            nodes.type_index, weights=self.free, minlength=len(self._rows)
        ).astype(np.int64)
        # By type, by free GPUs: a heap of rows of nodes. Made when a type is asked for often.
        self._heaps: list[list[list[int]] | None] = [None] * len(self._rows)
        self._num_asked = [0] * len(self._rows)

    def give_back(self, placement: Placement) -> None:
        """The GPUs of a placement are free again."""
        self._change(placement, 1)

    def take(self, placement: Placement) -> None:
        """The GPUs of a placement are taken."""
        self._change(placement, -1)

    def has(self, placement: Placement) -> bool:
        """Whether all the GPUs of a placement are free."""
        return all(self.free[node] >= count for node, count in placement)

    def _change(self, placement: Placement, sign: int) -> None:
        for node, count in placement:
            kind = int(self._type_index[node])
            now = int(self.free[node]) + sign * count
            self.free[node] = now
            self.free_by_type[kind] += sign * count
            heaps = self._heaps[kind]
            if heaps is not None and 0 <= now < len(heaps):
                heappush(heaps[now], node)

    def find(
        self, counts: IntArray | Sequence[int], style: Style = "tight", *, spread: bool = False
    ) -> Placement | None:
        """Where these GPUs could go, without taking them; None where they do not fit.

        With `spread` on any nodes with free GPUs, the emptiest first, so that they are few.
        """
        found: list[tuple[int, int]] = []
        numbers = counts.tolist() if isinstance(counts, np.ndarray) else counts
        for kind, number in enumerate(numbers):
            if number == 0:
                continue
            if number > self.free_by_type[kind]:
                return None
            part: list[tuple[int, int]] | None
            if spread:
                part = self._find_spread(kind, number)
            else:
                part = self._find_type(kind, number, style)
            if part is None:
                return None
            found.extend(part)
        return tuple(sorted(found))

    def place(
        self, counts: IntArray | Sequence[int], style: Style = "tight", *, spread: bool = False
    ) -> Placement | None:
        """Find a place and take it."""
        placement = self.find(counts, style, spread=spread)
        if placement is not None:
            self.take(placement)
        return placement

    def _find_type(self, kind: int, number: int, style: Style) -> list[tuple[int, int]] | None:
        self._num_asked[kind] += 1
        if self._heaps[kind] is None and self._num_asked[kind] <= _MAX_WITHOUT_HEAPS:
            return self._find_by_scan(kind, number, style)
        heaps = self._heaps_of(kind)
        largest = len(heaps) - 1
        if largest <= 0:
            return None
        num_whole, rest = divmod(number, largest)
        whole: list[int] = []
        while len(whole) < num_whole:
            node = self._top(heaps, largest)
            if node is None:
                break
            heappop(heaps[largest])
            if not whole or node != whole[-1]:
                whole.append(node)
        found = None
        if len(whole) == num_whole:
            found = [(node, largest) for node in whole]
            if rest:
                order = (
                    range(rest, largest + 1) if style == "tight" else range(largest, rest - 1, -1)
                )
                tops = (self._top_beside(heaps, free, whole) for free in order)
                node = next((top for top in tops if top is not None), None)
                found = None if node is None else [*found, (node, rest)]
        for node in whole:
            heappush(heaps[largest], node)
        return found

    def _find_by_scan(self, kind: int, number: int, style: Style) -> list[tuple[int, int]] | None:
        """The same place without heaps: they take longer to make than a few places to find."""
        rows = self._rows[kind]
        free = self.free[rows]
        largest = int(self._num_gpus[rows].max(initial=0))
        if largest <= 0:
            return None
        num_whole, rest = divmod(number, largest)
        whole = np.flatnonzero(free == largest)[:num_whole]
        if len(whole) < num_whole:
            return None
        found = [(node, largest) for node in rows[whole].tolist()]
        if rest:
            left = np.where(free >= rest, free, 0)
            left[whole] = 0
            if style == "tight":
                left = np.where(left > 0, largest + 1 - left, 0)
            at = int(left.argmax())  # of equals the first
            if left[at] <= 0:
                return None
            found.append((int(rows[at]), rest))
        return found

    def _find_spread(self, kind: int, number: int) -> list[tuple[int, int]]:
        rows = self._rows[kind]
        free = self.free[rows]
        order = np.lexsort((rows, -free))
        before = np.cumsum(free[order]) - free[order]
        taken = np.minimum(free[order], number - before)
        used = order[taken > 0]
        return [(int(rows[at]), int(count)) for at, count in zip(used, taken, strict=False)]

    def _top_beside(self, heaps: list[list[int]], free: int, whole: list[int]) -> int | None:
        """The first node with so many free; the whole nodes are spoken for already."""
        node = self._top(heaps, free)
        while node is not None and node in whole:  # a second entry of the same node
            heappop(heaps[free])
            node = self._top(heaps, free)
        return node

    def _top(self, heaps: list[list[int]], free: int) -> int | None:
        heap = heaps[free]
        while heap and self.free[heap[0]] != free:
            heappop(heap)
        return heap[0] if heap else None

    def _heaps_of(self, kind: int) -> list[list[int]]:
        heaps = self._heaps[kind]
        if heaps is None:
            rows = self._rows[kind]
            largest = int(self._num_gpus[rows].max(initial=0))
            free = self.free[rows]
            heaps = [rows[free == number].tolist() for number in range(largest + 1)]
            self._heaps[kind] = heaps
        return heaps


def make_room(snapshot: Snapshot, *, emptied: bool = False) -> Room:
    """What is free now, or what would be if every job stopped."""
    free = snapshot.nodes.num_gpus if emptied else None
    return Room(snapshot.nodes, free)


def spread_thinner(
    rows: IntArray, free: IntArray, num_gpus: int, per_node: int
) -> Placement | None:
    """Half as many GPUs on each node, and again, until there are nodes enough; `free` by row."""
    emptiest = rows[np.argsort(-free[rows], kind="stable")]
    while per_node > 1:
        per_node = (per_node + 1) // 2
        needed = -(-num_gpus // per_node)
        chosen = emptiest[free[emptiest] >= per_node][:needed]
        if len(chosen) == needed:
            counts = [per_node] * (needed - 1) + [num_gpus - per_node * (needed - 1)]
            return tuple(sorted(zip(chosen.tolist(), counts, strict=True)))
    return None


_MAX_NODES_TRIED: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedJob:
    """A job that is on one node only, and what it loses by being moved."""

    row: int
    num_gpus: int
    move_cost: float


Moves = list[tuple[PlacedJob, Placement]]


def clear_node(
    room: Room,
    nodes: NodeTable,
    *,
    kind: int,
    number: int,
    jobs_on: Callable[[int], list[PlacedJob] | None],  # None: somebody there must not move
    max_cost: float,
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
    order = able[np.argsort(-room.free[able], kind="stable")][:_MAX_NODES_TRIED]
    for node in order.tolist():
        there = jobs_on(node)
        if there is None:
            continue
        moves = _moves_off(room, node, kind, needed, there, max_cost)
        if moves is not None and room.find(_of_type(kind, number, nodes)) is not None:
            return moves
        if moves is not None:
            _undo(room, node, moves)
    return None


def _moves_off(
    room: Room, node: int, kind: int, needed: int, there: list[PlacedJob], max_cost: float
) -> Moves | None:
    """Move the cheapest jobs off a node until so many GPUs are free on it."""
    missing = needed - int(room.free[node])
    blocked: Placement = ((node, int(room.free[node])),)
    room.take(blocked)  # nobody moves onto the node that is being cleared
    moves: Moves = []
    cost = 0.0
    for job in sorted(there, key=lambda job: (job.move_cost / job.num_gpus, job.row)):
        if missing <= 0:
            break
        counts = [0] * (kind + 1)
        counts[kind] = job.num_gpus
        placement = room.place(counts)
        if placement is None or cost + job.move_cost > max_cost:
            if placement is not None:
                room.give_back(placement)
            continue
        moves.append((job, placement))
        missing, cost = missing - job.num_gpus, cost + job.move_cost
    room.give_back(blocked)
    for job, _ in moves:
        room.give_back(((node, job.num_gpus),))
    if missing > 0:
        _undo(room, node, moves)
        return None
    return moves


def _undo(room: Room, node: int, moves: Moves) -> None:
    for job, placement in moves:
        room.give_back(placement)
        room.take(((node, job.num_gpus),))


def _of_type(kind: int, number: int, nodes: NodeTable) -> list[int]:
    counts = [0] * len(nodes.rows_by_type)
    counts[kind] = number
    return counts
