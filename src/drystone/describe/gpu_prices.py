"""What renting a GPU costs, by cloud.

`data/prices.csv` holds example rows only, each with its source and date: prices move, and the
catalogue they come from has no licence. For a real decision, give your own prices.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache

from drystone.describe.catalogue import DATA_FOLDER, find_gpu, own_gpus
from drystone.errors import InvalidSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What one cloud asks for one GPU type, host included."""

    gpu: str  # the full name in the catalogue
    cloud: str
    instance: str
    num_gpus: int  # GPUs of that instance
    region: str
    on_demand_dollars_per_gpu_hour: float
    spot_dollars_per_gpu_hour: float  # 0: not offered, or not known
    date: str  # year-month-day
    source: str
    notes: str = ""

    def __post_init__(self) -> None:
        on_demand, spot = self.on_demand_dollars_per_gpu_hour, self.spot_dollars_per_gpu_hour
        if not (0 < on_demand < float("inf") and 0 <= spot < float("inf")):
            raise InvalidSpec(
                f"price of {self.gpu} on {self.cloud}: on demand must be > 0, spot >= 0"
            )
        if self.num_gpus < 1:
            raise InvalidSpec(f"price of {self.gpu} on {self.cloud}: num_gpus must be >= 1")


def load_prices() -> tuple[Price, ...]:
    """Every example price, in the order of the catalogue of GPUs; then those of own types."""
    return (*_shipped_prices(), *_own_prices())


def _own_prices() -> tuple[Price, ...]:
    return tuple(
        Price(
            gpu=gpu.name, cloud="own", instance="", num_gpus=1, region="",
            on_demand_dollars_per_gpu_hour=dollars, spot_dollars_per_gpu_hour=0.0,
            date=gpu.date, source=gpu.source,
        )
        for gpu, _, dollars in own_gpus()
        if dollars is not None
    )  # fmt: skip


@cache
def _shipped_prices() -> tuple[Price, ...]:
    with (DATA_FOLDER / "prices.csv").open(encoding="utf-8", newline="") as file:
        return tuple(_parse_row(row) for row in csv.DictReader(file))


def find_prices(gpu_name: str) -> tuple[Price, ...]:
    """The prices of one GPU type, cheapest on demand first; empty if none is known."""
    name = find_gpu(gpu_name).name
    prices = [price for price in load_prices() if price.gpu == name]
    return tuple(
        sorted(prices, key=lambda price: (price.on_demand_dollars_per_gpu_hour, price.cloud))
    )


def cheapest_price(gpu_name: str) -> Price | None:
    """The lowest on-demand price of one GPU type; None if no cloud in the examples rents it."""
    prices = find_prices(gpu_name)
    return prices[0] if prices else None


def _parse_row(row: dict[str, str]) -> Price:
    return Price(
        gpu=row["gpu"],
        cloud=row["cloud"],
        instance=row["instance"],
        num_gpus=int(row["num_gpus"]),
        region=row["region"],
        on_demand_dollars_per_gpu_hour=float(row["on_demand_dollars_per_gpu_hour"]),
        spot_dollars_per_gpu_hour=float(row["spot_dollars_per_gpu_hour"] or 0),
        date=row["date"],
        source=row["source"],
        notes=row["notes"],
    )
