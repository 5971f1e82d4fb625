"""`drystone check`: how right the estimates are, by measurements that others published."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from drystone.observe.check.accuracy import CheckReport


class Measure(StrEnum):
    """What is judged."""

    MEMORY = "memory"
    SPEED = "speed"


def check(
    measure: Annotated[Measure, typer.Argument(help="What to judge: memory or speed.")],
    rows: Annotated[
        Path | None,
        typer.Option(help="A CSV of published runs (docs/measurements.md); default: ours."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw predicted against measured into this file.")
    ] = None,
    worst: Annotated[int, typer.Option(help="How many of the worst rows to show.", min=0)] = 8,
    brief: Annotated[
        bool, typer.Option("--brief", help="Groups only: no datasets, worst or skipped rows.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Judge the estimates by published measurements.

    Every row whose columns suffice is evaluated; the others are listed with the reason. A run that
    was read by two tools counts once in the summary.

    With --json: {measure, rows, evaluated, median_abs_error, p90_abs_error, bias, by_group,
    by_dataset, by_dataset_kind, oom: {caught, missed, fits_accepted, fits_refused}, skipped:
    [{run_id, dataset, reason}], results: [{run_id, dataset, group, kind, estimated, measured,
    error}]}; errors are shares of the measurement.
    """
    from drystone.cli.output import print_json, say_made

    if plot is not None:  # refused now, not after all estimates
        from drystone.observe.plot import load_pyplot, plot_check

        load_pyplot(plot)
    report = _check(measure, rows)
    if plot is not None:
        plot_check(report, plot)
    if as_json:
        print_json(report.to_json())
        return
    from drystone.cli.check_view import print_report

    print_report(report, num_worst=worst, is_brief=brief)
    if plot is not None:
        say_made("Drawn", plot)


def _check(measure: Measure, rows: Path | None) -> CheckReport:
    from drystone.cli.output import track
    from drystone.observe.check.accuracy import check_memory, check_speed
    from drystone.observe.check.runs import load_runs
    from drystone.observe.check.tables import MEMORY_TABLE, SPEED_TABLE

    table = rows or (MEMORY_TABLE if measure is Measure.MEMORY else SPEED_TABLE)
    runs = load_runs(table, measure=measure.value)
    judge = check_memory if measure is Measure.MEMORY else check_speed
    return judge(track(runs, f"Estimating {measure.value}"))
