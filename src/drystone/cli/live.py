"""What the commands of the running system share: the connection, and jobs as rows of a table."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from drystone.cli.job_table import (
    JOB_COLUMNS,
    Table,
    format_end,
    format_gpus,
    job_row,
    print_jobs,
    shorten,
)

if TYPE_CHECKING:
    from drystone.service.client import Client

__all__ = [
    "JOB_COLUMNS",
    "Folder",
    "JobId",
    "JobIds",
    "Table",
    "change_jobs",
    "connected",
    "format_end",
    "format_gpus",
    "job_row",
    "print_jobs",
    "quoted",
    "say_emulated",
    "shorten",
    "watch",
]
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
    typer.Argument(help="Numbers of jobs.", metavar="JOB...", autocompletion=complete_jobs),
]
JobId = Annotated[
    str, typer.Argument(help="Number of a job.", metavar="JOB", autocompletion=complete_jobs)
]


@contextmanager
def connected(folder: Path | None) -> Iterator[Client]:
    """A connection to the running system."""
    from drystone.service.client import Client

    with Client(folder.expanduser().absolute() if folder else None) as client:
        yield client


def change_jobs(folder: Path | None, job_ids: Sequence[str], verb: str, done: str) -> None:
    """Do the same to every job named; the first that cannot be changed ends it."""
    from drystone.cli.output import make_console

    with connected(folder) as client:
        for job_id in job_ids:
            job = client.post(f"/v1/jobs/{quoted(job_id)}/{verb}")
            make_console(stderr=True).print(f"Job {job['id']} ({job['name']}) is {done}.")


def quoted(text: str) -> str:
    """A name as part of an address."""
    from urllib.parse import quote

    return quote(text, safe="")


def say_emulated(is_emulated: bool) -> None:
    """Nobody may take an emulated GPU for a real one."""
    if is_emulated:
        colour = None if os.environ.get("NO_COLOR") else "yellow"
        typer.secho("GPUs are emulated on this machine's processor.", fg=colour, err=True)


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
