"""First come, first served: jobs in order of arrival, each on the GPUs its owner named.

A job that does not fit holds back the later ones that want the same GPU type, never those that want
another. Nothing is preempted. This is the FCFS baseline of Crius/Arena (arXiv:2403.16125), which
puts a job on the emptiest nodes and drops one whose request cannot run at all.

It remembers, by GPU type, before which job nobody waits, and so looks at the first of each queue
and at those who are new, however long the queues are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from drystone.schedule.baselines.rigid import refuse, rigid_option
from drystone.schedule.decision import Decision, Start
from drystone.schedule.packing import Room, make_room
from drystone.schedule.policies import Memory
from drystone.schedule.snapshot import Placement, Snapshot

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
    jobs = snapshot.jobs
    if before is None or before.num_requeued != jobs.num_requeued or jobs.num_requeued < 0:
        num_types = len(snapshot.gpu_types)
        before = FifoMemory(num_seen=0, heads=(0,) * num_types, num_requeued=jobs.num_requeued)
    num_seen = jobs.num_seen
    decisions: list[Decision] = []
    if before.num_seen == num_seen and min(before.heads, default=num_seen) >= num_seen:
        return [], before  # nobody waits
    num_new = num_seen - before.num_seen
    for job in jobs.waiting_from(before.num_seen, num_new) if num_new else ():
        if rigid_option(snapshot, job.option_set, job.requested) < 0:
            decisions.append(refuse(job.spec.id))
    starts, heads = _start(snapshot, before.heads, num_seen)
    after = FifoMemory(num_seen=num_seen, heads=heads, num_requeued=jobs.num_requeued)
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
            placement = room.place(_counts(snapshot, job), "scatter")
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
    jobs, chunk = snapshot.jobs, _FIRST_CHUNK
    while sequence < num_seen and (found := jobs.waiting_from(sequence, chunk)):
        for job in found:
            option = rigid_option(snapshot, job.option_set, job.requested)
            facts = snapshot.options.facts(job.option_set, option)
            if facts is not None and facts.counts[kind] > 0:
                kinds = tuple(one for one, count in enumerate(facts.counts) if count > 0)
                yield _Candidate(job.sequence, job.spec.id, job.option_set, option, kinds)
        if len(found) < chunk:
            return  # those were all
        sequence = found[-1].sequence + 1
        chunk *= 2


def _counts(snapshot: Snapshot, job: _Candidate) -> np.ndarray:
    counts: np.ndarray = snapshot.options.counts[job.option_set, job.option]
    return counts
