"""Which GPUs this machine has, as a driver's tool tells it, and who gets which."""

import pytest

from drystone.describe.files.job import make_job
from drystone.errors import InvalidSpec
from drystone.run.control.launches import Seat, make_order
from drystone.run.engines.contract import Rendezvous
from drystone.run.engines.local import find_cluster, local_gpus

MIXED = """0, Tesla T4
1, NVIDIA A100-SXM4-80GB
2, Tesla T4
3, NVIDIA A100-SXM4-80GB
"""


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """A machine whose driver says what a test wants."""
    folder = tmp_path / "bin"
    folder.mkdir()
    tool = folder / "nvidia-smi"

    def says(text: str) -> None:
        (folder / "answer").write_text(text)
        tool.write_text(f'#!/bin/sh\nwhile read -r line; do echo "$line"; done < {folder}/answer\n')
        tool.chmod(0o755)

    monkeypatch.setenv("PATH", str(folder))
    return says


def test_types_of_one_machine_are_told_apart_by_the_drivers_numbers(driver):
    driver(MIXED)

    cluster = find_cluster(None)
    assert [(node.gpu, node.num_gpus) for node in cluster.nodes] == [
        ("T4-16GB", 2), ("A100-80GB-SXM", 2),
    ]  # fmt: skip
    assert list(cluster.device_numbers.values()) == [(0, 2), (1, 3)]


def test_a_launch_sees_its_own_gpus_alone(driver, tmp_path):
    driver(MIXED)
    cluster = find_cluster(None)
    nodes = [node.id for node in cluster.nodes]
    seats = [
        Seat(node=nodes[0], gpu="T4-16GB", device=1),
        Seat(node=nodes[1], gpu="A100-80GB-SXM", device=0),
        Seat(node=nodes[1], gpu="A100-80GB-SXM", device=1),
    ]
    job = make_job({"command": "true", "train": {"steps": 1}}, folder=tmp_path)

    order = make_order(
        job, job_id="1", epoch=1, num_steps=1, plan=None, seats=seats, cluster=cluster,
        rendezvous=Rendezvous(address="127.0.0.1", port=1), folder=tmp_path, lease_seconds=1.0,
    )  # fmt: skip
    seen = {
        node: {one["environment"]["CUDA_VISIBLE_DEVICES"] for one in order.requests[node]["ranks"]}
        for node in nodes
    }
    assert seen == {nodes[0]: {"2"}, nodes[1]: {"1,3"}}
    order_words = {
        one["environment"]["CUDA_DEVICE_ORDER"]
        for request in order.requests.values()
        for one in request["ranks"]
    }
    assert order_words == {"PCI_BUS_ID"}


def test_a_file_may_name_some_of_them_and_near_types(driver, tmp_path):
    driver("0, Some New Card\n" + MIXED.replace("3, ", "4, ").replace("0, T", "3, T"))
    path = tmp_path / "c.yaml"
    path.write_text("nodes: [{gpu: L4, name: new}, {gpu: A100, gpus_per_node: 2, name: big}]")

    assert local_gpus()[0] == "Some New Card"
    assert find_cluster(path).device_numbers == {"new": (0,), "big": (1, 4)}
    with pytest.raises(InvalidSpec, match="Some New Card, which the catalogue does not know"):
        find_cluster(None)
    path.write_text("nodes: [{gpu: A100, gpus_per_node: 8}]")
    with pytest.raises(InvalidSpec, match="names 8 GPUs, this machine has 5"):
        find_cluster(path)


def test_without_a_driver_devices_are_emulated(driver, tmp_path):
    assert local_gpus() == []
    assert find_cluster(None).is_emulated
    driver("NVIDIA-SMI has failed because it could not talk to the driver\n")
    assert local_gpus() == []
