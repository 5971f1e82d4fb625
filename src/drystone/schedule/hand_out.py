"""From picks to placements: who stays, who is placed, who yields, and who gets what is left."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import numpy as np

from drystone.schedule.decision import Decision, Move, Numbers, Preempt, Resize, Start
from drystone.schedule.defragment import Lodger, clear_node
from drystone.schedule.packing import Room, make_room
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
        self._counts = snapshot.options.counts[self._jobs.option_set]
        self._spread_speed_share = spread_speed_share
        free = snapshot.nodes.free
        self._room, self._closed = make_room(snapshot), frozenset(closed)
        self._room.take(tuple((node, int(free[node])) for node in closed))
        self._option = np.full(len(self._jobs), -1, dtype=np.int64)
        self._placements: dict[int, Placement] = {}
        self._reasons: dict[int, str] = {}
        self._held = {int(row) for row in np.flatnonzero(self._jobs.is_running)}
        self._on_node: dict[int, list[int]] | None = None
        self._prices = np.zeros(len(snapshot.gpu_types))
        self._surplus = np.where(self._values > 0, self._values, -np.inf)
        self._left_alone: set[int] = set()
        self._num_clearings = 0

    def settled(self) -> dict[int, int]:
        """The option of every job that is settled so far."""
        rows = list(self._placements)
        return dict(zip(rows, self._option[rows].tolist(), strict=True))

    def value(self) -> float:
        """What everything given out so far is worth."""
        rows = np.flatnonzero(self._option >= 0)
        return float(self._values[rows, self._option[rows]].sum())

    def price(self, prices: FloatArray) -> None:
        """From now on, GPUs have these prices."""
        self._prices = prices
        paid = self._counts @ prices
        self._surplus = np.where(self._values > 0, self._values - paid, -np.inf)

    def least_first(self, row: int) -> list[int]:
        """The options of a job, those with the fewest GPUs first, and of equals the best."""
        values, gpus = self._values[row], self._snapshot.job_num_gpus[row]
        return [int(one) for one in np.lexsort((-values, gpus)) if values[one] > 0]

    def keep(self, rows: IntArray) -> None:
        """Leave running jobs where they are."""
        self._option[rows] = self._jobs.option[rows]
        kept, placements = rows.tolist(), self._jobs.placements
        self._held.difference_update(kept)
        self._placements |= {row: placements[row] for row in kept}
        self._reasons |= dict.fromkeys(kept, "it stays")

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
            counts = self._counts[row, option]
            placement = self._room.place(counts) or self._evict_for(counts)
            if placement is not None:
                self._give(row, option, placement, reason)
                return True
        return False

    def place(self, picks: IntArray) -> None:
        """Keep who picks what it has, let go of the others, and place them, the widest first.

        Whoever picks nothing, or finds no place, keeps its GPUs if nobody took them.
        """
        jobs, held = self._jobs, self._held_rows()
        stays = (picks[held] == jobs.option[held]) & self._may_stay(held)
        self.keep(held[stays])
        for row in held[~stays].tolist():
            self._room.give_back(self._open_part(row))
        rows = np.flatnonzero((picks >= 0) & (self._option < 0))
        gpus = self._counts[rows, picks[rows]].max(axis=1, initial=0)
        order = rows[np.lexsort((rows, -self._surplus[rows, picks[rows]], -gpus))]
        missed = [row for row in order.tolist() if not self._place_pick(row, int(picks[row]))]
        for row in missed:
            self._place_otherwise(row, int(picks[row]))
        held = self._held_rows()
        is_worth = (self._option[held] < 0) & (self._values[held, jobs.option[held]] > 0)
        for at in np.flatnonzero(is_worth & self._may_stay(held)).tolist():
            placement = jobs.placements[held[at]]
            if self._room.has(placement):
                self._room.take(placement)
                self.keep(held[at : at + 1])

    def _open_part(self, row: int) -> Placement:
        """What a running job has on nodes that are not closed."""
        placement = self._jobs.placements[row]
        if not self._closed:
            return placement
        return tuple(one for one in placement if one[0] not in self._closed)

    def _held_rows(self) -> IntArray:
        """The running jobs that are not settled."""
        return np.array(sorted(self._held), dtype=np.int64)

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
        placement = self._room.place(self._counts[row, option])
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
            placement = self._room.place(self._counts[row, option], spread=True)
            if placement is not None:
                reason = f"spread over more nodes than it needs, at {share:.0%} of its speed"
                self._give(row, option, placement, reason)
                return
        if next_best >= 0:
            placement = self._room.place(self._counts[row, next_best])
            if placement is not None:
                self._give(row, next_best, placement, "its pick fits on no node; this one does")

    def _next_best(self, row: int, option: int) -> int:
        """The best of the other options that has a place now; -1: none."""
        fits = (self._counts[row] <= self._room.free_by_type).all(axis=1)
        fits &= self._surplus[row] >= 0
        fits[option] = False
        options = np.flatnonzero(fits)
        for one in options[np.argsort(-self._surplus[row, options], kind="stable")].tolist():
            if self._room.find(self._counts[row, one]) is not None:
                return int(one)
        return -1

    def _clear_for(self, row: int, option: int, gain: float) -> bool:
        """Move smaller jobs off a node, if that costs less than the job gains."""
        counts = self._counts[row, option]
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
            for row, placement in self._placements.items():
                for one, _ in placement:
                    self._on_node.setdefault(one, []).append(row)
        found = []
        for row in self._on_node.get(node, ()):
            placement = self._placements[row]
            if row in self._left_alone or len(placement) != 1:
                return None
            option = int(self._option[row])
            is_new = not self._jobs.is_running[row] or option != self._jobs.option[row]
            cost = 0.0 if is_new else self._worth.cost_of_move(row, option)
            found.append(Lodger(row=row, num_gpus=placement[0][1], cost=cost))
        return found

    def leave_nothing_over(self) -> None:
        """Give what is free to whoever still waits; then let jobs take better options."""
        best = self._surplus.max(axis=1, initial=-np.inf)
        if self._room.free_by_type.max(initial=0) > 0:
            fits = self._fits_free() & np.isfinite(self._surplus)
            waits = (self._option < 0) & ~self._jobs.is_running & _any_option(fits)
            for row in _highest_first(waits, best):
                options = np.flatnonzero(fits[row])
                for one in options[np.argsort(-self._surplus[row, options], kind="stable")]:
                    placement = self._room.place(self._counts[row, one])
                    if placement is not None:
                        self._give(row, int(one), placement, "GPUs were left over")
                        break
        better = self._better()
        for row in _highest_first(_any_option(better), best):
            self._grow(row, np.flatnonzero(better[row]))

    def _fits_free(self, own: IntArray | None = None) -> BoolArray:
        """By counts alone: which options fit into what is free, and into what each job has."""
        free = self._room.free_by_type if own is None else self._room.free_by_type + own[:, None]
        return np.asarray((self._counts <= free).all(axis=2), dtype=np.bool_)

    def _better(self) -> BoolArray:
        """Which options are clearly better than what each job is given, and might fit."""
        rows = np.flatnonzero(self._option >= 0)
        alone = np.array(sorted(self._left_alone), dtype=np.int64)
        own = np.zeros((len(self._jobs), len(self._prices)), dtype=np.int64)
        least = np.full(len(self._jobs), np.inf)
        own[rows] = self._counts[rows, self._option[rows]]
        least[rows] = self._values[rows, self._option[rows]] * _WORTH_GROWING
        least[alone] = np.inf
        better: BoolArray = (self._values > least[:, None]) & self._fits_free(own)
        return better

    def _grow(self, row: int, better: IntArray) -> None:
        """Let a job take a better option, if one fits into its own GPUs and what is left."""
        given, values = self._placements[row], self._values[row]
        self._room.give_back(given)
        for option in better[np.argsort(-values[better], kind="stable")].tolist():
            placement = self._room.place(self._counts[row, option])
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

    def decisions(self) -> list[Decision]:
        """Everything that changes."""
        numbers = {
            f"price_{gpu}": float(price)
            for gpu, price in zip(self._snapshot.gpu_types, self._prices, strict=True)
        }
        is_same = self._jobs.is_running & (self._option == self._jobs.option)
        placements = self._jobs.placements
        for row in np.flatnonzero(is_same).tolist():
            is_same[row] = self._placements[row] == placements[row]
        concerned = (self._option >= 0) | self._jobs.is_running
        return [self._decide(row, numbers) for row in np.flatnonzero(concerned & ~is_same).tolist()]

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
        value, left = float(self._values[row, option]), self._surplus[row].copy()
        found = {"value": value, "paid": value - float(left[option])}
        left[option] = -np.inf
        second = int(left.argmax())
        if np.isfinite(left[second]):
            found |= {"second_option": float(second), "second_left": float(left[second])}
        return found

    def _evict_for(self, counts: IntArray) -> Placement | None:
        """Take GPUs from running jobs that are not settled, the least worthy first."""
        jobs, kinds = self._jobs, set(np.flatnonzero(counts).tolist())
        types = self._snapshot.nodes.type_index
        victims = [
            row
            for row in sorted(self._held)
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
                self._held.discard(row)
        return placement


def _highest_first(rows: BoolArray, score: FloatArray) -> list[int]:
    """The rows that are marked, by score, in order of submission where it is equal."""
    found = np.flatnonzero(rows)
    ordered: list[int] = found[np.argsort(-score[found], kind="stable")].tolist()
    return ordered


def _any_option(table: BoolArray) -> BoolArray:
    """Of a table (jobs, options): which jobs have any."""
    return np.asarray(table.any(axis=1), dtype=np.bool_)
