"""Which nodes a cluster has: named nodes with GPUs of one type, from a YAML file.

nodes:
  - {gpu: A100, count: 80, gpus_per_node: 4}
  - {gpu: V100, count: 20, gpus_per_node: 16}

`gpu_types` describes types of one's own (`files/gpu_types.py`).

Or from a CSV of nodes with `sn`, `gpu` (how many) and `model`, as Alibaba publishes its clusters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from drystone.describe.catalogue import all_or_none
from drystone.describe.files.gpu_types import SECTION, load_gpu_types
from drystone.describe.files.reader import Document, load_yaml
from drystone.describe.traces.rows import Row, parse_rows, read_table
from drystone.errors import InvalidSpec, UnknownName, UnreadableFile

_KEYS = ("gpu", "count", "gpus_per_node", "memory_bytes")
_MOST_NODES = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """One machine: its name, and how many GPUs of which type it has."""

    id: str
    gpu: str
    num_gpus: int
    memory_bytes: float = 0.0  # of each GPU; 0: not stated, not checked

    def __post_init__(self) -> None:
        if not self.id or not self.gpu or self.num_gpus < 1 or self.memory_bytes < 0:
            raise InvalidSpec(f"node {self.id!r}: needs an id, a GPU type and at least one GPU")


@all_or_none()
def load_cluster(path: Path) -> tuple[NodeSpec, ...]:
    """The nodes that a cluster file names, in its order."""
    if path.suffix.lower() == ".csv":
        return _load_node_list(path)
    document = load_yaml(path)
    table = document.value
    hint = "Write it like: nodes: [{gpu: A100, count: 2, gpus_per_node: 8}]"
    if not isinstance(table, dict) or not isinstance(table.get("nodes"), list):
        raise UnreadableFile("a cluster file has a list `nodes`", where=str(path), hint=hint)
    if SECTION in table:
        load_gpu_types(path)
    nodes: list[NodeSpec] = []
    for index, row in enumerate(table["nodes"]):
        place = partial(_place, document, index)
        nodes.extend(_parse_row(row, first=len(nodes), place=place))
    if not nodes:
        raise InvalidSpec("the cluster has no nodes", where=str(path), hint=hint)
    return tuple(nodes)


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


def make_nodes(
    gpu: str, *, count: int, gpus_per_node: int, memory_bytes: float = 0.0, first: int = 0
) -> list[NodeSpec]:
    """Equal nodes, named by type and number."""
    return [
        NodeSpec(
            id=f"{gpu}-{first + index:04d}",
            gpu=gpu,
            num_gpus=gpus_per_node,
            memory_bytes=memory_bytes,
        )
        for index in range(count)
    ]


def _place(document: Document, index: int, *key: str) -> str:
    return document.place(("nodes", index, *key))


def _parse_row(row: Any, *, first: int, place: Callable[..., str]) -> list[NodeSpec]:
    where = place()
    if not isinstance(row, dict):
        raise InvalidSpec("a row is not a table of keys", where=where)
    for key in row:
        if key == "emulate":
            raise InvalidSpec(
                "emulated devices are for `drystone serve`",
                where=place(key),
                hint="Here GPUs are simulated as real ones: leave it out",
            )
        if key not in _KEYS:
            raise UnknownName("key", str(key), _KEYS, where=place(key))
    count, per_node = row.get("count", 1), row.get("gpus_per_node", 1)
    if not _is_count(count) or not _is_count(per_node) or not isinstance(row.get("gpu"), str):
        raise InvalidSpec("gpu must be a name, count and gpus_per_node whole numbers", where=where)
    memory = row.get("memory_bytes", 0)
    if not isinstance(memory, int | float):
        raise InvalidSpec("memory_bytes must be a number", where=where)
    return make_nodes(
        row["gpu"], count=count, gpus_per_node=per_node, memory_bytes=float(memory), first=first
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MOST_NODES
