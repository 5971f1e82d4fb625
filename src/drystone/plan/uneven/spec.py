"""What the assignment of batch and state to unlike GPUs is asked: ranks, batch, state, collectives.

Numbers only: they may come from our estimates or from somebody's measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from drystone.errors import InvalidSpec

FloatArray = NDArray[np.float64]

EXACT_BYTES = 2.0**53  # whole numbers are exact in float64 below it
EXACT_PRODUCT = 2.0**61  # bytes a sample, times samples, in int64
CEPHALO_UNEVEN_FACTOR = 1.25  # what its planner multiplies collectives of uneven shards by


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankKind:
    """Ranks on equal GPUs. Arrays are indexed by micro-batch size, from 0 to the largest open.

    Entry 0 is a rank that computes nothing: no time, but the memory that it needs anyway. An
    infinite time or memory says that this size cannot be run. Memory is rounded up to whole bytes.
    """

    num_ranks: int
    forward_seconds: FloatArray  # one layer, one micro-batch; entry 0 is 0
    backward_seconds: FloatArray  # without recomputation; entry 0 is 0
    compute_memory_bytes: FloatArray  # everything but the sharded training state
    usable_bytes: float  # of the GPU's memory; any safety factor is applied
    further_micro_batch_seconds: float = (
        0.0  # cost of each micro-batch after the first, in backward
    )

    def __post_init__(self) -> None:
        for name in ("forward_seconds", "backward_seconds", "compute_memory_bytes"):
            array = np.array(getattr(self, name), dtype=np.float64)
            if name == "compute_memory_bytes":
                array = np.ceil(array)
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        problems = list(self._problems())
        if problems:
            raise InvalidSpec("ranks of one kind: " + "; ".join(problems))

    def _problems(self) -> Sequence[str]:
        arrays = (self.forward_seconds, self.backward_seconds, self.compute_memory_bytes)
        checks = {
            "num_ranks must be at least 1": self.num_ranks >= 1,
            "the arrays must be equally long, from micro-batch 0 to at least 1": (
                all(array.ndim == 1 and array.size == arrays[0].size >= 2 for array in arrays)
            ),
            "times and memory must not be negative or missing": all(
                (array >= 0).all() for array in arrays
            ),
            "a micro-batch of 0 must take 0 seconds": not any(
                array[:1].any() for array in arrays[:2]
            ),
            "further_micro_batch_seconds must be finite and not negative": (
                0 <= self.further_micro_batch_seconds < np.inf
            ),
            "usable_bytes must be finite and not negative": 0 <= self.usable_bytes < np.inf,
        }
        return [text for text, holds in checks.items() if not holds]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRegime:
    """Bounds on every rank's share of the state, and what a layer's collectives take then."""

    name: str
    least_share: float = 0.0
    largest_share: float = 1.0
    allgather_seconds: float = 0.0
    reduce_scatter_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.least_share <= self.largest_share <= 1:
            raise InvalidSpec(f"regime {self.name}: shares must be 0 <= least <= largest <= 1")
        if not (0 <= self.allgather_seconds < np.inf and 0 <= self.reduce_scatter_seconds < np.inf):
            raise InvalidSpec(f"regime {self.name}: seconds must be finite and not negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignmentSpec:
    """One batch and one training state to be divided over ranks of these kinds.

    Each regime is solved exactly for itself, and the fastest wins; of equally fast ones the first.
    With `may_idle` a rank may compute nothing and still hold state.
    """

    kinds: tuple[RankKind, ...]
    batch: int
    state_bytes: float
    regimes: tuple[ShardRegime, ...]
    may_idle: bool = False
    most_micro_batch: int | None = None
    most_micro_batches: int | None = None

    def __post_init__(self) -> None:
        if not self.kinds or not self.regimes:
            raise InvalidSpec("an assignment needs at least one kind of rank and one regime")
        if self.batch < 1 or not 0 <= self.state_bytes < np.inf:
            raise InvalidSpec("batch must be at least 1, and state_bytes finite and not negative")
        if any(
            most is not None and most < 1
            for most in (self.most_micro_batch, self.most_micro_batches)
        ):
            raise InvalidSpec("most_micro_batch and most_micro_batches must be at least 1")
        if (
            sum(kind.num_ranks * kind.usable_bytes for kind in self.kinds) + self.state_bytes
            > EXACT_BYTES
        ):
            raise InvalidSpec("more memory than can be counted exactly (8 PiB)")
        if max(kind.usable_bytes for kind in self.kinds) * self.batch > EXACT_PRODUCT:
            raise InvalidSpec("the batch is too large for memory to be counted exactly")

    @property
    def num_ranks(self) -> int:
        """Ranks of all kinds together."""
        return sum(kind.num_ranks for kind in self.kinds)


def even_or_uneven(
    num_ranks: int,
    *,
    allgather_seconds: float = 0.0,
    reduce_scatter_seconds: float = 0.0,
    uneven_factor: float = CEPHALO_UNEVEN_FACTOR,
) -> tuple[ShardRegime, ...]:
    """Equal shares at the given times, or any shares at a multiple of them: Cephalo's rule.

    Unlike its code we let the factor apply to everybody as soon as any shard is uneven, since a
    collective is as slow as its slowest member.
    """
    return (
        ShardRegime(
            name="even",
            least_share=1 / num_ranks,
            allgather_seconds=allgather_seconds,
            reduce_scatter_seconds=reduce_scatter_seconds,
        ),
        ShardRegime(
            name="uneven",
            allgather_seconds=uneven_factor * allgather_seconds,
            reduce_scatter_seconds=uneven_factor * reduce_scatter_seconds,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RingLink:
    """The slowest link of the ring that all ranks form."""

    bandwidth_bytes_per_second: float
    latency_seconds: float = 0.0

    def collective_seconds(
        self, message_bytes: float, *, num_ranks: int, largest_share: float | None = None
    ) -> float:
        """One all-gather or reduce-scatter, of equal shards or of shards up to `largest_share`.

        Unequal shards are padded to the largest, or sent as a group of broadcasts or reduces, one a
        rank, whichever is quicker; the first wins up to a share of about 1 / (num_ranks - 1).
        """
        whole_seconds = message_bytes / self.bandwidth_bytes_per_second
        steps = num_ranks - 1
        even = steps * (whole_seconds / num_ranks + self.latency_seconds)
        if largest_share is None or num_ranks == 1:
            return even
        padded = steps * (largest_share * whole_seconds + self.latency_seconds)
        grouped = whole_seconds + num_ranks * self.latency_seconds
        return max(even, min(padded, grouped))


def ring_regimes(
    link: RingLink,
    *,
    num_ranks: int,
    allgather_bytes: float,
    reduce_scatter_bytes: float,
    even_layer_shares: Sequence[float] = (0.875, 0.75, 0.5, 0.25, 0.0),
) -> tuple[ShardRegime, ...]:
    """Regimes for shards laid out so that as many layers as possible stay even (Cephalo's default).

    If every rank holds at least `e / num_ranks` of the state, then the share e of the layers can be
    cut evenly and only the others pay for uneven shards; e is tried from all to none. The times are
    means over the layers.
    """
    message_bytes = (allgather_bytes, reduce_scatter_bytes)
    even = [link.collective_seconds(num_bytes, num_ranks=num_ranks) for num_bytes in message_bytes]
    regimes = [
        *even_or_uneven(num_ranks, allgather_seconds=even[0], reduce_scatter_seconds=even[1])[:1]
    ]
    # Half-way to where padding stops being worth it.
    padded_share = (1 / num_ranks + 1 / max(num_ranks - 1, 1)) / 2
    for even_share in even_layer_shares:
        for tail_share in (padded_share, 1.0):
            tail = [
                link.collective_seconds(num_bytes, num_ranks=num_ranks, largest_share=tail_share)
                for num_bytes in message_bytes
            ]
            mean = [
                even_share * one + (1 - even_share) * other
                for one, other in zip(even, tail, strict=True)
            ]
            regimes.append(
                ShardRegime(
                    name=f"{even_share:.1%} of layers even, others up to {tail_share:.3g} a rank",
                    least_share=even_share / num_ranks,
                    largest_share=min(1.0, even_share / num_ranks + (1 - even_share) * tail_share),
                    allgather_seconds=mean[0],
                    reduce_scatter_seconds=mean[1],
                )
            )
    return tuple(regimes)
