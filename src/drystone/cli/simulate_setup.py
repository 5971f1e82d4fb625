"""From files and words to a scenario: jobs, nodes, offers and what each job could run on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import numpy as np
import typer

from drystone.cli.options import Profiles
from drystone.cli.request import read_profiles
from drystone.describe.cluster import NodeSpec
from drystone.describe.files.cluster import load_cluster
from drystone.describe.traces.reading import Reading
from drystone.describe.traces.requests import match_requests
from drystone.describe.traces.speeds import fill_batches, fill_sizes, load_speeds
from drystone.describe.traces.trace import Trace, read_trace
from drystone.errors import InvalidSpec
from drystone.observe.simulation import Information, Scenario, reachable_nodes
from drystone.run.simulate.faults import FaultSpec
from drystone.schedule.options import (
    Scaling,
    duration_options,
    estimated_options,
    measured_options,
    option_key,
    types_of,
    types_that_do,
)
from drystone.schedule.snapshot import StartupCost

if TYPE_CHECKING:
    from drystone.describe.job import JobSpec
    from drystone.describe.market import Offer
    from drystone.describe.option import OptionSet

ARENA_DIVIDES_WORK: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the command line asked for."""

    trace: Path
    cluster: Path | None = None
    market: Path | None = None
    speeds: Path | None = None
    part: str = ""
    arena: bool = False
    divide_work: float = 1.0
    most_jobs: int = 0
    scaling: Scaling = field(default_factory=Scaling)
    budget_dollars_per_hour: float = math.inf
    hard_cap_dollars_per_hour: float = math.inf
    startup: StartupCost = field(default_factory=StartupCost)
    round_seconds: float = 0.0
    horizon_hours: float = 0.0
    faults: FaultSpec = field(default_factory=FaultSpec)
    knows_lengths: bool = True


