"""`drystone trace`: make a trace, convert one to our own CSV, or look at one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.text import Text

from drystone.cli.columns import counted
from drystone.cli.output import make_console, printable
from drystone.observe.trace_summary import TraceSummary
from drystone.units import format_seconds

if TYPE_CHECKING:
    from drystone.describe.job import JobSpec


trace_group = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)


@trace_group.callback()
def trace() -> None:
    """Make, convert and look at traces of jobs."""


@trace_group.command()
def generate(
    out: Annotated[Path, typer.Option(help="The CSV to write; - for standard output.")] = Path("-"),
    jobs: Annotated[int, typer.Option(help="How many.", min=1)] = 100,
    hours: Annotated[float, typer.Option(help="In which they arrive, on average.", min=0)] = 24.0,
    arrivals: Annotated[
        str, typer.Option(help="poisson, diurnal (by day and night) or bursty (sweeps).")
    ] = "poisson",
    mix: Annotated[
        str, typer.Option(help="Models and shares: llama-3.1-8b@lora:3,gpt2-xl; none: a usual mix.")
    ] = "",
    sizes: Annotated[
        str,
        typer.Option(
            help="lognormal:MEDIAN,SIGMA or a list; 4h: GPU hours on an A100-80G; 50M: tokens."
        ),
    ] = "lognormal:4h,1.5",
    owners: Annotated[int, typer.Option(help="How many teams.", min=1)] = 4,
    deadlines: Annotated[float, typer.Option(help="Share with a deadline.", min=0, max=1)] = 0.0,
    cluster: Annotated[
        Path | None, typer.Option(help="Let owners ask for GPUs of this cluster, for baselines.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same trace.", min=0)] = 0,
) -> None:
    """Write a trace of jobs with models known by name.

    Simulating it needs no measured speeds: Drystone estimates every model on every GPU type.
    """
    from drystone.cli.output import make_console
    from drystone.describe.files.cluster import load_cluster
    from drystone.observe.generate import (
        DEFAULT_MIX,
        TraceSpec,
        generate_trace,
        parse_mix,
        parse_sizes,
    )

    spec = TraceSpec(
        num_jobs=jobs,
        span_hours=hours,
        kinds=parse_mix(mix or DEFAULT_MIX),
        sizes=parse_sizes(sizes),
        arrivals=arrivals,
        num_owners=owners,
        deadline_share=deadlines,
        seed=seed,
    )
    nodes = load_cluster(cluster) if cluster is not None else ()
    _write(out, generate_trace(spec, nodes))
    if str(out) != "-":
        make_console(stderr=True).print(f"{counted(jobs, 'job')}: {out}", style="dim")


@trace_group.command()
def convert(
    file: Annotated[Path, typer.Argument(help="sacct output, or a public trace.")],
    out: Annotated[Path, typer.Option(help="The CSV to write; - for standard output.")] = Path("-"),
    part: Annotated[str, typer.Option(help="Which, where the file holds several.")] = "",
    max_jobs: Annotated[
        int,
        typer.Option("--max-jobs", "--most-jobs", help="Only the first so many; 0: all.", min=0),
    ] = 0,
) -> None:
    """Write a trace in our own format.

    From the output of Slurm's `sacct`, or from a public trace: the header says which it is. Jobs
    of which only a duration is known count GPU seconds.
    """
    from drystone.cli.output import make_console
    from drystone.describe.traces.reading import Reading
    from drystone.describe.traces.trace import read_trace

    found = read_trace(file, Reading(by_duration=True), part=part, most_jobs=max_jobs)
    _write(out, found.jobs)
    console = make_console(stderr=True)
    for note in found.notes:
        console.print(f"{note}.", style="dim", soft_wrap=True)


@trace_group.command()
def show(
    file: Annotated[Path, typer.Argument(help="Any trace.")],
    part: Annotated[str, typer.Option(help="Which, where the file holds several.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Sum up a trace: jobs, time, work, arrivals.

    Work is shown by GPU type and by model, arrivals as a histogram; what was left out is said.

    With --json: {file, format, num_jobs, span_seconds, gpu_hours, gpu_hours_by_type, models,
    owners, jobs_by_num_gpus, num_deadlines, arrivals_per_bin, bin_seconds, notes}.
    """
    from drystone.cli.output import print_json
    from drystone.cli.trace import print_summary
    from drystone.describe.traces.reading import Reading
    from drystone.describe.traces.trace import read_trace
    from drystone.observe.trace_summary import summarise_trace

    summary = summarise_trace(read_trace(file, Reading(by_duration=True), part=part))
    if as_json:
        print_json({"file": str(file)} | summary.to_json())
    else:
        print_summary(file.name, summary)


