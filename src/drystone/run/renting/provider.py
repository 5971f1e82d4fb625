"""Providers of rented nodes: the contract, what they say, the settings of renting.

Every rental has a token, which is in the log before the provider hears of it. A provider makes one
node for a token, however often it is asked, so whoever was killed in between simply asks again. All
tokens of one system begin alike (its fleet): what begins so and is in no log is an orphan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, Protocol

from drystone.describe.catalogue import find_gpu
from drystone.describe.cluster import NodeSpec
from drystone.describe.files.cluster import ClusterSpec, Emulation
from drystone.describe.market import Offer
from drystone.errors import DrystoneError, InvalidSpec


class Stage(StrEnum):
    """Where a rental stands at its provider."""

    STARTING = "starting"
    RUNNING = "running"  # it can be used, and is billed
    FAILED = "failed"  # it never came, and will not
    ENDED = "ended"  # it was given back or taken back


@dataclass(frozen=True, slots=True, kw_only=True)
class Rental:
    """One rental as its provider sees it."""

    token: str
    offer: str  # empty: the provider does not say; the log knows
    stage: Stage
    reason: str = ""  # why it failed or ended
    price_dollars_per_hour: float = 0.0  # that is billed now
    since_seconds: float = 0.0  # billed from then on
    billed_micro_dollars: int | None = None  # in all, once it is over; None: not said


OVER: Final = (Stage.FAILED, Stage.ENDED)


class ProviderTrouble(DrystoneError):
    """The provider does not answer, or not now; nothing is known to have changed."""


class Provider(Protocol):
    """Somebody who rents nodes out."""

    def quote(self) -> Mapping[str, float]:
        """Dollars an hour of a node now, by offer; offers that are not sold now are left out."""
        ...

    def rent(self, token: str, offer: Offer) -> None:
        """Ask for one node; asking twice with one token is asking once."""
        ...

    def status(self, fleet: str) -> Sequence[Rental]:
        """All rentals whose tokens begin with this, those that are over included where known.

        A whole token asks for one rental.
        """
        ...

    def release(self, token: str) -> None:
        """Give a node back, or take a request back; doing it twice is doing it once."""
        ...


def make_token(fleet: str, rental: int) -> str:
    """The token of a rental; also a name that clouds accept."""
    return f"{fleet}-{rental:06d}"


def rental_of(token: str, fleet: str) -> int | None:
    """The rental that a token stands for; None where it is not of this log's fleet."""
    start, _, number = token.rpartition("-")
    return int(number) if start == fleet and number.isdigit() else None


def node_name(offer: str, rental: int) -> str:
    """The name of a rented node in the cluster; no two rentals of a log have the same."""
    return f"rented-{offer}-{rental:04d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderStatus:
    """A provider's rentals and prices at one time."""

    asked: float = 0.0  # when it was asked, by the monotonic clock; 0: never
    rentals: Mapping[str, Rental] = field(default_factory=dict)  # by token
    prices: Mapping[str, float] = field(default_factory=dict)  # dollars an hour by offer


MAX_RENTED_GPUS: Final = 64  # of one offer, that options are made for
# A node of the simulated cloud is emulated here; unless its offer says how, like `serve` does it.
DEFAULT_EMULATION: Final = Emulation(speed=0.0003, memory_bytes=4 * 2**30)


class NodeJoiner(Protocol):
    """How a rented machine becomes a node of the cluster, and how it leaves."""

    def attach(self, name: str, offer: Offer) -> None:
        """Make a running rental a node of this name; attaching it twice is attaching it once."""
        ...

    def detach(self, name: str, reason: str) -> None:
        """The node is no more; nothing happens if it has left."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Renting:
    """From whom, what, and for how much."""

    provider: Provider
    offers: tuple[Offer, ...]
    joiner: NodeJoiner | None = None  # None: nodes of this machine
    budget_dollars_per_hour: float = math.inf  # on average
    hard_cap_dollars_per_hour: float = math.inf  # never above
    look_seconds: float = 2.0  # between looks at the provider
    patience_seconds: float = 900.0  # beyond the listed delay, for a node that does not come


def live_offers(offers: Sequence[Offer], *, is_simulated: bool) -> tuple[Offer, ...]:
    """Offers with the catalogue's names of GPUs, and with the memory that these have."""
    found = []
    for offer in offers:
        gpu = find_gpu(offer.gpu)
        if offer.outages and not is_simulated:
            raise InvalidSpec(
                f"offer {offer.name}: a spot_trace is for simulated nodes",
                hint="Write price_dollars_per_hour and spot: true; the provider says what there is",
            )
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
    own = tuple(node for node in cluster.nodes if not node.id.startswith("rented-"))
    more: list[NodeSpec] = []
    emulations, prices = dict(cluster.emulations), dict(cluster.dollars_per_gpu_hour)
    for offer in offers:
        number = min(offer.most_nodes, max(1, MAX_RENTED_GPUS // offer.num_gpus))
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
