"""`drystone simulate`: several policies on one trace and one cluster, side by side."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from drystone.errors import InvalidSpec

if TYPE_CHECKING:
    from drystone.describe.job import JobSpec
    from drystone.describe.trace_cluster import NodeSpec
    from drystone.observe.metrics import RunReport
    from drystone.observe.report import Scenario
    from drystone.run.events import Event
    from drystone.schedule.snapshot import OptionSet

ARENA_DIVIDES_WORK: Final = 5.0


def simulate(
    trace: Annotated[Path, typer.Option(help="Jobs: a CSV of ours, or one of Arena's.")],
    cluster: Annotated[Path, typer.Option(help="Nodes: a YAML file.")],
    speeds: Annotated[
        Path | None,
        typer.Option(
            help="Measured step times: a CSV by model, batch, GPU type and count. "
            "Without it, jobs take as long as the trace says on as many GPUs."
        ),
    ] = None,
    policy: Annotated[str, typer.Option(help="Names, joined by commas.")] = "prices,fifo",
    arena: Annotated[
        bool,
        typer.Option(
            "--arena",
            help="Fill sizes that were not measured, and divide work by 5, as Arena does.",
        ),
    ] = False,
    divide_work: Annotated[float, typer.Option(help="Shorten every job by this.", min=1e-9)] = 1.0,
    most_jobs: Annotated[int, typer.Option(help="Only the first so many; 0: all.", min=0)] = 0,
    round_seconds: Annotated[
        float,
        typer.Option(help="Decide at multiples of this; 0: whenever something happens.", min=0),
    ] = 0.0,
    restart_seconds_per_gpu: Annotated[
        float, typer.Option(help="What a start costs, for each GPU ...", min=0)
    ] = 10.0,
    restart_most_seconds: Annotated[float, typer.Option(help="... and at most.", min=0)] = 40.0,
    horizon_hours: Annotated[
        float, typer.Option(help="Stop then; 0: when the last job ends.", min=0)
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the faults.")] = 0,
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
    save_log: Annotated[
        Path | None, typer.Option(help="Write the events of each policy to FILE.<policy>.jsonl.")
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(help="Write who held which GPUs to FILE.<policy>.json, for Perfetto."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Run scheduling policies on a trace of jobs and compare them.

    All policies get the same jobs, measured speeds, lengths and faults. Jobs that were not done are
    counted as unfinished or refused. The lower bound is each job alone on its fastest option.

    With --json: {trace, cluster, num_gpus, settings, reports: [...]}.
    """
    from drystone.cli.simulate_view import follow, print_reports
    from drystone.observe.report import Scenario, simulate_policy
    from drystone.run.simulator.faults import FaultSpec
    from drystone.schedule.policy import find_policy
    from drystone.schedule.snapshot import StartupCost

    names = [name.strip() for name in policy.split(",") if name.strip()]
    if not names:
        raise InvalidSpec("no policy is named", hint="Try --policy prices,fifo")
    for name in names:
        find_policy(name)
    jobs, nodes, options_of = _load(trace, cluster, speeds, arena, divide_work, most_jobs)
    scenario = Scenario(
        jobs=jobs,
        nodes=nodes,
        options_of=options_of,
        startup=StartupCost(
            seconds_per_gpu=restart_seconds_per_gpu, most_seconds=restart_most_seconds
        ),
        round_seconds=round_seconds,
        horizon_seconds=horizon_hours * 3600 if horizon_hours else math.inf,
        faults=FaultSpec(
            seed=seed,
            node_losses_per_hour=node_losses_per_hour,
            failed_start_share=failed_starts,
            speed_error_share=speed_error,
        ),
        knows_lengths=not unknown_lengths,
    )
    reports = []
    for name in names:
        with follow(name, len(jobs)) as on_time:
            report, log = simulate_policy(scenario, name, on_time=on_time)
        reports.append(report)
        if save_log is not None:
            _save_log(save_log.with_name(f"{save_log.name}.{name}.jsonl"), log)
        if timeline is not None:
            path = timeline.with_name(f"{timeline.name}.{name}.json")
            _save_timeline(path, log, nodes, report.makespan_seconds)
    if as_json:
        _print_json(trace, cluster, scenario, reports)
    else:
        num_gpus = sum(node.num_gpus for node in nodes)
        print_reports(f"{trace.name}: {len(jobs)} jobs on {num_gpus} GPUs", reports)


def _load(
    trace: Path, cluster: Path, speeds: Path | None, arena: bool, divide_work: float, most_jobs: int
) -> tuple[tuple[JobSpec, ...], tuple[NodeSpec, ...], Callable[[JobSpec], OptionSet]]:
    from drystone.describe.trace import load_trace
    from drystone.describe.trace_cluster import load_cluster
    from drystone.describe.trace_speeds import fill_sizes, load_speeds
    from drystone.schedule.measured import duration_options, measured_options

    nodes = load_cluster(cluster)
    divide_work *= ARENA_DIVIDES_WORK if arena else 1.0
    jobs = load_trace(trace, divide_work=divide_work, most_jobs=most_jobs)
    if speeds is None:
        named = next((job for job in jobs if job.model), None)
        if named is not None:
            raise InvalidSpec(
                f"job {named.id} trains {named.model}, and no speeds are given",
                where=str(trace),
                hint="Give --speeds FILE, or a trace of durations (job_id, submit_time_s, "
                "num_gpus, duration_s)",
            )
        return jobs, nodes, duration_options(nodes)
    steps = load_speeds(speeds)
    steps = fill_sizes(steps) if arena else steps
    return jobs, nodes, measured_options(steps, nodes)


def _print_json(trace: Path, cluster: Path, scenario: Scenario, reports: list[RunReport]) -> None:
    from drystone.cli.output import print_json
    from drystone.observe.report import report_table

    horizon = scenario.horizon_seconds
    settings = {
        "round_seconds": scenario.round_seconds,
        "restart_seconds_per_gpu": scenario.startup.seconds_per_gpu,
        "restart_most_seconds": scenario.startup.most_seconds,
        "horizon_seconds": horizon if math.isfinite(horizon) else None,
        "faults": asdict(scenario.faults),
        "policies_know_lengths": scenario.knows_lengths,
    }
    print_json(
        {
            "trace": str(trace),
            "cluster": str(cluster),
            "num_gpus": sum(node.num_gpus for node in scenario.nodes),
            "settings": settings,
            "reports": report_table(reports),
        }
    )


def _save_log(path: Path, log: list[Event]) -> None:
    from drystone.run.events import render_event

    path.write_text("".join(render_event(event) + "\n" for event in log), encoding="utf-8")


def _save_timeline(
    path: Path, log: list[Event], nodes: tuple[NodeSpec, ...], end_seconds: float
) -> None:
    from drystone.observe.timeline import render_timeline

    path.write_text(json.dumps(render_timeline(log, nodes, end_seconds)), encoding="utf-8")
