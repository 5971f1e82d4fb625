"""Cluster files: the nodes of a running system or of a simulation, and what their GPUs cost.

nodes:
  - {gpu: A100, count: 2, gpus_per_node: 4}
  - {gpu: T4, gpus_per_node: 2, emulate: {speed: 0.0001, memory: 2GiB}}
prices: {A100: 1.80, T4: 0.35}
gpu_types: {X1-64GB: {like: A100, memory: 64GiB}}  # types of one's own: gpu_types.py

An emulated device is a process on this machine's processor that takes the time that a device with
`speed` times the rates of the real one would take, and gets no more memory than it is given.

A simulation reads the same file, and also a CSV of nodes with `sn`, `gpu` (how many) and `model`,
as Alibaba publishes its clusters. Its GPU types need not be in the catalogue: speeds may be given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field

from drystone.describe.catalogue import all_or_none, find_gpu
from drystone.describe.cluster import NodeSpec
from drystone.describe.files.gpu_types import adopt_gpu_types
from drystone.describe.files.reader import (
    Document,
    Key,
    Part,
    checked,
    load_yaml,
    parse_yaml,
    read_part,
)
from drystone.describe.gpu import GpuSpec
from drystone.describe.gpu_prices import cheapest_price
from drystone.describe.machine import Machine, default_machine
from drystone.describe.pool import GpuGroup, Pool, make_pool
from drystone.describe.profile import Profile, adopt_profile_files, load_profile
from drystone.describe.traces.rows import Row, parse_rows, read_table
from drystone.errors import InvalidSpec, UnknownName, UnreadableFile
from drystone.units import parse_bytes

_MAX_NODES: Final = 100_000  # of a running system
_MAX_PRICE_DOLLARS: Final = 1e6
_RATES: Final = (
    "memory_bandwidth_bytes_per_second", "fp32_flops", "tf32_flops", "fp16_flops", "bf16_flops",
    "fp8_flops", "measured_bf16_flops", "measured_fp8_flops", "link_bytes_per_second",
    "bus_bytes_per_second",
)  # fmt: skip
_HINT: Final = "Write it like: nodes: [{gpu: A100, count: 2, gpus_per_node: 8}]"


def _parse_memory(value: str | float) -> int:
    size = parse_bytes(str(value))
    if not 2**20 <= size <= 2**50:
        raise InvalidSpec("memory is 1 MiB to 1 PiB")
    return size


def _parse_price(value: str | float) -> float:
    if isinstance(value, str) or not 0 <= value <= _MAX_PRICE_DOLLARS:
        raise InvalidSpec(
            f"a price is dollars an hour, 0 to {_MAX_PRICE_DOLLARS:,.0f}", hint="Check the unit"
        )
    return float(value)


Memory = Annotated[int, checked(_parse_memory)]
Price = Annotated[float, checked(_parse_price)]
NumNodes = Annotated[int, Field(ge=1, le=1_000_000)]


class EmulatePart(Part):
    """How an emulated device differs from the real one."""

    speed: Annotated[float, Field(gt=0, le=1)] = 1e-4  # share of the real device's rates
    memory: Memory = Field(default="2GiB", validate_default=True)  # 1 MiB to 1 PiB
    # a profile, beside this file, whose times the device takes; no estimate sees it
    pace: str | None = None


class NodePart(Part):
    """A kind of equal nodes."""

    gpu: str  # the type, as in `drystone gpus`; for `simulate` any name that has speeds
    count: NumNodes = 1  # such nodes
    gpus_per_node: NumNodes = 1  # GPUs in each
    # of the node; with several, the stem of their names. Left out: after the type
    name: Annotated[str, Field(pattern=r"^[\w-]*[^\W_][\w-]*$", max_length=80)] | None = None
    emulate: EmulatePart | None = None  # the devices are processes on the processor; not `simulate`
    # of each GPU, for `simulate`; 0: not checked. `serve` asks the device
    memory_bytes: Annotated[float, Field(ge=0, le=1e18)] = 0.0


class ClusterPart(Part):
    """The whole file."""

    nodes: Annotated[tuple[NodePart, ...], Field(strict=False)] = ()  # rows of equal nodes each
    # dollars for an hour of one GPU, by type; over the example prices of the catalogue
    prices: dict[str, Price] | None = None
    gpu_types: Any = None  # GPU types of your own, by name; [how](../howto/own-gpu.md)
    # files that `drystone profile` wrote, beside this one: what was measured on its GPU types
    profiles: Annotated[tuple[str, ...], Field(strict=False)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """How an emulated device differs from the real one."""

    speed: float  # share of the real device's rates
    memory_bytes: int
    pace: Profile | None = None  # of the real device; None: as it is estimated

    @classmethod
    def of(cls, part: EmulatePart | None, folder: Path) -> Emulation | None:
        """What a file in that folder says of it; None where the device is real."""
        if part is None:
            return None
        pace = None if part.pace is None else load_profile(folder / part.pace)
        return cls(speed=part.speed, memory_bytes=part.memory, pace=pace)


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
        machine, emulation = default_machine(self.gpu(gpu), largest), self.emulations.get(gpu)
        if emulation is not None and machine.profile is not None:
            machine = replace(machine, profile=machine.profile.slowed(emulation.speed))
        return GpuGroup(machine=machine, count=count)

    def true_machine(self, gpu: str) -> Machine:
        """What a device of this type is paced by: its own table, or else the estimates."""
        machine, emulation = self.group(gpu, 1).machine, self.emulations.get(gpu)
        if emulation is None or emulation.pace is None:
            return machine
        return replace(machine, profile=emulation.pace.slowed(emulation.speed))

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
def load_cluster(path: Path) -> tuple[NodeSpec, ...]:
    """The nodes of a simulation, in the order of the file; GPU types as they are written."""
    if path.suffix.lower() == ".csv":
        return _load_node_list(path)
    document = load_yaml(path)
    nodes: list[NodeSpec] = []
    for index, row in enumerate(_read(document).nodes):
        if row.emulate is not None:
            raise InvalidSpec(
                "emulated devices are for `drystone serve`",
                where=document.place(("nodes", index, "emulate")),
                hint="Here GPUs are simulated as real ones: leave it out",
            )
        ids = _node_ids(row, len(nodes), stem=row.gpu, num_digits=4)
        nodes += _make_nodes(row, ids, row.gpu, row.memory_bytes)
    return _unlike_names(document, nodes)


def _read(document: Document, *, needs_nodes: bool = True) -> ClusterPart:
    part = read_part(document, ClusterPart, hint=_HINT)
    if needs_nodes and not part.nodes:
        raise InvalidSpec(
            "a cluster has a list `nodes`", where=document.place(("nodes",)), hint=_HINT
        )
    adopt_gpu_types(document)
    adopt_profile_files(_folder(document) / name for name in part.profiles)
    return part


@all_or_none()
def _cluster_of(document: Document, *, needs_nodes: bool = True) -> ClusterSpec:
    part = _read(document, needs_nodes=needs_nodes)
    if sum(row.count for row in part.nodes) > _MAX_NODES:
        raise InvalidSpec(f"more than {_MAX_NODES} nodes", where=document.place(("nodes",)))
    nodes: list[NodeSpec] = []
    emulations: dict[str, Emulation | None] = {}
    for index, row in enumerate(part.nodes):
        gpu = _find_gpu(document, row.gpu, ("nodes", index, "gpu"))
        emulation = Emulation.of(row.emulate, _folder(document))
        if emulations.setdefault(gpu.name, emulation) != emulation:
            raise InvalidSpec(
                f"{gpu.name} is emulated in two ways, or real and emulated at once",
                where=document.place(("nodes", index)),
                hint="Give one type one emulation",
            )
        ids = _node_ids(row, len(nodes), stem=gpu.name.split("-")[0].lower(), num_digits=1)
        memory_bytes = emulation.memory_bytes if emulation else gpu.usable_bytes
        nodes += _make_nodes(row, ids, gpu.name, float(memory_bytes))
    return ClusterSpec(
        nodes=_unlike_names(document, nodes),
        emulations={gpu: made for gpu, made in emulations.items() if made is not None},
        dollars_per_gpu_hour=_prices(document, part.prices or {}, set(emulations)),
    )


def _folder(document: Document) -> Path:
    """Where files are looked for that a file names."""
    return Path(document.where).parent


def _node_ids(row: NodePart, first: int, *, stem: str, num_digits: int) -> list[str]:
    """The name of each node; `first` nodes stand before them in the file."""
    if row.name is not None:
        stem, num_digits = row.name, 1
        if row.count == 1:
            return [stem]
    return [f"{stem}-{number:0{num_digits}d}" for number in range(first, first + row.count)]


def _make_nodes(row: NodePart, ids: Sequence[str], gpu: str, memory_bytes: float) -> list[NodeSpec]:
    return [
        NodeSpec(id=name, gpu=gpu, num_gpus=row.gpus_per_node, memory_bytes=memory_bytes)
        for name in ids
    ]


def _unlike_names(document: Document, nodes: list[NodeSpec]) -> tuple[NodeSpec, ...]:
    if len({node.id for node in nodes}) != len(nodes):
        raise InvalidSpec("two nodes have the same name", where=document.place(("nodes",)))
    return tuple(nodes)


def _prices(document: Document, given: Mapping[str, float], gpus: set[str]) -> dict[str, float]:
    """The cheapest example price of each type, and over them those of the file."""
    known = {gpu: cheapest_price(gpu) for gpu in gpus}
    prices = {gpu: price.on_demand_dollars_per_gpu_hour for gpu, price in known.items() if price}
    for name, dollars in given.items():
        prices[_find_gpu(document, name, ("prices", name)).name] = dollars
    return prices


def _find_gpu(document: Document, name: str, key: Key) -> GpuSpec:
    try:
        return find_gpu(name)
    except UnknownName as error:
        error.where = document.place(key)
        raise


def _load_node_list(path: Path) -> tuple[NodeSpec, ...]:
    rows, columns = read_table(path, "cluster")
    missing = [name for name in ("sn", "gpu", "model") if name not in columns]
    if missing:
        raise UnreadableFile(
            f"the column {missing[0]} is missing",
            where=str(path),
            hint="A list of nodes has sn, gpu (how many) and model; or write a YAML file",
        )
    nodes = parse_rows(rows, _parse_node, where=str(path))
    if not nodes:
        raise InvalidSpec("the cluster has no node with a GPU", where=str(path))
    return tuple(nodes)


def _parse_node(row: Row) -> NodeSpec | None:
    num_gpus = row.count("gpu", 0)
    if num_gpus == 0:
        return None  # a machine without GPUs trains nothing
    return NodeSpec(id=row.text("sn"), gpu=row.text("model"), num_gpus=num_gpus)
