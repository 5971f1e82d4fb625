"""Processes of a job, held together: a keeper for each rank, and nothing outlives it.

A keeper is a process that the agent forks. It starts the rank and is the reaper of whatever the
rank starts (`PR_SET_CHILD_SUBREAPER`): children that leave the process group or the session stay
its descendants. When the rank ends, or the agent dies, the keeper kills all of them, and then ends
as the rank ended. Where the machine lets us, a group of the kernel holds them too (`cgroups.py`).
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, NoReturn

from drystone.run.engines.agent.accounts import Account, become
from drystone.run.engines.agent.cgroups import end_group, join_group

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4
_PR_SET_CHILD_SUBREAPER: Final = 36
_PR_GET_CHILD_SUBREAPER: Final = 37
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_ORPHANED: Final = signal.SIGUSR1  # what a keeper gets when its agent dies
_HEARD: Final = frozenset({signal.SIGCHLD, signal.SIGTERM, _ORPHANED})
_LOOK_SECONDS: Final = 1.0
_OOM_SCORE: Final = 500  # of 1,000: the kernel adds this to the share of memory that is used
_MAX_FILES: Final = 65_536
_PATIENCE_SECONDS: Final = 2.0  # for a keeper to end once nothing is left that it keeps


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What a rank runs, and where its output goes."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: str
    output: IO[bytes]
    log: IO[bytes]
    account: Account | None = None  # None: that of the agent
    group: Path | None = None  # of the kernel; None: keepers alone hold it


class KeptProcess:
    """A rank and all that it started, seen from the agent."""

    def __init__(self, command: Command) -> None:
        """Start it, from the main thread: the kernel tells of the death of a thread.

        Raises `OSError` where the command cannot be run.
        """
        self.keeper_pid, self.pid = _fork_keeper(command)
        self.exit_code: int | None = None
        self._group = command.group
        self._killed_at = float("inf")

    def terminate(self) -> None:
        """Ask the rank itself to leave."""
        if self.exit_code is None:
            _kill(self.keeper_pid, signal.SIGTERM)

    def kill(self) -> None:
        """End all of it; to be repeated until `poll` says that it has ended."""
        if self.exit_code is not None:
            return
        now = time.monotonic()
        self._killed_at = min(self._killed_at, now)
        kill_descendants(self.keeper_pid)
        if self._group is not None:
            end_group(self._group)
        if now - self._killed_at > _PATIENCE_SECONDS:
            _kill(self.keeper_pid, signal.SIGKILL)  # stopped, or out of memory itself

    def poll(self) -> int | None:
        """The exit code of the rank, or minus the signal; None while anything of it runs."""
        if self.exit_code is None:
            try:
                pid, status = os.waitpid(self.keeper_pid, os.WNOHANG)
            except ChildProcessError:
                pid, status = self.keeper_pid, signal.SIGKILL
            if pid:
                if self._group is not None:
                    end_group(self._group)  # of a keeper that was killed
                self.exit_code = os.waitstatus_to_exitcode(status)
        return self.exit_code


def adopt_orphans() -> None:
    """From now on this process is the parent of descendants whose own parent died."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _adopts_orphans() -> bool:
    answer = ctypes.c_int(0)
    _LIBC.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(answer), 0, 0, 0)
    return bool(answer.value)


def hide_environment() -> None:
    """Other processes of the same user cannot read this one's variables and memory (not root's)."""
    _LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def be_killed_first() -> None:
    """Where the machine runs out of memory, this process goes before agents and the service."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE), encoding="ascii")


def birth_of(pid: int) -> str:
    """When the kernel started a process, in its own clock ticks: a pid may be used again."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()
    is_dead = not fields or fields[0] in ("Z", "X")
    return "" if is_dead else fields[19]


