"""`drystone cancel`: take jobs back."""

from __future__ import annotations

from drystone.cli.live import Folder, JobIds, change_jobs


def cancel(jobs: JobIds, folder: Folder = None) -> None:
    """Take jobs back.

    A running job is stopped at once; its last checkpoint stays.
    """
    change_jobs(folder, jobs, "cancel", "cancelled")
