"""The nodes of a cluster: machines with GPUs of one type each."""

from __future__ import annotations

from dataclasses import dataclass

from drystone.errors import InvalidSpec


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
