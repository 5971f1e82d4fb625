"""`drystone demo`: the best of what there is, one command after the other, on CPU."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

if TYPE_CHECKING:
    from drystone.service.client import Client


_ACTS = (
    (
        "You have eight A100 and eight V100. How should Llama-3-8B use them, all at once?",
        "plan llama-3-8b --gpus 8xA100-80G,8xV100-32G --limit 4",
    ),
    (
        "You have no GPUs yet. Which would do, and which is cheapest for a token?",
        "plan mistral-7b-v0.1 --limit 6",
    ),
    (
        "Does this one split fit, and where do memory and time go?",
        "estimate llama-3-70b --gpu H100 --layout dp=4,tp=8,pp=4,micro=1,zero=1,sp=1 "
        "--global-batch 128 --recompute full",
    ),
    (
        "Four T4 for a 70-billion-parameter model? A refusal says what to try.",
        "plan llama-3-70b --gpus 4xT4",
    ),
    (
        "Why believe any of it: estimates against runs that other people published.",
        "check memory --brief",
    ),
    ("The same for speed.", "check speed --brief"),
)

_LIVE = "Train, on two A100 and two T4 at once, and kill a process on purpose. What happens?"


def demo(
    only: Annotated[
        int, typer.Option(help="Show this act alone; 0: all of them.", min=0, max=len(_ACTS) + 1)
    ] = 0,
) -> None:
    """Show the best of what there is, on CPU.

    Each act is a command that you can run yourself; it is shown before its answer. The last one
    runs five jobs on emulated GPUs and kills a process on purpose; it takes a few minutes.
    """
    from rich.rule import Rule
    from rich.text import Text

    from drystone.cli.main import run
    from drystone.cli.output import make_console

    console = make_console()
    for number, (question, command) in enumerate(_ACTS, start=1):
        if only and number != only:
            continue
        console.print()
        console.print(Rule(Text(question, style="bold"), align="left", style="cyan"))
        console.print(Text(f"$ drystone {command}", style="dim"))
        console.print()
        run(shlex.split(command))
    if only in (0, len(_ACTS) + 1):
        console.print()
        console.print(Rule(Text(_LIVE, style="bold"), align="left", style="cyan"))
        console.print(Text("$ drystone serve, submit, top (emulated GPUs)", style="dim"))
        _show_live(is_asked_for=bool(only))


def _show_live(*, is_asked_for: bool) -> None:
    """Without torch the last act is left out, which is a failure only of who asked for it alone."""
    from importlib.util import find_spec

    from drystone.cli.output import make_console
    from drystone.errors import MissingExtra

    if find_spec("torch") is None:
        missing = MissingExtra("the last act trains, which needs torch", "runtime")
        if is_asked_for:
            raise missing
        make_console(stderr=True).print(f"\nLeft out: {missing}", style="yellow", soft_wrap=True)
        return
    show_live()


_CLUSTER: Final = """
nodes:
  - {gpu: A100, gpus_per_node: 2, emulate: {speed: 0.0005, memory: 4GiB}}
  - {gpu: T4, gpus_per_node: 2, emulate: {speed: 0.0005, memory: 4GiB}}
"""
_SHORT: Final = {"batch": 8, "sequence": 32, "checkpoint_every": 10}
_JOBS: Final[tuple[dict[str, Any], ...]] = (
    {"name": "victim", "model": "mini-llama", "train": {"steps": 60, **_SHORT}, "gpus": {"max": 1}},
    {"name": "mixed", "model": "mini-gpt", "train": {"steps": 40, **_SHORT}, "gpus": {"min": 3}},
    {"name": "in a hurry", "model": "mini-gpt", "train": {"steps": 40, **_SHORT}, "deadline": "2m"},
    {"name": "patient", "model": "mini-llama", "train": {"steps": 30, **_SHORT}, "priority": 0.5},
    {
        "name": "mistaken",
        "command": "python -c 'raise SystemExit(\"no such data set\")'",
        "train": {"steps": 5},
        "gpus": {"max": 1},
    },
)
_VICTIM_STEP: Final = 15
_MAX_SECONDS: Final = 600.0


def show_live() -> None:
    """Serve, submit, watch, kill, and say what happened and why."""
    from drystone.cli.output import make_console
    from drystone.service.client import Client

    console, port = make_console(), _free_port()
    with tempfile.TemporaryDirectory(prefix="drystone-demo-") as name, _serving(Path(name), port):
        folder = Path(name) / "s"
        with Client(folder) as client:
            _wait_for(client)
            console.print(f"Watch it live: http://127.0.0.1:{port}/", style="bold cyan")
            for job in _JOBS:
                client.post("/v1/jobs", {"job": job, "folder": name, "owner": "demo"})
            killed = _watch(client, folder)
            console.print()
            _tell(client, killed)


@contextmanager
def _serving(home: Path, port: int) -> Iterator[None]:
    (home / "cluster.yaml").write_text(_CLUSTER, encoding="utf-8")
    command = [sys.executable, "-m", "drystone", "serve", "--end-all", "--port", str(port)]
    where = ["--cluster", str(home / "cluster.yaml"), "--folder", str(home / "s")]
    with (home / "serve.log").open("wb") as log:
        server = subprocess.Popen([*command, *where], stdout=log, stderr=log)
    try:
        yield
    finally:
        server.terminate()
        try:
            server.wait(timeout=60)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _free_port() -> int:
    """For the page, on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_for(client: Client) -> None:
    from drystone.service.client import NotRunning

    for _ in range(600):
        try:
            client.get("/v1/health")
            return
        except NotRunning:
            time.sleep(0.1)
    client.get("/v1/health")


