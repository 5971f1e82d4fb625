"""First come, first served: jobs in order of arrival, each on the GPUs its owner named.

A job that does not fit holds back the later ones that want the same GPU type, never those that want
another. Nothing is preempted. This is the FCFS baseline of Crius/Arena (arXiv:2403.16125), which
puts a job on the emptiest nodes and drops one whose request cannot run at all.
"""

from __future__ import annotations

import numpy as np

from drystone.schedule.decision import Decision, Start
from drystone.schedule.packing import make_room
from drystone.schedule.policy import Memory
from drystone.schedule.rigid import refuse_impossible, rigid_options
from drystone.schedule.snapshot import Snapshot


def fifo(snapshot: Snapshot, memory: Memory) -> tuple[list[Decision], Memory]:
    """Start waiting jobs in order of arrival; per GPU type, stop at the first that does not fit."""
    if snapshot.jobs.is_running.all():
        return [], memory
    options = rigid_options(snapshot)
    decisions = refuse_impossible(snapshot, options)
    room = make_room(snapshot)
    blocked = np.zeros(len(snapshot.gpu_types), dtype=bool)
    for row in np.flatnonzero(~snapshot.jobs.is_running & (options >= 0)):
        counts = snapshot.counts(int(row), int(options[row]))
        wanted = counts > 0
        if (blocked & wanted).any():
            continue
        placement = room.place(counts, "scatter")
        if placement is None:
            blocked |= wanted
            if blocked.all():
                break
            continue
        decisions.append(
            Start(
                job_id=snapshot.jobs.specs[row].id,
                option=int(options[row]),
                placement=placement,
                reason="the oldest that waits for this GPU type, and it fits",
            )
        )
    return decisions, memory
