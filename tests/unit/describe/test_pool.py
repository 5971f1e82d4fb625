"""GPUs for one job, as people write them."""

import pytest

from drystone.describe.machine import Link
from drystone.describe.pool import GpuGroup, Pool, make_pool, parse_pool
from drystone.errors import InvalidSpec, UnknownName


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("8xA100-80G", {"A100-80GB-SXM": 8}),
        ("8xA100-80G,4xV100-32G", {"A100-80GB-SXM": 8, "V100-32GB-SXM": 4}),
        (" 2 X T4 , L4 ", {"T4-16GB": 2, "L4-24GB": 1}),
        ("2*T4,,3xT4,", {"T4-16GB": 5}),
        ("A100-80G, 1xA100-80GB-SXM", {"A100-80GB-SXM": 2}),
    ],
)
def test_counts_and_names(text, counts):
    pool = parse_pool(text)

    assert {group.gpu.name: group.count for group in pool.groups} == counts
    assert pool.num_gpus == sum(counts.values())


def test_what_is_printed_can_be_read_again():
    pool = parse_pool("8xA100-80G,4xV100-32G,1xT4")

    assert parse_pool(str(pool)) == pool


@pytest.mark.parametrize("text", ["", " , ", "0xT4", "99999999xT4"])
def test_no_gpus_and_too_many(text):
    with pytest.raises(InvalidSpec):
        parse_pool(text)


def test_a_count_without_its_x_is_understood_by_the_hint():
    with pytest.raises(UnknownName, match="written 8xA100-80G"):
        parse_pool("8A100-80G")


def test_an_unknown_type_has_a_hint():
    with pytest.raises(UnknownName):
        parse_pool("8xA1000000")


def test_a_type_is_one_group():
    group = parse_pool("2xT4").groups[0]

    with pytest.raises(InvalidSpec, match="twice"):
        make_pool([group, group])


def test_unlike_nodes_are_joined_by_the_slowest_network():
    pool = parse_pool("8xH100-80G,8xT4")
    slowest = min(group.machine.inter.bandwidth_bytes_per_second for group in pool.groups)

    assert pool.between.bandwidth_bytes_per_second == slowest


def test_the_network_between_can_be_given():
    link = Link(name="wide", bandwidth_bytes_per_second=1e9, latency_seconds=1e-3)

    assert parse_pool("2xT4,2xL4", between=link).between == link
    assert parse_pool("2xT4", gpus_per_node=2).groups[0].machine.gpus_per_node == 2


def test_nothing_to_join():
    link = Link(name="wide", bandwidth_bytes_per_second=1e9, latency_seconds=1e-3)

    with pytest.raises(InvalidSpec):
        make_pool([])
    with pytest.raises(InvalidSpec):
        Pool(groups=(), between=link)


def test_a_group_has_a_gpu():
    machine = parse_pool("T4").groups[0].machine

    assert str(GpuGroup(machine=machine, count=3)) == "3xT4-16GB"
    with pytest.raises(InvalidSpec):
        GpuGroup(machine=machine, count=0)
