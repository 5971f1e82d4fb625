"""What can be rented: offers of nodes with a price, a delay until they start, and a limit."""

from __future__ import annotations

from dataclasses import dataclass

from drystone.errors import InvalidSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A kind of node that can be rented."""

    name: str
    gpu: str
    num_gpus: int
    price_dollars_per_hour: float  # of the node
    start_delay_seconds: float = 0.0
    most_nodes: int = 1_000_000
    reclaims_per_hour: float = 0.0  # spot: how often the owner takes a node back

    def __post_init__(self) -> None:
        if self.num_gpus < 1 or self.most_nodes < 0:
            raise InvalidSpec(f"offer {self.name}: num_gpus must be >= 1 and most_nodes >= 0")
        if min(self.price_dollars_per_hour, self.start_delay_seconds, self.reclaims_per_hour) < 0:
            raise InvalidSpec(f"offer {self.name}: price, delay and reclaim rate must be >= 0")
