"""Gavel: a linear programme says which share of the time each job has on each GPU type.

After Gavel (OSDI 2020, github:stanford-futuredata/gavel). A job keeps its number of GPUs; its type
may change from round to round. Shares come from `time_shares.py`, with three objectives:
`gavel` is max-min fairness of normalised speed, `gavel-throughput` the greatest sum of samples a
second, `gavel-finish-time` finish-time fairness. Rounds of 360 s realise them: on each type, the
fastest first, jobs come by share wanted over share received; who has no share comes last, so that
no GPU idles. What was received is counted from the last programme on; a new one is solved when the
jobs have changed and the last is 1,920 s old, as in the authors' simulator.

`gavel-each-round` is the sum of samples a second as Sia's simulator has it (github:siasosp23/
artifacts, gavel.py): a new programme at every round, received time counted from the beginning, and
all types in one order of priority.

Where this differs, and why: ties of the programme are broken by the sum of normalised speeds (the
authors' solver happens to return an inner point, HiGHS a corner); GPUs that fall free within a
round are given to waiting jobs at once, which favours Gavel a little; who has no share comes last
of all, on the type where it is quickest (there, on the first type that has room, which is the
quickest for everybody on their GPUs); two jobs never share a GPU (their packing is not here). A
job whose owner named no count takes the one with the most work from each GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from drystone.schedule.baselines.gavel.time_shares import (
    SharingProblem,
    fairest_finish,
    greatest_least,
    greatest_sum,
)
from drystone.schedule.baselines.queues import rigid_options
from drystone.schedule.decision import (
    NO_SINGLE_TYPE,
    Decision,
    Memory,
    Preempt,
    Wake,
    change_job,
    refuse_jobs,
)
from drystone.schedule.packing import make_room
from drystone.schedule.snapshot import FloatArray, IntArray, Placement, Snapshot

ROUND_SECONDS: Final = 360.0
RESET_SECONDS: Final = 1920.0
# Everybody is taken to have had this much already, so that nobody's fraction is 0 / 0.
HEAD_START_SECONDS: Final = ROUND_SECONDS / 2

Objective = Callable[[SharingProblem], FloatArray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mechanism:
    """How rounds realise shares."""

    reset_seconds: float = RESET_SECONDS  # how old a programme must be for a new one
    forgets: bool = True  # what was received before a new programme
    is_by_type: bool = True  # one type after the other, the fastest first


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GavelMemory:
    """What is carried from one decision to the next; by id of a job: numbers by type."""

    now_seconds: float
    round_end_seconds: float
    reset_seconds: float  # when the shares were computed
    shares: Mapping[str, FloatArray]
    received_seconds: Mapping[str, FloatArray]  # since then
    given_seconds: FloatArray  # by type, to all jobs
    running: Mapping[str, int]  # who runs, on which type
    capacity: IntArray


def gavel(snapshot: Snapshot, memory: Memory) -> tuple[list[Decision], Memory]:
    """Max-min fairness."""
    return _decide(snapshot, memory, greatest_least)


def gavel_throughput(snapshot: Snapshot, memory: Memory) -> tuple[list[Decision], Memory]:
    """The greatest sum of samples a second."""
    return _decide(snapshot, memory, greatest_sum)


def gavel_finish_time(snapshot: Snapshot, memory: Memory) -> tuple[list[Decision], Memory]:
    """Finish-time fairness."""
    return _decide(snapshot, memory, fairest_finish)


def gavel_each_round(snapshot: Snapshot, memory: Memory) -> tuple[list[Decision], Memory]:
    """The greatest sum of samples a second, solved anew at every round."""
    mechanism = Mechanism(reset_seconds=0.0, forgets=False, is_by_type=False)
    return _decide(snapshot, memory, greatest_sum, mechanism)


def _decide(
    snapshot: Snapshot,
    before: GavelMemory | None,
    objective: Objective,
    mechanism: Mechanism = Mechanism(),
) -> tuple[list[Decision], GavelMemory]:
    options, speeds, num_gpus = type_choices(snapshot)
    account = _account(snapshot, before)
    memory = account
    if snapshot.now_seconds - account.reset_seconds >= mechanism.reset_seconds:
        memory = _reset_if_due(snapshot, account, speeds, num_gpus, objective)
        if not mechanism.forgets:
            memory = replace(
                memory,
                received_seconds=account.received_seconds,
                given_seconds=account.given_seconds,
            )
    order = _order(snapshot, memory, speeds, is_by_type=mechanism.is_by_type)
    is_round_end = snapshot.now_seconds >= memory.round_end_seconds - 1e-6
    chosen = _choose(snapshot, order, num_gpus, keeps_running=not is_round_end)
    decisions, running = _place(snapshot, chosen, options)
    can_run = np.asarray((speeds > 0).any(axis=1))
    decisions += refuse_jobs(snapshot.jobs, ~can_run, NO_SINGLE_TYPE)
    end = memory.round_end_seconds
    if is_round_end:
        end = snapshot.now_seconds + ROUND_SECONDS
    if 0 < len(running) < int(can_run.sum()):
        decisions.append(Wake(at_seconds=end, reason="the round ends, and others have their turn"))
    return decisions, replace(
        memory, round_end_seconds=end, running=running, capacity=snapshot.capacity
    )


def type_choices(snapshot: Snapshot) -> tuple[IntArray, FloatArray, IntArray]:
    """By job and type: the option with the job's own number of GPUs, its speed; and that number."""
    jobs, options = snapshot.jobs, snapshot.options
    num_jobs, num_types = len(jobs), len(snapshot.gpu_types)
    found = np.full((num_jobs, num_types), -1, dtype=np.int64)
    speeds = np.zeros((num_jobs, num_types))
    wanted = np.zeros(num_jobs, dtype=np.int64)
    if num_jobs == 0 or options.counts.shape[1] == 0:
        return found, speeds, wanted
    frugal = rigid_options(snapshot)
    is_single = ((options.counts > 0).sum(axis=2) == 1) & (options.samples_per_second > 0)
    kinds = options.counts.argmax(axis=2)
    for row in range(num_jobs):
        table = int(jobs.option_set[row])
        own = options.num_gpus[table]
        asked = jobs.specs[row].requested_count
        usable = is_single[table]
        if not (jobs.requested[row] != -2 and (usable & (own == asked)).any()):
            asked = int(own[frugal[row]]) if frugal[row] >= 0 else 0
            if not (usable & (own == asked)).any():
                asked = int(own[usable].min(initial=np.iinfo(np.int64).max))
        wanted[row] = asked
        for column in np.flatnonzero(usable & (own == asked)):
            kind, speed = kinds[table, column], options.samples_per_second[table, column]
            if speed > speeds[row, kind]:
                found[row, kind], speeds[row, kind] = column, speed
    return found, speeds, wanted


