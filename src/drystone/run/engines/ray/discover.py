"""Which nodes of a Ray cluster can train, with which GPUs? From resources and labels alone.

A node counts with as many GPUs as Ray gives it (`GPU`), of the type that it says: the label
`drystone-gpu`, else Ray's own `ray.io/accelerator-type`, else a resource `accelerator_type:NAME`.
With the labels `drystone-speed` and `drystone-memory` its GPUs are emulated on its processor; a
cluster file may say that for all nodes of a type. Its name is the label `drystone-node`, or the
type and the start of Ray's id.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from drystone.describe.catalogue import find_gpu
from drystone.describe.files.cluster import ClusterSpec, Emulation
from drystone.describe.gpu_prices import cheapest_price
from drystone.describe.node import NodeSpec
from drystone.errors import InvalidSpec, RequestError
from drystone.units import parse_bytes

GPU_LABEL: Final = "drystone-gpu"
SPEED_LABEL: Final = "drystone-speed"
MEMORY_LABEL: Final = "drystone-memory"
NAME_LABEL: Final = "drystone-node"
ID_LABEL: Final = "ray.io/node-id"
_TYPE_LABEL: Final = "ray.io/accelerator-type"
_TYPE_RESOURCE: Final = "accelerator_type:"
_DEFAULT_MEMORY: Final = "2GiB"
_ID_LENGTH: Final = 6  # of Ray's 56 digits: enough to tell nodes apart, short enough to read


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """A node that can train."""

    ray_id: str
    address: str
    spec: NodeSpec
    emulation: Emulation | None


@dataclass(slots=True)
class Found:
    """What a look at a Ray cluster shows."""

    nodes: dict[str, RayNode] = field(default_factory=dict)  # by our name
    passed_over: dict[str, str] = field(default_factory=dict)  # by Ray's id: why not


def find_nodes(rows: Iterable[Mapping[str, Any]], file: ClusterSpec | None = None) -> Found:
    """The nodes that are alive and have GPUs that the catalogue knows; rows as Ray gives them."""
    by_type = file.emulations if file is not None else {}
    found = Found()
    kinds: dict[str, Emulation | None] = {}
    for row in sorted(rows, key=lambda one: str(one["NodeID"])):
        if not row.get("Alive") or not int(row.get("Resources", {}).get("GPU", 0)):
            continue
        try:
            node = _read_node(row, by_type)
            if node.spec.id in found.nodes:
                raise InvalidSpec(f"another node is called {node.spec.id}")
            if kinds.setdefault(node.spec.gpu, node.emulation) != node.emulation:
                raise InvalidSpec(f"{node.spec.gpu} is emulated in another way on another node")
        except RequestError as error:
            found.passed_over[str(row["NodeID"])] = str(error)
            continue
        found.nodes[node.spec.id] = node
    return found


def cluster_of(nodes: Iterable[RayNode], file: ClusterSpec | None = None) -> ClusterSpec:
    """The cluster that nodes make, at the prices of a file, or else at example prices."""
    listed = sorted(nodes, key=lambda one: (one.spec.gpu, one.spec.id))
    prices = {one.spec.gpu: cheapest_price(one.spec.gpu) for one in listed}
    told = file.dollars_per_gpu_hour if file is not None else {}
    return ClusterSpec(
        nodes=tuple(one.spec for one in listed),
        emulations={one.spec.gpu: one.emulation for one in listed if one.emulation is not None},
        dollars_per_gpu_hour={
            gpu: told.get(gpu, price.on_demand_dollars_per_gpu_hour if price else 0.0)
            for gpu, price in prices.items()
            if price or gpu in told
        },
    )


def _read_node(row: Mapping[str, Any], by_type: Mapping[str, Emulation]) -> RayNode:
    labels, ray_id = row.get("Labels") or {}, str(row["NodeID"])
    gpu = find_gpu(_type_of(row, labels)).name
    emulation = _emulation(labels) or by_type.get(gpu)
    name = labels.get(NAME_LABEL) or f"{gpu.split('-')[0].lower()}-{ray_id[:_ID_LENGTH]}"
    memory = emulation.memory_bytes if emulation else find_gpu(gpu).usable_bytes
    spec = NodeSpec(
        id=name,
        gpu=gpu,
        num_gpus=int(row["Resources"]["GPU"]),
        memory_bytes=float(memory),
    )
    return RayNode(
        ray_id=ray_id, address=str(row["NodeManagerAddress"]), spec=spec, emulation=emulation
    )


def _type_of(row: Mapping[str, Any], labels: Mapping[str, str]) -> str:
    told = labels.get(GPU_LABEL) or labels.get(_TYPE_LABEL)
    if told:
        return told
    for name in row["Resources"]:
        if name.startswith(_TYPE_RESOURCE):
            return str(name.removeprefix(_TYPE_RESOURCE))
    raise InvalidSpec(
        "nothing says which GPUs this node has",
        hint=f"ray start --labels {GPU_LABEL}=A100 ...",
    )


def _emulation(labels: Mapping[str, str]) -> Emulation | None:
    if SPEED_LABEL not in labels and MEMORY_LABEL not in labels:
        return None
    told = labels.get(SPEED_LABEL, "0.0001")
    try:
        speed = float(told)
    except ValueError:
        speed = 0.0
    if not 0 < speed <= 1:
        raise InvalidSpec(f"the label {SPEED_LABEL}={told} is not above 0 and at most 1")
    memory = parse_bytes(labels.get(MEMORY_LABEL, _DEFAULT_MEMORY))
    return Emulation(speed=speed, memory_bytes=memory)
