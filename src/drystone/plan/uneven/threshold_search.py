"""The least layer time at which unlike ranks share a batch within their memory: a threshold search.

The objective is a bottleneck, so the time is not carried through the search but guessed: at a time
T each rank may choose any (micro-batch, number of micro-batches) that takes it at most T, and the
question is only whether choices that sum to the batch fit memory (`least_memory.py`). More time
only adds choices, so the least T is found by bisection over the times that occur. This replaces the
dynamic programme of Cephalo (arXiv:2411.01075), whose memory test is exact for linear memory only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from drystone.plan.uneven.least_memory import BatchSplit, RankCosts, has_split, least_split
from drystone.plan.uneven.spec import AssignmentSpec, RankKind, ShardRegime

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

FIRST_STEP = 1 / 64  # of the time, when looking upwards from the bound for a time that suffices
STEP_GROWTH = 4.0
CLOSED = np.iinfo(np.int64).min  # the cost of a local batch that no choice makes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choices:
    """What a rank of one kind may do: one entry a choice, the better of equal batch coming later.

    `cost_bytes` is memory that the state cannot use: compute memory, or more where the regime
    bounds the share that a rank may hold.
    """

    num_ranks: int
    batches: IntArray
    micro_batches: IntArray  # the size of one
    cost_bytes: IntArray
    seconds: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSplit:
    """The least layer time of a regime, and the cheapest split of the batch at that time."""

    layer_seconds: float
    split: BatchSplit
    micro_batch_of: tuple[dict[int, int], ...]  # per kind, the micro-batch size of a local batch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Search:
    """One regime's choices and memory limit, ready to be asked about times and batches."""

    choices: tuple[Choices, ...]
    batch: int
    limit_bytes: int

    def costs_at(self, seconds: float) -> list[RankCosts]:
        """What each local batch costs a rank that has this much time."""
        return [_costs_at(choice, seconds, self.batch) for choice in self.choices]

    def fits(self, seconds: float) -> bool:
        """Whether the batch can be done in this time within memory."""
        return has_split(self.costs_at(seconds), batch=self.batch, limit_bytes=self.limit_bytes)

    def solve(self, *, below_seconds: float = math.inf) -> FoundSplit | None:
        """The least time below the given one, and the cheapest split at it, if there is one."""
        seconds = self._least_seconds(below_seconds)
        if seconds is None:
            return None
        split = least_split(self.costs_at(seconds), batch=self.batch, limit_bytes=self.limit_bytes)
        assert split is not None, "a time that fits has a split"
        chosen = tuple(
            _micro_batch_of(choice, seconds, ranks)
            for choice, ranks in zip(self.choices, split.ranks_by_batch, strict=True)
        )
        return FoundSplit(layer_seconds=seconds, split=split, micro_batch_of=chosen)

    def _least_seconds(self, below_seconds: float) -> float | None:
        low = _bound_seconds(self.choices, self.batch)
        if low is None or low >= below_seconds:
            return None
        if self.fits(low):
            return low
        last = max(float(choice.seconds.max()) for choice in self.choices)
        top = min(last, float(np.nextafter(below_seconds, -math.inf)))
        step = FIRST_STEP
        while True:
            high = min(max(low * (1 + step), _next_seconds(self.choices, low)), top)
            if high <= low:
                return None
            if self.fits(high):
                break
            low, step = high, step * STEP_GROWTH
        times = np.unique(
            np.concatenate([_between(choice.seconds, low, high) for choice in self.choices])
        )
        return _first_that(times, self.fits)


def build_search(spec: AssignmentSpec, regime: ShardRegime) -> Search:
    """The search under one regime of shards."""
    state_bytes = math.ceil(spec.state_bytes)
    least_bytes = _least_shard_bytes(state_bytes, regime, spec.num_ranks)
    choices = []
    for kind in spec.kinds:
        usable_bytes = math.floor(kind.usable_bytes)
        floor_bytes = 0
        if regime.largest_share < 1:
            # A rank never holds more than this share: room beyond it is as good as used.
            floor_bytes = usable_bytes - math.floor(regime.largest_share * state_bytes)
        fits = kind.compute_memory_bytes <= usable_bytes - least_bytes
        choices.append(_sorted(enumerate_choices(kind, spec, regime, fits), floor_bytes))
    total_bytes = sum(kind.num_ranks * math.floor(kind.usable_bytes) for kind in spec.kinds)
    return Search(choices=tuple(choices), batch=spec.batch, limit_bytes=total_bytes - state_bytes)


