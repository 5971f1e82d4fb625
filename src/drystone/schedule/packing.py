"""On which nodes do the GPUs of an option go? As few nodes as its count needs, and no GPU twice.

A job of n GPUs of a type whose largest node has c goes on ceil(n / c) nodes, never on more: a job
that is spread thinner runs at another speed than its option says.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from drystone.schedule.snapshot import IntArray, NodeTable, Placement, Snapshot

# tight: the fullest node that has room, so that whole nodes stay whole;
# scatter: the emptiest node, as Arena's first-come baseline does.
Style = Literal["tight", "scatter"]


class Room:
    """Free GPUs while decisions are being made; the snapshot itself never changes."""

    def __init__(self, nodes: NodeTable, free: IntArray | None = None) -> None:
        self.free = (nodes.free if free is None else free).copy()
        self._rows = nodes.rows_by_type
        self._num_gpus, self._type_index = nodes.num_gpus, nodes.type_index
        self.free_by_type = np.bincount(
            nodes.type_index, weights=self.free, minlength=len(self._rows)
        ).astype(np.int64)

    def give_back(self, placement: Placement) -> None:
        """The GPUs of a placement are free again."""
        self._change(placement, 1)

    def take(self, placement: Placement) -> None:
        """The GPUs of a placement are taken."""
        self._change(placement, -1)

    def _change(self, placement: Placement, sign: int) -> None:
        for node, count in placement:
            self.free[node] += sign * count
            self.free_by_type[self._type_index[node]] += sign * count

    def find(self, counts: IntArray, style: Style = "tight") -> Placement | None:
        """Where these GPUs could go, without taking them; None where they do not fit."""
        found: list[tuple[int, int]] = []
        for kind, number in enumerate(counts.tolist()):
            if number == 0:
                continue
            if number > self.free_by_type[kind]:
                return None
            part = self._find_type(kind, number, style)
            if part is None:
                return None
            found.extend(part)
        return tuple(sorted(found))

    def place(self, counts: IntArray, style: Style = "tight") -> Placement | None:
        """Find a place and take it."""
        placement = self.find(counts, style)
        if placement is not None:
            self.take(placement)
        return placement

    def _find_type(self, kind: int, number: int, style: Style) -> list[tuple[int, int]] | None:
        rows = self._rows[kind]
        largest = int(self._num_gpus[rows].max(initial=0))
        if largest == 0:
            return None
        free = self.free[rows]
        found: list[tuple[int, int]] = []
        num_whole, rest = divmod(number, largest)
        if num_whole:
            whole = np.flatnonzero(free >= largest)[:num_whole]
            if len(whole) < num_whole:
                return None
            found.extend((int(rows[one]), largest) for one in whole)
            free = free.copy()
            free[whole] = 0
        if rest:
            if style == "scatter":
                best = int(np.argmax(free))
            else:
                best = int(np.argmin(np.where(free >= rest, free, np.iinfo(np.int64).max)))
            if free[best] < rest:
                return None
            found.append((int(rows[best]), rest))
        return found


def make_room(snapshot: Snapshot, *, emptied: bool = False) -> Room:
    """What is free now, or what would be if every job stopped."""
    free = snapshot.nodes.num_gpus if emptied else None
    return Room(snapshot.nodes, free)
