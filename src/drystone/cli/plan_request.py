"""From the words of `drystone plan` to a model and a pool of GPUs."""

from __future__ import annotations

from drystone.describe.catalogue import load_gpus
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


def example_prices() -> dict[str, float]:
    """The cheapest example price of each GPU type, dollars per hour on demand."""
    prices = {gpu.name: cheapest_price(gpu.name) for gpu in load_gpus()}
    return {
        name: price.on_demand_dollars_per_gpu_hour
        for name, price in prices.items()
        if price is not None
    }