def descendants(root: int) -> list[int]:
    """Processes that descend from one and are alive, parents before children."""
    children: dict[int, list[int]] = {}
    dead: set[int] = set()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            text = Path(entry.path, "stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            continue
        state, parent = text.rpartition(")")[2].split()[:2]
        children.setdefault(int(parent), []).append(int(entry.name))
        if state in ("Z", "X"):
            dead.add(int(entry.name))
    found, waiting = list[int](), [root]
    while waiting:
        for child in children.get(waiting.pop(), ()):
            found.append(child)
            waiting.append(child)
    return [pid for pid in found if pid not in dead]


def kill_descendants(root: int) -> bool:
    """Kill all that descends from a process, not the process itself; whether any was alive."""
    is_any = False
    for _ in range(10):  # what is started while we look is found in the next look
        alive = descendants(root)
        if not alive:
            break
        is_any = True
        for pid in alive:
            _kill(pid, signal.SIGKILL)
    return is_any


def kill_strays(known: frozenset[int]) -> None:
    """Kill and bury children of this process that nobody knows: of a keeper that was killed.

    Only where it is an agent's, which has no others.
    """
    if not _adopts_orphans():
        return
    own = os.getpid()
    try:
        text = Path(f"/proc/{own}/task/{own}/children").read_text(encoding="ascii")
        children = [int(word) for word in text.split()]
    except OSError:  # a kernel without that file
        children = [pid for pid in descendants(own) if _parent_of(pid) == own]
    for pid in children:
        if pid not in known:
            kill_descendants(pid)
            _kill(pid, signal.SIGKILL)
            try:
                os.waitpid(pid, 0)
            except ChildProcessError:
                continue


def kill_left_behind(keeper: int, birth: str, *, session: int, marker: str) -> None:
    """Kill what is left of a rank whose agent has died: its keeper is about to do the same.

    If the keeper was killed too, its processes are known by their session and by a `marker` in
    their variables.
    """
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while birth and birth_of(keeper) == birth:
        kill_descendants(keeper)
        if time.monotonic() > deadline:
            _kill(keeper, signal.SIGKILL)
        time.sleep(0.01)
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            pid = int(entry.name)
            try:
                is_ours = os.getsid(pid) == session
                is_ours = is_ours or marker.encode() in Path(entry.path, "environ").read_bytes()
            except OSError:
                continue
            if is_ours and birth_of(pid):
                kill_descendants(pid)
                _kill(pid, signal.SIGKILL)


def _parent_of(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[1])


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def _fork_keeper(command: Command) -> tuple[int, int]:
    """Fork the keeper and wait until the rank runs; the pids of both."""
    reading, writing = os.pipe()
    # Blocked before there is a keeper, so that it misses none.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    agent = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _keep(command, agent, writing, before)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read().decode(errors="replace")
    kind, _, rest = told.partition(" ")
    if kind == "started":
        return pid, int(rest)
    os.waitpid(pid, 0)
    number, _, text = rest.partition(" ")
    raise OSError(int(number) if number.isdigit() else 0, text or "its keeper died")


def _keep(command: Command, agent: int, writing: int, mask: set[int]) -> NoReturn:
    """The keeper; in a forked process, which must never return into the agent's code."""
    try:
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(_ORPHANED), 0, 0, 0)
        adopt_orphans()
        os.setsid()
        rank = _start_rank(command, agent, writing, mask)  # kept: forgetting it waits for it
        status = _watch_rank(rank.pid, agent)
        if command.group is not None:
            end_group(command.group)
        _end_like(status)
    except BaseException:
        kill_descendants(os.getpid())
        if command.group is not None:
            end_group(command.group)
    os._exit(1)


def _start_rank(
    command: Command, agent: int, writing: int, mask: set[int]
) -> subprocess.Popen[bytes]:
    kept = sorted({0, 1, 2, writing, command.output.fileno(), command.log.fileno()})
    for low, high in zip(kept, [*kept[1:], _MAX_FILES], strict=True):
        os.closerange(low + 1, high)  # above all the agent's lock and its connections
    keeper = os.getpid()

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        be_killed_first()
        if command.group is not None:
            join_group(command.group)
        if command.account is not None:
            become(command.account)
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != keeper:
            os._exit(1)

    try:
        if os.getppid() != agent:
            raise OSError("the agent died")
        rank = subprocess.Popen(
            list(command.arguments),
            env=dict(command.environment),
            cwd=command.folder or None,
            stdin=subprocess.DEVNULL,
            stdout=command.output.fileno(),
            stderr=command.log.fileno(),
            start_new_session=True,
            preexec_fn=prepare,
        )
    except OSError as error:
        text = f"{error.strerror or error}: {error.filename or command.arguments[0]}"
        os.write(writing, f"failed {error.errno or 0} {text}".encode())
        os._exit(1)
    os.write(writing, f"started {rank.pid}".encode())
    os.closerange(3, _MAX_FILES)
    return rank


def _watch_rank(rank: int, agent: int) -> int:
    """Until nothing is left: how the rank ended, as the kernel says it."""
    status: int | None = None
    while True:
        signalled = signal.sigtimedwait(_HEARD, _LOOK_SECONDS)
        number = signalled.si_signo if signalled is not None else 0
        if number == signal.SIGTERM and status is None:
            _kill(rank, signal.SIGTERM)
        if number == _ORPHANED or os.getppid() != agent:
            _kill(rank, signal.SIGKILL)
        while True:
            try:
                pid, ended = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                pid = 0
            if pid == 0:
                break
            if pid == rank:
                status = ended
        if status is not None and not kill_descendants(os.getpid()):
            return status


def _end_like(status: int) -> NoReturn:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)
