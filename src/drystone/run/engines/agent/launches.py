"""One launch of one job on this node: its processes, its files, its lease.

Everything about a launch is in one folder: `launch.json` (what was asked), `lease` (until when it
may run), `rank-N.out` and `rank-N.log` (what its processes wrote), `processes.json` (pids),
`ended.json` (exit codes). An agent that starts again finds its launches there.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from drystone.run.fence import EPOCH_VARIABLE, FENCE_VARIABLE, LEASE_VARIABLE, raise_fence

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def spawn(
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    folder: str,
    output: IO[bytes],
    log: IO[bytes],
) -> subprocess.Popen[bytes]:
    """Start it. It must be called from the main thread: the kernel's promise is a thread's."""
    parent = os.getpid()

    def prepare() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # we died between fork and here
            os._exit(1)

    return subprocess.Popen(
        list(arguments),
        env=dict(environment),
        cwd=folder or None,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=log,
        start_new_session=True,
        preexec_fn=prepare,
    )


def send(process: subprocess.Popen[bytes], number: int) -> None:
    """Signal the process itself."""
    if process.poll() is None:
        process.send_signal(number)


def kill_group(pid: int) -> None:
    """End a process and everything that it started and that stayed in its group."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def birth_of(pid: int) -> str:
    """When the kernel started a process, in its own clock ticks: a pid may be used again."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()
    is_dead = not fields or fields[0] in ("Z", "X")
    return "" if is_dead else fields[19]


PYTHON = "{python}"  # in arguments: the interpreter that runs the agent
LOST_EXIT = -1000  # how a process ended is not known: the agent that watched it is gone
_MAX_CHUNK_BYTES = 262_144


class Launch:
    """Processes of one job on one node, at one epoch."""

    def __init__(
        self, folder: Path, request: dict[str, Any], variables: Mapping[str, str] | None = None
    ) -> None:
        self.folder, self.request = folder, request
        self._variables = variables or {}  # of the node; what is asked for goes before them
        self.job_id, self.epoch = str(request["job_id"]), int(request["epoch"])
        self.devices = [int(rank["device"]) for rank in request["ranks"]]
        self.exits: dict[int, int | None] = {int(rank["rank"]): None for rank in request["ranks"]}
        self.note = ""  # why it was ended, where it was us
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._pids: dict[int, int] = {}
        self._kill_at = float("inf")
        self._lease_ends = 0.0

    @property
    def is_over(self) -> bool:
        """Whether no process of it is left."""
        return all(code is not None for code in self.exits.values())

    def start(self) -> None:
        """Raise the fence, take the lease, start every rank; all of them or none."""
        self.folder.mkdir(parents=True)
        fence = self.request.get("fence")
        if fence:
            raise_fence(Path(fence), self.epoch)
        write_whole(self.folder / "launch.json", self.request)
        self.renew(float(self.request["lease_seconds"]))
        try:
            for table in self.request["ranks"]:
                self._start_rank(table)
        except OSError as error:
            self.end(grace_seconds=0, note=f"cannot be started: {error}")
            raise
        pids = {rank: [pid, birth_of(pid)] for rank, pid in self._pids.items()}
        write_whole(self.folder / "processes.json", pids)

    def _start_rank(self, table: dict[str, Any]) -> None:
        rank = int(table["rank"])
        environment = {
            **self._variables,
            **os.environ,
            **self.request.get("environment", {}),
            **table.get("environment", {}),
            EPOCH_VARIABLE: str(self.epoch),
            LEASE_VARIABLE: str(self.folder / "lease"),
        }
        if self.request.get("fence"):
            environment[FENCE_VARIABLE] = str(self.request["fence"])
        with self._open(f"rank-{rank}.out") as output, self._open(f"rank-{rank}.log") as log:
            process = spawn(
                [sys.executable if word == PYTHON else word for word in self.request["arguments"]],
                environment=environment,
                folder=str(self.request.get("folder", "")),
                output=output,
                log=log,
            )
        self._processes[rank], self._pids[rank] = process, process.pid

    def _open(self, name: str) -> IO[bytes]:
        return (self.folder / name).open("ab")

    def renew(self, lease_seconds: float) -> None:
        """It may run for so much longer."""
        self._lease_ends = time.monotonic() + lease_seconds
        lease = {"epoch": self.epoch, "expires_seconds": time.time() + lease_seconds}
        write_whole(self.folder / "lease", lease, sync=False)

    def end(self, *, grace_seconds: float, note: str) -> None:
        """Ask its processes to leave; after the grace they are killed. Asking twice is once."""
        if self.is_over:
            return
        self.note = self.note or note
        deadline = time.monotonic() + grace_seconds
        if grace_seconds > 0 and self._kill_at == float("inf"):
            for process in self._processes.values():
                send(process, signal.SIGTERM)
        self._kill_at = min(self._kill_at, deadline)
        self.watch()

    def watch(self) -> None:
        """See who ended; end what has no lease any more, or was asked to leave long enough ago."""
        if self.is_over:
            return
        now = time.monotonic()
        if now > self._lease_ends:
            self._lease_ends = float("inf")
            self.end(grace_seconds=0, note="the lease ran out")
            return
        for rank, process in self._processes.items():
            if self.exits[rank] is None:
                if now >= self._kill_at:
                    kill_group(process.pid)
                code = process.poll()
                if code is not None:
                    kill_group(process.pid)  # what it left behind in its group
                    self.exits[rank] = code
        if all(code is not None for code in self.exits.values()):
            write_whole(self.folder / "ended.json", {"exits": self.exits, "note": self.note})

    def recover(self) -> None:
        """After the agent was started again: what ran is gone with the one before it."""
        ended = read_json(self.folder / "ended.json")
        if ended:
            self.exits = {int(rank): int(code) for rank, code in ended["exits"].items()}
            self.note = str(ended["note"])
            return
        for _, (pid, birth) in (read_json(self.folder / "processes.json") or {}).items():
            if birth and birth_of(int(pid)) == birth:
                kill_group(int(pid))
        self.exits = dict.fromkeys(self.exits, LOST_EXIT)
        self.note = "the agent of the node was lost"
        write_whole(self.folder / "ended.json", {"exits": self.exits, "note": self.note})

    def describe(self, offset: int) -> dict[str, Any]:
        """How it stands, and what it reported since `offset`."""
        text, end = self.read_reports(offset)
        return {
            "job_id": self.job_id,
            "epoch": self.epoch,
            "devices": self.devices,
            "exits": {str(rank): code for rank, code in self.exits.items()},
            "is_over": self.is_over,
            "note": self.note,
            "reports": text,
            "offset": end,
        }

    def read_reports(self, offset: int) -> tuple[str, int]:
        """Whole lines of reports since `offset`."""
        name = self.request.get("reports")
        return read_lines(self.folder / name, offset) if name else ("", offset)

    def tail(self, max_bytes: int) -> str:
        """The last of what its processes wrote to their logs, rank by rank."""
        parts = []
        for rank in self.exits:
            for ending in ("out", "log") if self.request.get("is_command") else ("log",):
                path = self.folder / f"rank-{rank}.{ending}"
                text = read_tail(path, max_bytes)
                if text.strip():
                    parts.append(f"--- rank {rank}\n{text}" if len(self.exits) > 1 else text)
        return "\n".join(parts)


def write_whole(path: Path, value: Any, *, sync: bool = True) -> None:
    """Write JSON so that a reader sees the old or the new, never a part."""
    scratch = path.with_name(f".{path.name}.part")
    with scratch.open("w", encoding="utf-8") as file:
        json.dump(value, file)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    scratch.replace(path)


def read_json(path: Path) -> Any:
    """What a file holds; None where it is not there or not whole."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def open_plain(path: Path) -> IO[bytes]:
    """A file that a job may have put there: what is no plain file could block for ever."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{path} is not a plain file")
    return os.fdopen(handle, "rb")


def read_lines(path: Path, offset: int) -> tuple[str, int]:
    """Whole lines from an offset on, at most a chunk; and where the next ones begin."""
    try:
        with open_plain(path) as file:
            file.seek(offset)
            chunk = file.read(_MAX_CHUNK_BYTES)
    except OSError:
        return "", offset
    end = chunk.rfind(b"\n") + 1
    if end == 0 and len(chunk) == _MAX_CHUNK_BYTES:
        end = len(chunk)  # one endless line: pass over it
    return chunk[:end].decode("utf-8", errors="replace"), offset + end


def read_tail(path: Path, max_bytes: int) -> str:
    """The end of a file."""
    try:
        with open_plain(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - max_bytes))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
