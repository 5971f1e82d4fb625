"""Placement for the policy `prices`: from the option that each job picks to decisions.

The file reads in the order of one decision:

1. `begin_assignment`: jobs that must not be disturbed keep their GPUs.
2. A job that waited too long (`patience.py`) gets the smallest option that finds a place, if need
   be on the GPUs of jobs that are not settled yet.
3. `hand_out` places the picks. A running job that picks what it has stays; the others give their
   GPUs back and all are placed, the widest first. Where a pick is free in number but not on one
   node, smaller jobs are moved off a node, or the job is spread, or it takes its next best option.
4. GPUs that are left over go to jobs that still wait, then to jobs that gain from a better option.
5. Whatever changed for a job becomes a decision with its reason and numbers.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from drystone.schedule.decision import Decision, Preempt, change_job
from drystone.schedule.packing import PlacedJob, Room, clear_node, make_room
from drystone.schedule.prices import reasons
from drystone.schedule.prices.integral import Picks
from drystone.schedule.prices.worth import Worth
from drystone.schedule.snapshot import BoolArray, FloatArray, IntArray, Placement, Snapshot

# A job that is placed takes a better option only if it is better by this factor: a smaller gain
# would not outlast the next change of prices.
_MIN_GROWTH: Final = 1.05
_MAX_CLEARINGS: Final = 32  # attempts to clear a node in one decision


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assignment:
    """What each job is given so far. The steps fill in `option`, `placed` and `room`.

    A running job holds its GPUs until it is settled (it is given an option) or lets them go.
    """

    snapshot: Snapshot
    worth: Worth
    closed: frozenset[int]  # nodes that no job is put on, or stays on
    pinned: frozenset[int]  # rows of jobs that keep what they have, whatever is left over later
    room: Room
    option: IntArray  # by job: what it is given, -1 for nothing
    is_holding: BoolArray  # by job: it runs, and is not settled
    # Where jobs are put, and why (`reasons.py`). A settled job that is not in here stays.
    placed: dict[int, tuple[Placement, str]] = field(default_factory=dict)

    def placement(self, row: int) -> Placement:
        """Nodes and GPUs of a settled job."""
        return self.placed[row][0] if row in self.placed else self.snapshot.jobs.placements[row]

    def give(self, row: int, option: int, placement: Placement, reason: str) -> None:
        """Settle a job on GPUs that are taken from the room already."""
        self.option[row] = option
        self.placed[row] = (placement, reason)

    def try_option(self, row: int, option: int, reason: str, *, spread: bool = False) -> bool:
        """Settle a job with an option if it finds a place."""
        placement = self.room.place(self.snapshot.counts(row, option), spread=spread)
        if placement is None:
            return False
        self.give(row, option, placement, reason)
        return True

    def keep(self, rows: IntArray | list[int]) -> None:
        """Settle running jobs where they are."""
        self.option[rows] = self.snapshot.jobs.option[rows]
        self.is_holding[rows] = False

    def open_part(self, row: int) -> Placement:
        """GPUs of a running job on nodes that are not closed."""
        placement = self.snapshot.jobs.placements[row]
        return tuple(part for part in placement if part[0] not in self.closed)

    def may_stay(self, rows: IntArray) -> BoolArray:
        """By row of a running job: whether none of its nodes is closed."""
        if not self.closed:
            return np.ones(len(rows), dtype=np.bool_)
        placements = [self.snapshot.jobs.placements[row] for row in rows.tolist()]
        stays = [self.closed.isdisjoint(node for node, _ in parts) for parts in placements]
        return np.array(stays, dtype=np.bool_)

    def value(self) -> float:
        """Worth of everything that is given out so far."""
        rows = (self.option >= 0).nonzero()[0]
        cells = rows * self.worth.values.shape[1] + self.option.take(rows)
        return float(self.worth.values.take(cells).sum())

    def final_room(self) -> Room:
        """What is free at the end, with the closed nodes: no job is left on those."""
        num_gpus = self.snapshot.nodes.num_gpus
        self.room.give_back(tuple((node, int(num_gpus[node])) for node in self.closed))
        return self.room

    def surplus(self, rows: IntArray, paid: FloatArray) -> FloatArray:
        """Worth of the options of these jobs less the price of their GPUs, (rows, options)."""
        values, sets = self.worth.values[rows], self.snapshot.jobs.option_set[rows]
        return np.where(values > 0, values - paid[sets], -np.inf)


def begin_assignment(
    snapshot: Snapshot, worth: Worth, *, pinned: IntArray, closed: Collection[int]
) -> Assignment:
    """The assignment in which only the pinned jobs are settled."""
    room = make_room(snapshot)
    room.take(tuple((node, int(snapshot.nodes.free[node])) for node in closed))
    given = Assignment(
        snapshot=snapshot,
        worth=worth,
        closed=frozenset(closed),
        pinned=frozenset(pinned.tolist()),
        room=room,
        option=np.full(len(snapshot.jobs), -1, dtype=np.int64),
        is_holding=snapshot.jobs.is_running.copy(),
    )
    given.keep(pinned)
    return given


def hand_out(
    given: Assignment, picks: Picks, prices: FloatArray, *, spread_speed_share: float
) -> list[tuple[int, Decision]]:
    """Place what jobs pick at these prices; everything that changes, with the rows of the jobs."""
    paid = given.snapshot.options.paid(prices)
    _keep_or_let_go(given, picks.options)
    misfits = _place_widest_first(given, picks.options, paid)
    _place_misfits(given, misfits, paid, spread_speed_share)
    _keep_where_still_free(given)
    if not _is_nothing_to_gain(given, picks):
        _start_on_leftovers(given, paid)
        _grow_into_leftovers(given, paid)
    return _decisions(given, prices, paid)


def _keep_or_let_go(given: Assignment, picks: IntArray) -> None:
    """Settle running jobs that pick what they have; the others give their GPUs back."""
    holding = given.is_holding.nonzero()[0]
    stays = given.may_stay(holding)
    stays &= picks.take(holding) == given.snapshot.jobs.option.take(holding)
    given.keep(holding[stays])
    for row in holding[~stays].tolist():
        given.room.give_back(given.open_part(row))


def _place_widest_first(
    given: Assignment, all_picks: IntArray, paid: FloatArray
) -> list[tuple[int, int]]:
    """Place the picks, those with the most GPUs of a type first; (row, pick) of the misfits."""
    rows = ((all_picks >= 0) & (given.option < 0)).nonzero()[0]
    if not len(rows):
        return []
    picks, sets = all_picks[rows], given.snapshot.jobs.option_set[rows]
    num_gpus = given.snapshot.options.counts[sets, picks].max(axis=1, initial=0)
    surplus = given.worth.values[rows, picks] - paid[sets, picks]
    order = np.lexsort((rows, -surplus, -num_gpus))
    return [
        (row, pick)
        for row, pick in zip(rows[order].tolist(), picks[order].tolist(), strict=True)
        if not given.try_option(row, pick, reasons.PICKED)
    ]


def _place_misfits(
    given: Assignment, misfits: list[tuple[int, int]], paid: FloatArray, spread_speed: float
) -> None:
    """Find another way for jobs whose picks are free in number but not on one node."""
    clearing = _Clearing(given)
    for row, pick in misfits:
        value = float(given.worth.values[row, pick])
        next_best = _next_best(given, row, pick, paid)
        next_value = float(given.worth.values[row, next_best]) if next_best >= 0 else 0.0
        cleared = clearing.clear_for(row, pick, value - next_value)
        if cleared and given.try_option(row, pick, reasons.PICKED):
            continue
        if spread_speed > 0 and value * spread_speed > next_value:
            reason = f"spread over more nodes than it needs, at {spread_speed:.0%} of its speed"
            if given.try_option(row, pick, reason, spread=True):
                continue
        if next_best >= 0:
            reason = reasons.why_no_node(given.snapshot, given.worth, row, pick, next_best)
            given.try_option(row, next_best, reason)


def _next_best(given: Assignment, row: int, pick: int, paid: FloatArray) -> int:
    """The best of a job's other options that has a place now; -1: none."""
    counts = given.snapshot.options.counts[given.snapshot.jobs.option_set[row]]
    surplus = given.surplus(np.array([row]), paid)[0]
    fits = (counts <= given.room.free_by_type).all(axis=1) & (surplus >= 0)
    fits[pick] = False
    for option in _highest_first(np.flatnonzero(fits), surplus[fits]):
        if given.room.find(counts[option]) is not None:
            return option
    return -1


