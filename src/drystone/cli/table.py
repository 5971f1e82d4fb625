"""`drystone table`: what training models takes, by GPU type, as a page of Markdown or HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from drystone.cli.options import AsJson, complete_gpus, complete_models

if TYPE_CHECKING:
    from drystone.plan.needs import Need

_GPUS = "RTX-4090,L40S,A100-80G,H100,H200,B200"
_HEADERS = ("model", "what is trained", "tokens", "GPUs", "how", "GiB of each", "tokens/s",
            "$/B tokens")  # fmt: skip


def table(
    models: Annotated[
        list[str], typer.Argument(help="Names or files.", autocompletion=complete_models)
    ],
    gpus: Annotated[str, typer.Option(help="GPU types.", autocompletion=complete_gpus)] = _GPUS,
    tuning: Annotated[str, typer.Option(help="Of full, lora, qlora.")] = "full,lora,qlora",
    seq_len: Annotated[str, typer.Option(help="Tokens in a sequence, e.g. 2048,8192.")] = "4096",
    global_batch: Annotated[int, typer.Option(help="Sequences in a step.", min=1)] = 64,
    launcher: Annotated[str, typer.Option(help="Whose conventions apply.")] = "drystone",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="A file: .html, else Markdown.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what training models takes, by GPU type, with ranges.

    For each type the fewest GPUs that do, how the work is split, the range of memory that each
    needs, and the range in which four of five measured speeds lie.

    With --json: [{model, tuning, seq_len, gpu, num_gpus, layout, recompute, low_bytes, high_bytes,
    low_tokens_per_second, high_tokens_per_second, dollars_per_billion_tokens}].
    """
    from drystone.cli.output import print_json, say_made, track
    from drystone.cli.request import example_prices, find_shape, parse_word
    from drystone.describe.catalogue import find_gpu
    from drystone.describe.files.json_shapes import to_plain
    from drystone.describe.recipe import Recipe, Tuning
    from drystone.plan.needs import needs_of

    shapes = [find_shape(name) for name in models]
    types = [find_gpu(name) for name in gpus.split(",")]
    methods = [parse_word(Tuning, word, "tuning") for word in tuning.split(",")]
    rows: list[Need] = []
    for shape in track(shapes, "Models"):
        for tokens in (int(word) for word in seq_len.split(",")):
            for method in methods:
                recipe = Recipe(
                    seq_len=tokens, global_batch=global_batch, tuning=method, launcher=launcher
                )
                rows += needs_of(shape, recipe, types, dollars_per_gpu_hour=example_prices())
    if as_json:
        print_json([to_plain(row) for row in rows])
        return
    is_page = out is not None and out.suffix == ".html"
    text = _html(rows) if is_page else markdown(rows)
    if out is None:
        print(text, end="")
    else:
        out.write_text(text, encoding="utf-8")
        say_made("Written", out)


def _cells(row: Need) -> tuple[str, ...]:
    gib = 2**30
    dollars = row.dollars_per_billion_tokens
    recompute = "" if row.recompute == "none" else f", recompute {row.recompute}"
    return (
        row.model,
        row.tuning,
        f"{row.seq_len:,}",
        f"{row.num_gpus} x {row.gpu}",
        f"{row.layout}{recompute}",
        f"{row.low_bytes / gib:.0f} to {row.high_bytes / gib:.0f}",
        f"{row.low_tokens_per_second:,.0f} to {row.high_tokens_per_second:,.0f}",
        "-" if dollars is None else f"{dollars:,.0f}",
    )


def markdown(rows: Sequence[Need]) -> str:
    """A table of Markdown."""
    lines = [_HEADERS, tuple("---" for _ in _HEADERS), *map(_cells, rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _html(rows: Sequence[Need]) -> str:
    head = "".join(f"<th>{escape(word)}</th>" for word in _HEADERS)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in _cells(row)) + "</tr>"
        for row in rows
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>What training takes'
        f"</title></head><body>\n<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n"
        "</tbody>\n</table>\n</body></html>\n"
    )
