"""`drystone top`: a live view of cluster, jobs and events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from drystone.cli.live import JOB_COLUMNS, Folder, connected, job_row, quoted

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live

    from drystone.cli.keys import Keys
    from drystone.service.client import Client

_STYLES = ("green", "cyan", "magenta", "yellow", "blue", "red")
_NUM_EVENTS = 8
_NUM_JOBS = 30  # that run or wait
_HELP: Final = "q quit   up, down select   s sort   l log   c cancel"
# By what jobs may be sorted; `state` is as the service lists them: what runs, what waits, what was.
_ORDERS: Final[Mapping[str, Callable[[dict[str, Any]], Any]]] = MappingProxyType(
    {
        "state": lambda job: 0,
        "cost": lambda job: -job["dollars"],
        "progress": lambda job: -job["progress"],
        "GPUs": lambda job: -sum(job["gpus"].values()),
        "name": lambda job: job["name"],
    }
)


@dataclass(frozen=True, slots=True)
class View:
    """What a person chose: which job, in which order, and what is asked of them."""

    selected: str = ""  # a job
    order: str = "state"
    question: str = ""  # the job that is to be cancelled, if the next key is y
    action: str = ""  # quit, log or cancel
    told: str = ""  # what became of the last action


def press(view: View, key: str, job_ids: list[str]) -> View:
    """The view after one key; its `action` is what has to be done now."""
    view = replace(view, action="", told="")
    if view.question:
        return replace(view, question="", action="cancel" if key == "y" else "")
    at = job_ids.index(view.selected) if view.selected in job_ids else None
    match key:
        case "q" | "escape":
            return replace(view, action="quit")
        case "up" | "down" if job_ids:
            step = {"up": -1, "down": 1}[key]
            after = (0 if step > 0 else -1) if at is None else (at + step) % len(job_ids)
            return replace(view, selected=job_ids[after])
        case "s":
            orders = list(_ORDERS)
            return replace(view, order=orders[(orders.index(view.order) + 1) % len(orders)])
        case "l" | "enter" | "c" if at is None:
            return replace(view, told="Select a job first: up, down")
        case "l" | "enter":
            return replace(view, action="log")
        case "c":
            return replace(view, question=view.selected)
    return view


def top(
    every: Annotated[float, typer.Option(help="Seconds between looks.", min=0.2)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show one picture and leave.")] = False,
    folder: Folder = None,
) -> None:
    """Watch cluster, jobs and events.

    Every device is a block in the colour of its job. Keys: q quits, up and down select a job, l
    shows its log, c cancels it, s sorts. A service that is started again is found again. The jobs
    go on when you leave.
    """
    from rich.live import Live

    from drystone.cli.keys import Keys
    from drystone.cli.output import make_console

    console = make_console()
    with connected(folder) as client:
        shown, job_ids = picture(client, console.width, View())
        if once:
            console.print(shown)
            return
        try:
            with Keys() as keys, Live(shown, console=console, screen=True) as live:
                _watch(client, live, keys, job_ids, every)
        except KeyboardInterrupt:
            pass
    make_console(stderr=True).print("Left. The jobs go on.", style="dim")


def _watch(client: Client, live: Live, keys: Keys, job_ids: list[str], every: float) -> None:
    """Look and hear until somebody leaves; while the service is away, its last picture stays."""
    from rich.console import Group
    from rich.text import Text

    from drystone.service.client import NotRunning

    view, shown = View(), live.renderable
    while view.action != "quit":
        key = keys.read(every)
        view = press(view, key, job_ids) if key else view
        try:
            view = _do(client, live, keys, view)
            shown, job_ids = picture(client, live.console.width, view)
            live.update(shown, refresh=True)
        except NotRunning:
            away = Text("The service does not answer; this is from before.", style="bold red")
            live.update(Group(away, shown), refresh=True)


def _do(client: Client, live: Live, keys: Keys, view: View) -> View:
    from drystone.errors import DrystoneError
    from drystone.service.client import NotRunning

    job = view.selected
    if view.action == "cancel":
        try:
            client.post(f"/v1/jobs/{quoted(job)}/cancel")
        except NotRunning:
            raise
        except DrystoneError as error:  # another's, or over by now
            return replace(view, action="", told=error.message)
        return replace(view, action="", told=f"Job {job} is cancelled")
    if view.action == "log":
        from drystone.cli.jobs import follow_log

        live.stop()
        follow_log(client, job, follow=False)
        live.console.print("Any key goes back.", style="dim")
        while not keys.read(3600.0):
            pass
        live.start(refresh=True)
        return replace(view, action="")
    return view


def picture(client: Client, width: int, view: View) -> tuple[Group, list[str]]:
    """Everything at this moment, and the jobs in the order in which they are shown."""
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
    shown = sorted((answer["jobs"] + waiting["jobs"])[:_NUM_JOBS] + ended, key=_ORDERS[view.order])
    rows = [job_row(job, answer["now_seconds"]) for job in shown]
    table = make_table(f"jobs by {view.order}", JOB_COLUMNS, rows, width=width)[0]
    job_ids = [job["id"] for job in shown]
    if view.selected in job_ids:
        table.rows[job_ids.index(view.selected)].style = "reverse"
    told = f"Cancel job {view.question}? y: yes" if view.question else view.told or _HELP
    return Group(
        head,
        *(_node(node) for node in cluster["nodes"]),
        Text(),
        table,
        Text(told, style="bold yellow" if view.question or view.told else "dim"),
        Text(),
        *_events(client, health["last_sequence"]),
    ), job_ids


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
