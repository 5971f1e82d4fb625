"""Where a unit of parameters is cut among the ranks: by their shares, at multiples of 16 bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from torch import nn

from drystone.errors import InvalidSpec

# A GPU reads 16 bytes at a time, and its kernels for matrices want pointers that are multiples of
# that: eight elements of the narrowest dtype that is computed in.
ALIGNED_ELEMENTS: Final = 8


def cut_units(sizes: Sequence[int], shares: Sequence[float]) -> list[tuple[int, ...]]:
    """Cuts of every unit such that rank r holds about `shares[r]` of all elements.

    As many units as possible are cut evenly, for the collectives over equal pieces are the fast
    ones: units are cut evenly, in order, as long as every rank has quota left for it, and the
    others by the quotas that are left (Cephalo, arXiv:2411.01075). An even unit is padded to a
    multiple of the number of ranks. Every piece begins at a multiple of 16 bytes.
    """
    shares = _normalised(shares)
    left = [share * sum(sizes) for share in shares]
    cuts = []
    is_even = True
    for size in sizes:
        each = aligned(-(-size // len(shares)))
        # Equal shares stay even to the end, whatever rounding leaves of the quotas.
        is_even = is_even and (len(set(shares)) == 1 or min(left) >= each)
        if is_even:
            cuts.append(tuple(each * rank for rank in range(len(shares) + 1)))
            left = [quota - each for quota in left]
        else:
            cuts.append(cut_by_shares(size, left))
    return cuts


def cut_by_shares(size: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Cuts of one unit in proportion to the shares; a share of 0 gives an empty piece."""
    total = sum(shares)
    cuts, reached = [0], 0.0
    last = max(rank for rank, share in enumerate(shares) if share > 0)
    for rank, share in enumerate(shares):
        reached += max(share, 0.0) / total
        ideal = size * min(reached, 1.0)
        near = ALIGNED_ELEMENTS * round(ideal / ALIGNED_ELEMENTS)
        cuts.append(size if rank >= last else min(near, size))
    return tuple(cuts)


def aligned(num_elements: int) -> int:
    """The next multiple at which a piece or a parameter may begin."""
    return -(-num_elements // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS


def _normalised(shares: Sequence[float]) -> list[float]:
    total = sum(shares)
    if not shares or min(shares) < 0 or total <= 0:
        raise InvalidSpec(f"state shares {list(shares)}: none may be negative, not all 0")
    return [share / total for share in shares]


def unit_size(parameters: Iterable[nn.Parameter]) -> int:
    """Elements of a unit's buffer."""
    return sum(aligned(parameter.numel()) for parameter in parameters)
