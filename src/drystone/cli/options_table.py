"""The options of a job as a table: what each way would take and cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from drystone.cli.columns import money
from drystone.cli.job_table import format_gpus
from drystone.cli.output import Column

_COLUMNS = (
    Column(header="GPUs", justify="left", style="bold green"),
    Column(header="samples/s", style="cyan"),
    Column(header="time"),
    Column(header="cost", style="yellow"),
    Column(header="$/h", rank=1),
    Column(header="now", rank=1, justify="left"),
    Column(header="speed is", rank=2, justify="left", style="dim"),
)


def print_options(title: str, options: Sequence[Mapping[str, Any]]) -> None:
    """A row each."""
    from drystone.cli.output import print_table

    print_table(title, _COLUMNS, [_row(one) for one in options])


def _row(option: Mapping[str, Any]) -> tuple[str, ...]:
    from drystone.units import format_seconds

    dollars, per_hour = option["dollars"], option["dollars_per_hour"]
    return (
        format_gpus(option["gpus"]),
        f"{option['samples_per_second']:.3g}",
        format_seconds(option["seconds"]),
        "-" if dollars is None else money(dollars),
        "-" if per_hour is None else f"{per_hour:.2f}",
        "free" if option["is_free"] else "taken",
        "measured" if option["is_measured"] else "estimated",
    )
