"""From picks to placements: who stays, who is placed, who yields, and who gets what is left."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from drystone.schedule.decision import Decision, Move, Numbers, Preempt, Resize, Start
from drystone.schedule.packing import make_room
from drystone.schedule.snapshot import BoolArray, FloatArray, IntArray, Placement, Snapshot

# A job that is placed takes a better option only if it is better by this much.
_WORTH_GROWING = 1.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What one job gets."""

    option: int
    placement: Placement
    reason: str


class HandOut:
    """Settles jobs one by one. A running job holds its GPUs until it is settled or evicted."""

    def __init__(self, snapshot: Snapshot, values: FloatArray) -> None:
        self._snapshot, self._jobs, self._values = snapshot, snapshot.jobs, values
        self._room = make_room(snapshot)
        self._given: dict[int, Given] = {}
        self._held: dict[int, Placement] = {
            int(row): self._jobs.placements[row] for row in np.flatnonzero(self._jobs.is_running)
        }
        self._prices = np.zeros(len(snapshot.gpu_types))
        self._surplus = np.where(values > 0, values, -np.inf)
        self._left_alone: set[int] = set()
        self.settled_value = 0.0

    def settled(self) -> dict[int, int]:
        """The option of every job that is settled so far; their value is remembered."""
        found = {row: given.option for row, given in self._given.items()}
        self.settled_value = self.value()
        return found

    def value(self) -> float:
        """What everything given out so far is worth."""
        return float(sum(self._values[row, one.option] for row, one in self._given.items()))

    def price(self, prices: FloatArray) -> None:
        """From now on, GPUs have these prices."""
        counts = self._snapshot.options.counts[self._jobs.option_set]
        self._prices = prices
        self._surplus = np.where(self._values > 0, self._values - counts @ prices, -np.inf)

    def least_first(self, row: int) -> list[int]:
        """The options of a job, those with the fewest GPUs first, and of equals the fastest."""
        speeds, gpus = self._snapshot.job_speeds[row], self._snapshot.job_num_gpus[row]
        return [int(one) for one in np.lexsort((-speeds, gpus)) if speeds[one] > 0]

    def keep(self, row: int) -> None:
        """Leave a running job where it is."""
        placement = self._held.pop(row)
        option = int(self._jobs.option[row])
        self._given[row] = Given(option=option, placement=placement, reason="it stays")

    def leave_alone(self, row: int) -> None:
        """Leave a running job where it is, whatever is left over later."""
        self.keep(row)
        self._left_alone.add(row)

    def place(self, picks: IntArray, surplus: FloatArray) -> None:
        """Keep who picks what it has; place the other picks, the most worth per price first.

        Whoever picks nothing keeps its GPUs unless somebody who picked needs them.
        """
        rows = np.arange(len(self._jobs))
        for row in np.flatnonzero(self._jobs.is_running & (picks == self._jobs.option)):
            if row in self._held:
                self.keep(int(row))
        value = self._values[rows, np.maximum(picks, 0)]
        share_kept = surplus / np.maximum(value, 1e-300)
        for row in np.lexsort((rows, -share_kept)):
            if picks[row] >= 0 and row not in self._given:
                reason = "of all its options this is worth most at these prices"
                self.settle(int(row), [int(picks[row])], evicts=True, reason=reason)
        for held in list(self._held):
            self.keep(held)

    def leave_nothing_over(self) -> None:
        """Give what is free to whoever still waits; then let jobs take better options."""
        rows = np.arange(len(self._jobs))
        best = self._surplus.max(axis=1, initial=-np.inf)
        order = np.lexsort((rows, -best)).tolist()
        fits: BoolArray = np.logical_and(self._fits_free(), np.isfinite(self._surplus))
        may_start = _any_option(fits) & ~self._jobs.is_running
        for row in order:
            if may_start[row] and row not in self._given:
                options = np.flatnonzero(fits[row])
                options = options[np.argsort(-self._surplus[row, options], kind="stable")]
                self.settle(row, options.tolist(), evicts=False, reason="GPUs were left over")
        better = self._better()
        may_grow = _any_option(better)
        for row in order:
            if may_grow[row]:
                self._grow(row, np.flatnonzero(better[row]))

    def _fits_free(self, own: IntArray | None = None) -> BoolArray:
        """By counts alone: which options fit into what is free, and into what each job has."""
        counts = self._snapshot.options.counts[self._jobs.option_set]
        free = self._room.free_by_type if own is None else self._room.free_by_type + own[:, None]
        return np.asarray((counts <= free).all(axis=2), dtype=np.bool_)

    def _better(self) -> BoolArray:
        """Which options are clearly better than what each job is given, and might fit."""
        own = np.zeros((len(self._jobs), len(self._prices)), dtype=np.int64)
        least = np.full(len(self._jobs), np.inf)
        for row, given in self._given.items():
            if row not in self._left_alone:
                own[row] = self._snapshot.counts(row, given.option)
                least[row] = self._values[row, given.option] * _WORTH_GROWING
        better: BoolArray = (self._values > least[:, None]) & self._fits_free(own)
        return better

    def settle(self, row: int, options: list[int], *, evicts: bool, reason: str) -> bool:
        """Give a job the first of these options that fits; else it still has what it had."""
        own = self._held.pop(row, None)
        if own is not None:
            self._room.give_back(own)
        for option in options:
            counts = self._snapshot.counts(row, option)
            placement = self._room.place(counts)
            if placement is None and evicts:
                placement = self._evict_for(counts)
            if placement is not None:
                self._given[row] = Given(option=option, placement=placement, reason=reason)
                return True
        if own is not None:
            self._room.take(own)
            self._held[row] = own
        return False

    def decisions(self) -> list[Decision]:
        """Everything that changes."""
        numbers = {
            f"price_{gpu}": float(price)
            for gpu, price in zip(self._snapshot.gpu_types, self._prices, strict=True)
        }
        found = (self._decide(row, numbers) for row in range(len(self._jobs)))
        return [one for one in found if one is not None]

    def _decide(self, row: int, numbers: Numbers) -> Decision | None:
        given, job_id = self._given.get(row), self._jobs.specs[row].id
        runs = bool(self._jobs.is_running[row])
        if given is None:
            if not runs:
                return None
            reason = "others are worth more on these GPUs at these prices"
            return Preempt(job_id=job_id, reason=reason, numbers=numbers)
        option, placement, reason = given.option, given.placement, given.reason
        numbers = {**numbers, "value": float(self._values[row, option])}
        if not runs:
            return Start(
                job_id=job_id, option=option, placement=placement, reason=reason, numbers=numbers
            )
        if option != self._jobs.option[row]:
            return Resize(
                job_id=job_id, option=option, placement=placement, reason=reason, numbers=numbers
            )
        if placement != self._jobs.placements[row]:
            return Move(job_id=job_id, placement=placement, reason=reason, numbers=numbers)
        return None

    def _evict_for(self, counts: IntArray) -> Placement | None:
        """Take GPUs from running jobs that are not settled, the least worthy first."""
        kinds = set(np.flatnonzero(counts).tolist())
        types = self._snapshot.nodes.type_index
        victims = [
            row
            for row, placement in self._held.items()
            if any(int(types[node]) in kinds for node, _ in placement)
        ]
        victims.sort(key=lambda row: float(self._values[row, self._jobs.option[row]]))
        evicted: list[tuple[int, Placement]] = []
        placement = None
        for row in victims:
            evicted.append((row, self._held.pop(row)))
            self._room.give_back(evicted[-1][1])
            placement = self._room.place(counts)
            if placement is not None:
                break
        for row, had in reversed(evicted):  # whoever was evicted in vain gets its GPUs back
            if all(self._room.free[node] >= count for node, count in had):
                self._room.take(had)
                self._held[row] = had
        return placement

    def _grow(self, row: int, better: IntArray) -> None:
        """Let a job take a better option, if one fits into its own GPUs and what is left."""
        given, values = self._given[row], self._values[row]
        self._room.give_back(given.placement)
        for option in better[np.argsort(-values[better], kind="stable")].tolist():
            placement = self._room.place(self._snapshot.counts(row, option))
            if placement is not None:
                reason = "better than its pick, and the GPUs were left over"
                self._given[row] = Given(option=option, placement=placement, reason=reason)
                return
        self._room.take(given.placement)


def _any_option(table: BoolArray) -> BoolArray:
    """Of a table (jobs, options): which jobs have any."""
    return np.asarray(table.any(axis=1), dtype=np.bool_)
