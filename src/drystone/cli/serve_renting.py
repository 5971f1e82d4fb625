"""What `drystone serve` rents from: a market file, a provider, a budget."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from drystone.describe.files.cluster import ClusterSpec
from drystone.errors import InvalidSpec, UnknownName

if TYPE_CHECKING:
    from drystone.run.engines.contract import Engine
    from drystone.run.renting.provider import NodeJoiner, Renting
    from drystone.run.renting.simulated_cloud import CloudConditions

PROVIDERS = ("simulated", "sky")


@dataclass(frozen=True, slots=True, kw_only=True)
class RentRequest:
    """What was said about renting on the command line."""

    market: Path | None = None
    provider: str = "simulated"
    simulated_cloud: str = ""  # its conditions: seed=1,stockout_share=0.1
    budget_dollars_per_hour: float = 0.0  # 0: no limit
    hard_cap_dollars_per_hour: float = 0.0
    address: str = ""  # of a Ray cluster that rented nodes join


def own_nodes(request: RentRequest, cluster: Path | None) -> ClusterSpec | None:
    """Where a market is given and no cluster, there may be no own nodes at all; None: look."""
    from drystone.run.engines.local import local_gpus

    if request.market is None or cluster is not None or local_gpus():
        return None
    return ClusterSpec(nodes=())


def open_renting(request: RentRequest, engine: Engine | None, folder: Path) -> Renting | None:
    """The provider and the offers; None: nothing is rented."""
    if request.provider not in PROVIDERS:
        raise UnknownName("provider", request.provider, PROVIDERS)
    if request.market is None:
        if request.budget_dollars_per_hour or request.hard_cap_dollars_per_hour:
            raise InvalidSpec("a budget needs something to buy", hint="Give --market FILE")
        return None
    from drystone.describe.files.market import load_market
    from drystone.run.renting.provider import Provider, Renting, live_offers
    from drystone.run.renting.simulated_cloud import SimulatedCloud

    is_simulated = request.provider == "simulated"
    offers = live_offers(load_market(request.market), is_simulated=is_simulated)
    provider: Provider
    if is_simulated:
        provider = SimulatedCloud(
            folder / "cloud.json", offers, parse_conditions(request.simulated_cloud)
        )
    else:
        from drystone.run.renting.skypilot import SkyPilot

        if engine is None:
            raise InvalidSpec(
                "machines of a cloud need a cluster to join",
                hint="Say --engine ray, on the head of a Ray cluster that they can reach",
            )
        provider = SkyPilot(offers, ray_address=request.address)
    return Renting(
        provider=provider,
        offers=offers,
        joiner=_joiner(request, engine, folder),
        budget_dollars_per_hour=request.budget_dollars_per_hour or math.inf,
        hard_cap_dollars_per_hour=request.hard_cap_dollars_per_hour or math.inf,
        look_seconds=2.0 if is_simulated else 15.0,
    )


def describe_renting(renting: Renting, provider: str) -> str:
    """`what can be rented, from whom, for how much`."""
    offers = ", ".join(
        f"{one.num_gpus} {one.gpu} at ${one.price_dollars_per_hour:g}/h" for one in renting.offers
    )
    limits = [
        f"{word} ${dollars:g}/h"
        for word, dollars in (
            ("budget", renting.budget_dollars_per_hour),
            ("hard cap", renting.hard_cap_dollars_per_hour),
        )
        if math.isfinite(dollars)
    ]
    cloud = "a simulated cloud" if provider == "simulated" else "SkyPilot"
    return f"rented from {cloud}: {offers}" + (f" ({', '.join(limits)})" if limits else "")


def _joiner(request: RentRequest, engine: Engine | None, folder: Path) -> NodeJoiner | None:
    from drystone.run.renting.joining import RayJoiner, SelfJoiner

    if engine is None:
        return None
    if request.provider != "simulated":
        return SelfJoiner()
    if not request.address:
        raise InvalidSpec(
            "nodes of the simulated cloud must know which Ray cluster to join",
            hint="Give --engine ray --address HOST:PORT",
        )
    return RayJoiner(request.address, folder / "rented")


def parse_conditions(text: str) -> CloudConditions:
    """`seed=1,stockout_share=0.1`: how unkind the simulated cloud is."""
    from drystone.run.renting.simulated_cloud import CloudConditions

    known = {field.name for field in fields(CloudConditions)}
    values: dict[str, float] = {}
    for word in text.split(",") if text else ():
        name, _, value = (part.strip() for part in word.partition("="))
        if name not in known:
            raise UnknownName("condition of the simulated cloud", name, sorted(known))
        try:
            values[name] = float(value)
        except ValueError:
            raise InvalidSpec(f"{word!r} is not a number", where="--simulated-cloud") from None
        if not (math.isfinite(values[name]) and values[name] >= 0):
            raise InvalidSpec(f"{word!r} must be 0 or more", where="--simulated-cloud")
    seed = int(values.pop("seed", 0))
    return CloudConditions(seed=seed, **values)
