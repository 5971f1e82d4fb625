"""`drystone simulate`: several policies on one trace and one cluster, side by side."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.text import Text

from drystone.cli.columns import counted
from drystone.cli.options import AsJson, complete_policies, takes_groups
from drystone.cli.output import HeadedTable, make_console, printable
from drystone.cli.simulate_setup import Request, Setup, TraceFile, TraceOptions, set_up
from drystone.errors import InvalidSpec
from drystone.observe.metrics import RunReport
from drystone.observe.reports.page import report_lines

if TYPE_CHECKING:
    from drystone.observe.simulation import PolicyRun


@takes_groups
def simulate(
    *,
    trace: TraceFile,
    cluster: Annotated[
        Path | None, typer.Option(help="Nodes there are: a YAML file, or Alibaba's list.")
    ] = None,
    market: Annotated[Path | None, typer.Option(help="Nodes to rent: a YAML file.")] = None,
    budget: Annotated[
        float, typer.Option(help="Dollars an hour, on average; 0: no limit.", min=0)
    ] = 0.0,
    hard_cap: Annotated[
        float, typer.Option(help="Dollars an hour, never to be exceeded; 0: none.", min=0)
    ] = 0.0,
    policy: Annotated[
        str,
        typer.Option(
            help="Names, joined by commas: prices, budget, cells, serverless, sia, gavel, pollux, "
            "elasticflow, fifo, shortest, least-attained, or a variant (docs/simulate.md).",
            autocompletion=complete_policies,
        ),
    ] = "prices,fifo",
    options: TraceOptions,
    round_seconds: Annotated[
        float,
        typer.Option(help="Decide at multiples of this; 0: whenever something happens.", min=0),
    ] = 0.0,
    horizon_hours: Annotated[
        float, typer.Option(help="Stop then; 0: when the last job ends.", min=0)
    ] = 0.0,
    node_losses_per_hour: Annotated[float, typer.Option(help="In the whole cluster.", min=0)] = 0.0,
    failed_starts: Annotated[
        float, typer.Option(help="Share of starts that fail.", min=0, max=0.99)
    ] = 0.0,
    speed_error: Annotated[
        float,
        typer.Option(
            help="True speeds differ from what policies see by up to this.", min=0, max=0.9
        ),
    ] = 0.0,
    unknown_lengths: Annotated[
        bool, typer.Option("--unknown-lengths", help="Policies do not see how long jobs are.")
    ] = False,
    bound: Annotated[
        bool,
        typer.Option(
            "--bound",
            help="Also work out a lower bound that knows that jobs share the GPUs: some seconds, "
            "minutes for a thousand jobs.",
        ),
    ] = False,
    save_log: Annotated[
        Path | None, typer.Option(help="Write the events of each policy to FILE.<policy>.jsonl.")
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            help="Write who held which GPUs to this JSON, for Perfetto; several policies: "
            "FILE.<policy>.json."
        ),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write one self-contained HTML page with plots.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run scheduling policies on a trace of jobs and compare them.

    All policies get the same jobs, speeds, lengths and faults. Jobs that were not done are counted
    as unfinished or refused. The lower bound is each job alone on its fastest option; with --bound
    there is a second one, which knows that jobs share the GPUs.

    With --json: {trace, format, cluster, market, num_jobs, num_gpus, settings, notes,
    information: {policy: ...}, reports: [...]}.
    """
    from drystone.cli.output import check_writable
    from drystone.run.simulate.faults import FaultSpec

    names = find_policies(policy)
    for path in (report, save_log, timeline):
        if path is not None:
            check_writable(path)
    faults = FaultSpec(
        seed=options.seed,
        node_losses_per_hour=node_losses_per_hour,
        failed_start_share=failed_starts,
        speed_error_share=speed_error,
    )
    request = options.request(
        trace=trace,
        cluster=cluster,
        market=market,
        budget_dollars_per_hour=budget or math.inf,
        hard_cap_dollars_per_hour=hard_cap or math.inf,
        round_seconds=round_seconds,
        horizon_hours=horizon_hours,
        faults=faults,
        knows_lengths=not unknown_lengths,
    )
    setup = set_up(request)
    runs = _run(setup, names, save_log=save_log, timeline=timeline)
    if bound:
        runs = _with_bound(setup, runs)
    if report is not None:
        _save_report(report, request, setup, runs)
    if as_json:
        _print_json(request, setup, runs)
    else:
        _print_table(request, setup, runs)


def find_policies(text: str) -> list[str]:
    """The names between commas; each must be one of a policy."""
    from drystone.observe.opponents import HINDSIGHT
    from drystone.schedule.decision import find_policy

    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise InvalidSpec("no policy is named", hint="Try --policy prices,fifo")
    for name in names:
        if name not in HINDSIGHT:
            find_policy(name)
    return names


def _run(
    setup: Setup, names: list[str], *, save_log: Path | None, timeline: Path | None
) -> list[PolicyRun]:
    from drystone.observe.opponents import HINDSIGHT, run_in_hindsight
    from drystone.observe.simulation import alone_seconds, run_policy

    alone = alone_seconds(setup.scenario)
    runs = []
    for name in names:
        with follow(name, len(setup.scenario.jobs)) as on_time:
            run = (
                run_in_hindsight(setup.scenario, name)
                if name in HINDSIGHT
                else run_policy(setup.scenario, name, on_time=on_time, alone=alone)
            )
        runs.append(run)
        if save_log is not None:
            _save_log(save_log.with_name(f"{save_log.name}.{name}.jsonl"), run)
        if timeline is not None:
            is_only = len(names) == 1 and timeline.suffix == ".json"
            stem = timeline.name.removesuffix(".json")
            _save_timeline(
                timeline if is_only else timeline.with_name(f"{stem}.{name}.json"), setup, run
            )
    return runs


