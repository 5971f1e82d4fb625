"""Who must move so that everybody gets the option that was chosen for them? As few as possible.

Jobs that keep their option keep their nodes, and the others are placed around them, the largest
first. Where one finds no room although there are GPUs enough, smaller jobs make way: those of the
node that has the most room, the smallest of them first. Where counts are powers of two, or whole
nodes, that always succeeds; elsewhere a job may be left without GPUs.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping

import numpy as np

from drystone.schedule.decision import Decision, Move, Preempt, Resize, Start
from drystone.schedule.packing import Room
from drystone.schedule.snapshot import IntArray, Placement, Snapshot

Numbers = Callable[[int], Mapping[str, float]]


def reassign(
    snapshot: Snapshot, chosen: IntArray, *, reason: str, numbers: Numbers | None = None
) -> list[Decision]:
    """The decisions that give each job its option; -1 takes its GPUs. `numbers` are by row."""
    jobs = snapshot.jobs
    placements = _Reassignment(snapshot, chosen).settle()
    decisions: list[Decision] = []
    for row, spec in enumerate(jobs.specs):
        given = dict(numbers(row)) if numbers is not None else {}
        option, placement = int(chosen[row]), placements[row]
        if not placement:
            if jobs.is_running[row]:
                text = f"others make more of its GPUs: {reason}"
                decisions.append(Preempt(job_id=spec.id, reason=text, numbers=given))
            continue
        if not jobs.is_running[row]:
            decisions.append(
                Start(
                    job_id=spec.id, option=option, placement=placement, reason=reason, numbers=given
                )
            )
        elif option != jobs.option[row]:
            decisions.append(
                Resize(
                    job_id=spec.id, option=option, placement=placement, reason=reason, numbers=given
                )
            )
        elif placement != jobs.placements[row]:
            text = f"it makes way for a larger job: {reason}"
            decisions.append(Move(job_id=spec.id, placement=placement, reason=text, numbers=given))
    return decisions


class _Reassignment:
    """Placements while they are being settled."""

    def __init__(self, snapshot: Snapshot, chosen: IntArray) -> None:
        self._snapshot, self._chosen = snapshot, chosen
        self._room = Room(snapshot.nodes, snapshot.nodes.num_gpus)
        self._placements: list[Placement] = [() for _ in range(len(snapshot.jobs))]
        self._on_node: dict[int, set[int]] = {}  # rows of jobs by node
        self._queue: list[tuple[int, int]] = []  # (minus GPUs, row), ascending
        jobs = snapshot.jobs
        for row in np.flatnonzero(chosen >= 0):
            if jobs.is_running[row] and jobs.option[row] == chosen[row]:
                self._put(int(row), jobs.placements[row])
            else:
                self._ask(int(row))

    def settle(self) -> list[Placement]:
        """The placement of each job; empty where it has none."""
        while self._queue:
            _, row = self._queue.pop(0)
            placement = self._old(row) or self._room.find(self._counts(row))
            if placement is None and self._make_way(row):
                placement = self._room.find(self._counts(row))
            if placement is not None:
                self._put(row, placement)
        return self._placements

    def _counts(self, row: int) -> IntArray:
        return self._snapshot.counts(row, int(self._chosen[row]))

    def _size(self, row: int) -> int:
        return int(self._counts(row).sum())

    def _ask(self, row: int) -> None:
        insort(self._queue, (-self._size(row), row))

    def _put(self, row: int, placement: Placement) -> None:
        self._placements[row] = placement
        self._room.take(placement)
        for node, _ in placement:
            self._on_node.setdefault(node, set()).add(row)

    def _evict(self, row: int) -> None:
        for node, _ in self._placements[row]:
            self._on_node[node].discard(row)
        self._room.give_back(self._placements[row])
        self._placements[row] = ()
        self._ask(row)

    def _old(self, row: int) -> Placement | None:
        """Where a job was that kept its option, if there is still room."""
        jobs = self._snapshot.jobs
        if jobs.option[row] != self._chosen[row]:
            return None
        old = jobs.placements[row]
        return old if all(self._room.free[node] >= count for node, count in old) else None

    def _make_way(self, row: int) -> bool:
        """Evict smaller jobs until this one fits; whether there is any hope that it does."""
        nodes, size = self._snapshot.nodes, self._size(row)
        for kind, number in enumerate(self._counts(row).tolist()):
            rows = nodes.rows_by_type[kind]
            largest = int(nodes.num_gpus[rows].max(initial=0))
            if not number:
                continue
            if number > self._room.free_by_type[kind] or not largest:
                return False
            whole, rest = divmod(number, largest)
            wanted = [largest] * whole + [rest] * (rest > 0)
            ready: set[int] = set()
            for need in wanted:
                node = self._clear_node(rows, need, size, ready)
                if node < 0:
                    return False
                ready.add(node)
        return True

    def _clear_node(self, rows: IntArray, need: int, size: int, ready: set[int]) -> int:
        """Free so many GPUs on one node by moving jobs smaller than `size`; -1 where none can."""
        best, best_free = -1, -1
        for node in rows.tolist():
            free = int(self._room.free[node])
            small = [one for one in self._on_node.get(node, ()) if self._size(one) < size]
            held = sum(count for one in small for at, count in self._placements[one] if at == node)
            if node not in ready and free + held >= need and free > best_free:
                best, best_free = node, free
        if best < 0:
            return -1
        for one in sorted(self._on_node.get(best, ()), key=lambda one: (self._size(one), one)):
            if self._room.free[best] >= need:
                break
            if self._size(one) < size:
                self._evict(one)
        return best
