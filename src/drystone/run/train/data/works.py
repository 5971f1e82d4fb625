"""Which rank computes which samples: the work of each rank of a plan, by global sample numbers.

A source of samples is addressed by their numbers, counted on through all epochs, so the position of
a job is one number and a job that is resized goes on where it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from drystone.errors import InvalidSpec
from drystone.plan.plan import Plan, Way


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """What one rank computes in a step, and what it holds; either may be nothing."""

    batch: int
    micro_batch: int
    state_share: float = 1.0  # relative to those of the other ranks
    usable_bytes: int = 0  # of its device; 0: nobody said

    def __post_init__(self) -> None:
        if self.batch < 0 or self.state_share < 0:
            raise InvalidSpec(f"a rank with batch {self.batch} and share {self.state_share}")
        if self.batch and self.micro_batch < 1:
            raise InvalidSpec(f"a rank with batch {self.batch} and micro_batch {self.micro_batch}")


def rank_works(plan: Plan) -> tuple[RankWork, ...]:
    """Every rank of a plan without tensor or pipeline parallelism, in the order of the plan."""
    if len(plan.stages) != 1 or plan.stages[0].tp * plan.stages[0].cp != 1:
        raise InvalidSpec(
            f"a plan of kind {plan.way.value} with tensor, context or pipeline parallelism",
            hint="Those that can be executed have a layout of their own: `cells.cell_layout`",
        )
    if plan.not_executable:
        raise InvalidSpec(f"the plan cannot be executed: {plan.not_executable}")
    usable = {need.gpu: int(need.usable_bytes) for need in plan.needs}
    works = [
        RankWork(
            batch=share.batch,
            micro_batch=share.micro_batch,
            state_share=share.state_share if plan.way is Way.UNEVEN else 1.0,
            usable_bytes=usable.get(share.gpu, 0),
        )
        for share in plan.stages[0].ranks
        for _ in range(share.count)
    ]
    if plan.way is Way.CELL:
        works = _without_excess(works, plan.recipe.global_batch)
    total = sum(work.batch for work in works)
    if total != plan.recipe.global_batch:
        raise InvalidSpec(
            f"the ranks' batches sum to {total}, the global batch is {plan.recipe.global_batch}"
        )
    return tuple(works)


def _without_excess(works: Sequence[RankWork], global_batch: int) -> list[RankWork]:
    """Equal ranks are planned with the batch of the largest; the last ones have less to do."""
    ends = [min(end, global_batch) for end in (0, *accumulate(work.batch for work in works))]
    return [
        replace(work, batch=end - start)
        for work, (start, end) in zip(works, pairwise(ends), strict=True)
    ]


def micro_batches(works: Sequence[RankWork], rank: int, position: int) -> list[range]:
    """The global sample numbers of each micro-batch of one rank in the step at `position`.

    As few as there can be, of sizes that differ by one at most.
    """
    ends = list(accumulate(work.batch for work in works))
    start = position + ends[rank] - works[rank].batch
    sizes = micro_batch_sizes(works[rank].batch, works[rank].micro_batch)
    return [
        range(start + first, start + last) for first, last in pairwise(accumulate(sizes, initial=0))
    ]


def micro_batch_sizes(batch: int, largest: int) -> list[int]:
    """A batch in as few parts as there can be, none larger than that, the larger ones first."""
    if batch == 0:
        return []
    number = -(-batch // max(largest, 1))
    each, rest = divmod(batch, number)
    return [each + 1] * rest + [each] * (number - rest)
