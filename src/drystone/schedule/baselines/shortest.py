"""Shortest remaining time first: whoever would be done soonest runs, others are preempted for it.

Each job keeps to the GPUs that its owner named. It needs to know the lengths of jobs.
"""

from __future__ import annotations

import numpy as np

from drystone.schedule.baselines.rigid import give_by_rank, refuse_impossible, rigid_options
from drystone.schedule.decision import Decision
from drystone.schedule.policies import Memory
from drystone.schedule.snapshot import Snapshot


def shortest(snapshot: Snapshot, memory: Memory) -> tuple[list[Decision], Memory]:
    """Rank by seconds left; a job that must start first pays for its start."""
    options = rigid_options(snapshot)
    rows = np.arange(len(snapshot.jobs))
    known = np.maximum(options, 0)
    speeds = snapshot.job_speeds[rows, known]
    left = snapshot.jobs.remaining_samples / np.where(speeds > 0, speeds, 1.0)
    startup = snapshot.startup_seconds[rows, known]
    left = left + np.where(snapshot.jobs.is_running, 0.0, startup)
    decisions = refuse_impossible(snapshot, options)
    decisions += give_by_rank(snapshot, rank=left, options=options, reason="the least time is left")
    return decisions, memory
