"""What can be rented, from a YAML file.

offers:
  - {name: a100-spot, gpu: A100, num_gpus: 8, price_dollars_per_hour: 12.4, reclaims_per_hour: 0.05}
  - name: t4
    gpu: T4
    num_gpus: 4
    price_dollars_per_hour: 1.4
    start_delay_seconds: 120
    most_nodes: 50
    price_changes: [{at_seconds: 86400, price_dollars_per_hour: 1.6}]
    instance: g4dn.12xlarge  # for SkyPilot: what the provider calls it,
    infra: aws/us-east-1     # and where
    spot: true               # cheaper, and its nodes can be taken back
    emulate: {speed: 0.0003, memory: 4GiB}  # for the simulated cloud, as in a cluster file

  - name: v100-spot  # simulated: prices and outages of a zone in a file of changes
    gpu: V100
    num_gpus: 1
    spot_trace: {file: spot_v100_aws.csv, zone: us-east-1c, start_hours: 24}

A price is that of a whole node. Nodes that are reserved, and so paid for whether they are used or
not, are no offers: they stand in the cluster file, as nodes of one's own. Without a name an offer
is called after its GPUs: `8xA100`. `gpu_types` describes types of one's own, as in a cluster file
(`gpu_types.py`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field

from drystone.describe.catalogue import all_or_none
from drystone.describe.files.cluster import EmulatePart, Emulation
from drystone.describe.files.gpu_types import adopt_gpu_types
from drystone.describe.files.reader import Document, Part, load_yaml, parse_yaml, read_part
from drystone.describe.market import Offer, PriceChange
from drystone.describe.traces.spot import load_spot_trace
from drystone.errors import InvalidSpec, UnknownName, UnreadableFile
from drystone.units import HOUR_SECONDS

_HINT: Final = "Write it like: offers: [{gpu: A100, num_gpus: 8, price_dollars_per_hour: 16.0}]"
_Amount = Annotated[float, Field(ge=0, le=1e12)]
_Name = Annotated[str, Field(min_length=1, max_length=80)]


class _ChangePart(Part):
    at_seconds: _Amount  # from the start of a simulation
    price_dollars_per_hour: _Amount


class _SpotTracePart(Part):
    file: Annotated[str, Field(min_length=1)]  # zone, seconds, available, spot_dollars_per_hour
    zone: _Name
    start_hours: _Amount = 0.0  # of the trace, where the simulation begins
    scale: Annotated[float, Field(gt=0, le=1e6)] = 1.0  # that prices are multiplied with


class _OfferPart(Part):
    gpu: _Name
    num_gpus: Annotated[int, Field(ge=1, le=10_000)] = 1  # of a node
    price_dollars_per_hour: _Amount | None = None  # of a whole node; left out with a spot trace
    name: _Name | None = None  # how events and decisions call it; left out: 8xA100
    start_delay_seconds: _Amount = 0.0  # from asking to joining
    most_nodes: Annotated[int, Field(ge=0, le=1_000_000)] = 1_000_000  # rented or on their way
    reclaims_per_hour: _Amount = 0.0
    memory_bytes: _Amount = 0.0
    # later prices, ascending in time; policies see a price once it holds
    price_changes: Annotated[tuple[_ChangePart, ...], Field(strict=False)] = ()
    instance: Annotated[str, Field(max_length=80)] = ""
    infra: Annotated[str, Field(max_length=80)] = ""
    spot: bool = False  # cheaper, and its nodes can be taken back
    spot_trace: _SpotTracePart | None = None  # prices and outages of a simulated offer
    emulate: EmulatePart | None = None


class _MarketPart(Part):
    offers: Annotated[tuple[_OfferPart, ...], Field(strict=False, min_length=1)]
    gpu_types: Any = None  # GPU types of one's own, as in a cluster file


def load_market(path: Path) -> tuple[Offer, ...]:
    """The offers that a file lists, in its order."""
    return _offers_of(load_yaml(path))


def parse_market(text: str, *, where: str = "market") -> tuple[Offer, ...]:
    """The offers that a text lists."""
    return _offers_of(parse_yaml(text, where=where))


@all_or_none()
def _offers_of(document: Document) -> tuple[Offer, ...]:
    if not isinstance(document.value, dict):
        raise UnreadableFile("a market has a list `offers`", where=document.where, hint=_HINT)
    adopt_gpu_types(document)
    market = read_part(document, _MarketPart, hint=_HINT)
    offers: dict[str, Offer] = {}
    for index, part in enumerate(market.offers):
        where = document.place(("offers", index))
        offer = _offer_of(part, where)
        if offer.name in offers:
            hint = "Give each offer its own `name`"
            raise InvalidSpec(f"two offers are called {offer.name!r}", where=where, hint=hint)
        offers[offer.name] = offer
    return tuple(offers.values())


def _offer_of(part: _OfferPart, where: str) -> Offer:
    fields = part.model_dump(exclude={"emulate", "spot", "spot_trace"})
    fields["name"] = part.name or f"{part.num_gpus}x{part.gpu}"
    fields["is_spot"] = part.spot
    folder = Path(where).parent
    try:
        fields["emulation"] = Emulation.of(part.emulate, folder)
        fields["price_changes"] = tuple(PriceChange(**one) for one in fields["price_changes"])
        if part.spot_trace is not None:
            fields |= _traced(part, part.spot_trace, folder)
        elif part.price_dollars_per_hour is None:
            raise InvalidSpec("`price_dollars_per_hour` is missing", hint=_HINT)
        return Offer(**fields)
    except InvalidSpec as error:
        raise InvalidSpec(error.message, where=where, hint=error.hint) from None


def _traced(part: _OfferPart, wanted: _SpotTracePart, folder: Path) -> dict[str, Any]:
    """Prices and outages of a zone, from the hour on at which the simulation begins."""
    if part.price_dollars_per_hour is not None or part.price_changes:
        raise InvalidSpec("prices come from the spot trace", hint="Leave out the prices")
    trace = load_spot_trace(folder / wanted.file)
    if wanted.zone not in trace.zones:
        raise UnknownName("zone", wanted.zone, trace.zones)
    start_seconds = wanted.start_hours * HOUR_SECONDS
    if start_seconds + trace.tick_seconds > trace.seconds:
        raise InvalidSpec(f"the trace ends before start_hours: {trace.seconds / HOUR_SECONDS:.0f}")
    here = trace.window([wanted.zone], start_seconds, trace.seconds - start_seconds)
    first, *later = (
        replace(change, price_dollars_per_hour=change.price_dollars_per_hour * wanted.scale)
        for change in here.price_changes(wanted.zone)
    )
    return {
        "is_spot": True,
        "price_dollars_per_hour": first.price_dollars_per_hour,
        "price_changes": tuple(later),
        "outages": here.outages(wanted.zone),
    }
