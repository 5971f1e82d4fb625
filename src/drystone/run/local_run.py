"""One job here and now, without a service: planned for these devices, started, followed, ended.

The folder of a run keeps its checkpoints, so that the same command goes on where it was. Only one
process may run in it at a time.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from drystone.describe.files.cluster import ClusterSpec
from drystone.describe.files.json_shapes import to_plain
from drystone.describe.job import TrainingJob, count_steps
from drystone.errors import DrystoneError, InvalidSpec, NothingFits
from drystone.plan.plan import Plan
from drystone.run.control.failures import FaultKind, judge
from drystone.run.control.launches import LaunchOrder, Seat, make_order, seat_ranks
from drystone.run.control.options import OptionBook
from drystone.run.control.progress import RunProgress
from drystone.run.engines.agent.launches import PYTHON, read_json, write_whole
from drystone.run.engines.contract import Rendezvous

_POLL_SECONDS: Final = 0.2
_GRACE_SECONDS: Final = 60.0  # to write a checkpoint and leave
_MOST_CRASHES: Final = 3  # without getting further
_LOG_BYTES: Final = 8192
# What the same job is: another of these in the same folder is another job.
_IDENTITY: Final = ("model", "data", "command", "global_batch", "seq_len", "optimizer", "tuning",
                    "lora", "from_scratch", "train")  # fmt: skip
_RETRIED: Final = (FaultKind.CRASH, FaultKind.NETWORK, FaultKind.PREEMPTED)


class RunFailed(DrystoneError):
    """The processes of a run ended with a fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPlan:
    """A job with the plan that it is run by."""

    job: TrainingJob
    plan: Plan | None  # None: a script whose model nobody told us
    num_steps: int
    seats: tuple[Seat, ...]
    cluster: ClusterSpec
    folder: Path

    @property
    def checkpoints(self) -> Path:
        """Where it saves."""
        return self.folder / "checkpoints"


@dataclass(slots=True)
class Followed:
    """How far a run is, and what was last said of it."""

    num_steps: int
    progress: RunProgress = field(default_factory=RunProgress)
    tokens_per_second: float = 0.0
    eval_loss: float | None = None
    ended: str = ""  # why before the last step, if it was


def plan_run(job: TrainingJob, cluster: ClusterSpec, folder: Path) -> LocalPlan:
    """The fastest way on these devices; what cannot be trained is refused, nothing started."""
    book = OptionBook(cluster)
    job = book.looked_at(job)
    book.check(job)
    job = book.settled(job)
    shape = book.shape(job)
    options = book.options(job)
    if not len(options) or not (options.samples_per_second > 0).any():
        raise NothingFits(
            f"{job.name}: these devices do not suffice",
            hint="`drystone plan` shows what would; or try a shorter sequence, or tune: lora",
        )
    best = int(np.argmax(options.samples_per_second))
    counts = book.counts_of(job, best)
    plan = book.plan(job, counts)
    seats = _seats(cluster, dict(book.named(counts)))
    return LocalPlan(
        job=job,
        plan=plan,
        num_steps=count_steps(job, shape),
        seats=tuple(seat_ranks(seats, plan)),
        cluster=cluster,
        folder=folder,
    )


def _seats(cluster: ClusterSpec, counts: Mapping[str, int]) -> list[Seat]:
    left, seats = dict(counts), []
    for node in cluster.nodes:
        taken = min(left.get(node.gpu, 0), node.num_gpus)
        left[node.gpu] = left.get(node.gpu, 0) - taken
        seats += [Seat(node=node.id, gpu=node.gpu, device=at) for at in range(taken)]
    return seats


