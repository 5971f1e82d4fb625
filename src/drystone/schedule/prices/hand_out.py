"""From picks to placements: who stays, who is placed, who yields, and who gets what is left."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import numpy as np

from drystone.schedule.decision import Decision, Move, Numbers, Preempt, Resize, Start
from drystone.schedule.packing import Lodger, Room, clear_node, make_room
from drystone.schedule.snapshot import BoolArray, FloatArray, IntArray, Placement, Snapshot

# A job that is placed takes a better option only if it is better by this much.
_WORTH_GROWING: Final = 1.05
_MOST_CLEARINGS: Final = 32  # nodes that one decision tries to clear
_PICKED: Final = "of all its options this is worth most at these prices"
_MOVED: Final = "it makes room on its node for a job that gains more than this move costs"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Worth:
    """What the options of each job are worth, (jobs, options); 0 where there is none."""

    values: FloatArray  # what a job runs now has no start to pay for
    after_start: FloatArray  # every option, its start paid

    def cost_of_move(self, row: int, option: int) -> float:
        """What a job loses if it starts again with the same option elsewhere."""
        return float(self.values[row, option] - self.after_start[row, option])


class HandOut:
    """Settles jobs one by one. A running job holds its GPUs until it is settled or let go."""

    def __init__(
        self,
        snapshot: Snapshot,
        worth: Worth,
        *,
        spread_speed_share: float = 0.0,
        closed: Collection[int] = (),  # nodes that nobody is put on, or stays on
    ) -> None:
        self._snapshot, self._jobs, self._worth = snapshot, snapshot.jobs, worth
        self._values = worth.values
        self._table, self._set = snapshot.options.counts, self._jobs.option_set
        self._spread_speed_share = spread_speed_share
        free = snapshot.nodes.free
        self._room, self._closed = make_room(snapshot), frozenset(closed)
        self._room.take(tuple((node, int(free[node])) for node in closed))
        self._option = np.full(len(self._jobs), -1, dtype=np.int64)
        # Who is settled and not here stays where it is.
        self._placements: dict[int, Placement] = {}
        self._reasons: dict[int, str] = {}
        self._is_held = self._jobs.is_running.copy()  # runs, and is not settled
        self._on_node: dict[int, list[int]] | None = None
        self._left_alone: set[int] = set()
        self._num_clearings = 0
        self._is_as_picked = False  # everybody has what it picked, and only that

    def settled(self) -> IntArray:
        """The option of every job that is settled so far, -1 for the others."""
        return self._option

    def value(self) -> float:
        """What everything given out so far is worth."""
        rows = (self._option >= 0).nonzero()[0]
        cells = rows * self._values.shape[1] + self._option.take(rows)
        return float(self._values.take(cells).sum())

    def price(self, prices: FloatArray) -> None:
        """From now on, GPUs have these prices."""
        self._prices, self._paid = prices, self._snapshot.options.paid(prices)

    def _surplus(self, rows: IntArray) -> FloatArray:
        """What the options of these jobs leave after their GPUs are paid."""
        values = self._values[rows]
        return np.where(values > 0, values - self._paid[self._set[rows]], -np.inf)

    def _counts(self, row: int, option: int) -> IntArray:
        """GPUs by type that an option of a job takes."""
        counts: IntArray = self._table[self._set[row], option]
        return counts

    def _placement(self, row: int) -> Placement:
        """Where a job is that is settled."""
        return self._placements.get(row) or self._jobs.placements[row]

    def least_first(self, row: int) -> list[int]:
        """The options of a job, those with the fewest GPUs first, and of equals the best."""
        values, gpus = self._values[row], self._snapshot.job_num_gpus[row]
        return [int(one) for one in np.lexsort((-values, gpus)) if values[one] > 0]

    def keep(self, rows: IntArray) -> None:
        """Leave running jobs where they are."""
        self._option[rows] = self._jobs.option[rows]
        self._is_held[rows] = False

    def leave_alone(self, rows: IntArray) -> None:
        """Leave running jobs where they are, whatever is left over later."""
        self.keep(rows)
        self._left_alone.update(rows.tolist())

    def _give(self, row: int, option: int, placement: Placement, reason: str) -> None:
        self._option[row] = option
        self._placements[row], self._reasons[row] = placement, reason

    def serve(self, row: int, reason: str) -> bool:
        """Give a waiting job the least that it can run on, from whoever is not settled."""
        for option in self.least_first(row):
            counts = self._counts(row, option)
            placement = self._room.place(counts) or self._evict_for(counts)
            if placement is not None:
                self._give(row, option, placement, reason)
                return True
        return False

    def place(self, picks: IntArray) -> None:
        """Keep who picks what it has, let go of the others, and place them, the widest first.

        Whoever picks nothing, or finds no place, keeps its GPUs if nobody took them.
        """
        jobs, held = self._jobs, self._is_held.nonzero()[0]
        stays = self._may_stay(held)
        stays &= picks.take(held) == jobs.option.take(held)
        self.keep(held[stays])
        for row in held[~stays].tolist():
            self._room.give_back(self._open_part(row))
        rows = ((picks >= 0) & (self._option < 0)).nonzero()[0]
        if len(rows):
            self._place_picks(rows, picks[rows])
        held = (self._is_held & (self._option < 0)).nonzero()[0]
        is_worth = self._values[held, jobs.option[held]] > 0
        for row in held[is_worth & self._may_stay(held)].tolist():
            placement = jobs.placements[row]
            if self._room.has(placement):
                self._room.take(placement)
                self.keep(np.array([row]))
        self._is_as_picked = bool((self._option == picks).all())

    def _place_picks(self, rows: IntArray, picks: IntArray) -> None:
        """The widest first; then whoever found no place."""
        sets = self._set[rows]
        gpus = self._table[sets, picks].max(axis=1, initial=0)
        surplus = self._values[rows, picks] - self._paid[sets, picks]
        order = np.lexsort((rows, -surplus, -gpus))
        ordered = list(zip(rows[order].tolist(), picks[order].tolist(), strict=True))
        for row, pick in [one for one in ordered if not self._place_pick(*one)]:
            self._place_otherwise(row, pick)

    def _open_part(self, row: int) -> Placement:
        """What a running job has on nodes that are not closed."""
        placement = self._jobs.placements[row]
        if not self._closed:
            return placement
        return tuple(one for one in placement if one[0] not in self._closed)

    def _may_stay(self, rows: IntArray) -> BoolArray:
        """Whether no node of each of these running jobs is closed."""
        if not self._closed:
            return np.ones(len(rows), dtype=np.bool_)
        placements = self._jobs.placements
        return np.array(
            [self._closed.isdisjoint(node for node, _ in placements[row]) for row in rows.tolist()],
            dtype=np.bool_,
        )

    def _place_pick(self, row: int, option: int) -> bool:
        placement = self._room.place(self._counts(row, option))
        if placement is not None:
            self._give(row, option, placement, _PICKED)
        return placement is not None

    def _place_otherwise(self, row: int, option: int) -> None:
        """For a pick that is there in number but not on one node."""
        next_best = self._next_best(row, option)
        floor = float(self._values[row, next_best]) if next_best >= 0 else 0.0
        if self._clear_for(row, option, float(self._values[row, option]) - floor):
            return
        share = self._spread_speed_share
        if share > 0 and float(self._values[row, option]) * share > floor:
            placement = self._room.place(self._counts(row, option), spread=True)
            if placement is not None:
                reason = f"spread over more nodes than it needs, at {share:.0%} of its speed"
                self._give(row, option, placement, reason)
                return
        if next_best >= 0:
            placement = self._room.place(self._counts(row, next_best))
            if placement is not None:
                self._give(row, next_best, placement, "its pick fits on no node; this one does")

    def _next_best(self, row: int, option: int) -> int:
        """The best of the other options that has a place now; -1: none."""
        fits = (self._table[self._set[row]] <= self._room.free_by_type).all(axis=1)
        surplus = self._surplus(np.array([row]))[0]
        fits &= surplus >= 0
        fits[option] = False
        options = np.flatnonzero(fits)
        for one in options[np.argsort(-surplus[options], kind="stable")].tolist():
            if self._room.find(self._counts(row, one)) is not None:
                return int(one)
        return -1

    def _clear_for(self, row: int, option: int, gain: float) -> bool:
        """Move smaller jobs off a node, if that costs less than the job gains."""
        counts = self._counts(row, option)
        kinds = np.flatnonzero(counts)
        if len(kinds) != 1 or self._num_clearings >= _MOST_CLEARINGS:
            return False
        self._num_clearings += 1
        moves = clear_node(
            self._room,
            self._snapshot.nodes,
            kind=int(kinds[0]),
            number=int(counts[kinds[0]]),
            lodgers=self._lodgers,
            most_cost=gain,
        )
        if moves is None:
            return False
        for lodger, placement in moves:
            self._give(lodger.row, int(self._option[lodger.row]), placement, _MOVED)
            self._on_node = None
        return self._place_pick(row, option)

    def _lodgers(self, node: int) -> list[Lodger] | None:
        """Who is on a node, with what a move costs; None where somebody must not move."""
        if self._on_node is None:
            self._on_node = {}
            for row in (self._option >= 0).nonzero()[0].tolist():
                for one, _ in self._placement(row):
                    self._on_node.setdefault(one, []).append(row)
        found = []
        for row in self._on_node.get(node, ()):
            placement = self._placement(row)
            if row in self._left_alone or len(placement) != 1:
                return None
            option = int(self._option[row])
            is_new = not self._jobs.is_running[row] or option != self._jobs.option[row]
            cost = 0.0 if is_new else self._worth.cost_of_move(row, option)
            found.append(Lodger(row=row, num_gpus=placement[0][1], cost=cost))
        return found

    def leave_nothing_over(self, most_gain: float = np.inf) -> None:
        """Give what is free to whoever still waits; then let jobs take better options.

        As long as all have what they picked, none gains more than `most_gain` by that.
        """
        if self._is_as_picked and most_gain < np.inf:
            values = self._values[self._values > 0]
            if most_gain <= (_WORTH_GROWING - 1.0) * float(values.min(initial=np.inf)):
                return
        if self._room.free_by_type.max(initial=0) > 0:
            rows = ((self._option < 0) & ~self._jobs.is_running).nonzero()[0]
            fits = (self._table[self._set[rows]] <= self._room.free_by_type).all(axis=2)
            surplus = np.where(fits, self._surplus(rows), -np.inf)
            can_start = rows[np.isfinite(surplus).any(axis=1)]
            for row in self._highest_first(can_start):
                self._start_with(row, surplus[rows.searchsorted(row)])
        rows, options = self._better()
        for row in self._highest_first(np.unique(rows)):
            self._grow(row, options[rows == row])

    def _start_with(self, row: int, surplus: FloatArray) -> None:
        """Give a waiting job the best of these options that has a place."""
        options = np.isfinite(surplus).nonzero()[0]
        for one in options[np.argsort(-surplus[options], kind="stable")].tolist():
            placement = self._room.place(self._counts(row, one))
            if placement is not None:
                self._give(row, one, placement, "GPUs were left over")
                return

    def _highest_first(self, rows: IntArray) -> list[int]:
        """By the surplus of their best options, in order of submission where it is equal."""
        if len(rows) == 0:
            return []
        best = self._surplus(rows).max(axis=1)
        ordered: list[int] = rows[np.argsort(-best, kind="stable")].tolist()
        return ordered

    def _better(self) -> tuple[IntArray, IntArray]:
        """Rows and options clearly better than what each job is given, that might fit."""
        width = self._values.shape[1]
        given = (self._option >= 0).nonzero()[0]
        cells = given * width + self._option.take(given)
        least = np.full(len(self._jobs), np.inf)
        least[given] = self._values.take(cells) * _WORTH_GROWING
        least[list(self._left_alone)] = np.inf
        found = (self._values > least[:, None]).ravel().nonzero()[0]
        rows = found // max(width, 1)
        # By counts alone: what fits into what is free, and into what the job has.
        sets = self._set.take(rows)
        counts = self._table.reshape(-1, self._table.shape[2])
        needs = counts.take(found + (sets - rows) * width, axis=0)
        needs -= counts.take(sets * width + self._option.take(rows), axis=0)
        fits = (needs <= self._room.free_by_type).all(axis=1).nonzero()[0]
        rows = rows.take(fits)
        return rows, found.take(fits) - rows * width

    def _grow(self, row: int, better: IntArray) -> None:
        """Let a job take a better option, if one fits into its own GPUs and what is left."""
        given, values = self._placement(row), self._values[row]
        self._room.give_back(given)
        for option in better[np.argsort(-values[better], kind="stable")].tolist():
            placement = self._room.place(self._counts(row, option))
            if placement is not None:
                reason = "better than its pick, and the GPUs were left over"
                self._give(row, option, placement, reason)
                return
        self._room.take(given)

    def room(self) -> Room:
        """What is left at the end, with the nodes that nobody is put on."""
        nodes = self._snapshot.nodes
        self._room.give_back(tuple((node, int(nodes.num_gpus[node])) for node in self._closed))
        return self._room

    def decisions(self) -> list[tuple[int, Decision]]:
        """Everything that changes, with the rows of the jobs."""
        numbers = {
            f"price_{gpu}": price
            for gpu, price in zip(self._snapshot.gpu_types, self._prices.tolist(), strict=True)
        }
        before = self._jobs.placements
        moved = [row for row, placement in self._placements.items() if placement != before[row]]
        rows = {*moved, *(self._option != self._jobs.option).nonzero()[0].tolist()}
        return [(row, self._decide(row, numbers)) for row in sorted(rows)]

    def _decide(self, row: int, numbers: Numbers) -> Decision:
        """What changes for a job that is given something, or has something."""
        jobs, option, runs = self._jobs, int(self._option[row]), bool(self._jobs.is_running[row])
        job_id = jobs.specs[row].id
        if option < 0:
            numbers = {**numbers, "value": float(self._values[row, jobs.option[row]])}
            reason = "others are worth more on these GPUs at these prices"
            return Preempt(job_id=job_id, reason=reason, numbers=numbers)
        placement, reason = self._placements[row], self._reasons[row]
        numbers = {**numbers, **self._numbers(row, option)}
        if not runs:
            return Start(
                job_id=job_id, option=option, placement=placement, reason=reason, numbers=numbers
            )
        if option != jobs.option[row]:
            return Resize(
                job_id=job_id, option=option, placement=placement, reason=reason, numbers=numbers
            )
        return Move(job_id=job_id, placement=placement, reason=reason, numbers=numbers)

    def _numbers(self, row: int, option: int) -> Numbers:
        """What the option is worth and costs, and the best of those that lost."""
        values, paid = self._values[row].tolist(), self._paid[self._set[row]].tolist()
        left = [one - cost for one, cost in zip(values, paid, strict=True)]
        found = {"value": values[option], "paid": values[option] - left[option]}
        others = [one for one, value in enumerate(values) if value > 0 and one != option]
        if others:
            second = max(others, key=left.__getitem__)
            found |= {"second_option": float(second), "second_left": left[second]}
        return found

    def _evict_for(self, counts: IntArray) -> Placement | None:
        """Take GPUs from running jobs that are not settled, the least worthy first."""
        jobs, kinds = self._jobs, set(np.flatnonzero(counts).tolist())
        types = self._snapshot.nodes.type_index
        victims = [
            row
            for row in self._is_held.nonzero()[0].tolist()
            if any(int(types[node]) in kinds for node, _ in jobs.placements[row])
        ]
        victims.sort(key=lambda row: float(self._values[row, jobs.option[row]]))
        evicted: list[int] = []
        placement = None
        for row in victims:
            evicted.append(row)
            self._room.give_back(self._open_part(row))
            placement = self._room.place(counts)
            if placement is not None:
                break
        for row in reversed(evicted):  # whoever was evicted in vain gets its GPUs back
            part = self._open_part(row)
            if self._room.has(part):
                self._room.take(part)
            else:
                self._is_held[row] = False
        return placement
