"""Who is on which nodes, while `cells` tries things out: placing, moving bubbles, spreading.

A bubble is a free GPU on a node that is partly used. Where a job fits by count but not in one
place, workers are moved between pairs of partly used nodes of its type, the emptiest with the
fullest, until one of each pair is empty or full (Crius: recursive halving and doubling). If that
does not help either, the job is spread thinner, half as many GPUs on each node at a time.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

import numpy as np

from drystone.schedule.packing import spread_thinner
from drystone.schedule.snapshot import NodeTable, Placement

MAX_PASSES: Final = 256


class Board:
    """Free GPUs and placements, changed in place; copies are cheap."""

    def __init__(self, nodes: NodeTable, num_jobs: int) -> None:
        self.free = nodes.free.copy()
        self.free_by_kind = np.array(
            [int(self.free[rows].sum()) for rows in nodes.rows_by_type], dtype=np.int64
        )
        self.kind = np.full(num_jobs, -1, dtype=np.int64)
        self.level = np.full(num_jobs, -1, dtype=np.int64)
        self.placements: dict[int, Placement] = {}
        self.halvings: dict[int, int] = {}  # jobs that are spread thinner, and how often halved
        self._nodes = nodes
        self._node_size = [int(nodes.num_gpus[rows].max(initial=0)) for rows in nodes.rows_by_type]

    def copy(self) -> Board:
        """A board to try something on."""
        other = Board.__new__(Board)
        other.free, other.free_by_kind = self.free.copy(), self.free_by_kind.copy()
        other.kind, other.level = self.kind.copy(), self.level.copy()
        other.placements, other.halvings = self.placements.copy(), self.halvings.copy()
        other._nodes, other._node_size = self._nodes, self._node_size
        return other

    def become(self, other: Board) -> None:
        """Take over what was tried on a copy."""
        self.free, self.free_by_kind = other.free, other.free_by_kind
        self.kind, self.level = other.kind, other.level
        self.placements, self.halvings = other.placements, other.halvings

    def register(self, row: int, kind: int, level: int, placement: Placement) -> None:
        """A job runs there already; its GPUs are not counted as free."""
        self.kind[row], self.level[row] = kind, level
        self.placements[row] = placement
        num_gpus = sum(count for _, count in placement)
        least = -(-num_gpus // max(self._node_size[kind], 1))
        if len(placement) > least:
            self.halvings[row] = int(np.log2(len(placement) / least) + 0.5)

    def remove(self, row: int) -> Placement:
        """Take a job off; returns where it was."""
        placement = self.placements.pop(row)
        self.halvings.pop(row, None)
        self._change(placement, int(self.kind[row]), 1)
        self.kind[row] = self.level[row] = -1
        return placement

    def put_back(self, row: int, kind: int, level: int, placement: Placement) -> bool:
        """Put a job where it was, if that is still free."""
        if any(self.free[node] < count for node, count in placement):
            return False
        self._change(placement, kind, -1)
        self.register(row, kind, level, placement)
        return True

    def shrink(self, row: int, level: int, num_gpus: int) -> None:
        """Leave a job only so many of its GPUs, on as few of its nodes as that needs."""
        kind = int(self.kind[row])
        kept: list[tuple[int, int]] = []
        left = num_gpus
        for node, count in sorted(self.placements[row], key=lambda part: -part[1]):
            if left > 0:
                kept.append((node, min(count, left)))
                left -= kept[-1][1]
        self.remove(row)
        placement = tuple(sorted(kept))
        self._change(placement, kind, -1)
        self.register(row, kind, level, placement)

    def place(self, row: int, kind: int, level: int, num_gpus: int) -> bool:
        """Put a job on so many GPUs of a type, moving others of that type about if need be."""
        if num_gpus > self.free_by_kind[kind] or self._node_size[kind] == 0:
            return False
        found = self._find(kind, num_gpus)
        if found is None:
            before = (self.free.copy(), self.placements.copy())
            found = self._move_bubbles(kind, num_gpus)
            if found is None:
                per_node = min(num_gpus, self._node_size[kind])
                rows = self._nodes.rows_by_type[kind]
                found = spread_thinner(rows, self.free, num_gpus, per_node)
            if found is None:
                self.free, self.placements = before
                return False
        self._change(found, kind, -1)
        self.register(row, kind, level, found)
        return True

    def restore_nodes(self, before: dict[int, tuple[int, int, Placement]]) -> None:
        """Undo moves that turned out to be pointless: jobs whose Cell is the same go back.

        A job goes back where its old nodes have room. One that fills whole nodes swaps them with
        whoever is there now: those came this time, so they do not care.
        """
        for row, (kind, level, placement) in before.items():
            now = self.placements.get(row)
            is_same = self.kind[row] == kind and self.level[row] == level
            if now is None or now == placement or not is_same:
                continue
            self.remove(row)
            if not self.put_back(row, kind, level, placement):
                self.put_back(row, kind, level, now)
                self._swap_whole_nodes(row, placement, now)

    def _swap_whole_nodes(self, row: int, before: Placement, now: Placement) -> None:
        size = self._node_size[int(self.kind[row])]
        if any(count < size for _, count in (*before, *now)):
            return
        ours, theirs = {node for node, _ in now}, {node for node, _ in before}
        for mine, old in zip(sorted(ours - theirs), sorted(theirs - ours), strict=False):
            swap = {mine: old, old: mine}
            for other, placement in list(self.placements.items()):
                if any(node in swap for node, _ in placement):
                    moved = sorted((swap.get(node, node), count) for node, count in placement)
                    self.placements[other] = tuple(moved)
            self.free[[mine, old]] = self.free[[old, mine]]

    def _change(self, placement: Placement, kind: int, sign: int) -> None:
        for node, count in placement:
            self.free[node] += sign * count
            self.free_by_kind[kind] += sign * count

    def _find(self, kind: int, num_gpus: int) -> Placement | None:
        """As few nodes as the count needs: idle ones, else the emptiest that is partly used."""
        rows, size = self._nodes.rows_by_type[kind], self._node_size[kind]
        free = self.free[rows]
        num_whole, rest = divmod(num_gpus, size)
        idle = np.flatnonzero(free >= size)
        if len(idle) < num_whole:
            return None
        found = [(int(rows[at]), size) for at in idle[:num_whole]]
        if rest:
            if len(idle) > num_whole:
                at = int(idle[num_whole])
            else:
                free[idle] = 0
                at = int(free.argmax())
                if free[at] < rest:
                    return None
            found.append((int(rows[at]), rest))
        return tuple(sorted(found))

    def _move_bubbles(self, kind: int, num_gpus: int) -> Placement | None:
        """Passes over pairs of partly used nodes, until the count fits or nothing changes."""
        rows, size = self._nodes.rows_by_type[kind], self._node_size[kind]
        for _ in range(MAX_PASSES):
            free = self.free[rows]
            partly = np.flatnonzero((free > 0) & (free < self._nodes.num_gpus[rows]))
            partly = partly[np.argsort(-free[partly], kind="stable")]
            enough = int(np.searchsorted(np.cumsum(free[partly]), num_gpus)) + 1
            nodes = rows[partly[:enough]].tolist()
            parts = self._parts_on(kind, set(nodes))
            moved = False
            for emptiest, fullest in zip(
                nodes[: len(nodes) // 2], reversed(nodes[len(nodes) // 2 :]), strict=False
            ):
                moved |= self._even_out(emptiest, fullest, parts, size)
            if not moved:
                return None
            found = self._find(kind, num_gpus)
            if found is not None:
                return found
        return None

    def _parts_on(self, kind: int, nodes: set[int]) -> dict[int, list[tuple[int, int]]]:
        """By node: the jobs of a type on it and their GPUs there."""
        parts: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for row in np.flatnonzero(self.kind == kind).tolist():
            for node, count in self.placements[row]:
                if node in nodes:
                    parts[node].append((row, count))
        return parts

    def _even_out(
        self, first: int, second: int, parts: dict[int, list[tuple[int, int]]], size: int
    ) -> bool:
        """Move workers so that one of two nodes is empty or full; False if nothing changes."""
        sizes = self._nodes.num_gpus
        here, there = parts[first], parts[second]
        rows = [row for row, _ in (*here, *there)]
        used = sum(count for _, count in (*here, *there))
        is_known = used == sizes[first] + sizes[second] - self.free[first] - self.free[second]
        is_full_size = sizes[first] == size == sizes[second]
        if not is_known or len(set(rows)) < len(rows) or not is_full_size:
            return False
        if used <= size:
            self._relocate(here, first, second)
            return bool(here)
        return self._fill_one(first, second, here, there, size)

    def _fill_one(
        self,
        first: int,
        second: int,
        here: list[tuple[int, int]],
        there: list[tuple[int, int]],
        size: int,
    ) -> bool:
        """Fill the node that has the largest part, the largest parts first."""
        all_parts = [(*part, first) for part in here] + [(*part, second) for part in there]
        all_parts.sort(key=lambda part: -part[1])
        full = all_parts[0][2]
        other = second if full == first else first
        room = {full: size, other: size}
        goes: list[tuple[int, int, int, int]] = []
        for row, count, node in all_parts:
            target = full if count <= room[full] else other
            if count > room[target]:
                return False
            room[target] -= count
            goes.append((row, count, node, target))
        if room[full] >= min(int(self.free[first]), int(self.free[second])):
            return False  # no fuller than the fuller one was
        for row, count, node, target in goes:
            if node != target:
                self._relocate([(row, count)], node, target)
        return True

    def _relocate(self, parts: list[tuple[int, int]], source: int, target: int) -> None:
        for row, count in parts:
            moved = [part for part in self.placements[row] if part != (source, count)]
            self.placements[row] = tuple(sorted([*moved, (target, count)]))
            self.free[source] += count
            self.free[target] -= count
