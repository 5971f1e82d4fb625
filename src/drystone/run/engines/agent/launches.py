"""One launch of one job on this node: its processes, its files, its lease.

Everything about a launch is in one folder: `launch.json` (what was asked), `lease` (until when it
may run), `rank-N.out` and `rank-N.log` (what its processes wrote), `processes.json` and
`keepers.json` (pids), `ended.json` (exit codes). An agent that starts again finds them there.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from drystone.run.engines.agent.accounts import Account, find_account, give, let_through
from drystone.run.engines.agent.cgroups import end_group, make_group
from drystone.run.engines.agent.environment import job_environment
from drystone.run.engines.agent.keeper import Command, KeptProcess, birth_of, kill_left_behind
from drystone.run.fence import (
    EPOCH_VARIABLE,
    FENCE_VARIABLE,
    LEASE_VARIABLE,
    raise_fence,
    write_lease,
)

PYTHON = "{python}"  # in arguments: the interpreter that runs the agent
LOST_EXIT = -1000  # how a process ended is not known: the agent that watched it is gone
_MAX_CHUNK_BYTES = 262_144
_MAX_JSON_BYTES = 64 * 2**20


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
        self._processes: dict[int, KeptProcess] = {}
        self._kill_at = float("inf")
        self._lease_ends = 0.0
        self._groups: dict[int, Path | None] = {}  # of the kernel

    @property
    def is_over(self) -> bool:
        """Whether no process of it is left."""
        return all(code is not None for code in self.exits.values())

    def start(self) -> None:
        """Raise the fence, take the lease, start every rank; all of them or none."""
        self.folder.mkdir(parents=True)
        fence = self.request.get("fence")
        if fence and not self.request.get("is_standby"):  # which does so when it takes over
            raise_fence(Path(fence), self.epoch)
        write_whole(self.folder / "launch.json", self.request)
        self.renew(float(self.request["lease_seconds"]))
        account = self._hand_over()
        try:
            for table in self.request["ranks"]:
                self._start_rank(table, account)
        except OSError as error:
            self.end(grace_seconds=0, note=f"cannot be started: {error}")
            raise
        ranks = {rank: process.pid for rank, process in self._processes.items()}
        keepers = {rank: process.keeper_pid for rank, process in self._processes.items()}
        groups = {rank: str(group) for rank, group in self._groups.items() if group is not None}
        write_whole(self.folder / "groups.json", groups)
        for name, pids in (("processes.json", ranks), ("keepers.json", keepers)):
            write_whole(
                self.folder / name, {rank: [pid, birth_of(pid)] for rank, pid in pids.items()}
            )

    @property
    def keepers(self) -> frozenset[int]:
        """Processes that hold its ranks."""
        return frozenset(process.keeper_pid for process in self._processes.values())

    def _hand_over(self) -> Account | None:
        """The account that it is to run as, which gets what it needs of our files."""
        name = str(self.request.get("account", ""))
        if not name:
            return None
        account = find_account(name)
        let_through(self.folder, *list(self.folder.parents)[:3])  # launches, node, agents
        (self.folder / "lease").chmod(0o644)
        (self.folder / "launch.json").chmod(0o600)
        if self.request.get("fence"):
            give(Path(self.request["fence"]), account)
        return account

    def _start_rank(self, table: dict[str, Any], account: Account | None) -> None:
        rank = int(table["rank"])
        self._groups[rank] = make_group(f"{os.getpid()}-{self.job_id}.{self.epoch}.{rank}")
        environment = {
            **self._variables,
            **job_environment(os.environ),
            **(account.variables if account is not None else {}),
            **self.request.get("environment", {}),
            **table.get("environment", {}),
            EPOCH_VARIABLE: str(self.epoch),
            LEASE_VARIABLE: str(self.folder / "lease"),
        }
        if self.request.get("fence"):
            environment[FENCE_VARIABLE] = str(self.request["fence"])
        with self._open(f"rank-{rank}.out") as output, self._open(f"rank-{rank}.log") as log:
            words = [
                sys.executable if word == PYTHON else word for word in self.request["arguments"]
            ]
            command = Command(
                arguments=words,
                environment=environment,
                folder=str(self.request.get("folder", "")),
                output=output,
                log=log,
                account=account,
                group=self._groups[rank],
            )
            self._processes[rank] = KeptProcess(command)

    def _open(self, name: str) -> IO[bytes]:
        return (self.folder / name).open("ab")

    def renew(self, lease_seconds: float) -> None:
        """It may run for so much longer."""
        self._lease_ends = time.monotonic() + lease_seconds
        write_lease(self.folder / "lease", self.epoch, lease_seconds)

    def end(self, *, grace_seconds: float, note: str) -> None:
        """Ask its processes to leave; after the grace they are killed. Asking twice is once."""
        if self.is_over:
            return
        self.note = self.note or note
        deadline = time.monotonic() + grace_seconds
        if grace_seconds > 0 and self._kill_at == float("inf"):
            for process in self._processes.values():
                process.terminate()
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
                    process.kill()
                self.exits[rank] = process.poll()
        if all(code is not None for code in self.exits.values()):
            self._write_end()

    def _write_end(self) -> None:
        """Write down how it ended; where that cannot be (the disk is full), it is known here.

        An agent that is started again then takes the launch for lost, which costs steps at most.
        """
        with suppress(OSError):
            write_whole(self.folder / "ended.json", {"exits": self.exits, "note": self.note})

    def recover(self) -> None:
        """After the agent was started again: what ran is gone with the one before it.

        Its files may be what the job has made of them: then it is lost.
        """
        with suppress(LookupError, TypeError, ValueError, AttributeError):
            ended = read_json(self.folder / "ended.json")
            self.exits = {rank: int(ended["exits"][str(rank)]) for rank in self.exits}
            self.note = str(ended["note"])
            return
        with suppress(LookupError, TypeError, ValueError, AttributeError):
            self._end_what_is_left()
        self.exits = dict.fromkeys(self.exits, LOST_EXIT)
        self.note = "the agent of the node was lost"
        self._write_end()

    def _end_what_is_left(self) -> None:
        marker = f"{LEASE_VARIABLE}={self.folder / 'lease'}"
        ranks = read_json(self.folder / "processes.json") or {}
        for rank, (keeper, birth) in (read_json(self.folder / "keepers.json") or {}).items():
            session = int(ranks.get(rank, (0, ""))[0])
            kill_left_behind(int(keeper), birth, session=session, marker=marker)
        for group in (read_json(self.folder / "groups.json") or {}).values():
            end_group(Path(group))

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
    scratch.unlink(missing_ok=True)  # whatever a job, or somebody who was killed, has left there
    handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(value, file)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    scratch.replace(path)


def read_json(path: Path) -> Any:
    """What a file holds; None where it is not there or not whole."""
    try:
        with open_plain(path) as file:
            return json.loads(file.read(_MAX_JSON_BYTES))
    except (OSError, ValueError, RecursionError):
        return None


def open_plain(path: Path) -> IO[bytes]:
    """A file that a job may have put there: what is no plain file could block for ever."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
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