def _write(out: Path, jobs: tuple[JobSpec, ...]) -> None:
    from drystone.describe.traces.trace import render_trace

    text = render_trace(jobs)
    if str(out) == "-":
        print(text, end="")
    else:
        out.write_text(text, encoding="utf-8")


_BLOCKS: Final = " ▁▂▃▄▅▆▇█"
_HEIGHT: Final = 4
_MAX_NAMES: Final = 8


def print_summary(name: str, summary: TraceSummary) -> None:
    """The facts of a trace and a picture of its arrivals."""
    console = make_console()
    console.print(Text(f"{printable(name)}: {counted(summary.num_jobs, 'job')}", style="bold"))
    facts = [
        ("format", summary.format),
        ("arrive in", format_seconds(summary.span_seconds)),
        ("models", _names(summary.models)),
        ("owners", _names(summary.owners)),
        ("asked for", _asked(summary.jobs_by_num_gpus)),
    ]
    if summary.gpu_hours:
        by_type = ", ".join(
            f"{printable(gpu)} {hours:,.0f}" for gpu, hours in summary.gpu_hours_by_type.items()
        )
        facts.insert(2, ("GPU hours", f"{summary.gpu_hours:,.0f} ({by_type})"))
    if summary.num_deadlines:
        facts.append(("deadlines", counted(summary.num_deadlines, "job")))
    for label, value in facts:
        console.print(Text.assemble((f"  {label:<11}", "cyan"), value), soft_wrap=True)
    for note in summary.notes:
        console.print(Text(f"  {note}.", style="dim"), soft_wrap=True)
    most = max(summary.arrivals_per_bin)
    each = format_seconds(summary.bin_seconds)
    console.print()
    tallest = counted(most, "job")
    console.print(Text(f"Arrivals, a column for {each}; the tallest is {tallest}", "bold"))
    for line in draw_bars(summary.arrivals_per_bin):
        console.print(Text(f"  {line}", style="blue"), soft_wrap=True)
    end = f"{format_seconds(summary.span_seconds)} later"
    gap = " " * max(1, len(summary.arrivals_per_bin) - len("first job") - len(end))
    console.print(Text(f"  first job{gap}{end}", style="dim"))


def draw_bars(values: Sequence[float], height: int = _HEIGHT) -> list[str]:
    """Lines of block characters, the highest value as tall as `height` lines."""
    most = max(values, default=0.0) or 1.0
    eighths = [round(value / most * height * 8) for value in values]
    # Something is never drawn as nothing.
    eighths = [max(one, 1) if value else 0 for one, value in zip(eighths, values, strict=True)]
    return [
        "".join(_BLOCKS[min(max(height - 8 * level, 0), 8)] for height in eighths).rstrip()
        for level in reversed(range(height))
    ]


def _names(counts: Mapping[str, int]) -> str:
    shown = [f"{printable(name)} {count:,}" for name, count in list(counts.items())[:_MAX_NAMES]]
    more = len(counts) - len(shown)
    return ", ".join(shown) + (f", and {more} more" if more > 0 else "")


def _asked(counts: Mapping[int, int]) -> str:
    def words(number: int) -> str:
        return "nothing" if number == 0 else "1 GPU" if number == 1 else f"{number} GPUs"

    return ", ".join(f"{words(number)} {count:,}" for number, count in counts.items())
