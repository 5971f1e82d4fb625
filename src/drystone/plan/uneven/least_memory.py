"""The least memory with which ranks of several kinds share a batch, each local batch at its cost.

Theory of operation. Rank i takes a local batch b_i that costs `cost_i[b_i]` bytes; the b_i must sum
to the batch exactly, and the total cost must be least. Ranks of one kind have one cost. This is a
(min,+) convolution of all ranks' costs, for any costs, with holes and without any shape. It is
exact; what makes it fast is to know beforehand what cannot matter:

1. *Bound from below.* For any slope s (bytes a sample) no split costs less than
   `s * batch + sum_i min_b(cost_i[b] - s b)`. The best slope is found by secants; slopes are whole
   bytes, so the bound has no rounding error.
2. *Bound from above.* Ranks are moved between the two ends that the slope leaves open, and what
   then remains is put right with one or two ranks.
3. *Pruning.* A choice whose reduced cost `cost_i[b] - s b - min` exceeds the distance between the
   two bounds (or to the limit) is in no solution of interest, alone or in a sum.
4. *Convolution* of what is left (`min_plus.py`): equal ranks by doubling, counted from the
   end that is nearer to the batch.

Costs are whole bytes. Sums in float64 are exact below 2**53; what exceeds that loses anyway.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from drystone.plan.uneven.min_plus import Node, joined, repeated, sumset, trace

IntArray = NDArray[np.int64]

MOST_BATCHES_TRIED = 64
MOST_BATCHES_TO_PAIR = 600  # beyond it, pairs of local batches are not tried for a simpler split


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankCosts:
    """The local batches open to each rank of one kind, ascending, and what each costs."""

    num_ranks: int
    batches: IntArray
    memory_bytes: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSplit:
    """For each kind, how many ranks take which local batch; and what it costs in all."""

    ranks_by_batch: tuple[dict[int, int], ...]
    memory_bytes: int


def has_split(costs: Sequence[RankCosts], *, batch: int, limit_bytes: float) -> bool:
    """Whether some split of the batch costs no more than the limit. Exact."""
    if not _is_in_range(costs, batch):
        return False
    bound = _bound_below(costs, batch)
    if bound.memory_bytes > limit_bytes:
        return False
    found = _split_near(costs, batch, bound)
    if found is not None and found.memory_bytes <= limit_bytes:
        return True
    if not _is_reachable(costs, batch):
        return False
    if sum(cost.num_ranks * int(cost.memory_bytes.max()) for cost in costs) <= limit_bytes:
        return True
    return _convolve(costs, batch, bound, limit_bytes) is not None


def least_split(
    costs: Sequence[RankCosts], *, batch: int, limit_bytes: float = math.inf
) -> BatchSplit | None:
    """The split of the batch that costs least, if one keeps to the limit. Exact.

    Among splits of equal cost, one with few different local batches per kind.
    """
    if not _is_in_range(costs, batch):
        return None
    bound = _bound_below(costs, batch)
    found = _split_near(costs, batch, bound)
    if found is None or found.memory_bytes > bound.memory_bytes:
        if not _is_reachable(costs, batch):
            return None
        above_bytes = found.memory_bytes if found is not None else math.inf
        found = _convolve(costs, batch, bound, min(limit_bytes, above_bytes))
    if found is None or found.memory_bytes > limit_bytes:
        return None
    simple = [
        _simplified(cost, ranks) for cost, ranks in zip(costs, found.ranks_by_batch, strict=True)
    ]
    return BatchSplit(ranks_by_batch=tuple(simple), memory_bytes=found.memory_bytes)


def largest_batch(costs: Sequence[RankCosts], *, at_most: int, limit_bytes: float) -> int | None:
    """The largest batch up to a given one that has a split within the limit, or none.

    Looked for downwards from where the bound from below allows it, a limited number of times: that
    the answer is none is certain only where even the cheapest choices exceed the limit.
    """
    _, last, least_bytes = _cheapest(costs, 0)
    if least_bytes > limit_bytes:
        return None
    least, cheapest = _totals(costs, [0] * len(costs))[0], _totals(costs, last)[0]
    top = min(at_most, _totals(costs, [cost.batches.size - 1 for cost in costs])[0])
    low = min(cheapest, top)
    while low < top:  # beyond the cheapest choices the bound only rises
        middle = (low + top + 1) // 2
        if _bound_below(costs, middle).memory_bytes <= limit_bytes:
            low = middle
        else:
            top = middle - 1
    for batch in range(top, max(top - MOST_BATCHES_TRIED, least - 1, 0), -1):
        if has_split(costs, batch=batch, limit_bytes=limit_bytes):
            return batch
    return None


@dataclass(frozen=True, slots=True)
class _Bound:
    """A bound from below, the slope that proves it, and the choices that the slope leaves open."""

    memory_bytes: int
    slope: int  # bytes a sample
    low: tuple[int, ...]  # per kind, a position in its batches; all at low take at most the batch
    high: tuple[int, ...]


def _is_in_range(costs: Sequence[RankCosts], batch: int) -> bool:
    if any(cost.batches.size == 0 for cost in costs):
        return False
    least = sum(cost.num_ranks * int(cost.batches[0]) for cost in costs)
    most = sum(cost.num_ranks * int(cost.batches[-1]) for cost in costs)
    return least <= batch <= most


def _totals(costs: Sequence[RankCosts], positions: Sequence[int]) -> tuple[int, int]:
    """Samples and bytes when every rank of a kind takes the choice at one position."""
    chosen = list(zip(costs, positions, strict=True))
    samples = sum(cost.num_ranks * int(cost.batches[position]) for cost, position in chosen)
    return samples, sum(cost.num_ranks * int(cost.memory_bytes[at]) for cost, at in chosen)


def _bound_below(costs: Sequence[RankCosts], batch: int) -> _Bound:
    """The Lagrangian bound, its slope found by secants over the lower convex hull of the sums."""
    low = tuple(0 for _ in costs)
    high = tuple(cost.batches.size - 1 for cost in costs)
    best: tuple[int, int] | None = None  # bytes, slope
    while True:
        (low_samples, low_bytes), (high_samples, high_bytes) = (
            _totals(costs, low),
            _totals(costs, high),
        )
        slope = round((high_bytes - low_bytes) / max(high_samples - low_samples, 1))
        first, last, least_bytes = _cheapest(costs, slope)
        bound_bytes = least_bytes + slope * batch
        if best is None or bound_bytes > best[0]:
            best = bound_bytes, slope
        first_samples, last_samples = _totals(costs, first)[0], _totals(costs, last)[0]
        if first_samples <= batch <= last_samples:
            return _Bound(*best, first, last)
        if low_samples < last_samples < batch:
            low = last
        elif batch < first_samples < high_samples:
            high = first
        else:  # the best slope is no whole number of bytes, or the batch is at the very end
            return _Bound(*best, low, high)


def _cheapest(
    costs: Sequence[RankCosts], slope: int
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """First and last position of each kind's least `cost - slope * batch`, and their sum."""
    first, last, least_bytes = [], [], 0
    for cost in costs:
        reduced = cost.memory_bytes - slope * cost.batches
        start = int(np.argmin(reduced))
        first.append(start)
        last.append(reduced.size - 1 - int(np.argmin(reduced[::-1])))
        least_bytes += cost.num_ranks * int(reduced[start])
    return tuple(first), tuple(last), least_bytes


