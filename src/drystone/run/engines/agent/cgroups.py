"""Groups of processes that the kernel keeps (cgroups v2), where this machine lets us make them.

Whatever a process does, its children stay in its group, and one write kills them all. That needs
the unified hierarchy with `cgroup.kill` (Linux 5.14) and the right to make groups below our own
(root, or `Delegate=yes` of systemd). Elsewhere keepers alone hold processes (`keeper.py`).
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

_PREFIX: Final = "drystone-job-"
_ROOTS: Final = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
_PATIENCE_SECONDS: Final = 5.0


def make_group(name: str) -> Path | None:
    """A new, empty group below that of this process; None where that cannot be."""
    own = _own_group()
    if own is None:
        return None
    group = own / f"{_PREFIX}{name}"
    try:
        if group.is_dir():
            end_group(group)
        group.mkdir()
    except OSError:
        return None
    if not (group / "cgroup.kill").exists():
        group.rmdir()
        return None
    return group


def join_group(group: Path) -> None:
    """Put this process there, and all that it starts from now on."""
    (group / "cgroup.procs").write_text("0")


def end_group(group: Path) -> None:
    """Kill all that is in it, and remove it."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    with suppress(OSError):  # it has been removed
        while "populated 1" in (group / "cgroup.events").read_text():
            (group / "cgroup.kill").write_text("1")
            if time.monotonic() > deadline:
                return
            time.sleep(0.005)
        group.rmdir()


def is_in_group(pid: int) -> bool:
    """Whether a process is a job's, whoever its parents are by now."""
    with suppress(OSError):
        return f"/{_PREFIX}" in Path(f"/proc/{pid}/cgroup").read_text()
    return False


def _own_group() -> Path | None:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    path = next((line[3:] for line in lines if line.startswith("0::")), "")
    for root in _ROOTS:
        own = root / path.lstrip("/")
        if path and (own / "cgroup.procs").exists() and os.access(own, os.W_OK):
            return own
    return None
