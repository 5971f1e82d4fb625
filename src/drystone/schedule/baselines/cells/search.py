"""Where does one more job fit, and who grows into what is left? The two searches of `cells`.

Fitting: place the job as it is; if that fails, or only a spread placement is found, search
breadth first over shrinking one running job (per GPU type, of those with at least half of the
largest allocation the one that loses least) and over moving one job off the wanted type. The new
job is a candidate for both. Of the plans in which everybody can run, the one with the greatest sum
of samples a second wins. Growing: the one step, another type or twice the GPUs, that gains most.

What a change is worth is known once it is placed; before, only that it is worth no more than on as
few nodes as its count needs. So candidates are placed in the order of what they may be worth, and
the rest are left out when none of them can be better. Changes in another order are searched once if
they lead to the same board. Neither alters a decision: the same search in plain loops is the oracle
(`tests/oracles/plain_cells_search.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

import numpy as np

from drystone.schedule.baselines.cells.board import Board
from drystone.schedule.snapshot import BoolArray, FloatArray, IntArray, Snapshot


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CellTable:
    """The Cells of all jobs, (jobs, types, levels)."""

    levels: IntArray  # GPUs at each level, ascending
    speeds: FloatArray  # samples a second; 0: there is no such Cell
    options: IntArray  # the option it is, or -1
    down: IntArray  # the level that halving leads to, (jobs, types, levels); -1 from one GPU
    up: IntArray  # the level that doubling leads to; -1 where there is none

    def speed(self, row: int, kind: int, level: int) -> float:
        """Samples a second of one Cell."""
        return float(self.speeds[row, kind, level])


def make_cells(snapshot: Snapshot, is_allowed: BoolArray | None = None) -> CellTable:
    """The table of a snapshot; `is_allowed` (jobs, options) leaves options out."""
    options = snapshot.options
    kind, num_gpus, is_cell = _single_type(options.counts, options.samples_per_second)
    levels = _levels(num_gpus[is_cell])
    by_set = np.full((len(options.counts), len(snapshot.gpu_types), len(levels)), -1, np.int64)
    sets, columns = np.nonzero(is_cell)
    slowest_first = np.argsort(options.samples_per_second[sets, columns], kind="stable")
    sets, columns = sets[slowest_first], columns[slowest_first]
    at = np.searchsorted(levels, num_gpus[sets, columns])
    by_set[sets, kind[sets, columns], at] = columns  # of two Cells alike the faster stays
    chosen = by_set[snapshot.jobs.option_set]
    jobs = np.arange(len(chosen))[:, None, None]
    if chosen.size and snapshot.job_speeds.shape[1]:
        speeds = np.where(chosen >= 0, snapshot.job_speeds[jobs, chosen], 0.0)
        if is_allowed is not None:
            speeds = np.where(is_allowed[jobs, chosen], speeds, 0.0)
    else:
        speeds = np.zeros(chosen.shape)
    chosen = np.where(speeds > 0, chosen, -1)
    down, up = _steps(levels, speeds)
    return CellTable(levels=levels, speeds=speeds, options=chosen, down=down, up=up)


def _single_type(counts: IntArray, speeds: FloatArray) -> tuple[IntArray, IntArray, BoolArray]:
    """By option: its type, its GPUs, and whether it is a Cell at all."""
    if counts.size == 0:
        nothing = np.zeros(counts.shape[:2], dtype=np.int64)
        return nothing, nothing, nothing.astype(np.bool_)
    is_cell: BoolArray = ((counts > 0).sum(axis=2) == 1) & (speeds > 0)
    return counts.argmax(axis=2), counts.sum(axis=2), is_cell


def _levels(num_gpus: IntArray) -> IntArray:
    found = set(num_gpus.tolist())
    for count in list(found):
        while count > 1:
            count //= 2
            found.add(count)
    return np.array(sorted(found), dtype=np.int64)


def _steps(levels: IntArray, speeds: FloatArray) -> tuple[IntArray, IntArray]:
    """Halving leads to the largest Cell of at most half, or else to half, though it is none.

    Doubling leads to the largest Cell of at most double.
    """
    if len(levels) == 0:
        nothing = np.zeros(speeds.shape, dtype=np.int64)
        return nothing, nothing
    index = np.arange(len(levels))
    largest = np.maximum.accumulate(np.where(speeds > 0, index, -1), axis=2)
    half = np.searchsorted(levels, levels // 2)
    below = largest[:, :, half]
    down = np.where(levels == 1, -1, np.where(below >= 0, below, half))
    double = np.searchsorted(levels, 2 * levels, "right") - 1
    above = largest[:, :, double]
    return down, np.where(above > index, above, -1)


# What a job keeps of its speed each time the GPUs on each of its nodes are halved (Arena,
# `macro_def.py`, LOCALITY_SCALE_FACTOR).
SPREAD_SPEED_SHARE: Final = 0.9
MAX_UPGRADES: Final = 10
_MIN_GAIN: Final = 1e-9
_IMPOSSIBLE: Final = -1e9  # stands for the speed of what is no Cell: leaving that gains most
_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fit:
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
) -> Fit | None:
    """The best fit for a job that would like so many GPUs of this type; None if there is none."""
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
    now, counts = _speeds_now(table, board, rows), table.levels[levels]
    other = table.speeds[rows, :, levels]
    num_kinds = other.shape[1]
    fits = (board.free_by_kind >= counts[:, None]) & (other > 0)
    fits[np.arange(len(rows)), kinds] = False
    doubled = table.up[rows, kinds, levels]
    can_double = (doubled >= 0) & (board.free_by_kind[kinds] >= table.levels[doubled] - counts)
    most = np.column_stack(  # by row: each type, then twice the GPUs
        (
            np.where(fits, other - now[:, None], -np.inf),
            np.where(can_double, table.speeds[rows, kinds, doubled] - now, -np.inf),
        )
    )
    most[most <= _MIN_GAIN] = -np.inf

    def attempt(at: int) -> tuple[float, tuple[int, Board]] | None:
        index, kind = divmod(at, num_kinds + 1)
        row, level = int(rows[index]), int(levels[index])
        if kind == num_kinds:
            kind, level = int(kinds[index]), int(doubled[index])
        trial = board.copy()
        trial.remove(row)
        if not trial.place(row, kind, level, int(table.levels[level])):
            return None
        gain = speed_on(table, trial, row) - speed_on(table, board, row)
        return (gain, (row, trial)) if gain > _MIN_GAIN else None

    best = _best(most.ravel(), attempt)
    if best is None:
        return None
    board.become(best[1])
    return best[0]


def speed_on(table: CellTable, board: Board, row: int) -> float:
    """What a job makes on the board, less where it is spread."""
    speed = table.speed(row, int(board.kind[row]), int(board.level[row]))
    return speed * SPREAD_SPEED_SHARE ** board.halvings.get(row, 0)


def _speeds_now(table: CellTable, board: Board, rows: IntArray) -> FloatArray:
    speeds: FloatArray = table.speeds[rows, board.kind[rows], board.level[rows]]
    if board.halvings:
        halvings = [board.halvings.get(row, 0) for row in rows.tolist()]
        speeds = speeds * np.array([SPREAD_SPEED_SHARE**halved for halved in halvings])
    return speeds


def _change(before: float, after: float) -> float:
    if after <= 0:
        return _IMPOSSIBLE
    return after - (before if before > 0 else _IMPOSSIBLE)


def _best(most: FloatArray, attempt: Callable[[int], tuple[float, _Found] | None]) -> _Found | None:
    """The candidate that is worth most, of equals the first; None where no attempt succeeds.

    `most` bounds what each may be worth (-inf: no candidate) and is used up; `attempt` says what it
    is worth.
    """
    best: tuple[float, int] | None = None
    found: _Found | None = None
    while most.size:
        at = int(most.argmax())
        bound = (float(most[at]), -at)
        if bound[0] == -np.inf or (best is not None and bound <= best):
            break
        most[at] = -np.inf
        tried = attempt(at)
        if tried is not None and (best is None or (tried[0], -at) > best):
            best, found = (tried[0], -at), tried[1]
    return found


class _Fitting:
    """One search: what was seen, and the best fit so far."""

    def __init__(self, table: CellTable, board: Board, row: int) -> None:
        self._table, self._start, self._row = table, board, row
        self._seen: set[object] = set()
        self.best: Fit | None = None
        self.is_settled = False

    def is_unseen(self, branch: _Branch) -> bool:
        """Whether no other order of changes led to this board before."""
        start = self._start.placements
        # Whoever was not moved has the very same placement.
        moved = [part for part in branch.board.placements.items() if part[1] is not start[part[0]]]
        key = (branch.kind, branch.level, branch.changed, frozenset(moved))
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
        if all(speed_on(table, board, changed) > 0 for changed in branch.changed):
            gain = speed_on(table, board, row) + sum(
                speed_on(table, board, changed) - speed_on(table, self._start, changed)
                for changed in sorted(branch.changed)
            )
            if self.best is None or gain > self.best.gain:
                self.best = Fit(board=board, gain=gain, changed=branch.changed)
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

    def _candidates(self, branch: _Branch, kind: int) -> tuple[IntArray, IntArray, FloatArray]:
        """Who is on a type, the new job last if it wants that type; their levels and speeds."""
        table, board = self._table, branch.board
        rows = np.flatnonzero(board.kind == kind)
        levels, now = board.level[rows], _speeds_now(table, board, rows)
        if branch.kind == kind:
            rows, levels = np.append(rows, self._row), np.append(levels, branch.level)
            now = np.append(now, table.speeds[self._row, kind, branch.level])
        return rows, levels, np.where(now > 0, now, _IMPOSSIBLE)

    def _shrink_one(self, branch: _Branch, kind: int) -> _Branch | None:
        table = self._table
        rows, levels, now = self._candidates(branch, kind)
        counts, down = table.levels[levels], table.down[rows, kind, levels]
        is_candidate = (counts >= counts.max(initial=0) // 2) & (down >= 0)
        after = table.speeds[rows, kind, down]
        change = np.where(after > 0, after - now, _IMPOSSIBLE)

        def attempt(at: int) -> tuple[float, _Branch]:
            row, level = int(rows[at]), int(down[at])
            if row == self._row:
                return float(change[at]), replace(branch, level=level)
            trial = branch.board.copy()
            trial.shrink(row, level, int(table.levels[level]))
            worth = _change(float(now[at]), speed_on(table, trial, row))
            return worth, replace(branch, board=trial, changed=branch.changed | {row})

        return _best(np.where(is_candidate, change, -np.inf), attempt)

    def _change_type(self, branch: _Branch) -> _Branch | None:
        """Move a job off the wanted type, or let the new job want another: what gains most."""
        table, board = self._table, branch.board
        rows, levels, now = self._candidates(branch, branch.kind)
        after = table.speeds[rows, :, levels]
        fits = (board.free_by_kind >= table.levels[levels][:, None]) & (after > 0)
        fits[:, branch.kind] = False

        def attempt(at: int) -> tuple[float, _Branch] | None:
            index, kind = divmod(at, after.shape[1])
            row, level = int(rows[index]), int(levels[index])
            trial = board.copy()
            if row != self._row:
                trial.remove(row)
            if not trial.place(row, kind, level, int(table.levels[level])):
                return None
            worth = _change(float(now[index]), speed_on(table, trial, row))
            if row == self._row:
                return worth, replace(branch, kind=kind)
            return worth, replace(branch, board=trial, changed=branch.changed | {row})

        return _best(np.where(fits, after - now[:, None], -np.inf).ravel(), attempt)