TraceFile = Annotated[
    Path, typer.Option(help="Jobs: our CSV, sacct output, or a public trace (see the docs).")
]


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """How a trace is read, and what a start costs, as `simulate` and `frontier` take it."""

    speeds: Annotated[
        Path | None,
        typer.Option(
            help="Measured step times: a CSV by model, batch, GPU type and count. Without it, "
            "models known by name are estimated, and other jobs take as long as the trace says."
        ),
    ] = None
    profile: Profiles = None
    part: Annotated[str, typer.Option(help="Which trace, where the file holds several.")] = ""
    arena: Annotated[
        bool,
        typer.Option(
            "--arena",
            help="Fill sizes that were not measured, and divide work by 5, as Arena does.",
        ),
    ] = False
    divide_work: Annotated[float, typer.Option(help="Shorten every job by this.", min=1e-9)] = 1.0
    max_jobs: Annotated[
        int,
        typer.Option("--max-jobs", "--most-jobs", help="Only the first so many; 0: all.", min=0),
    ] = 0
    scaling: Annotated[
        str, typer.Option(help="Of jobs with durations: rigid, linear, or amdahl:0.05.")
    ] = "rigid"
    type_speeds: Annotated[
        str, typer.Option(help="Of jobs with durations: types are `equal`, or differ by `peak`.")
    ] = "equal"
    restart_seconds_per_gpu: Annotated[
        float, typer.Option(help="What a start costs, for each GPU ...", min=0)
    ] = 10.0
    restart_max_seconds: Annotated[
        float,
        typer.Option(
            "--restart-max-seconds", "--restart-most-seconds", help="... and at most.", min=0
        ),
    ] = 40.0
    seed: Annotated[int, typer.Option(help="Of the faults.")] = 0

    def request(self, **more: Any) -> Request:
        """What the command line asked for, with what only this verb takes."""
        if self.type_speeds not in ("equal", "peak"):
            raise InvalidSpec(f"--type-speeds is {self.type_speeds!r}", hint="Write equal or peak")
        read_profiles(self.profile)
        return Request(
            speeds=self.speeds,
            part=self.part,
            arena=self.arena,
            divide_work=self.divide_work,
            most_jobs=self.max_jobs,
            scaling=Scaling.parse(self.scaling, by_peak=self.type_speeds == "peak"),
            startup=StartupCost(
                seconds_per_gpu=self.restart_seconds_per_gpu,
                most_seconds=self.restart_max_seconds,
            ),
            **more,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A scenario, and what has to be said about it."""

    scenario: Scenario
    on_nodes: Callable[[tuple[NodeSpec, ...]], Scenario]  # the same jobs, on these nodes alone
    format: str
    given: Information
    notes: tuple[str, ...]


def set_up(request: Request) -> Setup:
    """Load the files, and plan each kind of job once, with a bar of progress."""
    nodes, offers = _load_gpus(request)
    trace = read_trace(
        request.trace,
        Reading(
            divide_work=request.divide_work * (ARENA_DIVIDES_WORK if request.arena else 1.0),
            by_duration=request.speeds is None,
            is_elastic=request.scaling.is_elastic,
        ),
        part=request.part,
        most_jobs=request.most_jobs,
    )
    reachable = reachable_nodes(nodes, offers)
    options_of, words, notes = _options(request, trace, reachable)
    _plan_kinds(trace.jobs, options_of)
    runs_on = types_that_do(options_of, types_of(reachable))
    jobs, request_notes = match_requests(trace.jobs, reachable, runs_on)
    scenario = Scenario(
        jobs=jobs,
        nodes=nodes,
        options_of=options_of,
        startup=request.startup,
        round_seconds=request.round_seconds,
        horizon_seconds=request.horizon_hours * 3600 if request.horizon_hours else math.inf,
        faults=request.faults,
        knows_lengths=request.knows_lengths,
        offers=offers,
        budget_dollars_per_hour=request.budget_dollars_per_hour,
        hard_cap_dollars_per_hour=request.hard_cap_dollars_per_hour,
    )

    def on_nodes(others: tuple[NodeSpec, ...]) -> Scenario:
        theirs = _options(request, trace, others)[0]
        runs_on = types_that_do(theirs, types_of(others))
        return replace(
            scenario,
            jobs=match_requests(trace.jobs, others, runs_on)[0],
            nodes=others,
            options_of=theirs,
            offers=(),
            budget_dollars_per_hour=math.inf,
        )

    given = Information(
        speeds=words,
        speed_error_share=request.faults.speed_error_share,
        knows_lengths=request.knows_lengths,
    )
    return Setup(
        scenario=scenario,
        on_nodes=on_nodes,
        format=trace.format,
        given=given,
        notes=(*trace.notes, *request_notes, *notes, *_type_notes(scenario, reachable)),
    )


def _above_cap(scenario: Scenario, gpu_types: tuple[str, ...]) -> list[str]:
    """A note where jobs would wait for ever, since all their options are above the hard cap."""
    cap = scenario.hard_cap_dollars_per_hour
    if math.isinf(cap):
        return []
    from drystone.schedule.renting import options_above_cap

    own = np.array(
        [sum(node.num_gpus for node in scenario.nodes if node.gpu == gpu) for gpu in gpu_types],
        dtype=np.int64,
    )
    reasons: dict[str, list[str]] = {}
    for job in scenario.jobs:
        options = scenario.options_of(job)
        num_gpus = options.counts.sum(axis=1)
        within = options.only((num_gpus >= job.min_gpus) & (num_gpus <= job.max_gpus))
        _, reason = options_above_cap(within, own, scenario.offers, gpu_types, cap)
        if reason:
            reasons.setdefault(reason, []).append(job.id)
    return [
        f"{len(jobs)} of {len(scenario.jobs)} jobs (the first: {jobs[0]}) cannot start at the "
        f"listed prices: {reason}"
        for reason, jobs in reasons.items()
    ]


def _type_notes(scenario: Scenario, reachable: Sequence[NodeSpec]) -> list[str]:
    return [*_own_types(reachable), *_above_cap(scenario, types_of(reachable))]


def _own_types(nodes: Sequence[NodeSpec]) -> list[str]:
    """A note for each type of the user's own that is here or could be rented."""
    from drystone.describe.catalogue import own_gpus

    here = {node.gpu for node in nodes}
    return [
        f"{gpu.name} is a GPU type of your own: {gpu.source}"
        for gpu, _, _ in own_gpus()
        if gpu.name in here
    ]


def _load_gpus(request: Request) -> tuple[tuple[NodeSpec, ...], tuple[Offer, ...]]:
    if request.cluster is None and request.market is None:
        raise InvalidSpec(
            "there are no GPUs", hint="Give --cluster FILE, --market FILE to rent from, or both"
        )
    if math.isfinite(request.budget_dollars_per_hour) and request.market is None:
        raise InvalidSpec("a budget needs something to buy", hint="Give --market FILE")
    nodes = load_cluster(request.cluster) if request.cluster is not None else ()
    if request.market is None:
        return nodes, ()
    from drystone.describe.files.market import load_market

    return nodes, load_market(request.market)


def _options(
    request: Request, trace: Trace, nodes: tuple[NodeSpec, ...]
) -> tuple[Callable[[JobSpec], OptionSet], str, list[str]]:
    """A function from a job to its options, where its speeds are from, and what was assumed."""
    notes: list[str] = []
    words: list[str] = []
    by_model: Callable[[JobSpec], OptionSet] | None = None
    by_length = duration_options(nodes, request.scaling) if trace.counts_gpu_seconds else None
    if request.speeds is not None:
        steps = load_speeds(request.speeds, source=trace.source)
        if request.arena:
            steps = fill_sizes(steps)
        # Pollux and Sia tune batches; what they measured is a grid of them.
        tunes = trace.source in ("pollux", "sia")
        steps, num_filled = fill_batches(steps, trace.jobs, at_every_size=tunes)
        if num_filled:
            notes.append(f"{num_filled} kinds of work take the speed of the nearest measured batch")
        by_model = measured_options(steps, nodes)
        words.append(f"measured ({request.speeds.name})")
    elif any(job.model for job in trace.jobs):
        by_model = estimated_options(nodes)
        words.append("estimated by Drystone")
    if by_length is not None:
        notes.append(request.scaling.statement().rstrip("."))
        words.append("as the trace's durations")

    def options_of(job: JobSpec) -> OptionSet:
        found = by_model if job.model else by_length
        assert found is not None, job.id
        return found(job)

    return options_of, " and ".join(words), notes


def _plan_kinds(jobs: tuple[JobSpec, ...], options_of: Callable[[JobSpec], OptionSet]) -> None:
    """Meet each kind of job once, so that planning is over before time starts to run."""
    from drystone.cli.output import track

    kinds = {option_key(job): job for job in jobs if job.model}
    for job in track(list(kinds.values()), "Planning each kind of job"):
        options_of(job)
