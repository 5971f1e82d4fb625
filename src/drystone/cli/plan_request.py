"""From the words of `drystone plan` to a model and a pool of GPUs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from drystone.describe.catalogue import find_gpu, load_gpus
from drystone.describe.files.cluster import ClusterSpec, load_cluster_file
from drystone.describe.gpu import GpuSpec
from drystone.describe.gpu_prices import cheapest_price
from drystone.describe.links import find_link
from drystone.describe.model import ModelSpec
from drystone.describe.model_source import ModuleReference, resolve_model
from drystone.describe.pool import Pool, make_pool, parse_pool
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


def find_pool(text: str, network: str, cluster: ClusterSpec | None = None) -> Pool:
    """The GPUs, or all of a cluster where none are named; and the network between unlike nodes."""
    between = find_link(network) if network else None
    if text or cluster is None:
        return parse_pool(text, between=between)
    return make_pool(cluster.pool().groups, between=between)


def read_cluster(path: Path | None) -> ClusterSpec | None:
    """What a cluster file says: GPU types of one's own are known from now on."""
    return None if path is None else load_cluster_file(path, needs_nodes=False)


def say_own(gpus: Iterable[GpuSpec]) -> None:
    """Nobody may take a type that a file describes for one of the catalogue."""
    from drystone.cli.output import make_console

    for gpu in gpus:
        if gpu.is_own:
            told = f"{gpu.name} is a GPU type of your own: {gpu.source}"
            make_console(stderr=True).print(told, style="yellow", highlight=False)


def find_prices(text: str, cluster: ClusterSpec | None = None) -> dict[str, float]:
    """The example prices; over them a file's, and those of `A100-80G=1.80,V100-32G=0.90`."""
    prices = example_prices() | dict(cluster.dollars_per_gpu_hour if cluster else {})
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
