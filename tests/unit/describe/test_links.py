"""Links and usual wirings: every GPU type gets a machine, and each link says where it is from."""

import pytest

from drystone.describe.catalogue import find_gpu, load_gpus
from drystone.describe.gpu import GpuSpec
from drystone.describe.machine import _WIRINGS, default_machine, find_link, gpu_link, load_links
from drystone.errors import InvalidSpec, UnknownName
from drystone.units import GB


@pytest.mark.parametrize("link", load_links().values(), ids=lambda link: link.name)
def test_every_link_names_its_source_and_is_plausible(link):
    assert "latency:" in link.source
    assert 1 * GB <= link.bandwidth_bytes_per_second <= 1000 * GB
    assert 1e-6 <= link.latency_seconds <= 1e-4


@pytest.mark.parametrize("gpu", load_gpus(), ids=lambda gpu: gpu.name)
def test_every_gpu_has_a_usual_machine_faster_inside_than_between(gpu: GpuSpec):
    machine = default_machine(gpu)

    inside, between = machine.intra, machine.inter
    assert inside.bandwidth_bytes_per_second > between.bandwidth_bytes_per_second
    assert inside.latency_seconds < between.latency_seconds
    assert inside.bandwidth_bytes_per_second < max(
        gpu.link_bytes_per_second / 2, gpu.bus_bytes_per_second
    )
    assert "assumption: wired like" in between.source


def test_every_wiring_is_of_known_gpus_and_none_is_wired_twice():
    names = [name for wiring in _WIRINGS for name in wiring.gpus]

    assert len(names) == len(set(names))
    for name in names:
        assert find_gpu(name).name == name


@pytest.mark.parametrize(
    ("gpu", "gpus_per_node", "intra", "inter", "between_gb_per_second"),
    [
        ("A100-80G", 8, "NVLink 3.0", "InfiniBand HDR", 24.0),
        ("H100", 8, "NVLink 4.0", "InfiniBand NDR", 47.0),
        ("V100-32G", 8, "NVLink 2.0", "InfiniBand EDR", 6.1),
        ("GB200", 72, "NVLink 5.0", "InfiniBand NDR", 47.0),
        ("4090", 4, "PCIe 4.0 x16", "Ethernet 100", 2.75),
        ("A100-80GB-PCIe", 8, "PCIe 4.0 x16", "Ethernet 100", 1.375),
        ("MI300X", 8, "Infinity Fabric", "RoCE 400", 47.0),
    ],
)
def test_usual_wirings(
    gpu: str, gpus_per_node: int, intra: str, inter: str, between_gb_per_second: float
):
    machine = default_machine(find_gpu(gpu))

    assert machine.gpus_per_node == gpus_per_node
    assert (machine.intra.name, machine.inter.name) == (intra, inter)
    assert machine.inter.bandwidth_bytes_per_second / GB == pytest.approx(between_gb_per_second)


def test_collectives_reach_what_nccl_tests_report():
    rates = {
        name: gpu_link(find_gpu(name)).bandwidth_bytes_per_second / GB
        for name in ("V100-32G", "A100-80G", "A800", "H100", "H800")
    }

    assert rates["A100-80G"] == pytest.approx(235)
    assert rates["H100"] == pytest.approx(370.8)
    assert rates["V100-32G"] == pytest.approx(120)
    assert rates["A800"] == pytest.approx(235 * 400 / 600)
    assert rates["H800"] == pytest.approx(370.8 * 400 / 900)


def test_geforce_cards_copy_through_host_memory_and_others_do_not():
    geforce = gpu_link(find_gpu("4090")).bandwidth_bytes_per_second
    server = gpu_link(find_gpu("L40S")).bandwidth_bytes_per_second

    assert geforce == pytest.approx(server / 2)


def test_what_is_given_replaces_the_usual():
    gpu = find_gpu("A100-80G")

    assert default_machine(gpu, 4).gpus_per_node == 4
    assert default_machine(gpu, inter="ethernet-25").inter == find_link("Ethernet 25")
    assert default_machine(gpu, inter=find_link("RoCE 200")).inter == find_link("RoCE 200")


def test_unknown_links_and_empty_nodes_are_errors_with_a_hint():
    with pytest.raises(UnknownName, match="InfiniBand NDR"):
        find_link("infiniband ndx")
    with pytest.raises(InvalidSpec, match="gpus_per_node"):
        default_machine(find_gpu("T4"), 0)
