"""How a check looks in a terminal: errors by group and dataset, what was caught and skipped."""

from __future__ import annotations

from collections import Counter

from rich.text import Text

from drystone.cli.output import Column, make_console, print_table
from drystone.observe.check.accuracy import CheckReport, Errors, dataset_and_kind
from drystone.units import GiB

_ERROR_COLUMNS = (
    Column(header="runs"),
    Column(header="median", style="bold"),
    Column(header="p90"),
    Column(header="bias", rank=1),
)


def print_report(report: CheckReport, *, num_worst: int, is_brief: bool = False) -> None:
    """Groups and out-of-memory counts; unless it is brief datasets, the worst rows, the skipped."""
    console = make_console()
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


def _print_groups(report: CheckReport) -> None:
    runs = report.first_readings
    rows = [(name, *_error_cells(one)) for name, one in report.errors_by_group().items()]
    rows.append(("all", *_error_cells(Errors.of(runs))))
    columns = (Column(header="group", justify="left", style="green"), *_ERROR_COLUMNS)
    title = (
        f"Absolute error of estimated {report.measure}: {len(runs)} runs of {report.num_rows} rows"
    )
    print_table(title, columns, rows)


def _print_datasets(report: CheckReport) -> None:
    errors = report.errors_by(dataset_and_kind)
    columns = (Column(header="dataset", justify="left", style="green"), *_ERROR_COLUMNS)
    print_table("By dataset", columns, [(name, *_error_cells(one)) for name, one in errors.items()])


def _print_fits(report: CheckReport) -> None:
    counts, console = report.fit_counts, make_console()
    failed, fitted = counts.caught + counts.missed, counts.fits_accepted + counts.fits_refused
    if failed:
        console.print(
            Text.assemble(
                (f"{counts.caught} of {failed}", "bold"),
                f" runs that ran out of memory are caught ({counts.caught / failed:.1%})",
            )
        )
    if fitted:
        console.print(
            Text.assemble(
                (f"{counts.fits_accepted} of {fitted}", "bold"),
                f" runs that fitted are accepted ({counts.fits_accepted / fitted:.1%})",
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
        (run.run_id, run.group, run.kind or "-", _value(report, run.estimated),
         _value(report, run.measured), f"{run.error:+.0%}")
        for run in runs
    ]  # fmt: skip
    print_table(f"The {len(rows)} worst rows", columns, rows)


def _print_skipped(report: CheckReport) -> None:
    reasons = Counter(f"{one.dataset}: {one.reason}" for one in report.skipped)
    console = make_console(stderr=True)
    console.print(f"{len(report.skipped)} rows skipped; all of them with --json:", style="dim")
    for reason, number in reasons.most_common(12):
        console.print(Text(f"  {number:4d}  {reason[:120]}", style="dim"), soft_wrap=True)
    if len(reasons) > 12:
        console.print(f"        and {len(reasons) - 12} more reasons", style="dim")


def _error_cells(errors: Errors) -> tuple[str, ...]:
    return (
        str(errors.evaluated),
        f"{errors.median_abs_error:.1%}",
        f"{errors.p90_abs_error:.1%}",
        f"{errors.bias:+.1%}",
    )


def _value(report: CheckReport, value: float) -> str:
    return f"{value / GiB:.2f} GiB" if report.measure == "memory" else f"{value:,.0f} tok/s"
