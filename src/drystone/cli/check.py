"""`drystone check`: how right the estimates are, by measurements that others published."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from drystone.cli.output import Column, make_console, print_table
from drystone.observe.check.accuracy import GROUPS, CheckReport, Errors, dataset_and_kind
from drystone.observe.check.left_out import SourceErrors
from drystone.units import GiB

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
    profile: Annotated[
        Path | None,
        typer.Option(help="What `drystone profile` wrote, for speed as shipped on that GPU type."),
    ] = None,
    worst: Annotated[int, typer.Option(help="How many of the worst rows to show.", min=0)] = 8,
    brief: Annotated[
        bool, typer.Option("--brief", help="Groups only: no datasets, worst or skipped rows.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Judge the estimates by published measurements.

    First by what is known without the source of a row: every constant that was chosen by looking at
    published runs is chosen again without it, and sources count, not rows. Then as shipped, on the
    same rows that constants were chosen by. Every row whose columns suffice is evaluated; the
    others are listed with the reason. A run that was read by two tools counts once as shipped.

    With --json: {measure, rows, evaluated, median_abs_error, p90_abs_error, bias, left_out:
    {GROUP: {num_sources, median_abs_error, p90_abs_error, by_source}}, range: {num_sources,
    inside, above}, by_group, by_dataset, by_dataset_kind, oom: {caught, missed, warned,
    fits_accepted, fits_refused, by_group: {GROUP: [refused, runs]}}, skipped: [{run_id, dataset,
    reason}], results: [{run_id, dataset, group, kind, family, estimated, estimated_unseen,
    measured, error, unseen_error, unseen_range}]}; errors are shares of the measurement.
    """
    from drystone.cli.output import print_json, say_made

    if plot is not None:  # refused now, not after all estimates
        from drystone.observe.plots import load_pyplot, plot_check

        load_pyplot(plot)
    report = _check(measure, rows, profile)
    if plot is not None:
        plot_check(report, plot)
    if as_json:
        print_json(report.to_json())
        return
    from drystone.cli.check import print_report

    print_report(report, num_worst=worst, is_brief=brief)
    if plot is not None:
        say_made("Drawn", plot)


def _check(measure: Measure, rows: Path | None, profile: Path | None) -> CheckReport:
    from drystone.cli.output import track
    from drystone.observe.check.accuracy import MEMORY_TABLE, SPEED_TABLE, check_memory, check_speed
    from drystone.observe.check.runs import load_runs

    table = rows or (MEMORY_TABLE if measure is Measure.MEMORY else SPEED_TABLE)
    runs = load_runs(table, measure=measure.value)
    tracked = track(runs, f"Estimating {measure.value}")
    if measure is Measure.MEMORY:
        return check_memory(tracked)
    if profile is None:
        return check_speed(tracked)
    from drystone.describe.catalogue import find_gpu
    from drystone.estimate.learned.profile import load_profile

    measured = replace(find_gpu(load_profile(profile).device), profile=str(profile))
    return check_speed(tracked, measured=measured)


_ERROR_COLUMNS = (
    Column(header="runs"),
    Column(header="median", style="bold"),
    Column(header="p90"),
    Column(header="bias", rank=1),
)


def print_report(report: CheckReport, *, num_worst: int, is_brief: bool = False) -> None:
    """Groups and out-of-memory counts; unless it is brief datasets, the worst rows, the skipped."""
    console = make_console()
    _print_left_out(report, is_brief=is_brief)
    console.print()
    _print_groups(report)
    if not is_brief:
        console.print()
        _print_datasets(report)
    console.print()
    _print_fits(report)
    if is_brief:
        return
    if num_worst and report.runs:
        console.print()
        _print_worst(report, num_worst)
    if report.skipped:
        console.print()
        _print_skipped(report)


