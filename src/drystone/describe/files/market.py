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
    spot: true
    emulate: {speed: 0.0003, memory: 4GiB}  # for the simulated cloud, as in a cluster file

A price is that of a whole node. Without a name an offer is called after its GPUs: `8xA100`.
`gpu_types` describes types of one's own, as in a cluster file (`gpu_types.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field

from drystone.describe.catalogue import all_or_none
from drystone.describe.files.cluster import EmulatePart, Emulation
from drystone.describe.files.gpu_types import adopt_gpu_types
from drystone.describe.files.reader import Document, Part, load_yaml, parse_yaml, read_part
from drystone.describe.market import Offer, PriceChange
from drystone.errors import InvalidSpec, UnreadableFile

_HINT: Final = "Write it like: offers: [{gpu: A100, num_gpus: 8, price_dollars_per_hour: 16.0}]"
_Amount = Annotated[float, Field(ge=0, le=1e12)]
_Name = Annotated[str, Field(min_length=1, max_length=80)]


class _ChangePart(Part):
    at_seconds: _Amount  # from the start of a simulation
    price_dollars_per_hour: _Amount


class _OfferPart(Part):
    gpu: _Name
    num_gpus: Annotated[int, Field(ge=1, le=10_000)] = 1  # of a node
    price_dollars_per_hour: _Amount  # of a whole node
    name: _Name | None = None  # how events and decisions call it; left out: 8xA100
    start_delay_seconds: _Amount = 0.0  # from asking to joining
    most_nodes: Annotated[int, Field(ge=0, le=1_000_000)] = 1_000_000  # rented or on their way
    reclaims_per_hour: _Amount = 0.0
    memory_bytes: _Amount = 0.0
    # later prices, ascending in time; policies see a price once it holds
    price_changes: Annotated[tuple[_ChangePart, ...], Field(strict=False)] = ()
    instance: Annotated[str, Field(max_length=80)] = ""
    infra: Annotated[str, Field(max_length=80)] = ""
    spot: bool = False  # for SkyPilot: a machine that may be taken back, for less
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
    fields = part.model_dump(exclude={"emulate", "spot"})
    fields["name"] = part.name or f"{part.num_gpus}x{part.gpu}"
    fields["is_spot"] = part.spot
    try:
        fields["emulation"] = Emulation.of(part.emulate, Path(where).parent)
        fields["price_changes"] = tuple(PriceChange(**one) for one in fields["price_changes"])
        return Offer(**fields)
    except InvalidSpec as error:
        raise InvalidSpec(error.message, where=where, hint=error.hint) from None
