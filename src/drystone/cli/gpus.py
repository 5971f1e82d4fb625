"""`drystone gpus`: the catalogue of GPU types, for people and for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from drystone.cli.columns import counted
from drystone.cli.options import ClusterFile, complete_gpus

if TYPE_CHECKING:
    from drystone.describe.gpu import GpuSpec


def gpus(
    pattern: Annotated[
        str,
        typer.Argument(
            help="Words that a name, vendor or architecture must contain.",
            autocompletion=complete_gpus,
        ),
    ] = "",
    cluster: ClusterFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the GPU types: memory, rates, links, prices.

    Rates are dense teraflop/s; `measured` is the best matrix multiplication that others measured.
    Links count both directions. Prices are examples, on demand, one GPU for one hour. With
    --cluster the types that a file describes come last, marked as your own.

    With --json: {"gpus": [{name, vendor, architecture, year, memory_bytes, usable_bytes, ...,
    is_own,
    prices: [{cloud, on_demand_dollars_per_gpu_hour, spot_dollars_per_gpu_hour, date, ...}]}]},
    everything in bytes, seconds, operations and dollars; 0 means that there is none.
    """
    from drystone.describe.catalogue import match_gpus

    if cluster is not None:
        from drystone.describe.files.gpu_types import load_gpu_types

        load_gpu_types(cluster)
    found = match_gpus(pattern)
    if as_json:
        from drystone.cli.output import print_json

        print_json({"gpus": [_as_dict(gpu) for gpu in found]})
    else:
        _print_gpus(found)


def _as_dict(gpu: GpuSpec) -> dict[str, Any]:
    from dataclasses import asdict

    from drystone.describe.gpu_prices import find_prices

    return asdict(gpu) | {"prices": [asdict(price) for price in find_prices(gpu.name)]}


def _print_gpus(found: tuple[GpuSpec, ...]) -> None:
    from drystone.cli.output import Column, print_table

    columns = (
        Column(header="GPU", justify="left", style="bold green"),
        Column(header="GiB"),
        Column(header="usable", rank=3),
        Column(header="16-bit TF/s", rank=1),
        Column(header="fp8", rank=4),
        Column(header="fp32", rank=5),
        Column(header="measured", rank=4),
        Column(header="memory GB/s", rank=1),
        Column(header="link", rank=2, justify="left", style="cyan"),
        Column(header="link GB/s", rank=3),
        Column(header="W", rank=5),
        Column(header="year", rank=4),
        Column(header="$/h", rank=1, style="yellow"),
        Column(header="cloud", rank=2, justify="left"),
        Column(header="date", rank=5),
    )
    title = f"{counted(len(found), 'GPU type')} (*: fp16, there is no bf16)"
    if any(gpu.is_own for gpu in found):
        title = f"{title.removesuffix(')')}; own: from your file)"
    print_table(title, columns, [_row(gpu) for gpu in found])


def _row(gpu: GpuSpec) -> tuple[str, ...]:
    from drystone.describe.gpu_prices import cheapest_price
    from drystone.units import GB, TERA, GiB

    price = cheapest_price(gpu.name)
    return (
        f"{gpu.name} (own)" if gpu.is_own else gpu.name,
        _number(gpu.memory_bytes / GiB),
        f"{gpu.usable_bytes / GiB:.1f}",
        _number(gpu.bf16_flops / TERA) if gpu.bf16_flops else _starred(gpu.fp16_flops / TERA),
        _number(gpu.fp8_flops / TERA),
        _number(gpu.fp32_flops / TERA),
        _number(gpu.measured_bf16_flops / TERA),
        _number(gpu.memory_bandwidth_bytes_per_second / GB),
        gpu.link or gpu.bus,
        _number((gpu.link_bytes_per_second or 2 * gpu.bus_bytes_per_second) / GB),
        _number(gpu.power_watts),
        str(gpu.year or "-"),
        f"{price.on_demand_dollars_per_gpu_hour:.2f}" if price else "-",
        price.cloud if price else "-",
        (price.date if price else "") or "-",
    )


def _number(value: float) -> str:
    """At most one decimal, and a dash for what is not there."""
    return f"{value:.1f}".removesuffix(".0") if value else "-"


def _starred(value: float) -> str:
    return f"{_number(value)}*" if value else "-"
