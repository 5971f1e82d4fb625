"""Collectives: hand-computed times, and what must hold for any machine."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drystone.describe.catalogue import find_gpu
from drystone.describe.machine import Link, Machine
from drystone.estimate.time.network import (
    START_SECONDS,
    allreduce_seconds,
    alltoall_seconds,
    gather_seconds,
    make_group,
    send_seconds,
)

MACHINE = Machine(
    gpu=find_gpu("A100-80G"),
    gpus_per_node=8,
    intra=Link(name="inside", bandwidth_bytes_per_second=200e9, latency_seconds=2e-6),
    inter=Link(name="between", bandwidth_bytes_per_second=20e9, latency_seconds=10e-6),
)


def array(*values: float):
    return np.array(values, dtype=np.float64)


def group(size: float, stride: float = 1.0):
    return make_group(array(size), array(stride), MACHINE)


def test_a_group_inside_a_node_uses_the_link_inside():
    assert group(8).bandwidth_bytes_per_second == array(200e9)
    assert group(8).ring_seconds == pytest.approx(array(7 * 2e-6))
    assert group(8).tree_seconds == pytest.approx(array(3 * 2e-6))


def test_a_ring_across_nodes_runs_over_the_cards_of_all_its_members_in_a_node():
    assert group(16).bandwidth_bytes_per_second == array(8 * 20e9)
    assert group(16, stride=8).bandwidth_bytes_per_second == array(20e9)
    assert group(16, stride=4).bandwidth_bytes_per_second == array(2 * 20e9)


def test_cards_never_carry_more_than_the_link_inside():
    fast = replace(MACHINE, inter=replace(MACHINE.inter, bandwidth_bytes_per_second=100e9))

    assert make_group(array(16), 1.0, fast).bandwidth_bytes_per_second == array(200e9)


def test_an_allreduce_moves_each_byte_almost_twice():
    seconds = allreduce_seconds(array(1e9), group(8))

    assert seconds == pytest.approx(2 * 7 / 8 * 1e9 / 200e9 + 2 * 3 * 2e-6 + START_SECONDS)


def test_a_gather_moves_each_byte_almost_once_and_starts_every_call():
    seconds = gather_seconds(array(1e9), group(8), num_calls=4)

    assert seconds == pytest.approx(7 / 8 * 1e9 / 200e9 + 4 * (7 * 2e-6 + START_SECONDS))


def test_an_exchange_across_nodes_sends_over_each_card_what_leaves_the_node():
    """Two nodes of eight: half of the copies leave, the rest travels inside at the same time."""
    seconds = alltoall_seconds(array(1e9), group(16), MACHINE)
    inside = alltoall_seconds(array(1e9), group(8), MACHINE)

    assert seconds == pytest.approx(0.5 * 1e9 / 20e9, rel=0.01)
    assert inside == pytest.approx(7 / 8 * 1e9 / 200e9, rel=0.01)


def test_a_plain_exchange_sends_every_copy_and_a_fused_one_a_row_to_each_node_once():
    plain = alltoall_seconds(array(1e9), group(16), MACHINE, num_copies=8)
    fused = alltoall_seconds(array(1e9), group(16), MACHINE, num_copies=8, fused=True)

    assert plain == pytest.approx(8 * 0.5 * 1e9 / 20e9, rel=0.01)
    assert fused == pytest.approx((1 - 0.5**8) * 1e9 / 20e9, rel=0.01)


def test_experts_of_one_token_that_lie_on_few_nodes_send_it_to_those_only():
    everywhere = alltoall_seconds(array(1e9), group(64), MACHINE, num_copies=8, fused=True)
    limited = alltoall_seconds(
        array(1e9), group(64), MACHINE, num_copies=8, fused=True, share_of_nodes=0.5
    )

    assert everywhere == pytest.approx(7 * (1 - (7 / 8) ** 8) * 1e9 / 20e9, rel=0.01)
    assert limited == pytest.approx(4 * (1 - (3 / 4) ** 8) * 7 / 8 * 1e9 / 20e9, rel=0.01)


def test_nobody_waits_for_himself():
    alone = group(1)

    assert allreduce_seconds(array(1e9), alone) == 0
    assert gather_seconds(array(1e9), alone) == 0
    assert alltoall_seconds(array(1e9), alone, MACHINE) == 0
    assert send_seconds(array(1e9), array(1), array(1), MACHINE) == 0


def test_a_pipeline_that_leaves_the_node_sends_over_the_network():
    inside = send_seconds(array(1e9), array(2), array(4), MACHINE)
    across = send_seconds(array(1e9), array(4), array(4), MACHINE)

    assert inside == pytest.approx(1e9 / 200e9 + 2e-6 + START_SECONDS)
    assert across == pytest.approx(1e9 / 20e9 + 10e-6 + START_SECONDS)


@given(
    size=st.integers(2, 512),
    stride=st.sampled_from([1, 2, 4, 8, 16]),
    num_bytes=st.floats(1, 1e12),
    factor=st.floats(1, 100),
)
def test_faster_links_and_fewer_bytes_never_take_longer(size, stride, num_bytes, factor):
    faster = replace(
        MACHINE,
        intra=replace(MACHINE.intra, bandwidth_bytes_per_second=200e9 * factor),
        inter=replace(MACHINE.inter, bandwidth_bytes_per_second=20e9 * factor),
    )
    slow_group = make_group(array(size), array(stride), MACHINE)
    fast_group = make_group(array(size), array(stride), faster)

    for collective in (gather_seconds, allreduce_seconds):
        base = collective(array(num_bytes), slow_group)
        assert collective(array(num_bytes), fast_group) <= base
        assert collective(array(num_bytes / factor), slow_group) <= base


@given(size=st.integers(1, 500), num_bytes=st.floats(1, 1e12))
def test_more_ranks_never_gather_sooner(size, num_bytes):
    sizes = array(size, size + 1)
    groups = make_group(sizes, 1.0, replace(MACHINE, gpus_per_node=1024))

    seconds = gather_seconds(np.full(2, num_bytes), groups)

    assert seconds[0] <= seconds[1]
