"""Whole-node prices: what is left of a node is worth what others can use of it."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from drystone.describe.market import Offer
from drystone.schedule.budget.leftovers import billed_gpus, used_shares

NODE = Offer(name="a", gpu="A", num_gpus=8, price_dollars_per_hour=8.0)


def test_a_lone_job_pays_for_its_whole_node_and_one_among_many_for_its_gpus():
    counts = np.array([1, 4, 8, 12])

    assert billed_gpus(counts, NODE, 0.0).tolist() == [8, 8, 8, 16]
    assert billed_gpus(counts, NODE, 1.0).tolist() == [1, 4, 8, 12]


def test_few_jobs_share_nothing_and_many_nearly_all():
    few, many = (
        used_shares(np.array([[1]]), np.array([number]), {0: NODE}, 1)[0] for number in (0.5, 100.0)
    )
    assert few < 0.15
    assert many > 0.98


def test_whole_nodes_leave_nothing_to_share_and_single_gpus_are_nodes():
    alone = Offer(name="b", gpu="B", num_gpus=1, price_dollars_per_hour=1.0)
    shares = used_shares(np.array([[16, 0]]), np.array([9.0]), {0: NODE, 1: alone}, 2)

    assert shares.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(("width", "present"), [(1, 18.0), (2, 11.0), (4, 7.5)])
def test_the_share_is_about_what_a_stream_of_jobs_really_uses(width, present):
    """Poisson arrivals of an hour each, each on the fullest node that has room, none ever moved."""
    generator = np.random.default_rng(0)
    free: list[int] = []
    ends: list[tuple[float, int]] = []
    now = paid = used = 0.0
    for _ in range(20_000):
        arrival = now + generator.exponential(1 / present)
        while ends and ends[0][0] <= arrival:
            end, node = heapq.heappop(ends)
            paid += 8 * sum(left < 8 for left in free) * (end - now)
            now, free[node] = end, free[node] + width
        paid += 8 * sum(left < 8 for left in free) * (arrival - now)
        now = arrival
        able = [row for row, left in enumerate(free) if left >= width]
        if not able:
            free.append(8)
            able = [len(free) - 1]
        node = min(able, key=lambda row: free[row])
        free[node] -= width
        hours = generator.exponential(1.0)
        used += width * hours
        heapq.heappush(ends, (now + hours, node))
    alone = used * 8 / width

    share = used_shares(np.array([[width]]), np.array([present]), {0: NODE}, 1)[0]
    assert share == pytest.approx((alone - paid) / (alone - used), abs=0.15)
