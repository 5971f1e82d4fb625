"""ElasticFlow: every job the fewest GPUs that keep its deadline, what is left to who gains most.

After ElasticFlow (ASPLOS 2023, github:pkusys/ElasticFlow). A job's least share is the smallest
count that ends it by its deadline: now, a start, one round and the remaining work. Jobs are
admitted in order of submission while the least shares of all fit; then the GPUs that are left go, a
doubling at a time, to the job that gains most samples a second. That is done anew whenever a job
comes or goes, so jobs grow and shrink all the time. Without deadlines the least share is the fewest
GPUs that a job can run on at all; so Arena runs it as "ElasticFlow-LS", with loosened deadlines.

ElasticFlow knows one GPU type. Here, as in Arena, every job stays on the type that its owner named
(or where it makes the most of each GPU), and each type is a cluster of its own. Jobs that keep
their count keep their nodes; if somebody does not fit then, all of that type are placed anew, the
largest first, which is what its buddy allocation with migration comes to.

Where this differs, and why: its admission reserves future GPUs slot by slot, while here, as in
Arena, least shares are held from now on; a waiting job that is not admitted waits as long as its
deadline can be kept, and is refused after that; a running job that has missed its deadline goes on
with the least it can run on. A doubling that loses speed is not made (Arena makes it).
"""

from __future__ import annotations

import heapq
from typing import Final

import numpy as np

from drystone.schedule.baselines.cells.search import CellTable, make_cells
from drystone.schedule.baselines.queues import rigid_options
from drystone.schedule.decision import NO_SINGLE_TYPE, Decision, Memory, Preempt, Refuse, change_job
from drystone.schedule.packing import Room, make_room
from drystone.schedule.snapshot import IntArray, Placement, Snapshot

ROUND_SECONDS: Final = 300.0


def elasticflow(snapshot: Snapshot, memory: Memory) -> tuple[list[Decision], Memory]:
    """Share every type anew; whoever keeps its count keeps its nodes, if that is possible."""
    return _share_all(snapshot, keeps_nodes=True), memory


def elasticflow_moving(snapshot: Snapshot, memory: Memory) -> tuple[list[Decision], Memory]:
    """As Arena runs it: all jobs are placed anew every time, so most of them move."""
    return _share_all(snapshot, keeps_nodes=False), memory


def _share_all(snapshot: Snapshot, *, keeps_nodes: bool) -> list[Decision]:
    flow = _Flow(snapshot)
    for kind in range(len(snapshot.gpu_types)):
        flow.share(kind)
        flow.place(kind, keeps_nodes=keeps_nodes)
    return flow.decisions()