def _split_near(costs: Sequence[RankCosts], batch: int, bound: _Bound) -> BatchSplit | None:
    """A cheap split near the bound: ranks from low to high, and the rest by one or two ranks."""
    left = batch - _totals(costs, bound.low)[0]
    ranks: Counter[tuple[int, int]] = Counter()
    for kind, (cost, low, high) in enumerate(zip(costs, bound.low, bound.high, strict=True)):
        step = int(cost.batches[high] - cost.batches[low])
        moved = min(cost.num_ranks, left // step) if step > 0 else 0
        ranks[kind, low] += cost.num_ranks - moved
        ranks[kind, high] += moved
        left -= moved * step
    ranks = +ranks
    if left and not _repair(costs, ranks, left):
        return None
    return _as_split(costs, ranks)


def _repair(costs: Sequence[RankCosts], ranks: Counter[tuple[int, int]], left: int) -> bool:
    """Let one rank, or two, take `left` samples more in all, at the least further cost."""
    reach = max(int(cost.batches[-1]) for cost in costs) + left
    places = list(ranks)
    least = np.full(2 * reach + 1, np.inf)
    by = np.zeros(2 * reach + 1, dtype=np.int64)
    for number, (kind, position) in enumerate(places):
        one = costs[kind]
        index = one.batches - one.batches[position] + reach
        further = one.memory_bytes - one.memory_bytes[position]
        better = further < least[index]
        least[index[better]] = further[better]
        by[index[better]] = number
    pair = least[left:] + least[left:][::-1]  # entry i: one rank moves by i + left - reach
    at = int(np.argmin(pair)) + left
    one_by, other_by = at - reach, left - (at - reach)
    movers = (places[by[at]], places[by[other_by + reach]])
    if least[left + reach] <= pair[at - left]:
        one_by, other_by, movers = left, 0, (places[by[left + reach]],) * 2
    elif movers[0] == movers[1] and ranks[movers[0]] < 2:
        return False
    if not np.isfinite(least[one_by + reach] + least[other_by + reach]):
        return False
    for (kind, position), moved_by in zip(movers, (one_by, other_by), strict=True):
        if moved_by:
            goal = costs[kind].batches[position] + moved_by
            ranks[kind, position] -= 1
            ranks[kind, int(np.searchsorted(costs[kind].batches, goal))] += 1
    return True


def _as_split(costs: Sequence[RankCosts], ranks: Counter[tuple[int, int]]) -> BatchSplit:
    """A split out of how many ranks of a kind stand at which position of its batches."""
    by_kind: tuple[dict[int, int], ...] = tuple({} for _ in costs)
    memory_bytes = 0
    for (kind, position), num_ranks in sorted(ranks.items()):
        if num_ranks:
            by_kind[kind][int(costs[kind].batches[position])] = num_ranks
            memory_bytes += num_ranks * int(costs[kind].memory_bytes[position])
    return BatchSplit(ranks_by_batch=by_kind, memory_bytes=memory_bytes)


def _is_reachable(costs: Sequence[RankCosts], batch: int) -> bool:
    """Whether any split sums to the batch, whatever it costs: sums as bits of whole numbers."""
    within = (1 << (batch + 1)) - 1
    sums = 1
    for cost in costs:
        sums = sumset(sums, _repeated_sums(cost, within), within)
    return bool(sums >> batch & 1)


def _repeated_sums(one: RankCosts, within: int) -> int:
    """The sums that all ranks of one kind can make, as bits."""
    least, most = int(one.batches[0]), int(one.batches[-1])
    if most - least + 1 == one.batches.size:  # no holes, so none in the sums
        num_sums = one.num_ranks * (most - least) + 1
        return (((1 << num_sums) - 1) << (one.num_ranks * least)) & within
    power = sum(1 << int(batch) for batch in one.batches) & within
    sums, left = 1, one.num_ranks
    while left:
        if left & 1:
            sums = sumset(sums, power, within)
        left >>= 1
        if left:
            power = sumset(power, power, within)
    return sums


def _convolve(
    costs: Sequence[RankCosts], batch: int, bound: _Bound, limit_bytes: float
) -> BatchSplit | None:
    """The cheapest split that keeps to the limit, by the pruned convolution."""
    slack = limit_bytes - bound.memory_bytes
    kept = [_pruned(cost, bound.slope, slack) for cost in costs]
    if not _is_in_range([cost for cost, _ in kept], batch):
        return None
    from_low = batch - sum(cost.num_ranks * int(cost.batches[0]) for cost, _ in kept)
    from_high = sum(cost.num_ranks * int(cost.batches[-1]) for cost, _ in kept) - batch
    goal = min(from_low, from_high)
    nodes = []
    for kind, (cost, reduced) in enumerate(kept):
        offsets = (
            cost.batches - cost.batches[0]
            if from_low <= from_high
            else cost.batches[-1] - cost.batches
        )
        vector = np.full(int(offsets.max()) + 1, np.inf)
        vector[offsets] = reduced
        leaf = Node(vector[: goal + 1], kind=kind)
        nodes.append(repeated(leaf, cost.num_ranks, goal=goal, slack=slack))
    whole = joined(nodes, goal=goal, slack=slack)
    if whole.reduced.size <= goal or not np.isfinite(whole.reduced[goal]):
        return None
    ranks: Counter[tuple[int, int]] = Counter()
    for (kind, offset), num_ranks in trace(whole, goal).items():
        ends = kept[kind][0].batches
        taken = int(ends[0]) + offset if from_low <= from_high else int(ends[-1]) - offset
        ranks[kind, int(np.searchsorted(costs[kind].batches, taken))] += num_ranks
    return _as_split(costs, ranks)


def _pruned(one: RankCosts, slope: int, slack: float) -> tuple[RankCosts, IntArray]:
    """The choices whose reduced cost is within the slack, and these costs."""
    reduced = one.memory_bytes - slope * one.batches
    reduced -= reduced.min()
    keep = reduced <= slack
    kept = RankCosts(
        num_ranks=one.num_ranks, batches=one.batches[keep], memory_bytes=one.memory_bytes[keep]
    )
    return kept, reduced[keep]


def _simplified(one: RankCosts, ranks: dict[int, int]) -> dict[int, int]:
    """The same samples at the same cost with one local batch or two close ones, where possible."""
    if len(ranks) <= 1 or one.batches.size > MOST_BATCHES_TO_PAIR:
        return ranks
    samples = sum(batch * num_ranks for batch, num_ranks in ranks.items())
    positions = {batch: int(np.searchsorted(one.batches, batch)) for batch in ranks}
    memory_bytes = sum(one.memory_bytes[positions[batch]] * count for batch, count in ranks.items())
    low, high = np.triu_indices(one.batches.size)
    step = np.maximum(one.batches[high] - one.batches[low], 1)
    num_high = (samples - one.num_ranks * one.batches[low]) // step
    num_low = one.num_ranks - num_high
    same = (
        (num_high >= 0)
        & (num_low >= 0)
        & (num_low * one.batches[low] + num_high * one.batches[high] == samples)
        & (num_low * one.memory_bytes[low] + num_high * one.memory_bytes[high] == memory_bytes)
    )
    found = np.flatnonzero(same)
    if found.size == 0:
        return ranks
    is_pair = (num_high[found] > 0) & (num_low[found] > 0)
    best = found[np.argmin(is_pair * step[found])]  # one batch if possible; else the two closest
    simple = Counter({int(one.batches[low[best]]): int(num_low[best])})
    simple[int(one.batches[high[best]])] += int(num_high[best])
    return dict(+simple)
