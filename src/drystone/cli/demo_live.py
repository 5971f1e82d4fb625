"""The last act of `drystone demo`: a fine-tune that is resized, killed, recovered and exported."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from drystone.service.client import Client

_CLUSTER: Final = """
nodes:
  - {gpu: A100, gpus_per_node: 2, emulate: {speed: 0.001, memory: 4GiB}}
  - {gpu: T4, gpus_per_node: 2, emulate: {speed: 0.001, memory: 4GiB}}
"""
_URGENT: Final = {
    "name": "urgent",
    "model": "mini-gpt",
    "train": {"steps": 25, "batch": 8, "sequence": 32},
    "gpus": {"min": 3},
    "priority": 20.0,
}
_URGENT_STEP: Final = 30  # of the fine-tune, at which the other job comes
_KILL_STEP: Final = 80
_MAX_SECONDS: Final = 600.0
_EVENTS: Final = frozenset(
    {"Started", "Launched", "Stopped", "Interrupted", "Learned", "Finished", "Failed", "Refused"}
)


def show_live() -> None:
    """Make a model, serve, submit, resize, kill; say what happened, why, and what it learned."""
    from drystone.cli.output import make_console
    from drystone.service.client import Client

    console, port = make_console(), _free_port()
    with tempfile.TemporaryDirectory(prefix="drystone-demo-") as name, _serving(Path(name), port):
        home, folder = Path(name), Path(name) / "s"
        _run_sample(str(home))
        tune = (home / "tune.yaml").read_text(encoding="utf-8")
        console.print(tune, style="cyan")
        with Client(folder) as client:
            _wait_for(client)
            body = {"text": f"name: tune\n{tune}", "folder": name, "owner": "demo"}
            client.post("/v1/jobs", body)
            console.print(f"Watch it live: http://127.0.0.1:{port}/", style="bold cyan")
            killed = _watch(client, folder, name)
            console.print()
            _tell(client, killed)
        _compare(home / "base", folder / "jobs" / "1" / "export")


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


def _run_sample(*words: str) -> list[str]:
    """The sample model's own program; the lines that it prints."""
    command = [sys.executable, "-m", "drystone.run.train.sample_model", *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def _wait_for(client: Client) -> None:
    from drystone.service.client import NotRunning

    for _ in range(600):
        try:
            client.get("/v1/health")
            return
        except NotRunning:
            time.sleep(0.1)
    client.get("/v1/health")


def _watch(client: Client, folder: Path, home: str) -> str:
    """The live view until all is over; on the way another job comes, and a process dies."""
    from rich.live import Live

    from drystone.cli.output import make_console
    from drystone.cli.top import View, picture

    console = make_console()
    killed, ends = "", time.monotonic() + _MAX_SECONDS
    with Live(console=console, refresh_per_second=2, transient=True) as live:
        while time.monotonic() < ends:
            jobs = client.get("/v1/jobs")["jobs"]
            if console.is_terminal:
                live.update(picture(client, console.width, View())[0])
            if len(jobs) == 1 and jobs[0]["step"] >= _URGENT_STEP:
                client.post("/v1/jobs", {"job": _URGENT, "folder": home, "owner": "demo"})
            elif not killed and jobs[0]["step"] >= _KILL_STEP:
                killed = _kill_worker(folder, jobs[0])
            elif all(job["end_seconds"] is not None for job in jobs):
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
        console.print(Text(f"Job {job['id']}, {job['name']}", style="bold"))
        for event in client.get("/v1/events", job=job["id"], most=10_000)["events"]:
            if event["event"] in _EVENTS:
                at = event["time_seconds"] - job["submit_seconds"]
                console.print(Text(printable(f"{at:7.1f} s  {event['told']}")), soft_wrap=True)
    spent = client.get("/v1/cluster")["dollars"]
    console.print(f"\nAll of it would have cost ${spent:.2f} at example prices.", style="dim")


def _compare(base: Path, export: Path) -> None:
    """What the model says before and after, as transformers loads both folders."""
    from drystone.cli.output import make_console
    from drystone.errors import DrystoneError

    console = make_console()
    if not export.is_dir():
        raise DrystoneError("the fine-tune wrote no export", hint="See the events above")
    before, after = _run_sample("--ask", str(base), str(export))
    console.print("\nWhich colour has snow? As transformers loads the folders:", style="bold")
    console.print(f"  before   {before}", style="dim")
    console.print(f"  after    {after}", style="bold green")
