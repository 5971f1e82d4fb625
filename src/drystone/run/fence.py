"""Fencing: epochs and leases that decide whether a process may still write for its job.

Every launch of a job has an epoch, which only grows. Two files tell a training process whether it
is still the one: the lease that the agent of its node renews (`DRYSTONE_LEASE`), and the epoch of
the newest launch beside the job's checkpoints (`DRYSTONE_FENCE`). A checkpoint gets its name while
the second one is locked against change, so an old process cannot slip in between. Without these
variables everything is allowed: nobody launched the process but a person.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from drystone.errors import DrystoneError

LEASE_VARIABLE = "DRYSTONE_LEASE"
FENCE_VARIABLE = "DRYSTONE_FENCE"
EPOCH_VARIABLE = "DRYSTONE_EPOCH"
_EXPIRES = "expires_monotonic_seconds"
_LEASE_BYTES = 96


class Fenced(DrystoneError):
    """Another process trains the job now; this one must not write, and should end."""

    exit_code = 75  # "try again later" of sysexits.h: not the script's fault


def check_lease() -> None:
    """Raise `Fenced` if the lease of this process ran out or belongs to a later launch."""
    path = os.environ.get(LEASE_VARIABLE)
    if not path:
        return
    try:
        lease = json.loads(Path(path).read_text(encoding="utf-8"))
        epoch = int(lease["epoch"])
        if _EXPIRES in lease:
            # The clock since this machine was started, which agent and ranks share: nobody sets it.
            late_seconds = time.monotonic() - float(lease[_EXPIRES])
        else:  # of an agent of an earlier release
            late_seconds = time.time() - float(lease["expires_seconds"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Fenced(f"the lease cannot be read: {error}") from None
    if epoch != own_epoch():
        raise Fenced(f"this process has epoch {own_epoch()}, the lease is for epoch {epoch}")
    if late_seconds > 0:
        raise Fenced(f"the lease ran out {late_seconds:.1f} s ago")


def write_lease(path: Path, epoch: int, lease_seconds: float) -> None:
    """Let the processes of a launch on this machine write for so much longer.

    The file always has the same size: on a disk that is full it is written in place.
    """
    expires = time.monotonic() + lease_seconds
    table = {"epoch": epoch, _EXPIRES: round(expires, 3)}
    text = json.dumps(table).ljust(_LEASE_BYTES).encode()
    # What a job may have put there instead must neither block us nor lead us elsewhere.
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW, 0o644)
    try:
        os.pwrite(handle, text, 0)
    except OSError as error:
        # What runs goes on in any case; whether it may still save is what it cannot know then.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
    finally:
        os.close(handle)


def own_epoch() -> int:
    """The epoch that this process was launched with; 0 without one."""
    return int(os.environ.get(EPOCH_VARIABLE, "0") or 0)


@contextmanager
def writing() -> Iterator[None]:
    """While inside, no later launch of the job can begin; raises `Fenced` if one has."""
    check_lease()
    path = os.environ.get(FENCE_VARIABLE)
    if not path:
        yield
        return
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH)
        newest = _read_epoch(handle)
        if newest != own_epoch():
            raise Fenced(f"this process has epoch {own_epoch()}, the job is at epoch {newest}")
        yield
    finally:
        os.close(handle)


def raise_fence(path: Path, epoch: int, *, wait_seconds: float = 5.0) -> None:
    """From now on only `epoch` may write; raises `Fenced` if a later one was there before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _lock(handle, path, wait_seconds)
        newest = _read_epoch(handle)
        if newest > epoch:
            raise Fenced(f"the job is at epoch {newest}, a launch of epoch {epoch} comes too late")
        if newest < epoch:
            text = f"{epoch}\n".encode()
            os.pwrite(handle, text, 0)
            os.ftruncate(handle, len(text))
            os.fsync(handle)
    finally:
        os.close(handle)


def newest_epoch() -> int:
    """The launch that may write for the job of this process; 0 where no fence is there."""
    path = os.environ.get(FENCE_VARIABLE)
    if not path:
        return 0
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        return _read_epoch(handle)
    finally:
        os.close(handle)


def take_over() -> None:
    """From now on only the launch of this process may write; raises `Fenced` if it is too late."""
    check_lease()
    path = os.environ.get(FENCE_VARIABLE)
    if path:
        raise_fence(Path(path), own_epoch())


def _lock(handle: int, path: Path, wait_seconds: float) -> None:
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise Fenced(f"{path} is held by a process that writes a checkpoint") from None
            time.sleep(0.01)


def _read_epoch(handle: int) -> int:
    text = os.pread(handle, 64, 0).decode("ascii", errors="replace").strip()
    return int(text) if text.isdigit() else 0
