"""`drystone top`: a live view of cluster, jobs and events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from drystone.cli.live import JOB_COLUMNS, Folder, connected, job_row

if TYPE_CHECKING:
    from rich.console import Group

    from drystone.service.client import Client

_STYLES = ("green", "cyan", "magenta", "yellow", "blue", "red")
_NUM_EVENTS = 8
_NUM_JOBS = 30  # that run or wait


def top(
    every: Annotated[float, typer.Option(help="Seconds between looks.", min=0.2)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show one picture and leave.")] = False,
    folder: Folder = None,
) -> None:
    """Watch cluster, jobs and events.

    Every device is a block in the colour of its job. Ctrl-C leaves; the jobs go on.
    """
    import time

    from rich.live import Live

    from drystone.cli.output import make_console

    console = make_console()
    with connected(folder) as client:
        if once:
            console.print(picture(client, console.width))
            return
        try:
            with Live(picture(client, console.width), console=console, screen=True) as live:
                while True:
                    time.sleep(every)
                    live.update(picture(client, console.width))
        except KeyboardInterrupt:
            make_console(stderr=True).print("Left. The jobs go on.", style="dim")


def picture(client: Client, width: int) -> Group:
    """Everything at this moment."""
    from rich.console import Group
    from rich.text import Text

    from drystone.cli.output import make_table

    cluster, health = client.get("/v1/cluster"), client.get("/v1/health")
    answer = client.get("/v1/jobs", state=["running"], most=_NUM_JOBS)
    waiting = client.get("/v1/jobs", state=["queued", "paused"], most=_NUM_JOBS)
    over = ["done", "failed", "refused", "cancelled"]
    ended = client.get("/v1/jobs", state=over, newest="true", most=5)["jobs"][::-1]
    head = Text.assemble(
        (f"{answer['total']} running, {waiting['total']} waiting, ", "bold"),
        f"${cluster['dollars_per_hour']:.2f} an hour, ${cluster['dollars']:.2f} so far",
        ("  GPUs are emulated" if cluster["is_emulated"] else "", "yellow"),
        (f"  {health['last_error']}" if health["last_error"] else "", "red"),
    )
    shown = (answer["jobs"] + waiting["jobs"])[:_NUM_JOBS] + ended
    rows = [job_row(job, answer["now_seconds"]) for job in shown]
    return Group(
        head,
        *(_node(node) for node in cluster["nodes"]),
        Text(),
        make_table("jobs", JOB_COLUMNS, rows, width=width)[0],
        Text(),
        *_events(client, health["last_sequence"]),
    )


def _node(node: dict[str, Any]) -> Any:
    from rich.text import Text

    line = Text(f"{node['id']:<12} {node['gpu']:<16} ")
    for job in node["devices"]:
        style = "dim" if job is None else _STYLES[int(job) % len(_STYLES)]
        line.append("[    ] " if job is None else f"[{job:^4}] ", style=style)
    states = [word for word in ("drained", "lost") if node[f"is_{word}"]]
    line.append(" ".join(states), style="red")
    return line


def _events(client: Client, last: int) -> list[Any]:
    import datetime

    from rich.text import Text

    from drystone.cli.events import sentence
    from drystone.cli.output import printable
    from drystone.service.sentences import QUIET

    found = client.get("/v1/events", after=max(0, last - 4 * _NUM_EVENTS))["events"]
    told = [event for event in found if event["event"] not in QUIET]
    lines = []
    for event in told[-_NUM_EVENTS:]:
        at = datetime.datetime.fromtimestamp(event["time_seconds"]).astimezone()
        line = printable(f"{at:%H:%M:%S}  {sentence(event)}")
        lines.append(Text(line, style="dim", no_wrap=True, overflow="ellipsis"))
    return lines
