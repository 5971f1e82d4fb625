"""The folder of a service: one controller at a time, and nobody else's eyes."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path
from typing import Final

from drystone.errors import DrystoneError, InvalidSpec
from drystone.run.control.journal import Journal
from drystone.run.control.live_state import LiveState
from drystone.run.control.notes import FilesKept
from drystone.run.engines.agent.accounts import close_files, let_through

_OF_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
# Made by earlier releases with the modes of the day; what holds secrets is the owner's alone.
_NAME_FILE: Final = "folder.id"
_SECRET_FILES: Final = ("log.db", "log.db-wal", "log.db-shm", "session.key", "cloud.json")


def keep_private(folder: Path, *, is_passed: bool = False) -> None:
    """Make the folder, or close it to everybody but its owner; refuse one that is not ours.

    With `is_passed` others get through it to what is theirs (`run/engines/agent/accounts.py`).

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
    if is_passed:
        os.umask(0o077)  # what is made from now on is nobody else's, also what agents make
        close_files(folder)
        let_through(folder)
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


def name_of(folder: Path) -> str:
    """What a folder calls itself, wherever it is mounted; it gets a name when first asked."""
    path = folder / _NAME_FILE
    if not path.exists():
        scratch = path.with_suffix(".part")
        scratch.write_text(os.urandom(16).hex() + "\n", encoding="ascii")
        scratch.replace(path)
    return path.read_text(encoding="ascii").strip()


def check_files(folder: Path, live: LiveState) -> None:
    """Refuse a folder that is not the one in which the jobs of this log have their checkpoints.

    They would start again from the beginning, while what the last controller started may still
    run; or go on from checkpoints of other jobs with the same numbers.
    """
    name = name_of(folder)
    if live.folder_id:
        begun = [job_id for job_id, record in live.state.active.items() if record.num_starts]
        if live.folder_id != name and begun:
            raise InvalidSpec(
                f"is not the folder in which jobs {_listed(begun)} of this log have their "
                f"checkpoints: they would begin anew. That one calls itself {live.folder_id}",
                where=str(folder),
                hint=f"Give --folder that one (it holds a file {_NAME_FILE} with this name), on a "
                "disk that both machines see",
            )
    elif not live.num_events and any((folder / "jobs").glob("*/epoch")):
        raise InvalidSpec(
            "holds files of jobs, and the log is empty: new jobs would take them for their own",
            where=str(folder),
            hint="Give --folder another one, or bring the log back: drystone log restore",
        )


def note_folder(journal: Journal, folder: Path) -> None:
    """Write down in which folder the files of jobs are from now on."""
    name = name_of(folder)
    if journal.live.folder_id != name:
        journal.commit([FilesKept(time_seconds=journal.now(), folder_id=name)])


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
