"""For policies that change nothing about a job: its one option, and giving GPUs out by rank."""

from __future__ import annotations

from operator import le, sub

import numpy as np

from drystone.schedule.decision import Decision, Preempt, Refuse, Start
from drystone.schedule.packing import Style, make_room
from drystone.schedule.snapshot import FloatArray, IntArray, Snapshot


def rigid_options(snapshot: Snapshot) -> IntArray:
    """The one option of each job: what its owner named; -1 where that cannot run at all.

    A job whose owner named nothing gets the option with the most work from each GPU, and of equals
    the fastest.
    """
    jobs = snapshot.jobs
    if not (jobs.requested == -2).any():
        return jobs.requested
    speeds = snapshot.job_speeds
    if speeds.shape[1] == 0:
        return np.full(len(jobs), -1, dtype=np.int64)
    per_gpu = np.where(speeds > 0, speeds / np.maximum(snapshot.job_num_gpus, 1), -1.0)
    best = per_gpu.max(axis=1, keepdims=True)
    frugal = np.argmax(np.where(per_gpu >= best * (1 - 1e-9), speeds, -1.0), axis=1)
    frugal = np.where(best[:, 0] > 0, frugal, -1)
    return np.where(jobs.requested == -2, frugal, jobs.requested).astype(np.int64)


def rigid_option(snapshot: Snapshot, option_set: int, requested: int) -> int:
    """The same for one job, whose set of options and named option are these."""
    if requested != -2:
        return requested
    options = snapshot.options
    speeds = options.samples_per_second[option_set]
    if not (speeds > 0).any():
        return -1
    per_gpu = np.where(speeds > 0, speeds / np.maximum(options.num_gpus[option_set], 1), -1.0)
    return int(np.argmax(np.where(per_gpu >= per_gpu.max() * (1 - 1e-9), speeds, -1.0)))


def refuse_impossible(snapshot: Snapshot, options: IntArray) -> list[Decision]:
    """Refuse the waiting jobs that have no option."""
    return [
        refuse(snapshot.jobs.specs[row].id)
        for row in np.flatnonzero((options < 0) & ~snapshot.jobs.is_running)
    ]


def refuse(job_id: str) -> Refuse:
    """Refuse a job that has no option."""
    return Refuse(
        job_id=job_id,
        reason="it cannot run on the GPUs that were asked for, and this policy changes none",
    )


def give_by_rank(
    snapshot: Snapshot,
    *,
    rank: FloatArray,
    options: IntArray,
    reason: str,
    style: Style = "tight",
) -> list[Decision]:
    """Preemptive: the jobs of least rank get their option, whoever runs now; later ones may pass.

    A running job that keeps its turn keeps its nodes. Who gets GPUs is settled by counts first;
    then whoever lost them is stopped, and whoever won them is placed.
    """
    jobs = snapshot.jobs
    order = np.lexsort((np.arange(len(jobs)), rank))
    order = order[options[order] >= 0]
    left: list[int] = snapshot.capacity.tolist()
    chosen: list[int] = []
    needs = snapshot.options.counts[jobs.option_set[order], options[order]]
    for row, counts in zip(order.tolist(), needs.tolist(), strict=True):
        if all(map(le, counts, left)):
            left = list(map(sub, left, counts))
            chosen.append(row)
    keeps = set(chosen)
    decisions: list[Decision] = []
    room = make_room(snapshot)
    for row in np.flatnonzero(jobs.is_running):
        if int(row) not in keeps:
            room.give_back(jobs.placements[row])
            decisions.append(
                Preempt(job_id=jobs.specs[row].id, reason=f"others come first: {reason}")
            )
    for row in chosen:
        if not jobs.is_running[row]:
            placement = room.place(snapshot.counts(row, int(options[row])), style)
            if placement is not None:
                decisions.append(
                    Start(
                        job_id=jobs.specs[row].id,
                        option=int(options[row]),
                        placement=placement,
                        reason=reason,
                        numbers={"rank": float(rank[row])},
                    )
                )
    return decisions
