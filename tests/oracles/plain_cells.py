"""The policy `cells` as its description reads: one job, one candidate, one placement at a time.

The oracle of `schedule/baselines/cells/policy.py`, and what is timed beside it. What that decides
otherwise than the released code on purpose (its docstring says so), this does too; what it leaves
out of the search because it cannot matter, this searches (`plain_cells_search.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from plain_cells_search import Board, Cell, Search

from drystone.schedule.baselines.queues import rigid_options
from drystone.schedule.decision import Decision, Move, Preempt, Refuse, Resize, Start
from drystone.schedule.snapshot import Placement, Snapshot

MOST_RESTARTS = 100
MOST_UPGRADES = 10
DEPTH, DEPTH_IF_CROWDED, CROWDED_JOBS = 3, 2, 150


@dataclass(frozen=True)
class PlainMemory:
    known: frozenset[str]
    opportunists: frozenset[str]
    wanted: Mapping[str, Cell]  # of jobs that were stopped
    free: Mapping[int, int]


def plain_cells(
    snapshot: Snapshot, memory: PlainMemory | None
) -> tuple[list[Decision], PlainMemory]:
    """Decide as Crius does, step by step."""
    return Round(snapshot, memory).decide()


@dataclass
class Round:
    snapshot: Snapshot
    memory: PlainMemory | None
    opportunists: set[int] = field(default_factory=set)
    gains: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ids = [spec.id for spec in self.snapshot.jobs.specs]
        self.search = Search(self.snapshot)
        self.board = Board(dict(enumerate(self.snapshot.nodes.free.tolist())))
        self.register()
        self.before = {
            job: (self.board.cells[job], self.board.placements[job]) for job in self.board.cells
        }
        running = self.snapshot.jobs.is_running.tolist()
        self.waiting = [
            job for job, runs in enumerate(running) if not runs and self.search.cells[job]
        ]
        self.named = rigid_options(self.snapshot).tolist()
        self.wishes = {job: self.wish(job) for job in self.waiting}
        if self.memory is not None:
            self.opportunists = {
                job for job in self.board.cells if self.ids[job] in self.memory.opportunists
            }
        self.untag()

    def register(self) -> None:
        """The running jobs; whoever runs what is no Cell stays off the board."""
        jobs = self.snapshot.jobs
        for job, option in enumerate(jobs.option.tolist()):
            if option >= 0:
                counts = self.snapshot.counts(job, option).tolist()
                cells = [(kind, count) for kind, count in enumerate(counts) if count > 0]
                if len(cells) == 1 and self.search.speed(job, cells[0]) > 0:
                    self.board.cells[job] = cells[0]
                    self.board.placements[job] = jobs.placements[job]

    def wish(self, job: int) -> Cell:
        """What it had when it was stopped, what its owner named, or the most from each GPU."""
        cells = self.search.cells[job]
        if self.memory is not None and self.ids[job] in self.memory.wanted:
            return self.memory.wanted[self.ids[job]]
        for cell, (_, option) in cells.items():
            if option == self.named[job]:
                return cell
        per_gpu = {cell: speed / cell[1] for cell, (speed, _) in cells.items()}
        best = max(per_gpu.values())
        return next(cell for cell in cells if per_gpu[cell] >= best * (1 - 1e-9))

    def decide(self) -> tuple[list[Decision], PlainMemory]:
        known = self.memory.known if self.memory is not None else frozenset()
        new = [job for job in self.waiting if self.ids[job] not in known]
        free = dict(enumerate(self.snapshot.nodes.free.tolist()))
        something_ended = self.memory is None or self.memory.free != free
        if something_ended:
            self.restart([job for job in self.waiting if job not in new])
        for job in new:
            self.attempt(job)
        if new or something_ended:
            for _ in range(MOST_UPGRADES):
                if (step := self.search.upgrade(self.board)) is None:
                    break
                self.board = step[1]
            self.undo_pointless_moves()
        decisions = [self.decision(job) for job in range(len(self.ids))]
        return [one for one in decisions if one is not None], self.remember()

    def restart(self, waiting: list[int]) -> None:
        """The oldest first; after a failure jobs of the same work are left out until one starts."""
        num_starts, failed = 0, set()
        for job in sorted({*waiting, *self.opportunists}):
            work = int(self.snapshot.jobs.option_set[job])
            if job in self.board.cells or num_starts >= MOST_RESTARTS or work in failed:
                continue
            if self.attempt(job):
                num_starts, failed = num_starts + 1, set()
                self.untag()
            else:
                failed.add(work)

    def attempt(self, job: int) -> bool:
        """Fit one job in; opportunistic jobs behind it may lose their GPUs."""
        trial = self.board.copy()
        behind = {
            one: (self.board.cells[one], self.board.placements[one])
            for one in sorted(self.opportunists)
            if one > job
        }
        for one in behind:
            trial.remove(one)
        depth = DEPTH if len(self.board.cells) <= CROWDED_JOBS else DEPTH_IF_CROWDED
        plan = self.search.fit(trial, job, self.wishes[job], depth)
        if plan is None:
            return False
        self.board = plan.board
        self.gains |= dict.fromkeys([job, *plan.changed], plan.gain)
        for one, (cell, placement) in behind.items():
            if not self.board.put_back(one, cell, placement):
                self.suspend(one, cell)
        if any(one < job and one not in self.board.cells for one in self.waiting):
            self.opportunists.add(job)
        return True

    def suspend(self, job: int, cell: Cell) -> None:
        self.opportunists.discard(job)
        self.wishes[job] = cell
        self.gains[job] = 0.0
        if job not in self.waiting:
            self.waiting.append(job)

    def untag(self) -> None:
        """Whoever has no waiting job ahead is opportunistic no more."""
        waits = [job for job in self.waiting if job not in self.board.cells]
        self.opportunists = {job for job in self.opportunists if any(one < job for one in waits)}

    def undo_pointless_moves(self) -> None:
        """Whose Cell is the same goes back where it was, if need be swapping whole nodes."""
        board = self.board
        for job, (cell, placement) in self.before.items():
            if board.cells.get(job) != cell or board.placements[job] == placement:
                continue
            now = board.placements[job]
            board.remove(job)
            if not board.put_back(job, cell, placement):
                board.put_back(job, cell, now)
                size = self.search.placing.sizes[cell[0]]
                if all(count == size for _, count in (*placement, *now)):
                    self.swap_nodes(now, placement)

    def swap_nodes(self, now: Placement, before: Placement) -> None:
        ours, theirs = {node for node, _ in now}, {node for node, _ in before}
        board = self.board
        for mine, old in zip(sorted(ours - theirs), sorted(theirs - ours), strict=False):
            swap = {mine: old, old: mine}
            for job, placement in board.placements.items():
                swapped = [(swap.get(node, node), count) for node, count in placement]
                board.placements[job] = tuple(sorted(swapped))
            board.free[mine], board.free[old] = board.free[old], board.free[mine]

    def decision(self, job: int) -> Decision | None:
        job_id, placement = self.ids[job], self.board.placements.get(job)
        runs = bool(self.snapshot.jobs.is_running[job])
        if placement is None:
            if job in self.before:
                return Preempt(job_id=job_id, reason="an older job takes its GPUs")
            waits = runs or self.search.cells[job]
            return None if waits else Refuse(job_id=job_id, reason="it has no Cell")
        cell = self.board.cells[job]
        option = self.search.cells[job][cell][1]
        numbers = {"samples_per_second": self.search.speed_on(self.board, job)}
        if job in self.gains:
            numbers["gain_samples_per_second"] = self.gains[job]
        if not runs:
            return Start(
                job_id=job_id, option=option, placement=placement, reason="fits", numbers=numbers
            )
        if cell != self.before[job][0]:
            return Resize(
                job_id=job_id, option=option, placement=placement, reason="gains", numbers=numbers
            )
        if placement != self.snapshot.jobs.placements[job]:
            return Move(job_id=job_id, placement=placement, reason="moves", numbers=numbers)
        return None

    def remember(self) -> PlainMemory:
        return PlainMemory(
            known=frozenset(self.ids),
            opportunists=frozenset(self.ids[job] for job in self.opportunists),
            wanted={
                self.ids[job]: cell
                for job, cell in self.wishes.items()
                if job not in self.board.cells
            },
            free=self.board.free,
        )
