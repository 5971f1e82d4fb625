"""Who computes how much of a batch, and who holds how much state, when GPUs differ: decided apart.

Cephalo's way (arXiv:2411.01075): data parallel over all ranks, the state sharded over all of them.
A rank's batch follows its speed; the state goes where memory is left. A valid division of the state
exists if every rank's compute memory fits and all compute memory and state together fit all memory,
so the search needs only that sum, and the shares are filled in afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from drystone.errors import NothingFits
from drystone.plan.uneven.least_memory import largest_batch, least_split
from drystone.plan.uneven.spec import AssignmentSpec, RankKind, ShardRegime
from drystone.plan.uneven.threshold_search import FoundSplit, build_search, pass_seconds


def state_shares(
    room_bytes: ArrayLike, *, state_bytes: float, num_ranks: ArrayLike = 1
) -> NDArray[np.float64]:
    """The share of the state that a rank of each group holds, given the room that is left on it.

    Water-filling (Cephalo's `min_params`): the smallest level x with
    `sum(min(x, room)) >= state_bytes`, and the share `min(x, room) / state_bytes`. So the largest
    share is as small, and the smallest as large, as they can be; where even shares fit, they are
    even. `num_ranks` says for how many ranks each entry stands. Raises `NothingFits`.
    """
    room = np.maximum(np.asarray(room_bytes, dtype=np.float64), 0.0)
    counts = np.broadcast_to(np.asarray(num_ranks, dtype=np.int64), room.shape)
    short_bytes = state_bytes - float(room @ counts)
    if short_bytes > 0:
        raise NothingFits(
            f"the training state is {short_bytes:.0f} bytes larger than the room left"
        )
    if state_bytes <= 0:
        return np.full(room.shape, 1.0 / int(counts.sum()))
    level_bytes = fill_level_bytes(room, counts, state_bytes=state_bytes)
    return np.asarray(np.minimum(level_bytes, room) / state_bytes, dtype=np.float64)


def fill_level_bytes(
    room_bytes: NDArray[np.float64], counts: NDArray[np.int64], *, state_bytes: float
) -> float:
    """The smallest x with `sum(counts * min(x, room)) >= state_bytes`, if there is one.

    With the rooms ascending, the level is what is left over the ranks that are not yet full, at the
    first rank that has at least that much room.
    """
    order = np.argsort(room_bytes, kind="stable")
    room, ranks = room_bytes[order], counts[order]
    held_bytes = np.concatenate(([0.0], np.cumsum(room * ranks)[:-1]))
    ranks_left = np.cumsum(ranks[::-1])[::-1]
    levels = (state_bytes - held_bytes) / ranks_left
    enough = np.flatnonzero(levels <= room)
    # None only where rounding hides that the last rank is exactly full.
    return float(levels[enough[0]]) if enough.size else float(room[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """Ranks of one kind that do the same. All figures are of one rank, times of one layer."""

    kind_index: int
    num_ranks: int
    batch: int
    micro_batch: int
    num_micro_batches: int
    state_share: float
    compute_memory_bytes: float
    forward_seconds: float  # collectives included
    backward_seconds: float

    @property
    def layer_seconds(self) -> float:
        """Forward and backward of one layer."""
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Batch and state divided over all ranks: the least time, then the least memory."""

    groups: tuple[RankGroup, ...]  # by kind, in the order of the kinds; then by batch
    regime: ShardRegime
    layer_seconds: float  # the slowest rank's forward and backward
    compute_memory_bytes: float  # of all ranks
    state_bytes: float
    usable_bytes: float

    @property
    def synchronised_layer_seconds(self) -> float:
        """The slowest forward and the slowest backward: collectives make every rank wait."""
        slowest_forward = max(group.forward_seconds for group in self.groups)
        return slowest_forward + max(group.backward_seconds for group in self.groups)

    @property
    def memory_bytes(self) -> float:
        """Compute memory and state of all ranks together."""
        return self.compute_memory_bytes + self.state_bytes

    def ranks(self) -> Iterator[RankGroup]:
        """One entry a rank, kinds in order: the group that it belongs to."""
        for group in self.groups:
            for _ in range(group.num_ranks):
                yield group


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignmentShortfall:
    """Why nothing fits, by how much, and what would."""

    reason: str
    short_bytes: float  # of the kind named, or in aggregate; 0 where memory is not what is missing
    kind_index: int | None = None  # the kind on which not even the least fits
    batch_that_fits: int | None = None  # at any speed; None: none found


def plan_assignment(spec: AssignmentSpec) -> Assignment | AssignmentShortfall:
    """The fastest assignment over all regimes; of equally fast ones the first regime's.

    The order of the kinds in `spec` does not matter to what each of them is given.
    """
    order = sorted(range(len(spec.kinds)), key=lambda index: _identity(spec.kinds[index]))
    answer = _plan_in_order(replace(spec, kinds=tuple(spec.kinds[index] for index in order)))
    if isinstance(answer, AssignmentShortfall):
        if answer.kind_index is None:
            return answer
        return replace(answer, kind_index=order[answer.kind_index])
    named = [replace(group, kind_index=order[group.kind_index]) for group in answer.groups]
    return replace(answer, groups=tuple(sorted(named, key=lambda group: group.kind_index)))


def _identity(kind: RankKind) -> tuple[float, float, bytes, bytes, bytes, int]:
    """What tells a kind from another, in any order of them."""
    arrays = (kind.forward_seconds, kind.backward_seconds, kind.compute_memory_bytes)
    forward, backward, memory = (array.tobytes() for array in arrays)
    further_seconds = kind.further_micro_batch_seconds
    return kind.usable_bytes, further_seconds, forward, backward, memory, kind.num_ranks


def _plan_in_order(spec: AssignmentSpec) -> Assignment | AssignmentShortfall:
    """The fastest assignment, ties broken by the order of the kinds."""
    best: tuple[ShardRegime, FoundSplit] | None = None
    for regime in spec.regimes:
        below_seconds = best[1].layer_seconds if best else math.inf
        found = build_search(spec, regime).solve(below_seconds=below_seconds)
        if found is not None:
            best = regime, found
    return _assignment(spec, *best) if best else _shortfall(spec)


def _assignment(spec: AssignmentSpec, regime: ShardRegime, found: FoundSplit) -> Assignment:
    """The found split with memory, times and state shares."""
    choices = [
        (kind_index, num_ranks, batch, found.micro_batch_of[kind_index][batch])
        for kind_index, ranks in enumerate(found.split.ranks_by_batch)
        for batch, num_ranks in sorted(ranks.items(), reverse=True)
    ]
    kinds = [spec.kinds[kind_index] for kind_index, *_ in choices]
    num_ranks = np.array([count for _, count, _, _ in choices])
    compute_bytes = np.array(
        [kind.compute_memory_bytes[choice[3]] for kind, choice in zip(kinds, choices, strict=True)]
    )
    usable_bytes = np.array([float(math.floor(kind.usable_bytes)) for kind in kinds])
    shares = state_shares(
        usable_bytes - compute_bytes, state_bytes=spec.state_bytes, num_ranks=num_ranks
    )
    groups = [
        _group(spec, regime, choice, float(share))
        for choice, share in zip(choices, shares, strict=True)
    ]
    return Assignment(
        groups=tuple(groups),
        regime=regime,
        layer_seconds=found.layer_seconds,
        compute_memory_bytes=float(compute_bytes @ num_ranks),
        state_bytes=spec.state_bytes,
        usable_bytes=float(usable_bytes @ num_ranks),
    )


def _group(
    spec: AssignmentSpec, regime: ShardRegime, choice: tuple[int, int, int, int], share: float
) -> RankGroup:
    kind_index, num_ranks, batch, micro_batch = choice
    kind = spec.kinds[kind_index]
    count = batch // micro_batch if micro_batch else 0
    forward, backward = pass_seconds(kind, regime, np.array([micro_batch]), np.array([count]))
    return RankGroup(
        kind_index=kind_index,
        num_ranks=num_ranks,
        batch=batch,
        micro_batch=micro_batch,
        num_micro_batches=count,
        state_share=share,
        compute_memory_bytes=float(kind.compute_memory_bytes[micro_batch]),
        forward_seconds=float(forward[0]),
        backward_seconds=float(backward[0]),
    )


def _shortfall(spec: AssignmentSpec) -> AssignmentShortfall:
    """What is missing under the loosest regime: any share on any rank."""
    loosest = min(spec.regimes, key=lambda regime: (regime.least_share, -regime.largest_share))
    search = build_search(spec, loosest)
    for kind_index, (kind, choices) in enumerate(zip(spec.kinds, search.choices, strict=True)):
        if choices.batches.size == 0:
            return _kind_shortfall(spec, loosest, kind_index, kind)
    costs = search.costs_at(math.inf)
    sharable = sum(cost.num_ranks * int(cost.batches[0]) for cost in costs)
    at_most = max(spec.batch - 1, sharable)
    fitting = largest_batch(costs, at_most=at_most, limit_bytes=search.limit_bytes)
    least_bytes = sum(cost.num_ranks * int(cost.memory_bytes.min()) for cost in costs)
    cheapest = least_split(costs, batch=spec.batch)
    if cheapest is None and least_bytes <= search.limit_bytes:
        reason = (
            f"no choice of micro-batches on {spec.num_ranks} ranks sums to a batch of {spec.batch}"
        )
        return AssignmentShortfall(reason=reason, short_bytes=0.0, batch_that_fits=fitting)
    needed_bytes = cheapest.memory_bytes if cheapest is not None else least_bytes
    return AssignmentShortfall(
        reason="all memory together is too small for the training state and the least compute",
        short_bytes=float(needed_bytes - search.limit_bytes),
        batch_that_fits=fitting,
    )


def _kind_shortfall(
    spec: AssignmentSpec, regime: ShardRegime, kind_index: int, kind: RankKind
) -> AssignmentShortfall:
    """A kind on which not even one sample (or idling, where allowed) fits."""
    sizes = kind.compute_memory_bytes[0 if spec.may_idle else 1 :]
    needed_bytes = float(sizes.min()) + math.ceil(regime.least_share * spec.state_bytes)
    work = "even an idle rank" if spec.may_idle else "a single sample"
    return AssignmentShortfall(
        reason=f"{work} does not fit the memory of one kind of rank",
        short_bytes=max(needed_bytes - math.floor(kind.usable_bytes), 0.0),
        kind_index=kind_index,
    )