class _Flow:
    """One decision: the type and the least share of every job, and what it is given."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot, self._jobs = snapshot, snapshot.jobs
        self._table = make_cells(snapshot)
        self._kinds = _types(snapshot, self._table)
        self._least = _least_shares(snapshot, self._table, self._kinds)
        self._levels = np.full(len(self._kinds), -1, dtype=np.int64)
        self._room = make_room(snapshot)
        self._given: dict[int, Placement] = {}

    def share(self, kind: int) -> None:
        """Admit jobs of one type by their least shares; then hand out what is left."""
        jobs, table, levels = self._jobs, self._table, self._levels
        left = int(self._snapshot.capacity[kind])
        for row in np.flatnonzero(jobs.is_running & (self._kinds < 0)):
            left -= int(self._snapshot.counts(int(row), int(jobs.option[row]))[kind])
        rows = np.flatnonzero((self._kinds == kind) & (self._least >= 0))
        # Whoever runs was admitted before; then the oldest.
        for row in rows[np.lexsort((rows, ~jobs.is_running[rows]))]:
            share = int(table.levels[self._least[row]])
            if share <= left:
                left -= share
                levels[row] = self._least[row]
        steps: list[tuple[float, int, int]] = []
        for at in rows[levels[rows] >= 0].tolist():
            self._push_step(kind, at, steps)
        while steps and left > 0:
            _, at, level = heapq.heappop(steps)
            more = int(table.levels[level] - table.levels[levels[at]])
            if more <= left:
                left -= more
                levels[at] = level
                self._push_step(kind, at, steps)

    def _push_step(self, kind: int, row: int, steps: list[tuple[float, int, int]]) -> None:
        level = int(self._levels[row])
        above = int(self._table.up[row, kind, level])
        if above >= 0:
            gain = self._table.speed(row, kind, above) - self._table.speed(row, kind, level)
            if gain > 0:
                heapq.heappush(steps, (-gain, row, above))

    def place(self, kind: int, *, keeps_nodes: bool) -> None:
        """Place the jobs of one type that change; if that fails, all jobs of the type."""
        jobs, mine = self._jobs, np.flatnonzero(self._kinds == kind)
        for row in mine[jobs.is_running[mine]]:
            self._room.give_back(jobs.placements[row])
        admitted = mine[self._levels[mine] >= 0]
        counts = self._table.levels[self._levels[admitted]]
        order = [int(row) for row in admitted[np.lexsort((admitted, -counts))]]
        stays = {row for row in order if jobs.is_running[row] and not self._changes(row)}
        found = self._try(order, stays if keeps_nodes else set())
        if len(found) < len(order):
            found = max(found, self._try(order, set()), key=len)
        for row, placement in found.items():
            self._room.take(placement)
            self._given[row] = placement

    def _try(self, order: list[int], stays: set[int]) -> dict[int, Placement]:
        """Where everybody goes if some stay; whoever does not fit is left out."""
        room = Room(self._snapshot.nodes, self._room.free)
        found = {row: self._jobs.placements[row] for row in stays}
        for placement in found.values():
            room.take(placement)
        for row in order:
            if row not in stays:
                place = room.place(self._snapshot.counts(row, self._option(row)))
                if place is not None:
                    found[row] = place
        return found

    def _option(self, row: int) -> int:
        return int(self._table.options[row, self._kinds[row], self._levels[row]])

    def _changes(self, row: int) -> bool:
        return self._option(row) != int(self._jobs.option[row])

    def decisions(self) -> list[Decision]:
        """Everything that changes."""
        found = (self._decide(row) for row in range(len(self._jobs)))
        return [decision for decision in found if decision is not None]

    def _decide(self, row: int) -> Decision | None:
        jobs, job_id = self._jobs, self._jobs.specs[row].id
        runs, placement = bool(jobs.is_running[row]), self._given.get(row)
        if placement is None:
            if runs and self._kinds[row] >= 0:
                return Preempt(job_id=job_id, reason="the least shares of others take all GPUs")
            return None if runs or self._least[row] >= 0 else self._refusal(row)
        option = self._option(row)
        numbers = {
            "least_gpus": float(self._table.levels[self._least[row]]),
            "gpus": float(self._table.levels[self._levels[row]]),
        }
        return change_job(
            jobs,
            row,
            option,
            placement,
            reason="its least share fits, and what is left goes to who gains most",
            move_reason="others fit only if all of this type are placed anew",
            numbers=numbers,
        )

    def _refusal(self, row: int) -> Decision:
        reason = NO_SINGLE_TYPE
        if self._kinds[row] >= 0:
            reason = "it cannot end by its deadline any more, whatever it gets"
        return Refuse(job_id=self._jobs.specs[row].id, reason=reason)


def _types(snapshot: Snapshot, table: CellTable) -> IntArray:
    """The type of each job: where it runs, what its owner named, or where it does most; or -1."""
    jobs, rows = snapshot.jobs, np.arange(len(snapshot.jobs))
    if table.speeds.size == 0:
        return np.full(len(jobs), -1, dtype=np.int64)
    option = np.where(jobs.is_running, jobs.option, rigid_options(snapshot))
    counts = snapshot.options.counts[jobs.option_set, np.maximum(option, 0)]
    num_types = np.where(option >= 0, (counts > 0).sum(axis=1), 0)
    kinds = np.where(num_types == 1, counts.argmax(axis=1), -1)
    index = {name: at for at, name in reversed(list(enumerate(snapshot.gpu_types)))}
    named = np.array([index.get(spec.requested_gpu, -1) for spec in jobs.specs], dtype=np.int64)
    kinds = np.where(~jobs.is_running & (named >= 0), named, kinds)
    able = table.speeds.max(axis=2) > 0
    most = (table.speeds / table.levels).max(axis=2).argmax(axis=1)
    kinds = np.where((kinds >= 0) & able[rows, kinds], kinds, most)
    is_mixed = jobs.is_running & (num_types > 1)  # what mixes types is left alone
    return np.where(able.any(axis=1) & ~is_mixed, kinds, -1)


def _least_shares(snapshot: Snapshot, table: CellTable, kinds: IntArray) -> IntArray:
    """The level of the least share of each job; -1 where its deadline cannot be kept any more."""
    jobs = snapshot.jobs
    found = np.full(len(jobs), -1, dtype=np.int64)
    rows = np.flatnonzero(kinds >= 0)
    if len(rows) == 0:
        return found
    speeds, options = table.speeds[rows, kinds[rows]], table.options[rows, kinds[rows]]
    able = speeds > 0
    seconds = jobs.remaining_samples[rows, None] / np.where(able, speeds, 1.0)
    end = snapshot.now_seconds + snapshot.startup_seconds[rows[:, None], options] + seconds
    deadlines = np.array([jobs.specs[row].deadline_seconds for row in rows.tolist()])
    in_time = able & (end + ROUND_SECONDS <= deadlines[:, None])
    late = np.where(jobs.is_running[rows], able.argmax(axis=1), -1)
    found[rows] = np.where(in_time.any(axis=1), in_time.argmax(axis=1), late)
    return found
