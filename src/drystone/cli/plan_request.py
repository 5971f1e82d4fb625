"""From the words of `drystone plan` to a model and a pool of GPUs."""

from __future__ import annotations

from drystone.describe.catalogue import find_gpu, load_gpus
from drystone.describe.links import find_link
from drystone.describe.model import ModelSpec
from drystone.describe.model_source import ModuleReference, resolve_model
from drystone.describe.pool import Pool, parse_pool
from drystone.describe.prices import cheapest_price
from drystone.errors import InvalidSpec


def find_shape(text: str) -> ModelSpec:
    """The model; a module that only torch knows cannot be split by a plan."""
    found = resolve_model(text)
    if isinstance(found, ModuleReference):
        raise InvalidSpec(
            "a Python function cannot be planned: what is inside its blocks is not known",
            where=text,
            hint="`drystone estimate` traces it under data parallelism",
        )
    return found


def find_pool(text: str, network: str) -> Pool:
    """The GPUs, and the network between unlike nodes."""
    return parse_pool(text, between=find_link(network) if network else None)


def find_prices(text: str) -> dict[str, float]:
    """The example prices, with those of `A100-80G=1.80,V100-32G=0.90` in their place."""
    prices = example_prices()
    for part in filter(None, (one.strip() for one in text.split(","))):
        name, _, dollars = part.partition("=")
        try:
            price = float(dollars)
        except ValueError:
            price = -1.0
        if not 0 <= price < float("inf"):
            raise InvalidSpec(
                f"{part!r} is no price", hint="Write dollars per GPU and hour, like A100-80G=1.80"
            )
        prices[find_gpu(name).name] = price
    return prices


def example_prices() -> dict[str, float]:
    """The cheapest example price of each GPU type, dollars per hour on demand."""
    prices = {gpu.name: cheapest_price(gpu.name) for gpu in load_gpus()}
    return {
        name: price.on_demand_dollars_per_gpu_hour
        for name, price in prices.items()
        if price is not None
    }
