"""`drystone log`: the log of a service: check, repair, compact, back up, restore."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from drystone.cli.live import Folder
from drystone.cli.options import AsJson
from drystone.cli.output import Column, counted, make_console, print_json, print_table
from drystone.errors import InvalidSpec

if TYPE_CHECKING:
    from drystone.run.control.log_tools import BadLine, LogTools

log_group = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)
Database = Annotated[str, typer.Option(help="Where the log lives, if not in the folder.")]
Backup = Annotated[Path, typer.Argument(help="The file of the backup.", metavar="FILE")]


@log_group.callback()
def log() -> None:
    """Check, repair, compact and back up the log."""


@log_group.command("check")
def check_log(folder: Folder = None, database: Database = "", as_json: AsJson = False) -> None:
    """Read the whole log and name every event that is damaged or impossible.

    Exit code 1 if there is one. Nothing is changed; a service may run meanwhile.

    With --json: {num_events, num_jobs, seconds, bad: [{sequence, kind, job_id, reason}]}.
    """
    started = time.monotonic()
    with _opened(folder, database) as tools:
        found = tools.check()
    seconds = time.monotonic() - started
    if as_json:
        bad = [
            {key: value for key, value in asdict(one.line).items() if key in _SHOWN}
            | {"reason": one.reason}
            for one in found.bad
        ]
        counts = {"num_events": found.num_events, "num_jobs": len(found.live.state.jobs)}
        print_json({**counts, "seconds": seconds, "bad": bad})
    else:
        events = counted(found.num_events, "event")
        jobs = counted(len(found.live.state.jobs), "job")
        make_console(stderr=True).print(f"{events} of {jobs}, read in {seconds:.1f} s.")
        _print_bad(found.bad)
    if found.bad:
        raise typer.Exit(1)


@log_group.command("repair")
def repair_log(folder: Folder = None, database: Database = "") -> None:
    """Move damaged and impossible events out of the log, so that a service can start.

    They are written to log-removed.jsonl in the folder first. Make a backup before. The table of
    jobs is derived anew. No service may run meanwhile.
    """
    aside = _folder(folder) / "log-removed.jsonl"
    with _opened(folder, database) as tools:
        found = tools.repair(aside)
    _print_bad(found.bad)
    told = f"{counted(len(found.bad), 'event')} moved to {aside}." if found.bad else "All is well."
    make_console(stderr=True).print(told, soft_wrap=True)


@log_group.command("compact")
def compact_log(folder: Folder = None, database: Database = "") -> None:
    """Leave out what is not needed any more: progress that more progress follows, old decisions.

    The shorter log says the same of every job, node and dollar; if it would not, nothing is
    changed. No service may run meanwhile.
    """
    with _opened(folder, database) as tools:
        before, after = tools.compact()
    make_console(stderr=True).print(f"{before:,} events before, {after:,} now.")


@log_group.command("backup")
def backup_log(path: Backup, folder: Folder = None, database: Database = "") -> None:
    """Write the whole log to one compressed file; a service may run meanwhile.

    It holds what jobs were given, secrets of theirs too: the file is yours alone to read.
    Checkpoints are not in it.
    """
    with _opened(folder, database) as tools:
        number = tools.backup(path)
    make_console(stderr=True).print(f"{counted(number, 'event')} in {path}.", soft_wrap=True)


@log_group.command("restore")
def restore_log(path: Backup, folder: Folder = None, database: Database = "") -> None:
    """Fill an empty folder or database with a backup, whichever kind of database it was made of."""
    with _opened(folder, database, is_new=True) as tools:
        found = tools.restore(path)
    _print_bad(found.bad)
    make_console(stderr=True).print(f"{counted(found.num_events, 'event')} restored.")


_SHOWN = ("sequence", "kind", "job_id")


def _print_bad(bad: list[BadLine]) -> None:
    if not bad:
        return
    columns = [Column(header=name, justify="left") for name in (*_SHOWN, "why")]
    rows = [
        (str(one.line.sequence), one.line.kind, one.line.job_id or "-", one.reason) for one in bad
    ]
    print_table(counted(len(bad), "bad event"), columns, rows)


def _folder(folder: Path | None) -> Path:
    from drystone.service.client import default_folder

    return (folder or default_folder()).expanduser().absolute()


@contextmanager
def _opened(folder: Path | None, database: str, *, is_new: bool = False) -> Iterator[LogTools]:
    from drystone.run.control.folder import keep_private
    from drystone.run.control.log_tools import LogTools

    where = _folder(folder)
    if not database and not is_new and not (where / "log.db").exists():
        raise InvalidSpec(
            "there is no log here", where=str(where), hint="Say --folder or --database"
        )
    if not database:
        keep_private(where)
    tools = LogTools(database or f"sqlite:///{where / 'log.db'}")
    try:
        yield tools
    finally:
        tools.close()
