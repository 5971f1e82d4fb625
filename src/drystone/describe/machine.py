"""How GPUs are wired: links, and machines of equal nodes."""

from __future__ import annotations

from dataclasses import dataclass

from drystone.describe.gpu import GpuSpec
from drystone.errors import InvalidSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A way from one GPU to another: bandwidth of one direction per GPU, and latency of a hop."""

    name: str
    bandwidth_bytes_per_second: float
    latency_seconds: float
    source: str = ""

    def __post_init__(self) -> None:
        if self.bandwidth_bytes_per_second <= 0 or self.latency_seconds < 0:
            raise InvalidSpec(f"link {self.name}: bandwidth must be > 0 and latency >= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Equal nodes of one GPU type: what an estimate needs to know of the hardware."""

    gpu: GpuSpec
    gpus_per_node: int
    intra: Link  # inside a node
    inter: Link  # between nodes, per GPU

    def __post_init__(self) -> None:
        if self.gpus_per_node < 1:
            raise InvalidSpec(f"machine of {self.gpu.name}: gpus_per_node must be >= 1")