def enumerate_choices(
    kind: RankKind, spec: AssignmentSpec, regime: ShardRegime, fits: NDArray[np.bool_]
) -> Choices:
    """Every (micro-batch, number of them) up to the batch, of the micro-batches that fit."""
    largest = min(kind.forward_seconds.size - 1, spec.batch, spec.most_micro_batch or spec.batch)
    sizes = np.flatnonzero(fits[: largest + 1] & (np.arange(largest + 1) > 0))
    most = np.minimum(spec.batch // sizes, spec.most_micro_batches or spec.batch)
    micro_batches = np.repeat(sizes, most)
    counts = np.arange(micro_batches.size) - np.repeat(np.cumsum(most) - most, most) + 1
    if spec.may_idle and fits[0]:
        micro_batches, counts = np.append(micro_batches, 0), np.append(counts, 0)
    forward, backward = pass_seconds(kind, regime, micro_batches, counts)
    seconds = forward + backward
    can_run = np.isfinite(seconds)
    micro_batches, counts = micro_batches[can_run], counts[can_run]
    return Choices(
        num_ranks=kind.num_ranks,
        batches=micro_batches * counts,
        micro_batches=micro_batches,
        cost_bytes=kind.compute_memory_bytes[micro_batches].astype(np.int64),
        seconds=seconds[can_run],
    )


def pass_seconds(
    kind: RankKind, regime: ShardRegime, micro_batches: IntArray, counts: IntArray
) -> tuple[FloatArray, FloatArray]:
    """Forward and backward seconds of one layer on one rank, collectives overlapped with compute.

    `max(AG, l f)` and `max(AG + RS, l f + l g + (l - 1) c)`: backward computes the layer anew.
    """
    forward = counts * kind.forward_seconds[micro_batches]
    further = np.maximum(counts - 1, 0) * kind.further_micro_batch_seconds
    backward = forward + counts * kind.backward_seconds[micro_batches] + further
    gather = regime.allgather_seconds
    return np.maximum(gather, forward), np.maximum(gather + regime.reduce_scatter_seconds, backward)


def _least_shard_bytes(state_bytes: int, regime: ShardRegime, num_ranks: int) -> int:
    if regime.least_share * num_ranks >= 1 - 1e-9:  # even: without the rounding of 1 / num_ranks
        return -(-state_bytes // num_ranks)
    return math.ceil(regime.least_share * state_bytes)


def _sorted(one: Choices, floor_bytes: int) -> Choices:
    """The choices in order, the cheapest, quickest, largest last; none cheaper than the floor."""
    cost_bytes = np.maximum(one.cost_bytes, floor_bytes)
    order = np.lexsort((one.micro_batches, -one.seconds, -one.cost_bytes, -cost_bytes))
    return Choices(
        num_ranks=one.num_ranks,
        batches=one.batches[order],
        micro_batches=one.micro_batches[order],
        cost_bytes=cost_bytes[order],
        seconds=one.seconds[order],
    )


def _costs_at(one: Choices, seconds: float, batch: int) -> RankCosts:
    open_now = one.seconds <= seconds
    cost_bytes = np.full(batch + 1, CLOSED, dtype=np.int64)
    # Of repeated indices the last is kept, and the cheapest comes last.
    cost_bytes[one.batches[open_now]] = one.cost_bytes[open_now]
    batches = np.flatnonzero(cost_bytes != CLOSED)
    return RankCosts(num_ranks=one.num_ranks, batches=batches, memory_bytes=cost_bytes[batches])


def _micro_batch_of(one: Choices, seconds: float, ranks: dict[int, int]) -> dict[int, int]:
    """The micro-batch size that is cheapest for each local batch in use."""
    open_now = one.seconds <= seconds
    last = dict(
        zip(one.batches[open_now].tolist(), one.micro_batches[open_now].tolist(), strict=True)
    )
    return {batch: last[batch] for batch in ranks}


def _bound_seconds(choices: Sequence[Choices], batch: int) -> float | None:
    """The least time at which every rank has a choice and the largest choices reach the batch."""
    if any(choice.batches.size == 0 for choice in choices):
        return None
    # Entry b: the least time in which a rank does b samples or more.
    at_least = []
    for choice in choices:
        quickest = np.full(batch + 1, np.inf)
        np.minimum.at(quickest, choice.batches, choice.seconds)
        at_least.append(np.minimum.accumulate(quickest[::-1])[::-1])
    times = np.unique(np.concatenate(at_least))
    times = times[np.isfinite(times) & (times >= max(float(room[0]) for room in at_least))]

    def reaches(seconds: float) -> bool:
        most = (int(np.searchsorted(room, seconds, side="right")) - 1 for room in at_least)
        return sum(choice.num_ranks * n for choice, n in zip(choices, most, strict=True)) >= batch

    return _first_that(times, reaches)


def _first_that(times: FloatArray, holds: Callable[[float], bool]) -> float | None:
    """The first of ascending times for which a claim holds that stays true once it is; if any."""
    low, high = 0, times.size
    while low < high:
        middle = (low + high) // 2
        if holds(float(times[middle])):
            high = middle
        else:
            low = middle + 1
    return float(times[low]) if low < times.size else None


def _between(seconds: FloatArray, low: float, high: float) -> FloatArray:
    return seconds[(seconds > low) & (seconds <= high)]


def _next_seconds(choices: Sequence[Choices], above: float) -> float:
    """The least time of any choice that is above the given one; the given one if there is none."""
    later = [choice.seconds[choice.seconds > above].min(initial=math.inf) for choice in choices]
    least = float(min(later))
    return least if math.isfinite(least) else above
