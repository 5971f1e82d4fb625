"""Samples moved between unlike ranks while they train: by what each rank was seen to take for them.

Every rank sees the same seconds of all, so every rank comes to the same answer. A division is kept
for a few steps and its median counts. What a rank takes for other batches is drawn through what it
took for those it had: a line through two points, in proportion where there is one. A division is
tried if by those lines it is faster than the best that was measured; one that turned out slower is
left for the best. Where a rank is not what it was, everything is learned anew.

Before samples move, all ranks try smaller micro-batches, and those that gain nothing by them larger
ones, where memory surely suffices: each keeps what was fastest for the batch that it has.
"""

from __future__ import annotations

import bisect
import heapq
import statistics
from collections.abc import Sequence
from typing import Final, NamedTuple

from drystone.run.train.step_report import WARM_UP_STEPS, WINDOW_STEPS

Batches = tuple[int, ...]

MIN_GAIN: Final = 0.01  # of a step's compute; less is not worth moving samples for
_CHANGED_SHARE: Final = 0.15  # the same batch takes so much more or less: another device now
_MIN_SLOPE_SHARE: Final = 0.1  # of a sample's mean time, by which time grows with each at least
_MEMORY_SHARE: Final = 0.95  # of what a device has, that a larger batch may come to


class Division(NamedTuple):
    """Samples of each rank, and at most how many of them at a time."""

    batches: Batches
    micro_batches: Batches


class Balance:
    """Who should have how many samples, and at a time, learned from step to step."""

    def __init__(self, micro_batches: Sequence[int]) -> None:
        num_ranks = len(micro_batches)
        self._micro_batches = list(micro_batches)
        self._max_batches = self._max_micro_batches = (0,) * num_ranks
        self._sizes = MicroBatchTrials(num_ranks)
        self._seen: list[dict[int, float]] = [{} for _ in range(num_ranks)]  # seconds by batch
        self._tried: dict[Batches, float] = {}  # seconds of the slowest rank
        self._window: list[tuple[float, ...]] = []
        self._batches: Batches = ()
        self._num_left = WARM_UP_STEPS  # steps that do not count

    def see(self, batches: Sequence[int], compute_seconds: Sequence[float]) -> Division | None:
        """One more step; another division if one is worth a try from the next step on."""
        if tuple(batches) != self._batches:
            self._batches, self._window = tuple(batches), []
            self._num_left = max(self._num_left, 1)  # the first step with new shapes is slow
        if self._num_left:
            self._num_left -= 1
            return None
        self._window.append(tuple(compute_seconds))
        if len(self._window) < WINDOW_STEPS:
            return None
        taken = [statistics.median(column) for column in zip(*self._window, strict=True)]
        self._window = []
        before = list(self._micro_batches)
        is_trying = self._sizes.see(
            taken, self._batches, self._micro_batches, self._max_micro_batches
        )
        if is_trying or before != self._micro_batches:
            self._num_left = 1
        if is_trying:
            return Division(self._batches, tuple(self._micro_batches))
        if before == self._micro_batches:
            self._learn(taken)
        else:
            self._learn(self._sizes.best_seconds)
        found = self._choose()
        if found is None and before == self._micro_batches:
            return None
        return Division(found or self._batches, tuple(self._micro_batches))

    def limit(self, max_batches: Sequence[int], max_micro_batches: Sequence[int]) -> None:
        """From now on no rank gets more: a batch of 0 means any, a micro-batch no larger ones."""
        self._max_batches, self._max_micro_batches = tuple(max_batches), tuple(max_micro_batches)

    def _learn(self, taken: Sequence[float]) -> None:
        pairs = list(zip(self._seen, self._batches, taken, strict=True))
        for seen, batch, seconds in pairs:
            known = seen.get(batch)
            if batch and known and abs(seconds - known) > _CHANGED_SHARE * known:
                self._tried.clear()
                seen.clear()
        for seen, batch, seconds in pairs:
            if batch:
                seen[batch] = seconds
        self._tried[self._batches] = max(
            (seconds for _, batch, seconds in pairs if batch), default=0.0
        )

    def _choose(self) -> Batches | None:
        working = [rank for rank, seen in enumerate(self._seen) if seen]
        if len(working) < 2:
            return None
        best = min(self._tried, key=self._tried.__getitem__)
        found = self._divide(working)
        expected = max(self._seconds(rank, found[rank]) for rank in working)
        if found not in self._tried and expected <= (1.0 - MIN_GAIN) * self._tried[best]:
            return found
        is_behind = self._tried[self._batches] > (1.0 + MIN_GAIN) * self._tried[best]
        return best if is_behind else None

    def _divide(self, working: Sequence[int]) -> Batches:
        """Each sample goes where it is done first: that is the least longest time."""
        found = [0] * len(self._batches)
        ends = [(self._seconds(rank, 1), rank) for rank in working]
        heapq.heapify(ends)
        for _ in range(sum(self._batches)):
            _, rank = heapq.heappop(ends)
            found[rank] += 1
            limit = self._max_batches[rank]
            if not limit or found[rank] < limit:
                heapq.heappush(ends, (self._seconds(rank, found[rank] + 1), rank))
            elif not ends:
                return self._batches
        return tuple(found)

    def _seconds(self, rank: int, batch: int) -> float:
        """What so many samples would take on a rank."""
        seen = self._seen[rank]
        if batch in seen:
            return seen[batch]
        sizes = sorted(seen)
        at = bisect.bisect(sizes, batch)
        if len(sizes) == 1 or at == 0:
            return seen[sizes[0]] * batch / sizes[0]
        low, high = (sizes[-2], sizes[-1]) if at == len(sizes) else (sizes[at - 1], sizes[at])
        slope = (seen[high] - seen[low]) / (high - low)
        if at == len(sizes):
            slope = max(slope, _MIN_SLOPE_SHARE * seen[high] / high)
            return seen[high] + slope * (batch - high)
        return seen[low] + slope * (batch - low)


