"""Succession: the files by which a launch of a job hands over to the next one.

A launch that is to replace another begins as a standby (`DRYSTONE_STANDBY`): it starts its
processes, joins its ranks and builds its model while the one before it trains. It says that it is
ready. The controller then names it to the one that trains (`name_successor`) and asks that one to
leave. At the end of its step it offers its state, and the standby takes it. Where nothing is
offered, because the one before it failed or left in another way, the controller says that nothing
of it runs any more (`let_begin`), and the standby begins from the newest checkpoint.

The launch before never trains on after its offer, and the standby trains only once it has raised
the fence. So whoever is killed, and whenever, no two of them train the same steps.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

STANDBY_VARIABLE: Final = "DRYSTONE_STANDBY"  # the epoch that it waits for
_SUCCESSOR: Final = "successor.json"
_BEGIN: Final = "begin"


@dataclass(frozen=True, slots=True)
class Successor:
    """The launch that is to take over, and where its first rank can be reached."""

    epoch: int
    address: str


def awaited_epoch() -> int:
    """The launch that this process is to replace; 0 where it begins by itself."""
    return int(os.environ.get(STANDBY_VARIABLE, "0") or 0)


def name_successor(job_folder: Path, epoch: int, successor: Successor) -> None:
    """Tell the launch of that epoch who takes over from it."""
    table = {"epoch": successor.epoch, "address": successor.address}
    _write(_home(job_folder, epoch) / _SUCCESSOR, json.dumps(table))


def find_successor(job_folder: Path, epoch: int) -> Successor | None:
    """Who takes over from the launch of that epoch; None where it was told of nobody."""
    try:
        text = (_home(job_folder, epoch) / _SUCCESSOR).read_text(encoding="utf-8")
        table: dict[str, Any] = json.loads(text)
        return Successor(int(table["epoch"]), str(table["address"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def let_begin(job_folder: Path, epoch: int) -> None:
    """Tell a standby that nothing of the launch before it runs any more."""
    _write(_home(job_folder, epoch) / _BEGIN, "")


def may_begin(job_folder: Path, epoch: int) -> bool:
    """Whether a standby need not wait for an offer any more."""
    return (_home(job_folder, epoch) / _BEGIN).exists()


def offer_folder(checkpoints: Path, epoch: int) -> Path:
    """Where the launch before says how its state can be had; no checkpoint has such a name."""
    return checkpoints / f".hand-over-{epoch}"


def _home(job_folder: Path, epoch: int) -> Path:
    return job_folder / f"epoch-{epoch}"


def _write(path: Path, text: str) -> None:
    """Whole or not at all, and readable for the account that the job runs as."""
    scratch = path.with_name(f".{path.name}.part")
    scratch.write_text(text, encoding="utf-8")
    scratch.chmod(0o644)
    scratch.replace(path)