def _account(snapshot: Snapshot, before: GavelMemory | None) -> GavelMemory:
    """Bring what was received up to now; new jobs get a head start."""
    num_types = len(snapshot.gpu_types)
    if before is None:
        before = GavelMemory(
            now_seconds=snapshot.now_seconds,
            round_end_seconds=snapshot.now_seconds,
            reset_seconds=-np.inf,
            shares={},
            received_seconds={},
            given_seconds=np.zeros(num_types),
            running={},
            capacity=snapshot.capacity,
        )
    passed = snapshot.now_seconds - before.now_seconds
    given = before.given_seconds.copy()
    received = {}
    for kind in before.running.values():
        given[kind] += passed
    for spec in snapshot.jobs.specs:
        had = before.received_seconds.get(spec.id)
        if had is None:
            had = np.full(num_types, HEAD_START_SECONDS)
            given += HEAD_START_SECONDS
        elif spec.id in before.running:
            had = had.copy()
            had[before.running[spec.id]] += passed
        received[spec.id] = had
    runs = bool(snapshot.jobs.is_running.any())
    end = before.round_end_seconds if runs else min(before.round_end_seconds, snapshot.now_seconds)
    return replace(
        before,
        now_seconds=snapshot.now_seconds,
        round_end_seconds=end,
        received_seconds=received,
        given_seconds=given,
    )


def _reset_if_due(
    snapshot: Snapshot,
    memory: GavelMemory,
    speeds: FloatArray,
    num_gpus: IntArray,
    objective: Objective,
) -> GavelMemory:
    """Solve the programme anew if the jobs or the GPUs have changed."""
    jobs = snapshot.jobs
    has_changed = memory.shares.keys() != jobs.row_of.keys() or not np.array_equal(
        memory.capacity, snapshot.capacity
    )
    if not has_changed or len(jobs) == 0:
        return memory
    able = np.flatnonzero((speeds > 0).any(axis=1))
    submits = np.array([spec.submit_seconds for spec in jobs.specs])
    shares = np.zeros(speeds.shape)
    shares[able] = objective(
        SharingProblem(
            speeds=speeds[able],
            num_gpus=num_gpus[able],
            weights=jobs.weights[able],
            capacity=snapshot.capacity,
            elapsed_seconds=snapshot.now_seconds - submits[able],
            remaining_samples=jobs.remaining_samples[able],
            total_samples=_total_samples(snapshot)[able],
        )
    )
    return replace(
        memory,
        reset_seconds=snapshot.now_seconds,
        shares={spec.id: shares[row] for row, spec in enumerate(jobs.specs)},
        received_seconds={
            spec.id: np.full(speeds.shape[1], HEAD_START_SECONDS) for spec in jobs.specs
        },
        given_seconds=np.full(speeds.shape[1], HEAD_START_SECONDS * len(jobs)),
        capacity=snapshot.capacity,
    )