def _highest_first(items: IntArray, scores: FloatArray) -> list[int]:
    """Options or rows by their scores; of equals the first."""
    ordered: list[int] = items[np.argsort(-scores, kind="stable")].tolist()
    return ordered


class _Clearing:
    """Moving smaller jobs off a node; at most `_MAX_CLEARINGS` attempts in one decision."""

    def __init__(self, given: Assignment) -> None:
        self._given = given
        self._num_attempts = 0
        self._rows_on: dict[int, list[int]] = {}  # by node; empty: to be listed

    def clear_for(self, row: int, pick: int, max_cost: float) -> bool:
        """Clear a node for a job's pick of one type, if the moves cost no more than this."""
        given, counts = self._given, self._given.snapshot.counts(row, pick)
        kinds = np.flatnonzero(counts)
        if len(kinds) != 1 or self._num_attempts >= _MAX_CLEARINGS:
            return False
        self._num_attempts += 1
        moves = clear_node(
            given.room,
            given.snapshot.nodes,
            kind=int(kinds[0]),
            number=int(counts[kinds[0]]),
            jobs_on=self._jobs_on,
            max_cost=max_cost,
        )
        cost = sum(job.move_cost for job, _ in moves or ())
        for job, placement in moves or ():
            is_moved = job.move_cost > 0
            reason = (
                reasons.why_moved(given.snapshot, row, max_cost, cost)
                if is_moved
                else reasons.PICKED
            )
            given.give(job.row, int(given.option[job.row]), placement, reason)
            self._rows_on = {}
        return moves is not None

    def _jobs_on(self, node: int) -> list[PlacedJob] | None:
        """The settled jobs on a node and what moving each costs; None where one must not move."""
        given, jobs = self._given, self._given.snapshot.jobs
        if not self._rows_on:
            for row in (given.option >= 0).nonzero()[0].tolist():
                for used, _ in given.placement(row):
                    self._rows_on.setdefault(used, []).append(row)
        found = []
        for row in self._rows_on.get(node, ()):
            placement, option = given.placement(row), int(given.option[row])
            if row in given.pinned or len(placement) != 1:
                return None
            # A job that starts or is resized in this decision pays for its start anyway.
            is_new = not jobs.is_running[row] or option != jobs.option[row]
            cost = 0.0 if is_new else given.worth.cost_of_move(row, option)
            found.append(PlacedJob(row=row, num_gpus=placement[0][1], move_cost=cost))
        return found