def _with_bound(setup: Setup, runs: list[PolicyRun]) -> list[PolicyRun]:
    from drystone.observe.lower_bound import with_shared_bound

    if setup.scenario.offers or setup.scenario.faults.speed_error_share:
        raise InvalidSpec(
            "there is no bound for GPUs that can be rented, or speeds that nobody sees",
            hint="Leave out --bound, or --market and --speed-error.",
        )
    return with_shared_bound(setup.scenario, runs)


def _title(request: Request, setup: Setup) -> str:
    scenario = setup.scenario
    num_gpus = sum(node.num_gpus for node in scenario.nodes)
    places = [f"{num_gpus} GPUs"] if num_gpus else []
    places += ["rented GPUs"] if scenario.offers else []
    limit = scenario.budget_dollars_per_hour
    money = f", ${limit:,.2f} an hour" if math.isfinite(limit) else ""
    part = f" ({request.part})" if request.part else ""
    places_text = " and ".join(places)
    jobs = counted(len(scenario.jobs), "job")
    return f"{request.trace.name}{part}: {jobs} on {places_text}{money}"


def _print_table(request: Request, setup: Setup, runs: list[PolicyRun]) -> None:
    print_reports(_title(request, setup), [run.report for run in runs], _remarks(setup, runs))


def _remarks(setup: Setup, runs: list[PolicyRun]) -> list[str]:
    from drystone.observe.simulation import statements

    told = statements([run.report.policy for run in runs], setup.given)
    return [*(f"{line}." for line in told), *(f"{note}." for note in setup.notes)]


def _print_json(request: Request, setup: Setup, runs: list[PolicyRun]) -> None:
    from drystone.cli.output import print_json
    from drystone.observe.simulation import policy_information, report_table

    scenario = setup.scenario
    settings = {
        "round_seconds": scenario.round_seconds,
        "restart_seconds_per_gpu": scenario.startup.seconds_per_gpu,
        "restart_most_seconds": scenario.startup.most_seconds,
        "horizon_seconds": _finite(scenario.horizon_seconds),
        "budget_dollars_per_hour": _finite(scenario.budget_dollars_per_hour),
        "hard_cap_dollars_per_hour": _finite(scenario.hard_cap_dollars_per_hour),
        "faults": asdict(scenario.faults),
        "policies_know_lengths": scenario.knows_lengths,
        "scaling": asdict(request.scaling),
    }
    print_json(
        {
            "trace": str(request.trace),
            "format": setup.format,
            "cluster": str(request.cluster) if request.cluster else None,
            "market": str(request.market) if request.market else None,
            "num_jobs": len(scenario.jobs),
            "num_gpus": sum(node.num_gpus for node in scenario.nodes),
            "settings": settings,
            "notes": list(setup.notes),
            "information": {
                run.report.policy: policy_information(run.report.policy, setup.given)
                for run in runs
            },
            "reports": report_table([run.report for run in runs]),
        }
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _save_report(path: Path, request: Request, setup: Setup, runs: list[PolicyRun]) -> None:
    from drystone.cli.output import say_made
    from drystone.observe.reports.page import render_page

    text = render_page(
        setup.scenario, runs, title=_title(request, setup), remarks=_remarks(setup, runs)
    )
    path.write_text(text, encoding="utf-8")
    say_made("Written", path)


def _save_log(path: Path, run: PolicyRun) -> None:
    from drystone.run.events import render_event

    path.write_text("".join(render_event(event) + "\n" for event in run.log), encoding="utf-8")


def _save_timeline(path: Path, setup: Setup, run: PolicyRun) -> None:
    from drystone.observe.reports.series import render_timeline

    found = render_timeline(run.log, setup.scenario.nodes, run.end_seconds)
    path.write_text(json.dumps(found), encoding="utf-8")


_LABEL_WIDTH: Final = 22


@contextmanager
def follow(policy: str, num_jobs: int) -> Iterator[Callable[[float, int], None] | None]:
    """A bar of jobs settled, where a person looks; it goes away at the end."""
    console = make_console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("jobs, day {task.fields[day]:.1f}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(policy, total=num_jobs, day=0.0)
        yield lambda now, left: progress.update(task, completed=num_jobs - left, day=now / 86400)


def print_reports(title: str, reports: Sequence[RunReport], remarks: Sequence[str] = ()) -> None:
    """The policies side by side, a measure a line; as many tables as the width needs."""
    console = make_console()
    width = max(12, *(len(report.policy) + 2 for report in reports))
    per_table = max(1, (console.width - _LABEL_WIDTH) // width)
    for first in range(0, len(reports), per_table):
        chosen = range(first, min(first + per_table, len(reports)))
        table = HeadedTable(printable(title) if first == 0 else "")
        table.add_column("", style="cyan", no_wrap=True)
        for index in chosen:
            table.add_column(reports[index].policy, justify="right", no_wrap=True)
        for line in report_lines(reports):
            best = line.best()
            cells = [
                Text(line.texts[index], style="bold green" if index in best else "")
                for index in chosen
            ]
            table.add_row(line.label, *cells)
        console.print(table)
    if remarks:
        console.print()
    for remark in remarks:
        console.print(Text(printable(remark), style="dim"), soft_wrap=True)