def _total_samples(snapshot: Snapshot) -> FloatArray:
    """What each job has to do in all; where lengths are unknown, half of it is taken to be done."""
    if not snapshot.knows_lengths:
        return 2 * snapshot.jobs.remaining_samples
    return np.array([spec.total_samples for spec in snapshot.jobs.specs])


def _order(
    snapshot: Snapshot, memory: GavelMemory, speeds: FloatArray, *, is_by_type: bool
) -> list[tuple[int, int]]:
    """Pairs of a job and a type: the fastest type first, there by share wanted over received."""
    specs, num_types = snapshot.jobs.specs, len(snapshot.gpu_types)
    nothing = np.zeros(num_types)
    shares = np.array([memory.shares.get(spec.id, nothing) for spec in specs])
    received = np.array([memory.received_seconds[spec.id] for spec in specs])
    shares, received = shares.reshape(-1, num_types), received.reshape(-1, num_types)
    priority = shares * memory.given_seconds / np.maximum(received, 1e-9)
    if not is_by_type:
        rows, kinds = np.nonzero(speeds)
        first = np.lexsort((rows, kinds, -shares[rows, kinds], -priority[rows, kinds]))
        return list(zip(rows[first].tolist(), kinds[first].tolist(), strict=True))
    best = np.maximum(speeds.max(axis=1, initial=0.0), 1e-300)[:, None]
    fastest_first = np.argsort(-(speeds / best).sum(axis=0), kind="stable")
    found: list[tuple[int, int]] = []
    for kind in fastest_first.tolist():
        rows = np.lexsort((np.arange(len(specs)), -shares[:, kind], -priority[:, kind]))
        found.extend((int(row), kind) for row in rows if shares[row, kind] * speeds[row, kind] > 0)
    # Who has no share comes last, on the type where it is quickest.
    rows, kinds = np.nonzero((shares <= 0) & (speeds > 0))
    last = np.lexsort((rows, kinds, -(speeds / best)[rows, kinds]))
    return found + list(zip(rows[last].tolist(), kinds[last].tolist(), strict=True))


def _choose(
    snapshot: Snapshot, order: list[tuple[int, int]], num_gpus: IntArray, *, keeps_running: bool
) -> dict[int, int]:
    """The type of each job that runs this round, by counts alone."""
    jobs = snapshot.jobs
    left = snapshot.capacity.copy()
    chosen: dict[int, int] = {}
    for row in np.flatnonzero(jobs.is_running).tolist():
        counts = snapshot.counts(row, int(jobs.option[row]))
        # Whoever runs what Gavel would not choose, on several types, is left alone.
        if keeps_running or (counts > 0).sum() > 1:
            left -= counts
            chosen[row] = -1
    for row, kind in order:
        if row not in chosen and num_gpus[row] <= left[kind]:
            left[kind] -= num_gpus[row]
            chosen[row] = kind
    return chosen


def _place(
    snapshot: Snapshot, chosen: dict[int, int], options: IntArray
) -> tuple[list[Decision], dict[str, int]]:
    """Whoever keeps its option keeps its nodes; the others are placed, the largest first."""
    jobs, room = snapshot.jobs, make_room(snapshot)
    decisions: list[Decision] = []
    running: dict[str, int] = {}
    moving: list[int] = []
    for row in np.flatnonzero(jobs.is_running).tolist():
        kind = chosen.get(row)
        stays = kind == -1 or (kind is not None and options[row, kind] == jobs.option[row])
        if stays:
            counts = snapshot.counts(row, int(jobs.option[row]))
            running[jobs.specs[row].id] = int(counts.argmax())
        else:
            room.give_back(jobs.placements[row])
            moving.append(row)
    placed: dict[int, Placement] = {}
    coming = [
        row for row, kind in chosen.items() if kind >= 0 and jobs.specs[row].id not in running
    ]
    for row in sorted(
        coming, key=lambda row: -int(snapshot.job_num_gpus[row, options[row, chosen[row]]])
    ):
        placement = room.place(snapshot.counts(row, int(options[row, chosen[row]])))
        if placement is not None:
            placed[row] = placement
    for row in sorted({*moving, *placed}):
        job_id = jobs.specs[row].id
        if row not in placed:
            reason = "others have had less of their share of the time"
            decisions.append(Preempt(job_id=job_id, reason=reason))
            continue
        kind = running[job_id] = chosen[row]
        reason = f"it is its turn on {snapshot.gpu_types[kind]}"
        change = change_job(jobs, row, int(options[row, kind]), placed[row], reason=reason)
        if change is not None:
            decisions.append(change)
    return decisions, running
