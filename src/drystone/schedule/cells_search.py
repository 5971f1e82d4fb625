"""Where does one more job fit, and who grows into what is left? The two searches of `cells`.

Fitting: place the job as it is; if that fails, or only a spread placement is found, search
breadth first over shrinking one running job (per GPU type, of those with at least half of the
largest allocation the one that loses least) and over moving one job off the wanted type. The new
job is a candidate for both. Of the plans in which everybody can run, the one with the greatest sum
of samples a second wins. Growing: the one step, another type or twice the GPUs, that gains most.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from drystone.schedule.cells_board import Board
from drystone.schedule.cells_table import CellTable
from drystone.schedule.snapshot import FloatArray, IntArray

# What a job keeps of its speed each time the GPUs on each of its nodes are halved (Arena,
# `macro_def.py`, LOCALITY_SCALE_FACTOR).
SPREAD_SPEED_SHARE: Final = 0.9
MOST_UPGRADES: Final = 10
_IMPOSSIBLE: Final = -1e9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """A way to fit one job: the board with it, and what that gains in samples a second."""

    board: Board
    gain: float
    changed: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Branch:
    """Some changes made so far; the new job is not placed, but wants this type and level."""

    board: Board
    kind: int
    level: int
    changed: frozenset[int] = field(default_factory=frozenset)


def fit_job(
    table: CellTable, board: Board, row: int, *, kind: int, level: int, depth: int
) -> Plan | None:
    """The best plan for a job that would like so many GPUs of this type; None if there is none."""
    search = _Fitting(table, board, row)
    root = _Branch(board=board, kind=kind, level=level)
    search.try_to_place(root)
    if search.is_settled:
        return search.best
    branches = [root]
    for _ in range(depth):
        branches = [
            child
            for branch in branches
            for child in search.children(branch)
            if search.is_unseen(child) and not search.try_to_place(child)
        ]
    return search.best


def upgrade(table: CellTable, board: Board) -> int | None:
    """Make the one step that gains most; returns whose it was, None where no step gains."""
    rows = np.flatnonzero(board.kind >= 0)
    kinds, levels = board.kind[rows], board.level[rows]
    now = _speeds_now(table, board, rows)
    other = table.speeds[rows[:, None], np.arange(table.speeds.shape[1]), levels[:, None]]
    counts = table.levels[levels]
    fits = (board.free_by_kind >= counts[:, None]) & (other > 0)
    fits[np.arange(len(rows)), kinds] = False
    steps = [
        (float(other[at, kind] - now[at]), int(rows[at]), int(kind), int(levels[at]))
        for at, kind in np.argwhere(fits)
    ]
    doubled = table.up[rows, kinds, levels]
    for at in np.flatnonzero(doubled >= 0):
        more = int(table.levels[doubled[at]] - counts[at])
        if board.free_by_kind[kinds[at]] >= more:
            speed = table.speeds[rows[at], kinds[at], doubled[at]]
            steps.append((float(speed - now[at]), int(rows[at]), int(kinds[at]), int(doubled[at])))
    steps = sorted((step for step in steps if step[0] > 1e-9), key=lambda step: -step[0])
    return _make_best(table, board, steps)


def speed_on(table: CellTable, board: Board, row: int) -> float:
    """What a job makes on the board, less where it is spread."""
    speed = table.speed(row, int(board.kind[row]), int(board.level[row]))
    return speed * SPREAD_SPEED_SHARE ** board.halvings.get(row, 0)


def _make_best(
    table: CellTable, board: Board, steps: list[tuple[float, int, int, int]]
) -> int | None:
    """The first step that can be placed; steps promise what they gain if nothing is spread."""
    best: tuple[float, int, Board] | None = None
    for gain, row, kind, level in steps:
        if best is not None and gain <= best[0]:
            break
        before = speed_on(table, board, row)
        trial = board.copy()
        trial.remove(row)
        if trial.place(row, kind, level, int(table.levels[level])):
            real = speed_on(table, trial, row) - before
            if real > 1e-9 and (best is None or real > best[0]):
                best = (real, row, trial)
    if best is None:
        return None
    board.become(best[2])
    return best[1]


def _speeds_now(table: CellTable, board: Board, rows: IntArray) -> FloatArray:
    speeds: FloatArray = table.speeds[rows, board.kind[rows], board.level[rows]]
    if board.halvings:
        halvings = np.array([board.halvings.get(int(row), 0) for row in rows])
        speeds = speeds * SPREAD_SPEED_SHARE**halvings
    return speeds


class _Fitting:
    """One search: what was seen, and the best plan so far."""

    def __init__(self, table: CellTable, board: Board, row: int) -> None:
        self._table, self._start, self._row = table, board, row
        self._seen: set[object] = set()
        self.best: Plan | None = None
        self.is_settled = False

    def is_unseen(self, branch: _Branch) -> bool:
        """Whether no other order of the same changes led here before."""
        key = (
            branch.kind,
            branch.level,
            frozenset(
                (row, int(branch.board.kind[row]), int(branch.board.level[row]))
                for row in branch.changed
            ),
        )
        if key in self._seen:
            return False
        self._seen.add(key)
        return True

    def try_to_place(self, branch: _Branch) -> bool:
        """Try to place the new job; True if it has a place and is not spread."""
        table, row = self._table, self._row
        if table.speed(row, branch.kind, branch.level) <= 0:
            return False
        board = branch.board.copy()
        if not board.place(row, branch.kind, branch.level, int(table.levels[branch.level])):
            return False
        is_whole = row not in board.halvings
        if all(speed_on(table, board, one) > 0 for one in branch.changed):
            gain = speed_on(table, board, row) + sum(
                speed_on(table, board, one) - speed_on(table, self._start, one)
                for one in branch.changed
            )
            if self.best is None or gain > self.best.gain:
                self.best = Plan(board=board, gain=gain, changed=branch.changed)
            self.is_settled = is_whole
        return is_whole

    def children(self, branch: _Branch) -> Iterator[_Branch]:
        """One shrink for each type, and one change of type."""
        for kind in range(len(branch.board.free_by_kind)):
            child = self._shrink_one(branch, kind)
            if child is not None:
                yield child
        child = self._change_type(branch)
        if child is not None:
            yield child

    def _shrink_one(self, branch: _Branch, kind: int) -> _Branch | None:
        table, board = self._table, branch.board
        rows = np.flatnonzero(board.kind == kind)
        levels = board.level[rows]
        if branch.kind == kind:
            rows, levels = np.append(rows, self._row), np.append(levels, branch.level)
        counts = table.levels[levels]
        most = counts.max(initial=0)
        down = table.down[rows, kind, levels]
        is_candidate = (counts >= most // 2) & (down >= 0)
        if not is_candidate.any():
            return None
        after = table.speeds[rows, kind, down]
        change = np.where(after > 0, after - table.speeds[rows, kind, levels], _IMPOSSIBLE)
        at = int(np.where(is_candidate, change, -np.inf).argmax())
        if rows[at] == self._row:
            return replace(branch, level=int(down[at]))
        trial = board.copy()
        trial.shrink(int(rows[at]), int(down[at]), int(table.levels[down[at]]))
        return replace(branch, board=trial, changed=branch.changed | {int(rows[at])})

    def _change_type(self, branch: _Branch) -> _Branch | None:
        """Move a job off the wanted type, or let the new job want another: what gains most."""
        table, board = self._table, branch.board
        rows = np.append(np.flatnonzero(board.kind == branch.kind), self._row)
        levels = np.append(board.level[rows[:-1]], branch.level)
        now = table.speeds[rows, branch.kind, levels]
        now = np.where(now > 0, now, _IMPOSSIBLE)  # leaving what is impossible gains most
        after = table.speeds[rows[:, None], np.arange(table.speeds.shape[1]), levels[:, None]]
        fits = (board.free_by_kind >= table.levels[levels][:, None]) & (after > 0)
        fits[:, branch.kind] = False
        gains = np.where(fits, after - now[:, None], -np.inf)
        for flat in np.argsort(-gains, axis=None, kind="stable")[: int(fits.sum())]:
            at, kind = divmod(int(flat), gains.shape[1])
            row, level = int(rows[at]), int(levels[at])
            trial = board.copy()
            if row != self._row:
                trial.remove(row)
            if trial.place(row, kind, level, int(table.levels[level])):
                if row == self._row:
                    return replace(branch, kind=kind)
                return replace(branch, board=trial, changed=branch.changed | {row})
        return None