def _keep_where_still_free(given: Assignment) -> None:
    """Settle jobs that picked nothing or found no place on their old GPUs if these are free."""
    jobs = given.snapshot.jobs
    rows = (given.is_holding & (given.option < 0)).nonzero()[0]
    is_worth = given.worth.values[rows, jobs.option[rows]] > 0
    for row in rows[is_worth & given.may_stay(rows)].tolist():
        if given.room.has(jobs.placements[row]):
            given.room.take(jobs.placements[row])
            given.keep([row])


def _is_nothing_to_gain(given: Assignment, picks: Picks) -> bool:
    """Whether all have their picks, and those leave nothing that would be a clear gain."""
    if picks.max_gain == np.inf or not (given.option == picks.options).all():
        return False
    values = given.worth.values[given.worth.values > 0]
    return picks.max_gain <= (_MIN_GROWTH - 1.0) * float(values.min(initial=np.inf))


def _start_on_leftovers(given: Assignment, paid: FloatArray) -> None:
    """Start jobs that still wait on what is free, each with its best option that has a place."""
    if given.room.free_by_type.max(initial=0) <= 0:
        return
    jobs, counts = given.snapshot.jobs, given.snapshot.options.counts
    rows = ((given.option < 0) & ~jobs.is_running).nonzero()[0]
    fits = (counts[jobs.option_set[rows]] <= given.room.free_by_type).all(axis=2)
    surplus = np.where(fits, given.surplus(rows, paid), -np.inf)
    is_fitting = np.isfinite(surplus)
    can_start = np.flatnonzero(is_fitting.any(axis=1))
    best = given.surplus(rows[can_start], paid).max(axis=1, initial=-np.inf)
    for at in _highest_first(can_start, best):
        row, fitting = int(rows[at]), is_fitting[at]
        for option in _highest_first(np.flatnonzero(fitting), surplus[at, fitting]):
            if given.try_option(row, option, reasons.LEFT_OVER):
                break


