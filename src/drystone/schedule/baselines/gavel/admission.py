"""Gavel as Arena runs it: no turns; who is admitted runs, on the type that makes the sum greatest.

The baseline "Gavel" in the simulations of Crius/Arena (arXiv:2403.16125, `gavel_sched.py`) keeps
Gavel's objective of the greatest sum of samples a second and its fixed counts, but not its shares
of the time. For every job that asks to be admitted an integer programme gives all admitted jobs and
the new one a type each, so that everybody fits by count and at most three change their type; if it
has no answer, or the answer cannot be placed, the job waits. Jobs are spread over more nodes where
they do not fit otherwise. New jobs are tried once when they come; waiting jobs when something ends,
in order of submission, and the first that fails holds back the later ones that named the same type.
Nothing is preempted. Gavel itself is `policy.py`.

Where this differs: a job without an option of its own count is refused, while there it waits for
ever and holds others back. Our simulator does not slow down a job that is spread; Arena's does, by
a tenth for each halving.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from drystone.schedule.baselines.gavel.policy import type_choices
from drystone.schedule.decision import NO_SINGLE_TYPE, Decision, Memory, Refuse, change_job
from drystone.schedule.packing import Room, make_room, spread_thinner
from drystone.schedule.programme import Programme, Unsolved, solve
from drystone.schedule.snapshot import FloatArray, IntArray, Placement, Snapshot

MAX_CHANGES: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdmissionMemory:
    """Who was tried before, and what was free after the last decision."""

    known: frozenset[str]
    free: IntArray


def gavel_admission(snapshot: Snapshot, memory: Memory) -> tuple[list[Decision], Memory]:
    """Try waiting jobs if something ended, then the new ones."""
    before: AdmissionMemory | None = memory
    admission = _Admission(snapshot)
    known = before.known if before is not None else frozenset()
    specs = snapshot.jobs.specs
    waiting = np.flatnonzero(~snapshot.jobs.is_running).tolist()
    if before is None or not np.array_equal(before.free, snapshot.nodes.free):
        blocked: set[str] = set()
        for row in waiting:
            named = specs[row].requested_gpu
            if specs[row].id in known and named not in blocked and not admission.admit(row):
                blocked.add(named)
    for row in waiting:
        if specs[row].id not in known:
            admission.admit(row)
    memory = AdmissionMemory(
        known=frozenset(spec.id for spec in specs), free=admission.room.free.copy()
    )
    return admission.decisions(), memory


class _Admission:
    """The jobs that run, each on its type; others are let in one by one."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot, self._jobs = snapshot, snapshot.jobs
        self._options, self._speeds, self._num_gpus = type_choices(snapshot)
        self.room: Room = make_room(snapshot)
        self._kinds: dict[int, int] = {}
        self._placements: dict[int, Placement] = {}
        self._capacity = snapshot.capacity.copy()
        for row in np.flatnonzero(self._jobs.is_running).tolist():
            counts = snapshot.counts(row, int(self._jobs.option[row]))
            kind = int(counts.argmax())
            if self._options[row, kind] == self._jobs.option[row]:
                self._kinds[row], self._placements[row] = kind, self._jobs.placements[row]
            else:  # what Gavel would not choose is left alone
                self._capacity -= counts

    def admit(self, row: int) -> bool:
        """Let a job in if everybody can be given a type and a place."""
        if not (self._speeds[row] > 0).any():
            return False
        rows = [*self._kinds, row]
        before = np.array([*self._kinds.values(), -1])
        count = int(self._num_gpus[row])
        used = np.bincount(
            before[:-1], weights=self._num_gpus[rows[:-1]], minlength=len(self._capacity)
        )
        if count > int((self._capacity - used).sum()):
            return False
        kinds = _assign(self._speeds[rows], self._num_gpus[rows], self._capacity, before)
        return kinds is not None and self._place(rows, kinds)

    def _place(self, rows: list[int], kinds: IntArray) -> bool:
        """Place those whose type is new; nothing changes if one of them does not fit."""
        free = self.room.free.copy()
        changed = [at for at, row in enumerate(rows) if self._kinds.get(row, -1) != kinds[at]]
        room = Room(self._snapshot.nodes, free)
        for at in changed:
            if rows[at] in self._placements:
                room.give_back(self._placements[rows[at]])
        found: dict[int, Placement] = {}
        for at in changed:
            option = int(self._options[rows[at], kinds[at]])
            placement = room.place(self._snapshot.counts(rows[at], option), "scatter")
            if placement is None:
                nodes, number = self._snapshot.nodes, int(self._num_gpus[rows[at]])
                of_type = nodes.rows_by_type[int(kinds[at])]
                placement = spread_thinner(of_type, room.free, number, number)
                if placement is None:
                    return False
                room.take(placement)
            found[rows[at]] = placement
        self.room = room
        self._placements.update(found)
        self._kinds.update({rows[at]: int(kinds[at]) for at in changed})
        return True

    def decisions(self) -> list[Decision]:
        """Starts, changes of type, and refusals."""
        found = (self._decide(row) for row in range(len(self._jobs)))
        return [decision for decision in found if decision is not None]

    def _decide(self, row: int) -> Decision | None:
        job_id, runs = self._jobs.specs[row].id, bool(self._jobs.is_running[row])
        if row not in self._kinds:
            if runs or (self._speeds[row] > 0).any():
                return None
            return Refuse(job_id=job_id, reason=NO_SINGLE_TYPE)
        option, placement = int(self._options[row, self._kinds[row]]), self._placements[row]
        reason = "of all assignments this makes the most samples a second"
        return change_job(self._jobs, row, option, placement, reason=reason)


def _assign(
    speeds: FloatArray, num_gpus: IntArray, capacity: IntArray, before: IntArray
) -> IntArray | None:
    """A type for each job, of the greatest sum of speeds, few of them new; None if impossible.

    Rows: one type for each job, the GPUs of each type, and the number of jobs that keep theirs.
    """
    jobs, kinds = np.nonzero(speeds)
    num_jobs, num_types = speeds.shape
    last = num_jobs + num_types
    stays = (before[jobs] == kinds).astype(np.float64)
    rows = np.stack((jobs, num_jobs + kinds, np.full(len(jobs), last)), axis=1)
    values = np.stack((np.ones(len(jobs)), num_gpus[jobs].astype(np.float64), stays), axis=1)
    min_kept = max(0, int((before >= 0).sum()) - MAX_CHANGES)
    no_bound = np.full(num_types, -np.inf)
    programme = Programme(
        costs=-speeds[jobs, kinds],
        columns=np.repeat(np.arange(len(jobs)), 3),
        rows=rows.ravel(),
        values=values.ravel(),
        row_lower=np.concatenate((np.ones(num_jobs), no_bound, [min_kept])),
        row_upper=np.concatenate((np.ones(num_jobs), capacity.astype(np.float64), [np.inf])),
        is_integer=True,
    )
    try:
        taken = solve(programme) > 0.5
    except Unsolved:
        return None
    chosen = np.full(num_jobs, -1, dtype=np.int64)
    chosen[jobs[taken]] = kinds[taken]
    return chosen if (chosen >= 0).all() else None
