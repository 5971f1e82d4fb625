"""Start a process that dies with us, in a group of its own; signal it; see how it ended."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

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