def _grow_into_leftovers(given: Assignment, paid: FloatArray) -> None:
    """Let jobs take better options that fit into their own GPUs and what is left."""
    rows, options = _better_options(given)
    grows = np.unique(rows)
    best = given.surplus(grows, paid).max(axis=1, initial=-np.inf)
    for row in _highest_first(grows, best):
        own = given.placement(row)
        given.room.give_back(own)
        better = options[rows == row]
        better_first = _highest_first(better, given.worth.values[row, better])
        if not any(given.try_option(row, option, reasons.GREW) for option in better_first):
            given.room.take(own)


def _better_options(given: Assignment) -> tuple[IntArray, IntArray]:
    """Rows and options clearly better than what each job is given, that fit by counts."""
    values, sets = given.worth.values, given.snapshot.jobs.option_set
    width = values.shape[1]
    settled = (given.option >= 0).nonzero()[0]
    threshold = np.full(len(sets), np.inf)
    threshold[settled] = values.take(settled * width + given.option.take(settled)) * _MIN_GROWTH
    threshold[list(given.pinned)] = np.inf
    cells = (values > threshold[:, None]).ravel().nonzero()[0]
    rows = cells // max(width, 1)
    # What fits into what is free, and into what the job has.
    counts = given.snapshot.options.counts
    counts = counts.reshape(-1, counts.shape[2])
    sets = sets.take(rows)
    needs = counts.take(cells + (sets - rows) * width, axis=0)
    needs -= counts.take(sets * width + given.option.take(rows), axis=0)
    fits = (needs <= given.room.free_by_type).all(axis=1).nonzero()[0]
    rows = rows.take(fits)
    return rows, cells.take(fits) - rows * width


def _decisions(
    given: Assignment, prices: FloatArray, paid: FloatArray
) -> list[tuple[int, Decision]]:
    """A decision for every job whose option or placement is not what it was."""
    snapshot, worth, jobs = given.snapshot, given.worth, given.snapshot.jobs
    by_type = {
        f"price_{gpu}": price
        for gpu, price in zip(snapshot.gpu_types, prices.tolist(), strict=True)
    }
    placements = {row: placement for row, (placement, _) in given.placed.items()}
    found: list[tuple[int, Decision]] = []
    for row in sorted({*given.placed, *(given.option != jobs.option).nonzero()[0].tolist()}):
        option = int(given.option[row])
        if option < 0:
            job_id, value = jobs.specs[row].id, float(worth.values[row, jobs.option[row]])
            takers = reasons.takers_of(snapshot, placements, row)
            reason = reasons.why_stopped(snapshot, worth, row, paid, takers)
            numbers = {**by_type, "value": value}
            found.append((row, Preempt(job_id=job_id, reason=reason, numbers=numbers)))
            continue
        placement, cause = given.placed[row]
        numbers = {**by_type, **reasons.price_numbers(snapshot, worth, row, option, paid)}
        reason = reasons.why_given(snapshot, worth, row, option, cause, numbers)
        change = change_job(jobs, row, option, placement, reason=reason, numbers=numbers)
        if change is not None:
            found.append((row, change))
    return found