def _print_left_out(report: CheckReport, *, is_brief: bool) -> None:
    """What counts: each source by constants that were chosen without it, sources counting alike."""
    groups = report.left_out_by_group()
    rows = [
        (
            name,
            str(len(found.sources)),
            f"{found.median_abs_error:.1%}",
            f"{found.p90_abs_error:.1%}",
        )
        for name, found in groups.items()
    ]
    columns = (
        Column(header="group", justify="left", style="green"),
        Column(header="sources"),
        Column(header="median", style="bold"),
        Column(header="p90"),
    )
    print_table(
        f"Error of estimated {report.measure} on sources left out of all choosing "
        "(median over sources)",
        columns,
        rows,
    )
    if is_brief:
        return
    make_console().print()
    by_source = [
        (f"{found.source}, {name}", *_error_cells(found))
        for name in GROUPS
        if name in groups
        for found in groups[name].sources
    ]
    source = Column(header="source left out", justify="left", style="green")
    print_table("Each source by what is known without it", (source, *_ERROR_COLUMNS), by_source)


def _print_groups(report: CheckReport) -> None:
    runs = report.first_readings
    rows = [(name, *_error_cells(errors)) for name, errors in report.errors_by_group().items()]
    rows.append(("all", *_error_cells(Errors.of(runs))))
    columns = (Column(header="group", justify="left", style="green"), *_ERROR_COLUMNS)
    title = (
        f"Error of estimated {report.measure} as shipped, on rows that constants were chosen by: "
        f"{len(runs)} runs of {report.num_rows} rows"
    )
    print_table(title, columns, rows)


def _print_datasets(report: CheckReport) -> None:
    errors = report.errors_by(dataset_and_kind)
    columns = (Column(header="dataset", justify="left", style="green"), *_ERROR_COLUMNS)
    print_table("By dataset", columns, [(name, *_error_cells(one)) for name, one in errors.items()])


def _print_fits(report: CheckReport) -> None:
    counts, console = report.fit_counts, make_console()
    cover = report.range_cover()
    if cover.num_sources:
        console.print(
            Text.assemble(
                (f"{cover.inside:.0%}", "bold"),
                " of the readings of a left-out source lie inside the stated range (four of five "
                f"should), {cover.above:.0%} above it",
            )
        )
    failed, fitted = counts.caught + counts.missed, counts.fits_accepted + counts.fits_refused
    if failed:
        console.print(
            Text.assemble(
                (f"{counts.caught} of {failed}", "bold"),
                f" runs that ran out of memory are refused ({counts.caught / failed:.1%}); "
                f"of {counts.warned} the upper end of the range does not fit",
            )
        )
    if fitted:
        console.print(
            Text.assemble(
                (f"{counts.fits_accepted} of {fitted}", "bold"),
                f" runs that fitted are accepted ({counts.fits_accepted / fitted:.1%}); refused: "
                + ", ".join(
                    f"{refused} of {number} {group}"
                    for group, (refused, number) in counts.by_group.items()
                ),
            )
        )


def _print_worst(report: CheckReport, number: int) -> None:
    runs = sorted(report.runs, key=lambda run: -abs(run.error))[:number]
    columns = (
        Column(header="run", justify="left"),
        Column(header="group", justify="left", rank=1),
        Column(header="reading", justify="left", rank=2),
        Column(header="estimated"),
        Column(header="measured"),
        Column(header="error", style="bold red"),
    )
    rows = [
        (
            run.run_id,
            run.group,
            run.kind or "-",
            _value(report, run.estimated),
            _value(report, run.measured),
            f"{run.error:+.0%}",
        )
        for run in runs
    ]
    print_table(f"The {len(rows)} worst rows", columns, rows)


def _print_skipped(report: CheckReport) -> None:
    reasons = Counter(f"{run.dataset}: {run.reason}" for run in report.skipped)
    console = make_console(stderr=True)
    console.print(f"{len(report.skipped)} rows skipped; all of them with --json:", style="dim")
    for reason, number in reasons.most_common(12):
        console.print(Text(f"  {number:4d}  {reason[:120]}", style="dim"), soft_wrap=True)
    if len(reasons) > 12:
        console.print(f"        and {len(reasons) - 12} more reasons", style="dim")


def _error_cells(errors: Errors | SourceErrors) -> tuple[str, ...]:
    return (
        str(errors.evaluated),
        f"{errors.median_abs_error:.1%}",
        f"{errors.p90_abs_error:.1%}",
        f"{errors.bias:+.1%}",
    )


def _value(report: CheckReport, value: float) -> str:
    return f"{value / GiB:.2f} GiB" if report.measure == "memory" else f"{value:,.0f} tok/s"
