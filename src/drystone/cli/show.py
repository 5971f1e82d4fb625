"""`drystone show`: one job in full."""

from __future__ import annotations

import datetime
from typing import Any

from drystone.cli.live import Folder, JobId, connected, format_end, format_gpus, quoted, state_word
from drystone.cli.options import AsJson


def show(job: JobId, folder: Folder = None, as_json: AsJson = False) -> None:
    """Show one job in full.

    What was asked for, what it has, its plan, how far it is, what it costs, and all launches.

    With --json: see `GET /v1/jobs/ID` in docs/api.md.
    """
    from drystone.cli.output import make_console, print_json, printable

    with connected(folder) as client:
        answer = client.get(f"/v1/jobs/{quoted(job)}")
        now = client.get("/v1/health")["now_seconds"]
    if as_json:
        print_json(answer)
        return
    console = make_console()
    for name, value in _facts(answer, now):
        console.print(f"{name:>12}  {printable(value)}", markup=False)
    for launch in answer["launches"]:
        at = _time(launch["time_seconds"])
        console.print(f"{'launch':>12}  {launch['epoch']}: {at}  {launch['plan']}", markup=False)


def _facts(job: dict[str, Any], now: float) -> list[tuple[str, str]]:
    described, bad = job["description"], job["num_bad_reports"]
    facts = [
        ("job", f"{job['id']} {job['name']}" + (f" of {job['owner']}" if job["owner"] else "")),
        ("state", state_word(job)),
        ("trains", described["model"] or " ".join(described["command"])),
        ("data", described["data"]),
        ("progress", f"step {job['step']} of {job['num_steps']} ({job['progress']:.1%})"),
        ("GPUs", format_gpus(job["gpus"])),
        ("plan", job["plan"]),
        ("loss", "" if job["loss"] is None else f"{job['loss']:.4f}"),
        ("step", "" if job["step_seconds"] is None else f"{job['step_seconds']:.3g} s"),
        ("submitted", _time(job["submit_seconds"])),
        ("ends", format_end(job, now).removeprefix("-")),
        ("deadline", _time(job["deadline_seconds"]) if job["deadline_seconds"] else ""),
        ("cost", f"${job['dollars']:.4f}"),
        ("starts", f"{job['num_starts']}, faults {job['num_faults']}"),
        ("reason", job["reason"]),
        ("bad reports", f"{bad}, the last: {job['bad_report']}" if bad else ""),
    ]
    return [(name, value) for name, value in facts if value]


def _time(seconds: float) -> str:
    return f"{datetime.datetime.fromtimestamp(seconds).astimezone():%Y-%m-%d %H:%M:%S}"
