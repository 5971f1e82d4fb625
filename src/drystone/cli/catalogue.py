"""The verbs about the catalogue: `gpus` and `models`."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Annotated, Any, Final

import typer

from drystone.cli.options import AsJson, ClusterFile, complete_gpus, complete_models
from drystone.cli.output import Column, counted, print_json, print_table
from drystone.describe.catalogue import match_gpus
from drystone.describe.gpu import GpuSpec
from drystone.describe.gpu_prices import cheapest_price, find_prices
from drystone.describe.model import Experts, ModelSpec
from drystone.describe.model_source import find_model, model_names
from drystone.estimate.parameters import count_model
from drystone.units import GB, TERA, GiB, format_count

_GPU_COLUMNS: Final = (
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
_MODEL_COLUMNS: Final = (
    Column(header="model", justify="left", style="bold green"),
    Column(header="family", rank=3, justify="left", style="cyan"),
    Column(header="parameters", style="yellow"),
    Column(header="active", rank=2),
    Column(header="layers", rank=1),
    Column(header="hidden", rank=1),
    Column(header="heads", rank=1),
    Column(header="kv", rank=1),
    Column(header="ffn", rank=1),
    Column(header="vocab", rank=2),
    Column(header="context", rank=2),
    Column(header="source", rank=4, justify="left", style="dim"),
)


def gpus(
    pattern: Annotated[
        str,
        typer.Argument(
            help="Words that a name, vendor or architecture must contain.",
            autocompletion=complete_gpus,
        ),
    ] = "",
    cluster: ClusterFile = None,
    as_json: AsJson = False,
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
    if cluster is not None:
        from drystone.describe.files.gpu_types import load_gpu_types

        load_gpu_types(cluster)
    found = match_gpus(pattern)
    if as_json:
        print_json({"gpus": [_gpu_table(gpu) for gpu in found]})
    else:
        _print_gpus(found)


def _gpu_table(gpu: GpuSpec) -> dict[str, Any]:
    return asdict(gpu) | {"prices": [asdict(price) for price in find_prices(gpu.name)]}


def _print_gpus(found: tuple[GpuSpec, ...]) -> None:
    title = f"{counted(len(found), 'GPU type')} (*: fp16, there is no bf16)"
    if any(gpu.is_own for gpu in found):
        title = f"{title.removesuffix(')')}; own: from your file)"
    print_table(title, _GPU_COLUMNS, [_gpu_row(gpu) for gpu in found])


def _gpu_row(gpu: GpuSpec) -> tuple[str, ...]:
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


def models(
    pattern: Annotated[
        str,
        typer.Argument(
            help="Words that a name or family must contain.", autocompletion=complete_models
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """List the models known by name: shapes and parameters.

    `active` are the parameters that one token passes, which differ in mixtures of experts. Where
    layers differ, the shape is that of the last kind; the feed-forward size of a mixture is shown
    as top-k of experts times the size of one.

    With --json: {"models": [{name, family, num_params, num_active_params, stated_params,
    num_layers, hidden_size, num_heads, num_kv_heads, head_dim, ffn_size, num_experts, top_k,
    vocab_size, context_length, source}]}; 0 means that there is none, or that it is unknown.
    """
    found = _match_models(pattern)
    if as_json:
        print_json({"models": [_model_table(model) for model in found]})
    else:
        _print_models(found)


def _match_models(pattern: str) -> tuple[ModelSpec, ...]:
    """The models whose name or family has every word of `pattern` in it, else the one so named.

    A number in a word is a whole one: `llama-3` does not match `llama-30b`.
    """
    words = [re.escape(word) for word in pattern.lower().replace("*", " ").split()]
    wanted = [re.compile(rf"{word}(?!\d)" if word[-1].isdigit() else word) for word in words]
    known = (find_model(name) for name in model_names())
    found = tuple(
        model
        for model in known
        if all(word.search(f"{model.name} {model.family}".lower()) for word in wanted)
    )
    return found or (find_model(pattern),)


def _model_table(model: ModelSpec) -> dict[str, Any]:
    block = model.stack[-1][0]
    experts = block.feed_forward if isinstance(block.feed_forward, Experts) else None
    count = count_model(model)
    return {
        "name": model.name,
        "family": model.family,
        "num_params": count.total,
        "num_active_params": count.active,
        "stated_params": model.stated_params,
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_heads": block.attention.num_heads,
        "num_kv_heads": block.attention.num_kv_heads,
        "head_dim": block.attention.head_dim,
        "ffn_size": block.feed_forward.ffn_size,
        "num_experts": experts.num_experts if experts else 0,
        "top_k": experts.top_k if experts else 0,
        "vocab_size": model.vocab_size,
        "context_length": model.context_length,
        "source": model.source,
    }


def _print_models(found: tuple[ModelSpec, ...]) -> None:
    print_table(
        counted(len(found), "model"),
        _MODEL_COLUMNS,
        [_model_row(_model_table(model)) for model in found],
    )


def _model_row(model: dict[str, Any]) -> tuple[str, ...]:
    active = model["num_active_params"]
    ffn = str(model["ffn_size"])
    if model["num_experts"]:
        ffn = f"{model['top_k']}/{model['num_experts']} x {ffn}"
    return (
        model["name"],
        model["family"],
        format_count(model["num_params"]),
        "" if active == model["num_params"] else format_count(active),
        str(model["num_layers"]),
        str(model["hidden_size"]),
        str(model["num_heads"]),
        str(model["num_kv_heads"]),
        ffn,
        str(model["vocab_size"] or "-"),
        str(model["context_length"] or "-"),
        model["source"],
    )
