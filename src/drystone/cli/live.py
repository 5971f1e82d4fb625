"""What the commands of the running system share: the connection, and jobs as rows of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from drystone.cli.columns import Column, fit_columns, money, output_width, printable

if TYPE_CHECKING:
    from drystone.service.client import Client


Table = Mapping[str, Any]

_STATE_STYLES: Final = {
    "training": "green",
    "running": "green",
    "done": "bold blue",
    "failed": "bold red",
    "refused": "red",
    "cancelled": "dim",
    "paused": "magenta",
}


def state_style(word: str) -> str:
    """The colour of a state: what runs, what is well, what is not; yellow is what waits."""
    return _STATE_STYLES.get(word, "yellow")


JOB_COLUMNS: Final = (
    Column(header="id", justify="right", style="bold green"),
    Column(header="name", rank=1, justify="left"),
    Column(header="owner", rank=3, justify="left"),
    Column(header="state", justify="left", style_of=state_style),
    Column(header="GPUs", rank=1, justify="left"),
    Column(header="plan", rank=5, justify="left", style="dim"),
    Column(header="progress", rank=1, style="yellow"),
    Column(header="loss", rank=4),
    Column(header="ends", rank=2),
    Column(header="cost", rank=2),
    Column(header="reason", rank=3, justify="left", style="dim"),
)
_MAX_REASON: Final = 60
_MAX_DRAWN: Final = 100


def state_word(job: Table) -> str:
    """Its state, or more closely what a job that waits or runs does just now."""
    state, phase = str(job["state"]), str(job["phase"])
    return state if phase == "training" else phase


def job_row(job: Table, now: float) -> tuple[str, ...]:
    """One job as text, in the order of `JOB_COLUMNS`."""
    return (
        job["id"],
        job["name"],
        job["owner"] or "-",
        state_word(job),
        format_gpus(job["gpus"]) or "-",
        job["plan"] or "-",
        f"{job['step']}/{job['num_steps']} {job['progress']:.0%}",
        "-" if job["loss"] is None else f"{job['loss']:.3f}",
        format_end(job, now),
        money(job["dollars"]),
        shorten(job["reason"]),
    )


def print_jobs(title: str, jobs: Sequence[Table], now: float) -> None:
    """A table of jobs; long ones as plain text, since drawing a row takes a millisecond."""
    rows = [job_row(job, now) for job in jobs]
    if len(rows) <= _MAX_DRAWN:
        from drystone.cli.output import print_table

        print_table(title, JOB_COLUMNS, rows)
        return
    kept = fit_columns(JOB_COLUMNS, rows, width=output_width())
    lines = [tuple(JOB_COLUMNS[index].header for index in kept)]
    lines += [tuple(printable(row[index]) for index in kept) for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    is_left = [JOB_COLUMNS[index].justify == "left" for index in kept]
    print(title)
    for line in lines:
        cells = (
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(line, widths, is_left, strict=True)
        )
        print("  ".join(cells).rstrip())


def format_end(job: Table, now: float) -> str:
    """How long until it is done, or how long it took in all."""
    from drystone.units import format_seconds

    if job["end_seconds"] is not None:
        return f"took {format_seconds(max(job['end_seconds'] - job['submit_seconds'], 0.0))}"
    if job["eta_seconds"] is None:
        return "-"
    left = f"in {format_seconds(max(job['eta_seconds'] - now, 0.0))}"
    is_late = job["deadline_seconds"] is not None and job["eta_seconds"] > job["deadline_seconds"]
    return f"{left} (late)" if is_late else left


def format_gpus(gpus: Mapping[str, int]) -> str:
    """`2 A100-80GB-SXM + 1 T4-16GB`."""
    return " + ".join(f"{count} {gpu}" for gpu, count in gpus.items())


def shorten(text: str) -> str:
    """The first line, and not all of it if it is long."""
    line = text.splitlines()[0] if text else ""
    return line if len(line) <= _MAX_REASON else line[: _MAX_REASON - 3] + "..."


_COMPLETION_SECONDS: Final = 1.0  # nobody waits longer for a Tab


def complete_jobs(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Jobs that are not over yet, for a shell to offer; none where no system answers."""
    states = ["running", "queued", "paused"]
    jobs = _asked_quietly(ctx, "/v1/jobs", "jobs", state=states)
    return [
        (job["id"], f"{job['name']}, {job['state']}")
        for job in jobs
        if job["id"].startswith(incomplete)
    ]


def complete_nodes(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Nodes, for a shell to offer; none where no system answers."""
    nodes = _asked_quietly(ctx, "/v1/cluster", "nodes")
    return [
        (node["id"], f"{node['num_gpus']} {node['gpu']}")
        for node in nodes
        if node["id"].startswith(incomplete)
    ]


def _asked_quietly(ctx: typer.Context, path: str, key: str, **query: Any) -> list[Table]:
    """What the running system says, or nothing: completion must never disturb a prompt."""
    from drystone.errors import DrystoneError
    from drystone.service.client import Client

    folder = ctx.params.get("folder")
    try:
        with Client(
            Path(folder).expanduser().absolute() if folder else None,
            timeout_seconds=_COMPLETION_SECONDS,
        ) as client:
            found: list[Table] = client.get(path, **query)[key]
            return found
    except DrystoneError:
        return []


Folder = Annotated[
    Path | None, typer.Option(help="Of the running system (DRYSTONE_FOLDER, else ~/.drystone).")
]
JobIds = Annotated[
    list[str],
    typer.Argument(
        help="Numbers or names of jobs.", metavar="JOB...", autocompletion=complete_jobs
    ),
]
JobId = Annotated[
    str,
    typer.Argument(help="Number or name of a job.", metavar="JOB", autocompletion=complete_jobs),
]


@contextmanager
def connected(folder: Path | None) -> Iterator[Client]:
    """A connection to the running system."""
    from drystone.service.client import Client

    with Client(folder.expanduser().absolute() if folder else None) as client:
        yield client


def quoted(text: str) -> str:
    """A name as part of an address."""
    from urllib.parse import quote

    return quote(text, safe="")


def watch(show: Callable[[], None], *, every_seconds: float) -> None:
    """Show again and again; Ctrl-C ends the watching, never the jobs."""
    import time

    from drystone.cli.output import make_console

    try:
        while True:
            make_console().clear()
            show()
            time.sleep(every_seconds)
    except KeyboardInterrupt:
        make_console(stderr=True).print("Left. The jobs go on.", style="dim")


_OPTION_COLUMNS: Final = (
    Column(header="GPUs", justify="left", style="bold green"),
    Column(header="samples/s", style="cyan"),
    Column(header="time"),
    Column(header="cost", style="yellow"),
    Column(header="$/h", rank=1),
    Column(header="now", rank=1, justify="left"),
    Column(header="speed is", rank=2, justify="left", style="dim"),
)


def print_options(title: str, options: Sequence[Mapping[str, Any]]) -> None:
    """What a job can choose from, a row each."""
    from drystone.cli.output import print_table

    print_table(title, _OPTION_COLUMNS, [_option_row(option) for option in options])


def _option_row(option: Mapping[str, Any]) -> tuple[str, ...]:
    from drystone.units import format_seconds

    dollars, per_hour = option["dollars"], option["dollars_per_hour"]
    return (
        format_gpus(option["gpus"]),
        f"{option['samples_per_second']:.3g}",
        format_seconds(option["seconds"]),
        "-" if dollars is None else money(dollars),
        "-" if per_hour is None else f"{per_hour:.2f}",
        option.get("where") or ("free" if option["is_free"] else "taken"),
        "measured" if option["is_measured"] else "estimated",
    )
