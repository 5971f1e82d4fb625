"""What can be rented: offers of nodes with a price, a delay until they start, and a limit."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import pairwise

from drystone.describe.cluster import NodeSpec
from drystone.describe.files.cluster import Emulation
from drystone.errors import InvalidSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceChange:
    """From this time on an offer has another price."""

    at_seconds: float
    price_dollars_per_hour: float

    def __post_init__(self) -> None:
        for value in (self.at_seconds, self.price_dollars_per_hour):
            if not (math.isfinite(value) and value >= 0):
                raise InvalidSpec(f"a price change needs a time and a price of 0 or more: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """While this lasts an offer has no nodes, and takes back those that it had."""

    from_seconds: float
    until_seconds: float

    def __post_init__(self) -> None:
        if not 0 <= self.from_seconds < self.until_seconds:
            raise InvalidSpec(f"an outage needs a time from 0 on and a later one: {self}")


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
    memory_bytes: float = 0.0  # of each GPU; 0: not stated, not checked
    price_changes: tuple[PriceChange, ...] = ()  # ascending in time; policies do not see them
    outages: tuple[Outage, ...] = ()  # ascending in time; policies do not see them
    instance: str = ""  # what its provider calls it, e.g. p4d.24xlarge
    infra: str = ""  # where, e.g. aws/us-east-1
    is_spot: bool = False  # cheaper, and its nodes can be taken back
    emulation: Emulation | None = None  # of a simulated cloud: how its GPUs are emulated
    is_short: bool = False  # it was out of stock of late: nothing is asked of it for now

    def __post_init__(self) -> None:
        if not self.name or not self.gpu:
            raise InvalidSpec("an offer needs a name and a GPU type")
        if self.num_gpus < 1 or self.most_nodes < 0:
            raise InvalidSpec(f"offer {self.name}: num_gpus must be >= 1 and most_nodes >= 0")
        amounts = (
            self.price_dollars_per_hour, self.start_delay_seconds, self.reclaims_per_hour,
            self.memory_bytes,
        )  # fmt: skip
        if not all(math.isfinite(one) and one >= 0 for one in amounts):
            raise InvalidSpec(
                f"offer {self.name}: price, delay, reclaim rate and memory must be >= 0"
            )
        times = [change.at_seconds for change in self.price_changes]
        if any(later <= before for before, later in pairwise(times)):
            raise InvalidSpec(f"offer {self.name}: price changes must ascend in time")
        if any(
            later.from_seconds < before.until_seconds for before, later in pairwise(self.outages)
        ):
            raise InvalidSpec(f"offer {self.name}: outages must ascend in time")

    def node(self, node_id: str) -> NodeSpec:
        """A node of this offer, by this name."""
        return NodeSpec(
            id=node_id, gpu=self.gpu, num_gpus=self.num_gpus, memory_bytes=self.memory_bytes
        )

    def seen_at(self, price_dollars_per_hour: float) -> Offer:
        """The offer as somebody sees it who does not know the future."""
        return replace(
            self, price_dollars_per_hour=price_dollars_per_hour, price_changes=(), outages=()
        )

    def is_out_at(self, seconds: float) -> bool:
        """Whether an outage lasts at this time."""
        row = bisect_right(self.outages, seconds, key=lambda outage: outage.from_seconds) - 1
        return row >= 0 and seconds < self.outages[row].until_seconds
