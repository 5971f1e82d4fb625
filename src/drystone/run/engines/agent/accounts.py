"""Accounts of this machine under which jobs run, where the service runs as root (`serve --run-as`).

A job's processes belong to its account, and of the service's folder they can reach only what is
theirs: checkpoints, the file of reports, the files that came with the job. Folders on the way there
can be passed through, not listed.
"""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from drystone.errors import InvalidSpec

SUBMITTER: Final = "submitter"  # each job as the account that is called like its owner
_PASSED: Final = 0o711


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Of one user."""

    name: str
    uid: int
    gid: int
    home: str
    shell: str

    @property
    def variables(self) -> dict[str, str]:
        """What a login sets."""
        return {"HOME": self.home, "USER": self.name, "LOGNAME": self.name, "SHELL": self.shell}


def account_name(run_as: str, owner: str) -> str:
    """Under which account a job of this owner runs; empty: under that of the service."""
    return owner if run_as == SUBMITTER else run_as


def find_account(name: str) -> Account:
    """The account of that name; not root's."""
    try:
        found = pwd.getpwnam(name)
    except (KeyError, ValueError):
        raise InvalidSpec(
            f"there is no account {name[:100]!r} on this machine to run the job as",
            hint="Submit with a token that is called like an account: serve has --run-as submitter",
        ) from None
    if found.pw_uid == 0:
        raise InvalidSpec("jobs do not run as root", hint="serve has --run-as")
    return Account(
        name=name, uid=found.pw_uid, gid=found.pw_gid, home=found.pw_dir, shell=found.pw_shell
    )


def become(account: Account) -> None:
    """For good, with the account's groups and no others; in a process that is about to begin."""
    os.initgroups(account.name, account.gid)
    os.setgid(account.gid)
    os.setuid(account.uid)


def let_through(*folders: Path) -> None:
    """Whoever knows what is inside gets there."""
    for folder in folders:
        folder.chmod(_PASSED)


def give(path: Path, account: Account) -> None:
    """A file, or a folder with all that is inside; once: links in it may be the job's own."""
    if path.lstat().st_uid == account.uid:
        return
    for root, folders, files in os.walk(path):
        for name in (*folders, *files):
            os.chown(Path(root, name), account.uid, account.gid, follow_symlinks=False)
    os.chown(path, account.uid, account.gid, follow_symlinks=False)


def hand_over(job: Path, epoch: Path, work: Path, account: Account) -> None:
    """What the next launch of a job needs is its account's: `job` and `epoch` are its folders.

    The folder of the launch stays ours: it holds what agents are asked to do.
    """
    service = job.parents[1]
    let_through(service, job.parent, job, epoch)
    reports = epoch / "progress.jsonl"
    reports.touch(mode=0o600)
    for path in (job / "checkpoints", reports, epoch / "plan.json"):
        if path.exists():
            give(path, account)
    if work.is_relative_to(service / "uploads"):
        let_through(service / "uploads", work.parent)
        if work.name == "empty":
            let_through(work)
        else:
            give(work, account)


def close_files(service: Path) -> None:
    """Orders of earlier launches hold variables of jobs: nobody else's eyes."""
    for pattern in ("agents/*/launches/*/*.json", "jobs/*/epoch-*/*.json"):
        for path in service.glob(pattern):
            path.chmod(0o600)
