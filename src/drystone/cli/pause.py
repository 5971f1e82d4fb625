"""`drystone pause`: let jobs wait until they are resumed."""

from __future__ import annotations

from drystone.cli.live import Folder, JobIds, change_jobs


def pause(jobs: JobIds, folder: Folder = None) -> None:
    """Let jobs wait until they are resumed.

    A running job writes a checkpoint and gives its GPUs back.
    """
    change_jobs(folder, jobs, "pause", "paused")
