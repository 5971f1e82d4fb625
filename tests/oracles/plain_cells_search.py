"""Placing one job, fitting it in, and the steps up, as Crius describes them: the plain way.

One job, one candidate, one placement at a time: lists, dictionaries and loops, and nothing is kept
from one trial to the next. Where a choice is made, every candidate is placed on a copy of the board
and valued with the placement that it found, and every order of changes is searched. Of equals the
first is taken: the older job, the earlier GPU type. `plain_cells.py` makes a policy of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from drystone.schedule.snapshot import Placement, Snapshot

MOST_PASSES = 256
SPREAD_SPEED_SHARE = 0.9
IMPOSSIBLE = -1e9  # the speed of what is no Cell, where changes are compared
Cell = tuple[int, int]  # GPU type, GPUs


@dataclass
class Board:
    """Who is where: GPUs that are free on each node, and of each job its Cell and its nodes."""

    free: dict[int, int]
    cells: dict[int, Cell] = field(default_factory=dict)
    placements: dict[int, Placement] = field(default_factory=dict)

    def copy(self) -> Board:
        return Board(dict(self.free), dict(self.cells), dict(self.placements))

    def take(self, job: int, cell: Cell, placement: Placement) -> None:
        for node, count in placement:
            self.free[node] -= count
        self.cells[job], self.placements[job] = cell, placement

    def remove(self, job: int) -> None:
        for node, count in self.placements.pop(job):
            self.free[node] += count
        del self.cells[job]

    def put_back(self, job: int, cell: Cell, placement: Placement) -> bool:
        if any(self.free[node] < count for node, count in placement):
            return False
        self.take(job, cell, placement)
        return True

    def shrink(self, job: int, num_gpus: int) -> None:
        """On as few of its nodes as that needs, those first where it has most."""
        kind, kept = self.cells[job][0], []
        for node, count in sorted(self.placements[job], key=lambda part: -part[1]):
            left = num_gpus - sum(count for _, count in kept)
            if left > 0:
                kept.append((node, min(count, left)))
        self.remove(job)
        self.take(job, (kind, num_gpus), tuple(sorted(kept)))

    def relocate(self, job: int, count: int, source: int, target: int) -> None:
        moved = [part for part in self.placements[job] if part != (source, count)]
        self.placements[job] = tuple(sorted([*moved, (target, count)]))
        self.free[source] += count
        self.free[target] -= count


class Placing:
    """Where a job goes: idle nodes, the emptiest one, after moving bubbles, or spread."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.num_gpus = snapshot.nodes.num_gpus.tolist()
        kinds = snapshot.nodes.type_index.tolist()
        self.nodes = [
            [node for node, its_kind in enumerate(kinds) if its_kind == kind]
            for kind in range(len(snapshot.gpu_types))
        ]
        self.sizes = [max((self.num_gpus[node] for node in rows), default=0) for rows in self.nodes]

    def num_free(self, board: Board, kind: int) -> int:
        return sum(board.free[node] for node in self.nodes[kind])

    def num_halvings(self, board: Board, job: int) -> int:
        """How often the GPUs on each node were halved: 0 on as few nodes as the count needs."""
        (kind, count), num_nodes = board.cells[job], len(board.placements[job])
        least = math.ceil(count / self.sizes[kind])
        return round(math.log2(num_nodes / least)) if num_nodes > least else 0

    def place(self, board: Board, job: int, cell: Cell) -> bool:
        """Put a job on the board; others of that type may move, even if it fails in the end."""
        kind, count = cell
        if self.sizes[kind] == 0 or self.num_free(board, kind) < count:
            return False
        found = self.find(board, kind, count)
        if found is None:
            found = self.find_after_moves(board, kind, count) or self.spread(board, kind, count)
        if found is None:
            return False
        board.take(job, cell, found)
        return True

    def find(self, board: Board, kind: int, count: int) -> Placement | None:
        size = self.sizes[kind]
        idle = [node for node in self.nodes[kind] if board.free[node] >= size]
        num_whole, rest = divmod(count, size)
        if len(idle) < num_whole:
            return None
        found = [(node, size) for node in idle[:num_whole]]
        if rest and len(idle) > num_whole:
            found.append((idle[num_whole], rest))
        elif rest:
            partly = [node for node in self.nodes[kind] if node not in idle]
            emptiest = max(partly, key=lambda node: board.free[node], default=None)
            if emptiest is None or board.free[emptiest] < rest:
                return None
            found.append((emptiest, rest))
        return tuple(sorted(found))

    def find_after_moves(self, board: Board, kind: int, count: int) -> Placement | None:
        for _ in range(MOST_PASSES):
            if not self.move_bubbles(board, kind, count):
                return None
            if (found := self.find(board, kind, count)) is not None:
                return found
        return None

    def move_bubbles(self, board: Board, kind: int, count: int) -> bool:
        """One pass over partly used nodes with bubbles enough: the emptiest with the fullest."""
        partly = [node for node in self.nodes[kind] if 0 < board.free[node] < self.num_gpus[node]]
        chosen, num_bubbles = [], 0
        for node in sorted(partly, key=lambda node: -board.free[node]):
            if num_bubbles < count:
                chosen.append(node)
                num_bubbles += board.free[node]
        moved = False
        for index in range(len(chosen) // 2):
            moved |= self.even_out(board, kind, chosen[index], chosen[-1 - index])
        return moved

    def even_out(self, board: Board, kind: int, first: int, second: int) -> bool:
        """Empty the first of two nodes, or fill one of them; False if nothing changes."""
        size = self.sizes[kind]
        parts = [
            (job, count, node)
            for job, placement in board.placements.items()
            for node, count in placement
            if node in (first, second)
        ]
        parts.sort(key=lambda part: (part[2] != first, part[0]))
        used = sum(count for _, count, _ in parts)
        is_known = used == sum(self.num_gpus[one] - board.free[one] for one in (first, second))
        is_apart = len({job for job, _, _ in parts}) == len(parts)
        if (
            not is_known
            or not is_apart
            or not self.num_gpus[first] == self.num_gpus[second] == size
        ):
            return False
        if used <= size:
            goes = [(job, count, node, second) for job, count, node in parts]
        else:
            goes = self.fill_one(board, parts, first, second, size)
        moves = [one for one in goes if one[2] != one[3]]
        for job, count, node, target in moves:
            board.relocate(job, count, node, target)
        return bool(moves)

    def fill_one(
        self, board: Board, parts: list[tuple[int, int, int]], first: int, second: int, size: int
    ) -> list[tuple[int, int, int, int]]:
        """Fill the node with the largest part, largest parts first; nothing if no fuller."""
        parts = sorted(parts, key=lambda part: -part[1])
        full = parts[0][2]
        other = second if full == first else first
        room, goes = {full: size, other: size}, []
        for job, count, node in parts:
            target = full if count <= room[full] else other
            if count > room[target]:
                return []
            room[target] -= count
            goes.append((job, count, node, target))
        return goes if room[full] < min(board.free[first], board.free[second]) else []

    def spread(self, board: Board, kind: int, count: int) -> Placement | None:
        """Half as many GPUs on each node, and again, until there are nodes enough."""
        per_node = min(count, self.sizes[kind])
        emptiest_first = sorted(self.nodes[kind], key=lambda node: -board.free[node])
        while per_node > 1:
            per_node = math.ceil(per_node / 2)
            needed = math.ceil(count / per_node)
            chosen = [node for node in emptiest_first if board.free[node] >= per_node][:needed]
            if len(chosen) == needed:
                parts = [(node, per_node) for node in chosen[:-1]]
                return tuple(sorted([*parts, (chosen[-1], count - per_node * (needed - 1))]))
        return None


@dataclass(frozen=True)
class Branch:
    """Some changes were made; the new job is not placed, but wants this Cell."""

    board: Board
    wish: Cell
    changed: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Plan:
    board: Board
    gain: float
    changed: frozenset[int]


class Search:
    """Fitting one job in, and the steps up."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.placing = Placing(snapshot)
        self.kinds = range(len(snapshot.gpu_types))
        by_set = [
            read_cells(counts, speeds)
            for counts, speeds in zip(
                snapshot.options.counts.tolist(),
                snapshot.options.samples_per_second.tolist(),
                strict=True,
            )
        ]
        self.cells = [by_set[one] for one in snapshot.jobs.option_set.tolist()]

    def speed(self, job: int, cell: Cell) -> float:
        return self.cells[job].get(cell, (0.0, -1))[0]

    def speed_on(self, board: Board, job: int) -> float:
        halvings = self.placing.num_halvings(board, job)
        return self.speed(job, board.cells[job]) * SPREAD_SPEED_SHARE**halvings

    def half(self, job: int, cell: Cell) -> int | None:
        """The largest Cell of at most half as many GPUs; half of them where there is none."""
        kind, count = cell
        smaller = [num for one, num in self.cells[job] if one == kind and num <= count // 2]
        return None if count == 1 else max(smaller, default=count // 2)

    def double(self, job: int, cell: Cell) -> int | None:
        kind, count = cell
        larger = [num for one, num in self.cells[job] if one == kind and count < num <= 2 * count]
        return max(larger, default=None)

    def fit(self, board: Board, job: int, wish: Cell, depth: int) -> Plan | None:
        """The best plan with this job on the board: as it is, or after changes breadth first."""
        plans: list[Plan] = []
        root = Branch(board, wish)
        branches = [] if self.try_to_place(root, root, job, plans) else [root]
        for _ in range(depth):
            branches = [
                child
                for branch in branches
                for child in self.children(branch, job)
                if not self.try_to_place(root, child, job, plans)
            ]
        return max(plans, key=lambda plan: plan.gain, default=None)

    def try_to_place(self, root: Branch, branch: Branch, job: int, plans: list[Plan]) -> bool:
        """Note the plan if everybody can run; True if the new job has a place and is not spread."""
        board = branch.board.copy()
        if self.speed(job, branch.wish) <= 0 or not self.placing.place(board, job, branch.wish):
            return False
        speeds = {one: self.speed_on(board, one) for one in sorted(branch.changed)}
        if all(speed > 0 for speed in speeds.values()):
            changes = sum(speeds[one] - self.speed_on(root.board, one) for one in speeds)
            plans.append(Plan(board, self.speed_on(board, job) + changes, branch.changed))
        return self.placing.num_halvings(board, job) == 0

    def children(self, branch: Branch, job: int) -> Iterator[Branch]:
        """Of the shrinks on each type, and of the changes of type, the one that loses least."""
        for kind in self.kinds:
            yield from best_of(self.shrinks(branch, job, kind))
        yield from best_of(self.type_changes(branch, job))

    def shrinks(self, branch: Branch, job: int, kind: int) -> Iterator[tuple[float, Branch]]:
        wants = {one: cell for one, cell in sorted(branch.board.cells.items()) if cell[0] == kind}
        if branch.wish[0] == kind:
            wants[job] = branch.wish
        most = max((count for _, count in wants.values()), default=0)
        for one, cell in wants.items():
            count = self.half(one, cell)
            if cell[1] < most // 2 or count is None:
                continue
            if one == job:
                before, after = self.speed(job, cell), self.speed(job, (kind, count))
                yield change(before, after), replace(branch, wish=(kind, count))
            else:
                board = branch.board.copy()
                board.shrink(one, count)
                before, after = self.speed_on(branch.board, one), self.speed_on(board, one)
                yield change(before, after), Branch(board, branch.wish, branch.changed | {one})

    def type_changes(self, branch: Branch, job: int) -> Iterator[tuple[float, Branch]]:
        wanted = branch.wish[0]
        jobs = [one for one, cell in sorted(branch.board.cells.items()) if cell[0] == wanted]
        num_free = [self.placing.num_free(branch.board, kind) for kind in self.kinds]
        for one in [*jobs, job]:
            now = branch.wish if one == job else branch.board.cells[one]
            before = self.speed(job, now) if one == job else self.speed_on(branch.board, one)
            for kind in self.kinds:
                cell = (kind, now[1])
                if kind == wanted or self.speed(one, cell) <= 0 or num_free[kind] < cell[1]:
                    continue
                board = branch.board.copy()
                if one != job:
                    board.remove(one)
                if not self.placing.place(board, one, cell):
                    continue
                gain = change(before, self.speed_on(board, one))
                if one == job:
                    yield gain, replace(branch, wish=cell)
                else:
                    yield gain, Branch(board, branch.wish, branch.changed | {one})

    def upgrade(self, board: Board) -> tuple[int, Board] | None:
        """The one step, another type or twice the GPUs, that gains most; None if none gains."""
        best: tuple[float, int, Board] | None = None
        for job in sorted(board.cells):
            before = self.speed_on(board, job)
            for cell in self.steps_up(board, job):
                trial = board.copy()
                trial.remove(job)
                if self.placing.place(trial, job, cell):
                    gain = self.speed_on(trial, job) - before
                    if gain > 1e-9 and (best is None or gain > best[0]):
                        best = (gain, job, trial)
        return None if best is None else best[1:]

    def steps_up(self, board: Board, job: int) -> list[Cell]:
        kind, count = board.cells[job]
        cells = [(other, count) for other in self.kinds if other != kind]
        if (double := self.double(job, (kind, count))) is not None:
            cells.append((kind, double))
        return [cell for cell in cells if self.speed(job, cell) > 0]


def read_cells(counts: list[list[int]], speeds: list[float]) -> dict[Cell, tuple[float, int]]:
    """By type and GPUs: samples a second, and which option that is; of two alike the faster."""
    cells: dict[Cell, tuple[float, int]] = {}
    for option, (row, speed) in enumerate(zip(counts, speeds, strict=True)):
        kinds = [kind for kind, count in enumerate(row) if count > 0]
        if len(kinds) == 1 and speed > 0:
            cell = (kinds[0], row[kinds[0]])
            if cell not in cells or speed >= cells[cell][0]:
                cells[cell] = (speed, option)
    return dict(sorted(cells.items()))


def change(before: float, after: float) -> float:
    """In samples a second; leaving what is impossible gains most, and getting there least."""
    if after <= 0:
        return IMPOSSIBLE
    return after - (before if before > 0 else IMPOSSIBLE)


def best_of(candidates: Iterator[tuple[float, Branch]]) -> list[Branch]:
    best = max(candidates, key=lambda candidate: candidate[0], default=None)
    return [] if best is None else [best[1]]
