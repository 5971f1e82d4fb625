"""Cells: jobs in order of arrival, on the Cell they ask for, then on smaller and on better ones.

After Crius, later Arena (arXiv:2403.16125), whose details are read from its released scheduler. A
Cell is the best plan of a job on so many GPUs of one type. Decisions follow two events.

Something ended: every waiting job is tried again, oldest first (at most 100 starts; a job whose
model and batch just failed is skipped). Something arrived: every new job is tried once. A trial
places the job at the type and count that it asks for, moving bubbles; failing that it searches
over shrinking jobs and changing their types (`search.py`), three changes deep, two
where more than 150 jobs run. In the end running jobs take the ten steps up that gain most, in
samples a second. A job that starts while older ones wait is opportunistic: when one of those is
tried, its GPUs count as free, and if they are taken it waits again.

Where this differs from the released code, and why: the gain of a plan counts each change once (the
code counts a change of type of another job twice, and prefers a change of the new job's own type
whatever it gains); a job whose owner named nothing, or what cannot run, asks for the option with
the most work from each GPU; one without any Cell is refused, as the loop wants every job settled;
counts need not be powers of two (half or double is then the largest Cell of at most that). A mixed
option is no Cell, and a job that runs one is left alone. What the search leaves out alters nothing:
the procedure in plain loops, every candidate placed and every order searched, decides the same
(`tests/oracles/plain_cells.py`).

`cells-deadline` allows a Cell only if the job ends by its deadline on it: now, the start, one round
of 300 s and the remaining work. A waiting job that cannot make it any more is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from drystone.schedule.baselines.cells.board import Board
from drystone.schedule.baselines.cells.search import (
    MAX_UPGRADES,
    CellTable,
    fit_job,
    make_cells,
    speed_on,
    upgrade,
)
from drystone.schedule.baselines.queues import rigid_options
from drystone.schedule.decision import NO_SINGLE_TYPE, Decision, Memory, Preempt, Refuse, change_job
from drystone.schedule.snapshot import BoolArray, IntArray, Placement, Snapshot

MAX_RESTARTS: Final = 100
DEPTH: Final = 3
DEPTH_IF_CROWDED: Final = 2
CROWDED_JOBS: Final = 150
ROUND_SECONDS: Final = 300.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CellsMemory:
    """What is carried from one decision to the next."""

    known: frozenset[str]  # the jobs that were tried before
    opportunists: frozenset[str]
    wanted: Mapping[str, tuple[int, int]]  # of jobs that were stopped: the type and GPUs they had
    free: IntArray  # by node, after the decisions


def cells(snapshot: Snapshot, memory: Memory) -> tuple[list[Decision], Memory]:
    """Decide as Crius does."""
    return _Round(snapshot, memory, make_cells(snapshot)).decide()


def cells_deadline(snapshot: Snapshot, memory: Memory) -> tuple[list[Decision], Memory]:
    """Decide as Crius does where deadlines must be kept."""
    in_time = _in_time(snapshot)
    table = make_cells(snapshot, in_time)
    return _Round(snapshot, memory, table, has_deadlines=True).decide()


def _in_time(snapshot: Snapshot) -> BoolArray:
    """By job and option: whether the job would end by its deadline; what it runs is allowed."""
    jobs, speeds = snapshot.jobs, snapshot.job_speeds
    deadlines = np.array([spec.deadline_seconds for spec in jobs.specs])
    left = jobs.remaining_samples[:, None] / np.where(speeds > 0, speeds, np.inf)
    end = snapshot.now_seconds + snapshot.startup_seconds + ROUND_SECONDS + left
    allowed: BoolArray = (speeds > 0) & (end <= deadlines[:, None])
    running = np.flatnonzero(jobs.is_running)
    allowed[running, jobs.option[running]] = True
    return allowed


@dataclass(slots=True)
class _Tags:
    """What is said of jobs while a round is decided."""

    opportunists: set[int] = field(default_factory=set)
    reasons: dict[int, str] = field(default_factory=dict)
    gains: dict[int, float] = field(default_factory=dict)


class _Round:
    """One decision: the board as it was, and as it is being changed."""

    def __init__(
        self,
        snapshot: Snapshot,
        memory: CellsMemory | None,
        table: CellTable,
        *,
        has_deadlines: bool = False,
    ) -> None:
        self._snapshot, self._jobs, self._memory = snapshot, snapshot.jobs, memory
        self._table, self._has_deadlines = table, has_deadlines
        self._board = Board(snapshot.nodes, len(snapshot.jobs))
        self._register()
        self._before = {
            row: (int(self._board.kind[row]), int(self._board.level[row]), placement)
            for row, placement in self._board.placements.items()
        }
        self._waiting = [
            int(row)
            for row in np.flatnonzero(~self._jobs.is_running)
            if (table.speeds[row] > 0).any()
        ]
        self._wanted = self._wishes()
        self._tags = _Tags()
        if memory is not None:
            rows = {self._jobs.row_of.get(job_id, -1) for job_id in memory.opportunists}
            self._tags.opportunists = {row for row in rows if row in self._board.placements}
        self._untag()

    def decide(self) -> tuple[list[Decision], CellsMemory]:
        """Both events, the steps up, and what changed."""
        known = self._memory.known if self._memory is not None else frozenset()
        new = [row for row in self._waiting if self._jobs.specs[row].id not in known]
        something_ended = self._memory is None or not np.array_equal(
            self._memory.free, self._snapshot.nodes.free
        )
        if something_ended:
            self._restart([row for row in self._waiting if row not in set(new)])
        for row in new:
            self._try(row, reason="it is new, and it fits")
        if new or something_ended:
            self._upgrade()
            self._board.restore_nodes(self._before)
        decisions = self._decisions()
        return decisions, self._remember()

    def _register(self) -> None:
        """Put the running jobs on the board; those that run what is no Cell stay off it."""
        jobs, levels = self._jobs, self._table.levels
        for row in np.flatnonzero(jobs.is_running).tolist():
            counts = self._snapshot.counts(row, int(jobs.option[row]))
            kinds = np.flatnonzero(counts)
            if len(kinds) == 1:
                level = int(np.searchsorted(levels, counts[kinds[0]]))
                if self._table.speed(row, int(kinds[0]), level) > 0:
                    self._board.register(row, int(kinds[0]), level, jobs.placements[row])

    def _wishes(self) -> dict[int, tuple[int, int]]:
        """The type and level that each waiting job asks for."""
        frugal = rigid_options(self._snapshot)
        before = self._memory.wanted if self._memory is not None else {}
        levels, wishes = self._table.levels, {}
        for row in self._waiting:
            kind, num_gpus = before.get(self._jobs.specs[row].id, (-1, 0))
            found = np.flatnonzero(levels == num_gpus)
            if kind < 0 or len(found) == 0:
                cell = np.argwhere(self._table.options[row] == frugal[row])
                if frugal[row] < 0 or len(cell) == 0:
                    cell = self._most_from_each_gpu(row)
                wishes[row] = (int(cell[0][0]), int(cell[0][1]))
            else:
                wishes[row] = (kind, int(found[0]))
        return wishes

    def _most_from_each_gpu(self, row: int) -> IntArray:
        speeds = self._table.speeds[row] / self._table.levels
        return np.argwhere(speeds >= speeds.max() * (1 - 1e-9))

    def _restart(self, queue: list[int]) -> None:
        """Try the waiting jobs, the oldest first; whoever is stopped for them is tried as well."""
        num_starts = 0
        failed: set[int] = set()  # the work of jobs that just failed
        queue = sorted({*queue, *self._tags.opportunists})
        for row in queue:
            if row in self._board.placements or num_starts >= MAX_RESTARTS:
                continue
            work = int(self._jobs.option_set[row])
            if work in failed:
                continue
            if self._try(row, reason="something ended, and it fits now"):
                num_starts, failed = num_starts + 1, set()
                self._untag()
            else:
                failed.add(work)

    def _try(self, row: int, *, reason: str) -> bool:
        """Fit one job; opportunistic jobs behind it may lose their GPUs."""
        trial = self._board.copy()
        behind = sorted(other for other in self._tags.opportunists if other > row)
        had = {other: self._state(other) for other in behind}
        for other in behind:
            trial.remove(other)
        num_running = len(self._board.placements)
        kind, level = self._wanted[row]
        plan = fit_job(
            self._table,
            trial,
            row,
            kind=kind,
            level=level,
            depth=DEPTH if num_running <= CROWDED_JOBS else DEPTH_IF_CROWDED,
        )
        if plan is None:
            return False
        self._board.become(plan.board)
        self._say(row, reason, plan.gain)
        for other in plan.changed:
            self._say(other, "it makes room for a job that would not fit otherwise", plan.gain)
        for other, (its_kind, its_level, placement) in had.items():
            if not self._board.put_back(other, its_kind, its_level, placement):
                self._suspend(other, its_kind, its_level)
        if any(other < row and other not in self._board.placements for other in self._waiting):
            self._tags.opportunists.add(row)
        return True

    def _state(self, row: int) -> tuple[int, int, Placement]:
        board = self._board
        return int(board.kind[row]), int(board.level[row]), board.placements[row]

    def _suspend(self, row: int, kind: int, level: int) -> None:
        self._tags.opportunists.discard(row)
        self._wanted[row] = (kind, level)
        if row not in self._waiting:
            self._waiting = sorted([*self._waiting, row])
        self._say(row, "an older job that waited takes the GPUs it was lent", 0.0)

    def _untag(self) -> None:
        """Whoever has no waiting job ahead is opportunistic no more."""
        waits = [row for row in self._waiting if row not in self._board.placements]
        first = min(waits, default=len(self._jobs))
        self._tags.opportunists = {row for row in self._tags.opportunists if row > first}

    def _upgrade(self) -> None:
        for _ in range(MAX_UPGRADES):
            row = upgrade(self._table, self._board)
            if row is None:
                return
            self._tags.reasons.setdefault(row, "of all steps up its step gains most")

    def _say(self, row: int, reason: str, gain: float) -> None:
        self._tags.reasons[row] = reason
        self._tags.gains[row] = gain

    def _decisions(self) -> list[Decision]:
        found = [self._decide(row) for row in range(len(self._jobs))]
        return [decision for decision in found if decision is not None]

    def _decide(self, row: int) -> Decision | None:
        job_id, placement = self._jobs.specs[row].id, self._board.placements.get(row)
        runs, reason = bool(self._jobs.is_running[row]), self._tags.reasons.get(row, "")
        if placement is None:
            if row in self._before:
                return Preempt(job_id=job_id, reason=reason)
            has_cell = bool((self._table.speeds[row] > 0).any())
            return None if runs or has_cell else self._refusal(row)
        kind, level = int(self._board.kind[row]), int(self._board.level[row])
        # Of two Cells alike it may run the slower, which the table leaves out.
        is_same = row in self._before and (kind, level) == self._before[row][:2]
        option = int(self._jobs.option[row] if is_same else self._table.options[row, kind, level])
        numbers = {"samples_per_second": speed_on(self._table, self._board, row)}
        if row in self._tags.gains:
            numbers["gain_samples_per_second"] = self._tags.gains[row]
        return change_job(
            self._jobs,
            row,
            option,
            placement,
            reason=reason,
            move_reason="its GPUs are needed in one place, and others do as well for it",
            numbers=numbers,
        )

    def _refusal(self, row: int) -> Decision:
        reason = NO_SINGLE_TYPE
        if self._has_deadlines and (self._snapshot.job_speeds[row] > 0).any():
            reason = "it cannot end by its deadline any more, whatever it gets"
        return Refuse(job_id=self._jobs.specs[row].id, reason=reason)

    def _remember(self) -> CellsMemory:
        specs, levels = self._jobs.specs, self._table.levels
        return CellsMemory(
            known=frozenset(spec.id for spec in specs),
            opportunists=frozenset(specs[row].id for row in self._tags.opportunists),
            wanted={
                specs[row].id: (kind, int(levels[level]))
                for row, (kind, level) in self._wanted.items()
                if row not in self._board.placements
            },
            free=self._board.free.copy(),
        )
