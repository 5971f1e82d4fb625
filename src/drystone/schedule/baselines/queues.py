"""Queues of jobs on the GPUs their owners named: first come, shortest first, least attained first.

`fifo` preempts nothing. A job that does not fit holds back the later ones that want the same GPU
type, never those that want another. This is the FCFS baseline of Crius/Arena (arXiv:2403.16125),
which puts a job on the emptiest nodes and drops one whose request cannot run at all. It remembers,
by GPU type, before which job nobody waits, and so looks at the first of each queue and at those who
are new, however long the queues are.

`shortest` and `least_attained` preempt: they differ only in the rank that they give each job.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import le, sub
from typing import Final, NamedTuple

import numpy as np

from drystone.schedule.decision import (
    Decision,
    Memory,
    Preempt,
    Refuse,
    Start,
    change_job,
    refuse_jobs,
)
from drystone.schedule.packing import Room, make_room
from drystone.schedule.snapshot import FloatArray, IntArray, Placement, Snapshot
from drystone.units import HOUR_SECONDS

_IMPOSSIBLE: Final = "it cannot run on the GPUs that were asked for, and this policy changes none"


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


def give_by_rank(
    snapshot: Snapshot, rank: FloatArray, options: IntArray, *, reason: str
) -> list[Decision]:
    """Preemptive: the jobs of least rank get their option, whoever runs now; later ones may pass.

    A running job that keeps its turn keeps its nodes. Who gets GPUs is settled by counts first;
    then whoever lost them is stopped, and whoever won them is placed. Jobs without an option are
    refused.
    """
    jobs = snapshot.jobs
    decisions = refuse_jobs(jobs, options < 0, _IMPOSSIBLE)
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
    room = make_room(snapshot)
    for row in snapshot.running.tolist():
        if row not in keeps:
            room.give_back(jobs.placements[row])
            why = f"others come first: {reason}"
            decisions.append(Preempt(job_id=jobs.specs[row].id, reason=why))
    for row in chosen:
        option = int(options[row])
        placement = None if jobs.is_running[row] else room.place(snapshot.counts(row, option))
        if placement is not None:
            numbers = {"rank": float(rank[row])}
            start = change_job(jobs, row, option, placement, reason=reason, numbers=numbers)
            if start is not None:
                decisions.append(start)
    return decisions


_FIRST_CHUNK: Final = 4
_REASON: Final = "the oldest that waits for this GPU type, and it fits"


@dataclass(frozen=True, slots=True, kw_only=True)
class FifoMemory:
    """Where the queues begin, as sequence numbers of jobs."""

    num_seen: int  # jobs before this one were looked at once
    heads: tuple[int, ...]  # by GPU type: nobody before this one waits for it
    num_requeued: int


class _Candidate(NamedTuple):
    sequence: int
    job_id: str
    option_set: int
    option: int
    kinds: tuple[int, ...]  # the GPU types that it wants


def fifo(snapshot: Snapshot, memory: Memory) -> tuple[list[Decision], Memory]:
    """Start waiting jobs in order of arrival; per GPU type, stop at the first that does not fit."""
    before = memory if isinstance(memory, FifoMemory) else None
    num_requeued, num_seen = snapshot.num_requeued, snapshot.num_seen
    if before is None or before.num_requeued != num_requeued or num_requeued < 0:
        num_types = len(snapshot.gpu_types)
        before = FifoMemory(num_seen=0, heads=(0,) * num_types, num_requeued=num_requeued)
    decisions: list[Decision] = []
    if before.num_seen == num_seen and min(before.heads, default=num_seen) >= num_seen:
        return [], before  # nobody waits
    num_new = num_seen - before.num_seen
    for job in snapshot.waiting_from(before.num_seen, num_new) if num_new else ():
        if rigid_option(snapshot, job.option_set, job.requested) < 0:
            decisions.append(Refuse(job_id=job.spec.id, reason=_IMPOSSIBLE))
    starts, heads = _start(snapshot, before.heads, num_seen)
    after = FifoMemory(num_seen=num_seen, heads=heads, num_requeued=num_requeued)
    return decisions + starts, after


def _start(
    snapshot: Snapshot, heads: tuple[int, ...], num_seen: int
) -> tuple[list[Decision], tuple[int, ...]]:
    """Merge the queues of all types by age; whoever does not fit closes the queues it stands in."""
    queues = [_queue(snapshot, kind, head, num_seen) for kind, head in enumerate(heads)]
    first = {kind: job for kind, queue in enumerate(queues) if (job := next(queue, None))}
    stays: dict[int, int] = {}  # by type: the first that goes on waiting
    decisions: list[Decision] = []
    room: Room | None = None
    while first:
        job = min(first.values())
        is_open = all(kind in first for kind in job.kinds)
        placement: Placement | None = None
        if is_open:
            room = room or make_room(snapshot)
            counts = snapshot.options.counts[job.option_set, job.option]
            placement = room.place(counts, "scatter")
        if placement is not None:
            decisions.append(
                Start(job_id=job.job_id, option=job.option, placement=placement, reason=_REASON)
            )
        for kind in job.kinds:
            if kind not in first:
                continue
            if placement is None:
                stays.setdefault(kind, job.sequence)
            following = next(queues[kind], None) if placement is not None or not is_open else None
            if following is None:
                del first[kind]
            else:
                first[kind] = following
    return decisions, tuple(stays.get(kind, num_seen) for kind in range(len(heads)))


def _queue(snapshot: Snapshot, kind: int, sequence: int, num_seen: int) -> Iterator[_Candidate]:
    """Waiting jobs that want a type, the oldest first, from a sequence number on."""
    chunk = _FIRST_CHUNK
    while sequence < num_seen and (found := snapshot.waiting_from(sequence, chunk)):
        for job in found:
            option = rigid_option(snapshot, job.option_set, job.requested)
            facts = snapshot.options.facts(job.option_set, option)
            if facts is not None and facts.counts[kind] > 0:
                kinds = tuple(index for index, count in enumerate(facts.counts) if count > 0)
                yield _Candidate(job.sequence, job.spec.id, job.option_set, option, kinds)
        if len(found) < chunk:
            return  # those were all
        sequence = found[-1].sequence + 1
        chunk *= 2


def shortest(snapshot: Snapshot, memory: Memory) -> tuple[list[Decision], Memory]:
    """Rank by seconds left; a job that must start first pays for its start."""
    options = rigid_options(snapshot)
    rows, known = np.arange(len(snapshot.jobs)), np.maximum(options, 0)
    speeds = snapshot.job_speeds[rows, known]
    left = snapshot.jobs.remaining_samples / np.where(speeds > 0, speeds, 1.0)
    startup = snapshot.startup_seconds[rows, known]
    left = left + np.where(snapshot.jobs.is_running, 0.0, startup)
    return give_by_rank(snapshot, left, options, reason="the least time is left"), memory


# Where one queue ends and the next begins, in GPU seconds; Tiresias' simulator uses two queues
# with about one GPU hour between them, and large jobs need one more.
QUEUE_BOUNDS: Final = (1 * HOUR_SECONDS, 10 * HOUR_SECONDS)


def least_attained(snapshot: Snapshot, memory: Memory) -> tuple[list[Decision], Memory]:
    """Rank by queue; of one queue, by submission."""
    queue = np.searchsorted(np.array(QUEUE_BOUNDS), snapshot.jobs.attained_gpu_seconds, "right")
    rank, reason = queue.astype(np.float64), "it has had the fewest GPU hours"
    return give_by_rank(snapshot, rank, rigid_options(snapshot), reason=reason), memory
