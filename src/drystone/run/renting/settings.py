"""What renting is started with: the offers as the engine will see them, the provider, the money."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from drystone.describe.catalogue import find_gpu
from drystone.describe.files.cluster import ClusterSpec, Emulation
from drystone.describe.market import Offer
from drystone.describe.node import NodeSpec
from drystone.errors import InvalidSpec
from drystone.run.renting.provider import Provider

MOST_RENTED_GPUS: Final = 64  # of one offer, that options are made for
# A node of the simulated cloud is emulated here; unless its offer says how, like `serve` does it.
DEFAULT_EMULATION: Final = Emulation(speed=0.0003, memory_bytes=4 * 2**30)


class Door(Protocol):
    """How a rented machine becomes a node of the cluster, and how it leaves."""

    def bring(self, name: str, offer: Offer) -> None:
        """Make a running rental a node of this name; bringing it twice is bringing it once."""
        ...

    def take(self, name: str, reason: str) -> None:
        """The node is no more; nothing happens if it has left."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Renting:
    """From whom, what, and for how much."""

    provider: Provider
    offers: tuple[Offer, ...]
    door: Door | None = None  # None: nodes of this machine
    budget_dollars_per_hour: float = math.inf  # on average
    hard_cap_dollars_per_hour: float = math.inf  # never above
    look_seconds: float = 2.0  # between looks at the provider
    patience_seconds: float = 900.0  # beyond the listed delay, for a node that does not come


def live_offers(offers: Sequence[Offer], *, is_simulated: bool) -> tuple[Offer, ...]:
    """Offers with the catalogue's names of GPUs, and with the memory that these have."""
    found = []
    for offer in offers:
        gpu = find_gpu(offer.gpu)
        emulation = offer.emulation or (DEFAULT_EMULATION if is_simulated else None)
        memory = emulation.memory_bytes if emulation else gpu.usable_bytes
        found.append(
            replace(
                offer,
                gpu=gpu.name,
                emulation=emulation,
                memory_bytes=offer.memory_bytes or float(memory),
            )
        )
    return tuple(found)


def with_rentable(cluster: ClusterSpec, offers: Sequence[Offer]) -> ClusterSpec:
    """The cluster as it could become: options are made for nodes that are not here yet, too.

    Nodes that are rented already are left out: they are among those that could be.
    """
    own = tuple(one for one in cluster.nodes if not one.id.startswith("rented-"))
    more: list[NodeSpec] = []
    emulations, prices = dict(cluster.emulations), dict(cluster.dollars_per_gpu_hour)
    for offer in offers:
        number = min(offer.most_nodes, max(1, MOST_RENTED_GPUS // offer.num_gpus))
        more += [offer.node(f"{offer.name}-{index}") for index in range(number)]
        prices.setdefault(offer.gpu, offer.price_dollars_per_hour / offer.num_gpus)
        if offer.emulation is not None:
            emulations.setdefault(offer.gpu, offer.emulation)
    return replace(cluster, nodes=(*own, *more), emulations=emulations, dollars_per_gpu_hour=prices)


def check_emulations(cluster: ClusterSpec, offers: Sequence[Offer]) -> None:
    """One GPU type is emulated in one way, or not at all, wherever it is from."""
    own = {node.gpu for node in cluster.nodes if not node.id.startswith("rented-")}
    seen = {gpu: cluster.emulations.get(gpu) for gpu in own}
    for offer in offers:
        if seen.setdefault(offer.gpu, offer.emulation) != offer.emulation:
            raise InvalidSpec(
                f"{offer.gpu} is emulated in two ways, or real and emulated at once",
                where=f"offer {offer.name}",
                hint="Give the offer the same `emulate` as the cluster file, or another GPU type",
            )
