"""Processes behind the owner's socket: the kernel says who they are, their parents what they are.

A job runs as the user who runs the service, unless `--run-as` says otherwise, so the modes of the
socket's file do not keep it out. But whatever a job starts descends from an agent
(`run/engines/agent/keeper.py`), and from no other process that could have a reason to ask; where
there are groups of the kernel, it is in one of those, also when its parents have died.
"""

from __future__ import annotations

import socket
import struct
from pathlib import Path
from typing import Final

from drystone.run.engines.agent.cgroups import is_in_group

PEER_PREFIX: Final = "uid "
# Programs below which code of those who submit jobs runs: agents, training, probes of modules.
_PROGRAMS: Final = (b"drystone.run.engines.", b"drystone.run.train", b"drystone.run.runtime")
_MAX_DEPTH: Final = 1000


def peer_of(connection: socket.socket) -> tuple[str, int]:
    """The user and the process at the other end of a Unix socket, as a client of ASGI."""
    size = struct.calcsize("3i")
    pid, uid, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )
    return f"{PEER_PREFIX}{uid}", pid


def is_job_process(pid: int) -> bool:
    """Whether a process is, or descends from, an agent or another program that runs jobs' code.

    One that cannot be looked at (it has ended, or hides) is taken for a job's.
    """
    if is_in_group(pid):
        return True
    for _ in range(_MAX_DEPTH):
        if pid <= 1:
            return False
        folder = Path(f"/proc/{pid}")
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            stat = (folder / "stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            return True
        if any(word.startswith(_PROGRAMS) for word in words):
            return True
        pid = int(stat.rpartition(")")[2].split()[1])
    return True
