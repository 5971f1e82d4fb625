"""`drystone models`: the models known by name, for people and for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from drystone.cli.options import complete_models

if TYPE_CHECKING:
    from drystone.describe.model import ModelSpec


def models(
    pattern: Annotated[
        str,
        typer.Argument(
            help="Words that a name or family must contain.", autocompletion=complete_models
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
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
        from drystone.cli.output import print_json

        print_json({"models": [_as_dict(model) for model in found]})
    else:
        _print_models(found)


def _match_models(pattern: str) -> tuple[ModelSpec, ...]:
    """The models whose name or family has every word of `pattern` in it, else the one so named.

    A number in a word is a whole one: `llama-3` is no `llama-30b`.
    """
    import re

    from drystone.describe.model_source import find_model, model_names

    words = [re.escape(word) for word in pattern.lower().replace("*", " ").split()]
    wanted = [re.compile(rf"{word}(?!\d)" if word[-1].isdigit() else word) for word in words]
    known = (find_model(name) for name in model_names())
    found = tuple(
        model
        for model in known
        if all(one.search(f"{model.name} {model.family}".lower()) for one in wanted)
    )
    return found or (find_model(pattern),)


def _as_dict(model: ModelSpec) -> dict[str, Any]:
    from drystone.describe.model import Experts
    from drystone.estimate.parameters import count_model

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
    from drystone.cli.output import Column, print_table

    columns = (
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
    title = f"{len(found)} model{'' if len(found) == 1 else 's'}"
    print_table(title, columns, [_row(_as_dict(model)) for model in found])


def _row(model: dict[str, Any]) -> tuple[str, ...]:
    from drystone.units import format_count

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
