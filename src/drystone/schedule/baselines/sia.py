"""Sia: the option of every job from one integer programme, each minute.

After Jayaram Subramanya et al., SOSP 2023, and the authors' artifact (github:siasosp23/artifacts,
sia.py at 37c68be), with its settings:

- An option takes GPUs of one type: a power of two within a node, or whole nodes.
- A job begins with one GPU (or its least) and at most doubles what it has had so far: Sia learns
  how a job scales while it runs. `sia-freed` is without this rule, which who is told the speeds of
  all options does not need.
- Each job's speeds are divided by the slowest of its allowed options. What would restart a running
  job is worth only (age - restarts x cost) / (age + cost) of that.
- The programme minimises the sum over jobs of speed^-0.5, to two decimals, plus 1.1 for every job
  without GPUs. A job that is starting up is left alone.
- Rounds are of 60 s; where the world has none, it asks to be woken when a job has started up.

The artifact has a second penalty, lambda_a = 0.01 for every changed allocation, but leaves it out
of its programme; so does this (with it, Sia is 2 % slower on its own traces). There, Sia learns
speeds while jobs run; here it is told them, as every policy is, and needs about a tenth less time.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from drystone.schedule.decision import (
    NO_SINGLE_TYPE,
    Decision,
    Move,
    Preempt,
    Resize,
    Start,
    Wake,
    change_job,
    refuse_jobs,
)
from drystone.schedule.packing import Room
from drystone.schedule.programme import choose_exactly
from drystone.schedule.snapshot import BoolArray, FloatArray, IntArray, Placement, Snapshot

Numbers = Callable[[int], Mapping[str, float]]


def reassign(
    snapshot: Snapshot, chosen: IntArray, *, reason: str, numbers: Numbers | None = None
) -> list[Decision]:
    """The decisions that give each job its option; -1 takes its GPUs. `numbers` are by row."""
    jobs = snapshot.jobs
    placements = _Reassignment(snapshot, chosen).settle()
    decisions: list[Decision] = []
    for row, spec in enumerate(jobs.specs):
        given = dict(numbers(row)) if numbers is not None else {}
        option, placement = int(chosen[row]), placements[row]
        if not placement:
            if jobs.is_running[row]:
                text = f"others make more of its GPUs: {reason}"
                decisions.append(Preempt(job_id=spec.id, reason=text, numbers=given))
            continue
        change = change_job(
            jobs,
            row,
            option,
            placement,
            reason=reason,
            move_reason=f"it makes way for a larger job: {reason}",
            numbers=given,
        )
        if change is not None:
            decisions.append(change)
    return decisions


class _Reassignment:
    """Placements while they are being settled."""

    def __init__(self, snapshot: Snapshot, chosen: IntArray) -> None:
        self._snapshot, self._chosen = snapshot, chosen
        self._room = Room(snapshot.nodes, snapshot.nodes.num_gpus)
        self._placements: list[Placement] = [() for _ in range(len(snapshot.jobs))]
        self._on_node: dict[int, set[int]] = {}  # rows of jobs by node
        self._queue: list[tuple[int, int]] = []  # (minus GPUs, row), ascending
        jobs = snapshot.jobs
        for row in np.flatnonzero(chosen >= 0):
            if jobs.is_running[row] and jobs.option[row] == chosen[row]:
                self._put(int(row), jobs.placements[row])
            else:
                self._ask(int(row))

    def settle(self) -> list[Placement]:
        """The placement of each job; empty where it has none."""
        while self._queue:
            _, row = self._queue.pop(0)
            placement = self._old(row) or self._room.find(self._counts(row))
            if placement is None and self._make_way(row):
                placement = self._room.find(self._counts(row))
            if placement is not None:
                self._put(row, placement)
        return self._placements

    def _counts(self, row: int) -> IntArray:
        return self._snapshot.counts(row, int(self._chosen[row]))

    def _size(self, row: int) -> int:
        return int(self._counts(row).sum())

    def _ask(self, row: int) -> None:
        insort(self._queue, (-self._size(row), row))

    def _put(self, row: int, placement: Placement) -> None:
        self._placements[row] = placement
        self._room.take(placement)
        for node, _ in placement:
            self._on_node.setdefault(node, set()).add(row)

    def _evict(self, row: int) -> None:
        for node, _ in self._placements[row]:
            self._on_node[node].discard(row)
        self._room.give_back(self._placements[row])
        self._placements[row] = ()
        self._ask(row)

    def _old(self, row: int) -> Placement | None:
        """Where a job was that kept its option, if there is still room."""
        jobs = self._snapshot.jobs
        if jobs.option[row] != self._chosen[row]:
            return None
        old = jobs.placements[row]
        return old if all(self._room.free[node] >= count for node, count in old) else None

    def _make_way(self, row: int) -> bool:
        """Evict smaller jobs until this one fits; whether there is any hope that it does."""
        nodes, size = self._snapshot.nodes, self._size(row)
        for kind, number in enumerate(self._counts(row).tolist()):
            rows = nodes.rows_by_type[kind]
            largest = int(nodes.num_gpus[rows].max(initial=0))
            if not number:
                continue
            if number > self._room.free_by_type[kind] or not largest:
                return False
            whole, rest = divmod(number, largest)
            wanted = [largest] * whole + [rest] * (rest > 0)
            ready: set[int] = set()
            for need in wanted:
                node = self._clear_node(rows, need, size, ready)
                if node < 0:
                    return False
                ready.add(node)
        return True

    def _clear_node(self, rows: IntArray, need: int, size: int, ready: set[int]) -> int:
        """Free so many GPUs on one node by moving jobs smaller than `size`; -1 where none can."""
        best, best_free = -1, -1
        for node in rows.tolist():
            free = int(self._room.free[node])
            small = [job for job in self._on_node.get(node, ()) if self._size(job) < size]
            held = sum(count for job in small for at, count in self._placements[job] if at == node)
            if node not in ready and free + held >= need and free > best_free:
                best, best_free = node, free
        if best < 0:
            return -1
        for job in sorted(self._on_node.get(best, ()), key=lambda job: (self._size(job), job)):
            if self._room.free[best] >= need:
                break
            if self._size(job) < size:
                self._evict(job)
        return best


FAIRNESS_POWER: Final = -0.5  # p: the more negative, the more even
NO_GPUS_PENALTY: Final = 1.1  # lambda_n
RELATIVE_GAP: Final = 1e-4
ROUND_SECONDS: Final = 60.0
_DECIMALS: Final = 2
_LARGEST_COST: Final = 3000.0
_ANY_NUMBER: Final = 1 << 40

SiaMemory = Mapping[str, int]  # by job: the most GPUs it has had


def sia(snapshot: Snapshot, memory: SiaMemory | None) -> tuple[list[Decision], SiaMemory]:
    """One round, as the authors run it."""
    return _decide(snapshot, _most_gpus(snapshot, memory or {}))


def sia_freed(snapshot: Snapshot, memory: SiaMemory | None) -> tuple[list[Decision], SiaMemory]:
    """One round, in which every job may have as many GPUs as it can use from the start."""
    return _decide(snapshot, np.full(len(snapshot.jobs), _ANY_NUMBER))


def _decide(snapshot: Snapshot, most: IntArray) -> tuple[list[Decision], SiaMemory]:
    """One round, if each job may have twice as many GPUs as `most` says."""
    jobs = snapshot.jobs
    allowed = allowed_options(snapshot, most)
    refusals = refuse_jobs(jobs, ~np.asarray(one_type(snapshot).any(axis=1)), NO_SINGLE_TYPE)
    speeds = relative_speeds(snapshot, allowed)
    costs = programme_costs(speeds)
    held, costs, capacity = _hold_starting(snapshot, costs)
    counts = snapshot.options.counts[jobs.option_set]
    chosen = choose_exactly(costs, counts, capacity, relative_gap=RELATIVE_GAP)
    chosen = np.where(held, jobs.option, chosen)

    def numbers(row: int) -> Mapping[str, float]:
        speed = {"relative_speed": float(speeds[row, chosen[row]])} if chosen[row] >= 0 else {}
        return {**speed, "options": float(allowed[row].sum())}

    decisions = reassign(
        snapshot,
        chosen,
        reason="the integer programme gives it this option for the sake of everybody's speed",
        numbers=numbers,
    )
    given = {spec.id: int(count) for spec, count in zip(jobs.specs, most, strict=True) if count}
    return [*refusals, *decisions, *wake_after_startup(snapshot, decisions)], given


def wake_after_startup(snapshot: Snapshot, decisions: Sequence[Decision]) -> list[Decision]:
    """Decide again at the first round after some job has started up: it may have more then."""
    jobs = snapshot.jobs
    running = np.flatnonzero(jobs.is_running)
    startup = snapshot.startup_seconds[running, jobs.option[running]]
    ready = (jobs.running_since_seconds[running] + startup).tolist()
    for decision in decisions:
        if isinstance(decision, Start | Resize | Move):
            row = jobs.row_of[decision.job_id]
            option = int(jobs.option[row]) if isinstance(decision, Move) else decision.option
            ready.append(snapshot.now_seconds + float(snapshot.startup_seconds[row, option]))
    coming = [time for time in ready if time >= snapshot.now_seconds]
    if not coming:
        return []
    at = (math.floor(min(coming) / ROUND_SECONDS) + 1) * ROUND_SECONDS
    return [Wake(at_seconds=at, reason="a job will have worked with its GPUs and may get more")]


def one_type(snapshot: Snapshot) -> BoolArray:
    """Which options take GPUs of one type, (jobs, options)."""
    plain = (snapshot.options.counts > 0).sum(axis=2) == 1
    found: BoolArray = plain[snapshot.jobs.option_set] & (snapshot.job_speeds > 0)
    return found


def allowed_options(snapshot: Snapshot, most_gpus: IntArray) -> BoolArray:
    """Which options Sia looks at, (jobs, options).

    A job none of whose counts is a power of two or makes whole nodes may have the counts it has.
    """
    counts = snapshot.options.counts
    size = np.array(
        [snapshot.nodes.num_gpus[rows].max(initial=1) for rows in snapshot.nodes.rows_by_type]
    )
    inside = (counts <= size) & ((counts & (counts - 1)) == 0)
    is_regular = np.asarray((inside | (counts % size == 0)).all(axis=2))
    found = one_type(snapshot)
    regular = found & is_regular[snapshot.jobs.option_set]
    found = np.where(np.asarray(regular.any(axis=1))[:, None], regular, found)
    fits = np.asarray((counts <= snapshot.capacity).all(axis=2))
    found &= fits[snapshot.jobs.option_set]
    num_gpus = snapshot.job_num_gpus
    far = np.iinfo(np.int64).max
    least = np.where(found, num_gpus, far).min(axis=1, initial=far)
    limit = np.where(most_gpus > 0, 2 * most_gpus, least)
    result: BoolArray = found & (num_gpus <= np.maximum(limit, least)[:, None])
    return result


def relative_speeds(snapshot: Snapshot, allowed: BoolArray) -> FloatArray:
    """Speeds over the slowest allowed option of each job, less what a restart takes; 0: none."""
    jobs = snapshot.jobs
    speeds = np.where(allowed, snapshot.job_speeds, np.inf)
    slowest = speeds.min(axis=1, initial=np.inf)[:, None]
    relative = np.where(allowed, speeds / np.where(np.isfinite(slowest), slowest, 1.0), 0.0)
    factor = np.broadcast_to(restart_factors(snapshot)[:, None], relative.shape).copy()
    running = np.flatnonzero(jobs.is_running)
    factor[running, jobs.option[running]] = 1.0
    factor[~jobs.is_running] = 1.0
    result: FloatArray = np.where(allowed, relative * factor, 0.0)
    return result


def restart_factors(snapshot: Snapshot) -> FloatArray:
    """The share of its age that a job would have spent at work after one more restart."""
    jobs = snapshot.jobs
    cost = snapshot.startup_seconds.max(axis=1, initial=0.0)
    age = snapshot.now_seconds - np.array([spec.submit_seconds for spec in jobs.specs])
    lost = np.maximum(jobs.num_starts - 1, 0) * cost
    factor = np.maximum(age - lost, 0.0) / np.maximum(age + cost, 1e-9)
    result: FloatArray = np.where(age < cost, 1.0, factor)
    return result


def programme_costs(speeds: FloatArray) -> FloatArray:
    """What an option costs more than no GPUs at all; infinite where it cannot be chosen."""
    with np.errstate(divide="ignore"):
        costs = np.minimum(np.round(speeds**FAIRNESS_POWER, _DECIMALS), _LARGEST_COST)
    result: FloatArray = np.where(speeds > 0, costs - NO_GPUS_PENALTY, np.inf)
    return result


def _hold_starting(snapshot: Snapshot, costs: FloatArray) -> tuple[BoolArray, FloatArray, IntArray]:
    """Which jobs are starting up and keep what they have, the costs without them, what is left."""
    jobs = snapshot.jobs
    running = np.flatnonzero(jobs.is_running)
    held = np.zeros(len(jobs), dtype=bool)
    startup = snapshot.startup_seconds[running, jobs.option[running]]
    ready = jobs.running_since_seconds[running] + startup
    held[running] = ready > snapshot.now_seconds + 1e-9
    capacity = snapshot.capacity.copy()
    for row in np.flatnonzero(held):
        capacity -= snapshot.counts(int(row), int(jobs.option[row]))
    return held, np.where(held[:, None], np.inf, costs), capacity


def _most_gpus(snapshot: Snapshot, before: SiaMemory) -> IntArray:
    """The most GPUs that each job has worked with so far."""
    jobs = snapshot.jobs
    most = np.array([before.get(spec.id, 0) for spec in jobs.specs], dtype=np.int64)
    running = np.flatnonzero(jobs.is_running)
    startup = snapshot.startup_seconds[running, jobs.option[running]]
    worked = jobs.running_since_seconds[running] + startup < snapshot.now_seconds - 1e-9
    now = np.where(worked, snapshot.job_num_gpus[running, jobs.option[running]], 0)
    most[running] = np.maximum(most[running], now)
    return most
