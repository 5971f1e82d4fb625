"""The hardware of a published run, from the words of its table."""

from dataclasses import replace

import pytest

from drystone.describe.catalogue import find_gpu
from drystone.describe.machine import default_machine, find_link
from drystone.errors import DrystoneError, RequestError, UnknownName
from drystone.observe.check.accuracy import SPEED_TABLE
from drystone.observe.check.runs import PublishedRun, load_runs, machine_of

GIGABIT_BYTES = 1e9 / 8


@pytest.fixture(scope="module")
def run() -> PublishedRun:
    runs = load_runs(SPEED_TABLE, measure="speed")
    first = next(one for one in runs if isinstance(one, PublishedRun))
    return replace(first, gpu_name="H100-80GB-SXM", gpus_per_node=8, interconnect="")


def test_an_unstated_network_is_as_usual_for_the_gpu(run):
    assert machine_of(run) == default_machine(find_gpu("H100-80GB-SXM"), gpus_per_node=8)


@pytest.mark.parametrize(
    ("text", "gpus_per_node", "gigabits"),
    [
        ("NVLink intra-node; 400 Gb/s RDMA per GPU", 8, 400),
        ("NVLink; Jean Zay Omni-Path 4x100Gb/node", 4, 100),
        ("NVLink intra-node; 1600 Gbps/node RoCE", 8, 200),
        ("NVLink; EFA/IB 8x400Gb", 8, 400),
        ("12.5 Gbit/s per GPU", 8, 12.5),
        ("RoCE 8*400G", 8, 400),
        ("3.2 Tb/s per node", 8, 400),
        ("InfiniBand HDR 200 Gb/s x 4", 8, 100),
        ("NVLink 600 GB/s; IB HDR 200Gb/s", 8, 200),  # what one port carries, and each GPU has one
        ("800 Gbps IB", 8, 100),  # no port carries as much
        ("100GbE", 8, 12.5),
    ],
)
def test_a_stated_rate_is_that_of_one_gpu(run, text, gpus_per_node, gigabits):
    machine = machine_of(replace(run, interconnect=text, gpus_per_node=gpus_per_node))
    known = find_link("InfiniBand NDR")
    reached = known.bandwidth_bytes_per_second / (400 * GIGABIT_BYTES)

    bandwidth = machine.inter.bandwidth_bytes_per_second
    assert bandwidth == pytest.approx(gigabits * GIGABIT_BYTES * reached)
    assert machine.inter.latency_seconds == known.latency_seconds
    assert text in machine.inter.source


@pytest.mark.parametrize(
    "text", ["NVLink", "PCIe, no NVLink", "NVLink; IB", "NVLink 600 GB/s", "A100 80G"]
)
def test_words_without_a_network_rate_change_nothing(run, text):
    assert machine_of(replace(run, interconnect=text)) == machine_of(run)


def test_a_gpu_that_is_not_stated_or_not_known_is_refused(run):
    with pytest.raises(RequestError, match="the GPU is not stated"):
        machine_of(replace(run, gpu_name=""))
    with pytest.raises(UnknownName, match="Abacus"):
        machine_of(replace(run, gpu_name="Abacus 9000"))


def test_a_network_without_bandwidth_is_refused(run):
    with pytest.raises(DrystoneError, match="bandwidth must be > 0"):
        machine_of(replace(run, interconnect="0 Gb/s per GPU"))