@contextmanager
def claimed(folder: Path, job: TrainingJob) -> Iterator[None]:
    """The folder of a run, for this process alone and for this job alone."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InvalidSpec("somebody runs here already", where=str(folder)) from None
        told = to_plain(job)
        mine = {name: told[name] for name in _IDENTITY}
        known = read_json(folder / "job.json")
        if known is not None and known != mine:
            differs = [name for name in _IDENTITY if known.get(name) != mine[name]]
            raise InvalidSpec(
                f"is the folder of another job: {', '.join(differs)} differ",
                where=str(folder),
                hint="Give another --folder, or remove this one to begin anew",
            )
        write_whole(folder / "job.json", mine)
        yield


def train_here(run: LocalPlan, show: Callable[[Followed], None]) -> Followed:
    """Start the ranks and follow them to the end; after a crash they go on from the checkpoint.

    KeyboardInterrupt lets them write a checkpoint and leave; it is raised again afterwards.
    """
    followed = Followed(num_steps=run.num_steps)
    num_crashes, reached = 0, -1
    while True:
        epoch = _next_epoch(run.folder)
        order = _order(run, epoch)
        home = run.folder / f"epoch-{epoch}"
        with _started(order, home) as processes:
            exits = _follow(processes, home, run, followed, show)
        if not any(exits.values()) and (followed.progress.is_finished or run.job.is_command):
            return followed
        fault = judge(exits, {rank: _log_end(home, rank) for rank in exits})
        num_crashes = num_crashes + 1 if followed.progress.checkpoint_step <= reached else 1
        reached = max(reached, followed.progress.checkpoint_step)
        if fault.kind not in _RETRIED or num_crashes >= _MOST_CRASHES:
            raise RunFailed(fault.reason.replace("\n", " | ")[-2000:], where=str(home))
        followed.progress = RunProgress()


def _next_epoch(folder: Path) -> int:
    numbers = [int(path.name[6:]) for path in folder.glob("epoch-*") if path.name[6:].isdigit()]
    return max(numbers, default=0) + 1


def _order(run: LocalPlan, epoch: int) -> LaunchOrder:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return make_order(
        run.job,
        job_id=run.job.name,
        epoch=epoch,
        num_steps=run.num_steps,
        plan=run.plan,
        seats=run.seats,
        rendezvous=Rendezvous(address="127.0.0.1", port=port),
        cluster=run.cluster,
        folder=run.folder,
        lease_seconds=0.0,
    )


@contextmanager
def _started(order: LaunchOrder, home: Path) -> Iterator[dict[int, subprocess.Popen[bytes]]]:
    """The processes of all ranks; none is left when this ends."""
    processes: dict[int, subprocess.Popen[bytes]] = {}
    files: list[IO[bytes]] = []
    try:
        for request in order.requests.values():
            words = [sys.executable if word == PYTHON else word for word in request["arguments"]]
            for rank in request["ranks"]:
                number = rank["rank"]
                out, log = ((home / f"rank-{number}.{end}").open("wb") for end in ("out", "log"))
                files += [out, log]
                processes[number] = subprocess.Popen(
                    words,
                    cwd=request["folder"],
                    env=os.environ | _threads(order) | request["environment"] | rank["environment"],
                    stdout=out,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C is for this process, which tells them
                )
        yield processes
    finally:
        _end(processes)
        for file in files:
            file.close()


def _threads(order: LaunchOrder) -> dict[str, str]:
    """On a processor, an equal share of its cores for each rank."""
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return {"OMP_NUM_THREADS": str(max(1, cores // len(order.seats)))}


def _end(processes: Mapping[int, subprocess.Popen[bytes]]) -> None:
    for process in processes.values():
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _follow(
    processes: Mapping[int, subprocess.Popen[bytes]],
    home: Path,
    run: LocalPlan,
    followed: Followed,
    show: Callable[[Followed], None],
) -> dict[int, int]:
    """Until all have ended; when one has failed the others get a moment, and are ended too."""
    reports = home / ("progress.jsonl" if run.job.is_command else "rank-0.out")
    failed_at = 0.0
    try:
        while any(process.poll() is None for process in processes.values()):
            time.sleep(_POLL_SECONDS)
            _read_reports(reports, followed)
            show(followed)
            has_failed = any(process.poll() for process in processes.values())
            failed_at = failed_at or (time.monotonic() if has_failed else 0.0)
            if failed_at and time.monotonic() - failed_at > 10:
                break
    except KeyboardInterrupt:
        _ask_to_leave(processes, run.job.patience.grace_seconds or _GRACE_SECONDS)
        _read_reports(reports, followed)
        raise
    _end(processes)
    _read_reports(reports, followed)
    show(followed)
    return {rank: process.wait() for rank, process in processes.items()}


def _ask_to_leave(processes: Mapping[int, subprocess.Popen[bytes]], grace_seconds: float) -> None:
    """A checkpoint, then the end; a second Ctrl-C does not wait for it."""
    for process in processes.values():
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    until = time.monotonic() + grace_seconds
    with suppress(KeyboardInterrupt):
        while time.monotonic() < until and any(p.poll() is None for p in processes.values()):
            time.sleep(0.1)


def _read_reports(path: Path, followed: Followed) -> None:
    """Whole lines that came since."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(followed.progress.offset)
        text = file.read()
        end = text.rfind(b"\n") + 1
        followed.progress.offset += end
        lines = text[:end].decode("utf-8", "replace")
        followed.progress.read(lines, time.time())
        for line in lines.splitlines():
            _take_more(line, followed)


def _take_more(line: str, followed: Followed) -> None:
    """What only a person who watches wants to know."""
    import json

    with suppress(ValueError, KeyError, TypeError):
        table: dict[str, Any] = json.loads(line)
        if table["event"] == "step":
            followed.tokens_per_second = float(table["tokens_per_second"])
        elif table["event"] == "evaluated":
            followed.eval_loss = float(table["loss"])
        elif table["event"] == "finished":
            followed.ended = str(table.get("reason", ""))


def _log_end(home: Path, rank: int) -> str:
    with suppress(OSError), (home / f"rank-{rank}.log").open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - _LOG_BYTES))
        return file.read().decode("utf-8", "replace")
    return ""


def export_here(run: LocalPlan, out: Path) -> Path | None:
    """The result as a folder that `transformers` loads; None where there is no such format."""
    if run.plan is None or run.job.module is not None:
        return None
    if out.exists():
        return out
    best = run.checkpoints / "best"
    source = best if best.is_dir() else run.checkpoints
    plans = sorted(run.folder.glob("epoch-*/plan.json"), key=lambda path: path.stat().st_mtime)
    command = [sys.executable, "-m", "drystone.run.train.export", str(source), str(plans[-1])]
    variables = os.environ | {"PYTHONPATH": _python_path()}
    done = subprocess.run(
        [*command, str(out)], env=variables, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RunFailed(f"the export failed: {done.stderr.strip()[-500:]}", where=str(source))
    return out


def _python_path() -> str:
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, paths))


def on_processor(job: TrainingJob) -> TrainingJob:
    """A processor computes in fp32 unless it is asked for something else."""
    return replace(job, precision="fp32") if job.precision == "auto" else job