class MicroBatchTrials:
    """Every rank tries micro-batches of half the size, twice while it gains; then of double."""

    def __init__(self, num_ranks: int) -> None:
        self.best_seconds: list[float] = [0.0] * num_ranks
        self._best: list[int] = [0] * num_ranks
        self._gained: set[int] = set()  # ranks that gained by some trial
        self._going = set(range(num_ranks))  # ranks that still try in this direction
        self._left = [0.5, 0.5, 2.0, 2.0]
        self._is_trial = False

    def see(
        self,
        taken: Sequence[float],
        batches: Batches,
        micro_batches: list[int],
        largest: Sequence[int],
    ) -> bool:
        """Judge the last trial, and set the sizes of the next; False: there is none any more."""
        if not self._left and not self._is_trial:
            return False
        self._judge(taken, micro_batches)
        while self._left:
            factor = self._left.pop(0)
            if factor == 2.0 and len(self._left) == 1:  # the other direction begins
                self._going = set(range(len(batches))) - self._gained
            wanted = {
                rank: int(self._best[rank] * factor)
                for rank in self._going
                if _is_possible(batches[rank], self._best[rank], factor, largest[rank])
            }
            self._going = set(wanted)
            if wanted:
                for rank, size in wanted.items():
                    micro_batches[rank] = size
                self._is_trial = True
                return True
        micro_batches[:] = self._best
        self._is_trial = False
        return False

    def _judge(self, taken: Sequence[float], micro_batches: list[int]) -> None:
        if not self._is_trial:
            self._best, self.best_seconds = list(micro_batches), list(taken)
            return
        for rank in list(self._going):
            if taken[rank] < (1.0 - MIN_GAIN) * self.best_seconds[rank]:
                self._best[rank], self.best_seconds[rank] = micro_batches[rank], taken[rank]
                self._gained.add(rank)
            else:
                self._going.discard(rank)
        micro_batches[:] = self._best


def _is_possible(batch: int, size: int, factor: float, largest: int) -> bool:
    if factor < 1.0:
        return min(size, batch) >= 2
    return size < batch and int(size * factor) <= largest


def largest_sizes(
    batches: Sequence[int], peak_bytes: Sequence[int], usable_bytes: Sequence[int]
) -> Batches:
    """What each rank could have if all of its memory grew with its size; 0: nobody knows."""
    return tuple(
        max(batch, int(_MEMORY_SHARE * batch * usable / peak)) if peak and usable else 0
        for batch, peak, usable in zip(batches, peak_bytes, usable_bytes, strict=True)
    )
