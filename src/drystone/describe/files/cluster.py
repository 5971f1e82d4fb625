"""Which devices a running system has: real ones, or emulated ones for trying things out.

nodes:
  - {gpu: A100, count: 2, gpus_per_node: 4}
  - {gpu: T4, gpus_per_node: 2, emulate: {speed: 0.0001, memory: 2GiB}}
prices: {A100: 1.80, T4: 0.35}
gpu_types: {X1-64GB: {like: A100, memory: 64GiB}}  # types of one's own: gpu_types.py

An emulated device is a process on this machine's processor that takes the time that a device with
`speed` times the rates of the real one would take, and gets no more memory than it is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from drystone.describe.catalogue import all_or_none, find_gpu
from drystone.describe.cluster import NodeSpec
from drystone.describe.files.gpu_types import SECTION, adopt_gpu_types
from drystone.describe.files.reader import Document, Key, load_yaml, parse_yaml
from drystone.describe.gpu import GpuSpec
from drystone.describe.gpu_prices import cheapest_price
from drystone.describe.machine import default_machine
from drystone.describe.pool import GpuGroup, Pool, make_pool
from drystone.errors import InvalidSpec, RequestError, UnknownName
from drystone.units import parse_bytes

_KEYS: Final = ("nodes", "prices", SECTION)
_NODE_KEYS: Final = ("gpu", "count", "gpus_per_node", "name", "emulate", "memory_bytes")
_EMULATE_KEYS: Final = ("speed", "memory")
_MOST: Final = 100_000
_RATES: Final = (
    "memory_bandwidth_bytes_per_second", "fp32_flops", "tf32_flops", "fp16_flops", "bf16_flops",
    "fp8_flops", "measured_bf16_flops", "measured_fp8_flops", "link_bytes_per_second",
    "bus_bytes_per_second",
)  # fmt: skip
_HINT: Final = "Write it like: nodes: [{gpu: A100, count: 2, gpus_per_node: 8}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """How an emulated device differs from the real one."""

    speed: float  # share of the real device's rates
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """Nodes, what is emulated of them, and what a GPU hour costs."""

    nodes: tuple[NodeSpec, ...]
    emulations: Mapping[str, Emulation] = field(default_factory=dict)  # by GPU type
    dollars_per_gpu_hour: Mapping[str, float] = field(default_factory=dict)  # by GPU type
    # By node: what the driver calls its GPUs. Left out: 0, 1, 2 ... as on a machine of their own.
    device_numbers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """In order of appearance."""
        return tuple(dict.fromkeys(node.gpu for node in self.nodes))

    @property
    def is_emulated(self) -> bool:
        """Whether any device is."""
        return bool(self.emulations)

    def gpu(self, name: str) -> GpuSpec:
        """A type as this cluster has it: slowed and capped where it is emulated."""
        real = find_gpu(name)
        emulation = self.emulations.get(name)
        if emulation is None:
            return real
        changed = {rate: getattr(real, rate) * emulation.speed for rate in _RATES}
        for size in ("memory_bytes", "usable_bytes"):
            changed[size] = emulation.memory_bytes
        return replace(real, **changed)

    def group(self, gpu: str, count: int) -> GpuGroup:
        """So many GPUs of one type, on nodes as this cluster has them."""
        largest = max(node.num_gpus for node in self.nodes if node.gpu == gpu)
        return GpuGroup(machine=default_machine(self.gpu(gpu), largest), count=count)

    def pool(self, counts: Mapping[str, int] | None = None) -> Pool:
        """Some of its GPUs, or all."""
        if counts is None:
            counts = {
                gpu: sum(node.num_gpus for node in self.nodes if node.gpu == gpu)
                for gpu in self.gpu_types
            }
        return make_pool([self.group(gpu, count) for gpu, count in counts.items() if count])


def load_cluster_file(path: Path, *, needs_nodes: bool = True) -> ClusterSpec:
    """The cluster that a file describes; with `needs_nodes=False` prices and types alone will do.

    GPU types that it describes are known to this process from now on (`gpu_types.py`).
    """
    return _cluster_of(load_yaml(path), needs_nodes=needs_nodes)


def parse_cluster(text: str, *, where: str = "cluster") -> ClusterSpec:
    """The cluster that a text describes."""
    return _cluster_of(parse_yaml(text, where=where))


@all_or_none()
def _cluster_of(document: Document, *, needs_nodes: bool = True) -> ClusterSpec:
    table = _table(document, document.value, (), _KEYS)
    adopt_gpu_types(document)
    rows = table.get("nodes", None if needs_nodes else [])
    if not isinstance(rows, list) or (needs_nodes and not rows):
        raise InvalidSpec(
            "a cluster has a list `nodes`", where=document.place(("nodes",)), hint=_HINT
        )
    nodes: list[NodeSpec] = []
    emulations: dict[str, Emulation | None] = {}
    for index, row in enumerate(rows):
        made, emulation = _row(document, row, ("nodes", index), first=len(nodes))
        gpu = made[0].gpu
        if emulations.setdefault(gpu, emulation) != emulation:
            raise InvalidSpec(
                f"{gpu} is emulated in two ways, or real and emulated at once",
                where=document.place(("nodes", index)),
                hint="Give one type one emulation",
            )
        nodes.extend(made)
        if len(nodes) > _MOST:
            raise InvalidSpec(f"more than {_MOST} nodes", where=document.place(("nodes", index)))
    names = [node.id for node in nodes]
    if len(set(names)) != len(names):
        raise InvalidSpec("two nodes have the same name", where=document.place(("nodes",)))
    return ClusterSpec(
        nodes=tuple(nodes),
        emulations={gpu: one for gpu, one in emulations.items() if one is not None},
        dollars_per_gpu_hour=_prices(document, table.get("prices"), set(emulations)),
    )


def _row(
    document: Document, row: Any, key: Key, *, first: int
) -> tuple[list[NodeSpec], Emulation | None]:
    row = _table(document, row, key, _NODE_KEYS)
    gpu = _gpu_name(document, row.get("gpu"), (*key, "gpu"))
    count = _number(document, row.get("count", 1), (*key, "count"))
    per_node = _number(document, row.get("gpus_per_node", 1), (*key, "gpus_per_node"))
    stem = row.get("name", gpu.split("-")[0].lower())
    if not isinstance(stem, str) or not stem.replace("-", "").replace("_", "").isalnum():
        raise InvalidSpec("a name is letters, digits and -", where=document.place((*key, "name")))
    emulation = None
    if row.get("emulate") is not None:
        emulation = _emulation(document, row["emulate"], (*key, "emulate"))
    memory = emulation.memory_bytes if emulation else find_gpu(gpu).usable_bytes
    nodes = [
        NodeSpec(
            id=stem if "name" in row and count == 1 else f"{stem}-{first + index}",
            gpu=gpu,
            num_gpus=per_node,
            memory_bytes=float(memory),
        )
        for index in range(count)
    ]
    return nodes, emulation


def _emulation(document: Document, value: Any, key: Key) -> Emulation:
    table = _table(document, value, key, _EMULATE_KEYS)
    speed = table.get("speed", 1e-4)
    if not isinstance(speed, int | float) or isinstance(speed, bool) or not 0 < speed <= 1:
        raise InvalidSpec("speed is above 0 and at most 1", where=document.place((*key, "speed")))
    memory = table.get("memory", "2GiB")
    try:
        size = parse_bytes(str(memory))
    except RequestError as error:
        error.where = document.place((*key, "memory"))
        raise
    if not 2**20 <= size <= 2**50:
        raise InvalidSpec("memory is 1 MiB to 1 PiB", where=document.place((*key, "memory")))
    return Emulation(speed=float(speed), memory_bytes=size)


def _prices(document: Document, value: Any, gpus: set[str]) -> dict[str, float]:
    """The cheapest example price of each type, and over them those of the file."""
    table = _table(document, {} if value is None else value, ("prices",), None)
    known = {gpu: cheapest_price(gpu) for gpu in gpus}
    prices = {gpu: one.on_demand_dollars_per_gpu_hour for gpu, one in known.items() if one}
    for name, dollars in table.items():
        gpu = _gpu_name(document, name, ("prices", name))
        if not isinstance(dollars, int | float) or isinstance(dollars, bool) or dollars < 0:
            raise InvalidSpec("a price is dollars an hour", where=document.place(("prices", name)))
        if dollars > 1e6:
            raise InvalidSpec("nobody pays that", where=document.place(("prices", name)))
        prices[gpu] = float(dollars)
    return prices


def _table(document: Document, value: Any, key: Key, known: tuple[str, ...] | None) -> Any:
    if not isinstance(value, dict):
        raise InvalidSpec("must be a table of keys", where=document.place(key), hint=_HINT)
    for name in value:
        if known is not None and name not in known:
            raise UnknownName("key", name, known, where=document.place((*key, name)))
    return value


def _gpu_name(document: Document, value: Any, key: Key) -> str:
    if not isinstance(value, str):
        raise InvalidSpec("a GPU type is a name", where=document.place(key), hint=_HINT)
    try:
        return find_gpu(value).name
    except UnknownName as error:
        error.where = document.place(key)
        raise


def _number(document: Document, value: Any, key: Key) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST:
        raise InvalidSpec(f"must be a whole number, 1 to {_MOST}", where=document.place(key))
    return value
