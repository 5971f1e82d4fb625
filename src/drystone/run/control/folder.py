"""The folder of a service: one controller at a time, and nobody else's eyes."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path
from typing import Final

from drystone.errors import DrystoneError, InvalidSpec

_OF_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
# Made by earlier releases with the modes of the day; what holds secrets is the owner's alone.
_SECRET_FILES: Final = ("log.db", "log.db-wal", "log.db-shm", "session.key", "cloud.json")


def keep_private(folder: Path) -> None:
    """Make the folder, or close it to everybody but its owner; refuse one that is not ours.

    It holds the log, variables of jobs, the key of sessions, and the socket whose callers may do
    everything.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.stat()
    if found.st_uid != os.getuid():
        raise InvalidSpec(
            f"belongs to another user (uid {found.st_uid}), who could read secrets of jobs there",
            where=str(folder),
            hint="Give --folder a folder of your own",
        )
    if found.st_mode & stat.S_ISVTX:
        raise InvalidSpec(
            "is shared by all users of this machine",
            where=str(folder),
            hint=f"Give --folder a folder of your own, such as {folder / 'drystone'}",
        )
    if found.st_mode & _OF_OTHERS:
        folder.chmod(stat.S_IMODE(found.st_mode) & ~_OF_OTHERS)
    for name in _SECRET_FILES:
        path = folder / name
        if path.exists() and path.stat().st_mode & _OF_OTHERS:
            path.chmod(0o600)


def lock_folder(folder: Path) -> int:
    """An open file whose lock says that a controller runs here."""
    handle = os.open(folder / "controller.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise DrystoneError(
            "another controller runs here", where=str(folder), hint="Use it, or end it first"
        ) from None
    return handle