def _watch(client: Client, folder: Path) -> str:
    """The live view until all is over; the victim loses a process on the way."""
    from rich.live import Live

    from drystone.cli.output import make_console
    from drystone.cli.top import picture

    console = make_console()
    killed, ends = "", time.monotonic() + _MAX_SECONDS
    with Live(console=console, refresh_per_second=2, transient=True) as live:
        while time.monotonic() < ends:
            jobs = client.get("/v1/jobs")["jobs"]
            if console.is_terminal:
                live.update(picture(client, console.width))
            if not killed and jobs[0]["step"] >= _VICTIM_STEP:
                killed = _kill_worker(folder, jobs[0])
            if all(job["end_seconds"] is not None for job in jobs):
                break
            time.sleep(0.5)
    return killed


def _kill_worker(folder: Path, job: dict[str, Any]) -> str:
    """SIGKILL to the first process of a job, as a machine's failure would be."""
    if not job["devices"]:
        return ""
    node = job["devices"][0][0]
    launch = folder / "agents" / node / "launches" / f"{job['id']}.{job['num_starts']}"
    with suppress(OSError, ValueError, KeyError):
        processes = json.loads((launch / "processes.json").read_text(encoding="utf-8"))
        pid = int(next(iter(processes.values()))[0])
        os.kill(pid, signal.SIGKILL)
        return f"process {pid} of job {job['id']} on {node}, at step {job['step']}"
    return ""


def _tell(client: Client, killed: str) -> None:
    """What happened to each job, event by event, with the reasons."""
    from rich.text import Text

    from drystone.cli.live import JOB_COLUMNS, job_row
    from drystone.cli.output import make_console, print_table, printable
    from drystone.cli.quick import say_emulated

    answer = client.get("/v1/jobs")
    rows = [job_row(job, answer["now_seconds"]) for job in answer["jobs"]]
    print_table("What became of them", JOB_COLUMNS, rows)
    say_emulated(answer["is_emulated"])
    console = make_console()
    if killed:
        console.print(f"\nKilled on purpose: {killed}.", style="bold red")
    for job in answer["jobs"]:
        console.print()
        console.print(Text(f"job {job['id']}, {job['name']}", style="bold"))
        for event in client.get("/v1/events", job=job["id"], most=10_000)["events"]:
            line = _line(event, job["submit_seconds"])
            if line:
                console.print(Text(printable(line)), soft_wrap=True)
    spent = client.get("/v1/cluster")["dollars"]
    console.print(f"\nAll of it would have cost ${spent:.2f} at example prices.", style="dim")


def _line(event: dict[str, Any], since: float) -> str:
    at = f"{event['time_seconds'] - since:7.1f} s  "
    reason = (event.get("reason") or "").replace("\n", " | ")[:160]
    match event["event"]:
        case "Launched":
            return f"{at}runs on {event['plan']}"
        case "Started":
            return f"{at}gets GPUs: {reason}"
        case "Stopped":
            return f"{at}gives them back: {reason}"
        case "Interrupted":
            return f"{at}interrupted: {reason}"
        case "Learned" if event["measured_samples_per_second"]:
            measured = event["measured_samples_per_second"]
            estimated = event["estimated_samples_per_second"]
            return f"{at}learned: {measured:.3g} samples/s, the estimate was {estimated:.3g}"
        case "Finished" | "Failed" | "Refused" | "Cancelled" as end:
            return f"{at}{end.lower()}{': ' if reason else ''}{reason}"
    return ""
