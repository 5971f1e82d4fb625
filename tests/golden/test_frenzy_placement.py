"""Frenzy's two stages, on clusters small enough to place by hand (arXiv:2412.14479, reviews)."""

import numpy as np
import pytest

from drystone.schedule.baselines.serverless import (
    FreeNodes,
    GpuRequest,
    place_request,
)

GB = 1e9


def nodes(*pairs: tuple[int, float]) -> FreeNodes:
    """From (free GPUs, gigabytes of each)."""
    return FreeNodes(
        rows=np.arange(len(pairs)),
        free=np.array([free for free, _ in pairs]),
        memory_bytes=np.array([memory * GB for _, memory in pairs]),
    )


def request(num_gpus: int, gigabytes: float = 0.0, group: int = 1) -> GpuRequest:
    return GpuRequest(num_gpus=num_gpus, min_memory_bytes=gigabytes * GB, group_size=group)


@pytest.mark.parametrize(
    ("wanted", "free", "expected"),
    [
        # One node is enough: the one that is left with least.
        (request(4), nodes((8, 40), (4, 40), (6, 40)), ((1, 4),)),
        (request(3), nodes((8, 40), (4, 40), (6, 40)), ((1, 3),)),
        # Large GPUs are spared, even if a small one leaves more over.
        (request(2, 30), nodes((2, 80), (8, 40), (8, 16)), ((1, 2),)),
        # No single node is enough: greedily, small memory first, then the emptiest.
        (request(10), nodes((4, 80), (6, 40), (3, 40)), ((0, 1), (1, 6), (2, 3))),
        (request(8), nodes((3, 40), (6, 40), (3, 40)), ((0, 2), (1, 6))),
        # A tensor parallel group is not split over nodes.
        (request(8, group=4), nodes((7, 40), (6, 40), (8, 80)), ((2, 8),)),
        (request(8, group=4), nodes((7, 40), (6, 40), (7, 80)), ((0, 4), (1, 4))),
        (request(8, group=4), nodes((3, 40), (3, 40), (4, 80)), None),
        # Too little memory is no GPU at all.
        (request(2, 60), nodes((8, 40), (1, 80)), None),
    ],
)
def test_a_plan_is_placed_by_best_fit_and_else_greedily(wanted, free, expected):
    assert place_request(wanted, free) == expected
