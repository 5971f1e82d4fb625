import pytest

from drystone.describe.files.cluster import parse_cluster
from drystone.run.engines.ray.nodes import cluster_of, find_nodes


def row(number: int, *, gpus: float = 2.0, alive: bool = True, resources=None, **labels) -> dict:
    named = {name.replace("_", "-"): value for name, value in labels.items()}
    return {
        "NodeID": f"{number:06x}" + "0" * 50,
        "Alive": alive,
        "NodeManagerAddress": f"10.0.0.{number}",
        "Resources": {"CPU": 4.0} | ({"GPU": gpus} if gpus else {}) | (resources or {}),
        "Labels": named,
    }


def test_types_come_from_our_label_then_rays_then_a_resource():
    rows = [
        row(1, drystone_gpu="A100"),
        row(2, gpus=4.0, resources={"accelerator_type:V100": 1.0}),
        row(3, gpus=1.0) | {"Labels": {"ray.io/accelerator-type": "T4"}},
    ]
    found = find_nodes(rows)

    told = [(one.spec.id, one.spec.gpu, one.spec.num_gpus) for one in found.nodes.values()]
    assert told == [
        ("a100-000001", "A100-80GB-SXM", 2),
        ("v100-000002", "V100-16GB-SXM", 4),
        ("t4-000003", "T4-16GB", 1),
    ]
    assert found.nodes["t4-000003"].address == "10.0.0.3"
    assert not found.passed_over


def test_nodes_without_gpus_and_dead_ones_are_not_there():
    assert not find_nodes([row(1, gpus=0), row(2, alive=False, drystone_gpu="T4")]).nodes


@pytest.mark.parametrize(
    ("labels", "why"),
    [
        ({}, "which GPUs"),
        ({"drystone_gpu": "T5000"}, "unknown GPU"),
        ({"drystone_gpu": "T4", "drystone_speed": "fast"}, "drystone-speed=fast"),
        ({"drystone_gpu": "T4", "drystone_speed": "0.1", "drystone_memory": "much"}, "much"),
    ],
)
def test_what_cannot_be_read_is_passed_over_with_the_reason(labels, why):
    found = find_nodes([row(1, **labels), row(2, drystone_gpu="T4")])

    assert list(found.nodes) == ["t4-000002"]
    [reason] = found.passed_over.values()
    assert why in reason


def test_emulation_by_labels_or_for_all_nodes_of_a_type():
    file = parse_cluster(
        "nodes: [{gpu: T4, emulate: {speed: 0.5, memory: 1GiB}}]\nprices: {T4: 9.0}"
    )
    rows = [
        row(1, drystone_gpu="A100", drystone_speed="0.25", drystone_memory="4GiB"),
        row(2, drystone_gpu="T4"),
    ]
    cluster = cluster_of(find_nodes(rows, file).nodes.values(), file)

    assert {gpu: one.speed for gpu, one in cluster.emulations.items()} == {
        "A100-80GB-SXM": 0.25, "T4-16GB": 0.5,
    }  # fmt: skip
    assert cluster.emulations["A100-80GB-SXM"].memory_bytes == 4 * 2**30
    assert cluster.dollars_per_gpu_hour["T4-16GB"] == 9.0
    assert cluster.dollars_per_gpu_hour["A100-80GB-SXM"] > 0  # an example price


def test_a_type_is_emulated_in_one_way():
    found = find_nodes([row(1, drystone_gpu="T4"), row(2, drystone_gpu="T4", drystone_speed="0.1")])

    assert list(found.nodes) == ["t4-000001"]
    assert "in another way" in next(iter(found.passed_over.values()))


def test_a_name_is_taken_once():
    rows = [row(number, drystone_gpu="T4", drystone_node="rented-7") for number in (1, 2)]
    found = find_nodes(rows)

    assert list(found.nodes) == ["rented-7"]
    assert "rented-7" in next(iter(found.passed_over.values()))
