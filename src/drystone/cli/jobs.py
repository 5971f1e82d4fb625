"""The verbs about jobs: `jobs`, `show`, `why`, `wait`, `logs`, `cancel`, `pause`, `resume`."""

from __future__ import annotations

import datetime
import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from drystone.cli.columns import money
from drystone.cli.live import (
    Folder,
    JobId,
    JobIds,
    connected,
    format_end,
    format_gpus,
    quoted,
    state_style,
    state_word,
    watch,
)
from drystone.cli.options import AsJson, words
from drystone.cli.output import make_console, print_json, printable
from drystone.cli.quick import (
    DEFAULT_LIMIT,
    MAX_LIMIT,
    SORTS,
    check_sort,
    find_job,
    list_jobs,
    print_page,
    show_reasons,
)
from drystone.units import format_seconds

if TYPE_CHECKING:
    from drystone.service.client import Client


def jobs(
    state: Annotated[
        list[str] | None, typer.Option(help="Only these, e.g. --state running --state waiting.")
    ] = None,
    owner: Annotated[str, typer.Option(help="Only jobs of this owner.")] = "",
    sort: Annotated[
        str,
        typer.Option(
            help=f"By {', '.join(SORTS)}; id: as they came.", autocompletion=words(*SORTS)
        ),
    ] = "id",
    limit: Annotated[
        int, typer.Option("--limit", "--most", help="How many.", min=1, max=MAX_LIMIT)
    ] = DEFAULT_LIMIT,
    watching: Annotated[bool, typer.Option("--watch", "-w", help="Show again and again.")] = False,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """List the jobs: state, GPUs, progress, end, cost, reason.

    In the order in which they came, unless --sort says otherwise: costly, wide and far ones first.
    Ctrl-C ends --watch; the jobs go on.

    With --json: {jobs: [...], total, now_seconds, sequence, is_emulated}, see docs/api.md.
    """
    check_sort(sort)
    with connected(folder) as client:

        def show_jobs() -> None:
            print_page(list_jobs(client, state or (), owner, limit, sort), as_json=as_json)

        if watching and not as_json:
            watch(show_jobs, every_seconds=2.0)
        else:
            show_jobs()


def why(job: JobId, folder: Folder = None, as_json: AsJson = False) -> None:
    """Say why a job waits, or why it got what it has.

    The place in the queue, who is in the way, when it should start, what it could choose from, and
    what GPUs are worth to all jobs together.

    With --json: see `Why` in docs/api.md.
    """
    with connected(folder) as client:
        show_reasons(client, job, as_json=as_json)


def wait(
    jobs: JobIds,
    timeout: Annotated[
        str, typer.Option(help="Give up after this long, e.g. 30m; the jobs go on.")
    ] = "",
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Wait until jobs are over.

    Exit code 0: all are done; 1: one failed, was refused or cancelled, or the time was over.

    With --json: {jobs: [{id, state}]}.
    """
    from drystone.describe.files.amounts import parse_duration
    from drystone.service.submission import Submitted

    until = time.monotonic() + parse_duration(timeout) if timeout else None
    with connected(folder) as client:
        numbers = [find_job(client, job) for job in jobs]
    ended = []
    for number in numbers:
        job = Submitted(number, folder.expanduser().absolute() if folder else None)
        left = None if until is None else max(until - time.monotonic(), 0.0)
        try:
            state = job.wait(left, must_be_done=False)
        except TimeoutError:
            state = "not over"
        ended.append({"id": number, "state": state})
        if not as_json:
            make_console(stderr=True).print(f"Job {number} is {state}.", style=state_style(state))
    if as_json:
        print_json({"jobs": ended})
    if any(row["state"] != "done" for row in ended):
        raise typer.Exit(1)


def cancel(jobs: JobIds, folder: Folder = None) -> None:
    """Cancel jobs.

    A running job is stopped at once; its last checkpoint stays.
    """
    _change(folder, jobs, "cancel", "cancelled")


def pause(jobs: JobIds, folder: Folder = None) -> None:
    """Pause jobs until they are resumed.

    A running job writes a checkpoint and gives its GPUs back.
    """
    _change(folder, jobs, "pause", "paused")


def resume(jobs: JobIds, folder: Folder = None) -> None:
    """Let paused jobs run again.

    It goes on from its last checkpoint.
    """
    _change(folder, jobs, "resume", "waiting for GPUs")


def _change(folder: Folder, job_ids: list[str], verb: str, done: str) -> None:
    """Do the same to every job named; the first that cannot be changed ends it."""
    with connected(folder) as client:
        for job_id in job_ids:
            job = client.post(f"/v1/jobs/{quoted(find_job(client, job_id))}/{verb}")
            make_console(stderr=True).print(f"Job {job['id']} ({job['name']}) is {done}.")


def show(job: JobId, folder: Folder = None, as_json: AsJson = False) -> None:
    """Show one job in full.

    What was asked for, what it has, its plan, how far it is, what it costs, and all launches.

    With --json: see `GET /v1/jobs/ID` in docs/api.md.
    """
    with connected(folder) as client:
        answer = client.get(f"/v1/jobs/{quoted(find_job(client, job))}")
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
        ("used", _used(job)),
        ("cost", money(job["dollars"])),
        ("starts", f"{job['num_starts']}, faults {job['num_faults']}"),
        ("reason", job["reason"]),
        ("bad reports", f"{bad}, the last: {job['bad_report']}" if bad else ""),
    ]
    return [(name, value) for name, value in facts if value]


def _used(job: dict[str, Any]) -> str:
    """What a job had, and for how long: of one that is over, nothing else says it."""
    if job["end_seconds"] is None or not job["launches"]:
        return ""
    last, count = job["launches"][-1], len(job["launches"])
    several = f" (the last of {count} launches)" if count > 1 else ""
    return f"{last['plan']}{several}, {format_seconds(job['run_seconds'])} of running in all"


def _time(seconds: float) -> str:
    return f"{datetime.datetime.fromtimestamp(seconds).astimezone():%Y-%m-%d %H:%M:%S}"


def logs(
    job: JobId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more.")] = False,
    rank: Annotated[int, typer.Option(help="Of which rank.", min=0)] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Reports as JSON, as they are.")] = False,
    folder: Folder = None,
) -> None:
    """Show what a job writes.

    Of the latest launch, and with -f of those that follow. Ctrl-C leaves; the job goes on.
    """
    with connected(folder) as client:
        follow_log(client, find_job(client, job), follow=follow, rank=rank, raw=raw)


def follow_log(
    client: Client, job: str, *, follow: bool = True, rank: int = 0, raw: bool = False
) -> None:
    """Print what a job writes, until it is over where it is followed."""
    reader = _Reader(client, job, rank, raw)
    try:
        while not reader.read() and follow:
            time.sleep(0.5)
    except KeyboardInterrupt:
        make_console(stderr=True).print("Left. The job goes on.", style="dim")


class _Reader:
    """Both streams of one rank, launch after launch."""

    def __init__(self, client: Client, job: str, rank: int, raw: bool) -> None:
        self._client, self._path, self._rank = client, f"/v1/jobs/{quoted(job)}/logs", rank
        self._raw, self._epoch = raw, 0
        self._offsets = {"log": 0, "out": 0}

    def read(self) -> bool:
        """Print what is new; whether nothing more will come."""
        is_over = True
        for stream in ("log", "out"):
            while True:
                answer = self._ask(stream)
                if answer["epoch"] != self._epoch:
                    self._epoch, self._offsets = answer["epoch"], {"log": 0, "out": 0}
                    answer = self._ask(stream)
                is_over = is_over and answer["is_over"]
                if not answer["text"]:
                    break
                self._offsets[stream] = answer["offset"]
                for line in answer["text"].splitlines():
                    self._print(line)
        return is_over

    def _ask(self, stream: str) -> dict[str, Any]:
        return self._client.get(
            self._path, rank=self._rank, stream=stream, offset=self._offsets[stream]
        )

    def _print(self, line: str) -> None:
        print(printable(line if self._raw else _readable(line)), flush=True)


def _readable(line: str) -> str:
    """A report in words; anything else as it is."""
    try:
        report = json.loads(line)
        match report["event"]:
            case "step":
                return (
                    f"step {report['step']:>6}  loss {report['loss']:.4f}  "
                    f"{report['step_seconds']:.3f} s  {report['tokens_per_second']:.0f} tokens/s"
                )
            case "checkpoint":
                return f"checkpoint at step {report['step']}"
            case "started":
                return f"started at step {report['step']} on {report['ranks']} ranks"
            case other:
                return f"{other} at step {report['step']}"
    except (ValueError, KeyError, TypeError):
        return line
