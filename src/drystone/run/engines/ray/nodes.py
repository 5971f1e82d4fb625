"""Nodes of a Ray cluster that can train, and how their agents are started.

Which GPUs a node has is known from its resources and labels alone.
A node counts with as many GPUs as Ray gives it (`GPU`), of the type that it says: the label
`drystone-gpu`, else Ray's own `ray.io/accelerator-type`, else a resource `accelerator_type:NAME`.
With the labels `drystone-speed` and `drystone-memory` its GPUs are emulated on its processor; a
cluster file may say that for all nodes of a type. Its name is the label `drystone-node`, or the
type and the start of Ray's id.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from drystone.describe.catalogue import find_gpu
from drystone.describe.cluster import NodeSpec
from drystone.describe.files.cluster import ClusterSpec, Emulation
from drystone.describe.gpu_prices import cheapest_price
from drystone.errors import DrystoneError, InvalidSpec, RequestError
from drystone.run.engines.agent.client import find_agent, run_agent
from drystone.run.engines.agent.launches import read_json
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
    for row in sorted(rows, key=lambda row: str(row["NodeID"])):
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
    listed = sorted(nodes, key=lambda node: (node.spec.gpu, node.spec.id))
    prices = {node.spec.gpu: cheapest_price(node.spec.gpu) for node in listed}
    told = file.dollars_per_gpu_hour if file is not None else {}
    return ClusterSpec(
        nodes=tuple(node.spec for node in listed),
        emulations={node.spec.gpu: node.emulation for node in listed if node.emulation},
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


_START_SECONDS: Final = 30.0
_DEATH_SECONDS: Final = 3.0
# What Ray sets for its own workers; training processes are no such workers.
_RAY_VARIABLES: Final = ("RAY_", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTHONBREAKPOINT")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRequest:
    """What is asked of a node."""

    folder: str  # of the agent, on the disk that all nodes share
    node: str
    host: str  # of the node, as the others call it
    secret: str  # the file with it
    token: str  # a file that the controller has just written, and its text
    token_text: str
    version: str
    replaces_hung: bool  # one that is there but does not answer is ended


class NotShared(DrystoneError):
    """The folder is not the controller's folder on this machine."""


def own_version() -> str:
    """Of this package, as it is installed."""
    try:
        return version("drystone")
    except PackageNotFoundError:
        return ""


def begin_agent(request: AgentRequest) -> dict[str, Any]:
    """Find or start the agent; its address. It runs on the node, in a worker of Ray."""
    _check(request)
    folder = Path(request.folder)
    secret = Path(request.secret).read_text(encoding="ascii").strip()

    def find_address() -> dict[str, Any] | None:
        found = find_agent(folder, request.node, secret, timeout_seconds=2.0)
        return None if found is None else {"host": found.host, "port": found.port}

    known = find_address()
    if known is not None:
        return known
    if request.replaces_hung:
        _end_hung(folder)
    folder.mkdir(parents=True, exist_ok=True)
    raylet = find_raylet(os.getpid())
    options = ["--listen", request.host, "--secret", request.secret, "--life", str(raylet)]
    return run_agent(
        folder,
        [request.node, *options],
        find_address,
        environment={
            name: value for name, value in os.environ.items() if not name.startswith(_RAY_VARIABLES)
        },
        wait_seconds=_START_SECONDS,
        prepare=lambda: _be_as_nice_as(raylet),
    )


def _be_as_nice_as(raylet: int) -> None:
    """Ray lets its workers wait for everybody else (niceness 15); training should not.

    Where the system does not allow that, they stay as they are: see docs/ray.md.
    """
    with suppress(OSError):
        wanted = os.getpriority(os.PRIO_PROCESS, raylet)
        os.setpriority(os.PRIO_PROCESS, 0, wanted)


def find_raylet(pid: int) -> int:
    """The raylet that a process descends from; 0 where there is none."""
    while pid > 1:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            return 0
        name = fields.partition("(")[2].rpartition(")")[0]
        if name == "raylet":
            return pid
        pid = int(fields.rpartition(")")[2].split()[1])
    return 0


def _check(request: AgentRequest) -> None:
    try:
        text = Path(request.token).read_text(encoding="ascii")
    except OSError:
        text = ""
    if text != request.token_text:
        raise NotShared(f"{Path(request.token).parent} is not the same folder there")
    if own_version() != request.version:
        raise DrystoneError(f"it has drystone {own_version() or 'none'}, not {request.version}")


def _end_hung(folder: Path) -> None:
    """An agent that does not answer is killed, and what it started dies with it."""
    pid = int((read_json(folder / "address.json") or {}).get("pid", 0))
    command = Path(f"/proc/{pid}/cmdline")
    try:
        is_agent = str(folder).encode() in command.read_bytes().split(b"\0")
    except OSError:
        return
    if is_agent:
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + _DEATH_SECONDS
        while command.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
