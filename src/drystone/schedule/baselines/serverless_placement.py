"""Which of these plans fits what is free, and where? Frenzy's heterogeneity-aware scheduler.

Two stages (arXiv:2412.14479). Plans come best first; the first that the free GPUs can satisfy is
taken. Then it is placed: on one node if one is enough, of those with the least memory that
suffices the one that is left with least; otherwise greedily over several nodes. GPUs of one tensor
parallel group stay on one node. No search, no solver: a walk over plans times nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from drystone.schedule.snapshot import FloatArray, IntArray, Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRequest:
    """What a plan needs: so many GPUs with so much memory, in groups that share a node."""

    num_gpus: int
    least_memory_bytes: float = 0.0
    group_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FreeNodes:
    """The nodes that may be used: their rows, free GPUs, and the memory of each GPU."""

    rows: IntArray
    free: IntArray
    memory_bytes: FloatArray


def place_first_that_fits(
    requests: Sequence[GpuRequest], nodes: FreeNodes
) -> tuple[int, Placement] | None:
    """The position of the first request that fits, and where; None if none does."""
    for position, request in enumerate(requests):
        placement = place_request(request, nodes)
        if placement is not None:
            return position, placement
    return None


def place_request(request: GpuRequest, nodes: FreeNodes) -> Placement | None:
    """Where a request goes; None if it does not fit."""
    whole = nodes.free - nodes.free % request.group_size
    whole = np.where(nodes.memory_bytes >= request.least_memory_bytes, whole, 0)
    if int(whole.sum()) < request.num_gpus:
        return None
    enough = np.flatnonzero(whole >= request.num_gpus)
    if len(enough):
        order = np.lexsort((nodes.free[enough], nodes.memory_bytes[enough]))
        return ((int(nodes.rows[enough[order[0]]]), request.num_gpus),)
    found: list[tuple[int, int]] = []
    left = request.num_gpus
    for at in np.lexsort((-nodes.free, nodes.memory_bytes)):
        taken = min(int(whole[at]), left)
        if taken > 0:
            found.append((int(nodes.rows[at]), taken))
            left -= taken
    return tuple(sorted(found))
