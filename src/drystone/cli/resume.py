"""`drystone resume`: let paused jobs run again."""

from __future__ import annotations

from drystone.cli.live import Folder, JobIds, change_jobs


def resume(jobs: JobIds, folder: Folder = None) -> None:
    """Let paused jobs run again.

    It goes on from its last checkpoint.
    """
    change_jobs(folder, jobs, "resume", "waiting for GPUs")
