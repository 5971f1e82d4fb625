"""Is a list of decisions sound? No GPU twice, nothing unknown, memory kept, the hard cap kept.

The list is judged as a whole: what it takes away is free for what it gives out, and what it gives
back may be rented again. The budget itself is an average over time, which no single list can break;
what a list can break is the hard cap on dollars an hour.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import assert_never

import numpy as np

from drystone.schedule.check_rentals import check_rentals
from drystone.schedule.decision import (
    Decision,
    Move,
    Preempt,
    Refuse,
    Release,
    Rent,
    Resize,
    Start,
    Wake,
)
from drystone.schedule.snapshot import Snapshot


def check_decisions(snapshot: Snapshot, decisions: Sequence[Decision]) -> list[str]:
    """Everything that is wrong with the list, in words; empty where it may be carried out."""
    problems: list[str] = []
    touched: set[str] = set()
    for decision in decisions:
        if isinstance(decision, Rent | Release):
            continue
        if isinstance(decision, Wake):
            problems.extend(_check_wake(snapshot, decision))
            continue
        row = snapshot.jobs.row_of.get(decision.job_id, -1)
        if row < 0:
            problems.append(f"{_name(decision)}: there is no job {decision.job_id!r}")
            continue
        if decision.job_id in touched:
            problems.append(f"{_name(decision)}: job {decision.job_id} is decided on twice")
        touched.add(decision.job_id)
        problems.extend(_check_state(snapshot, decision, row))
        if isinstance(decision, Start | Resize | Move):
            option = (
                int(snapshot.jobs.option[row]) if isinstance(decision, Move) else decision.option
            )
            problems.extend(_check_placement(snapshot, decision, row, option))
    if not decisions:
        return problems
    problems.extend(check_rentals(snapshot, decisions))
    return problems or _check_room(snapshot, decisions)


def _check_room(snapshot: Snapshot, decisions: Sequence[Decision]) -> list[str]:
    """No node gives out more GPUs than it has, once all that is taken away is free."""
    nodes = snapshot.nodes
    free = nodes.free.copy()
    for decision in decisions:
        if isinstance(decision, Resize | Move | Preempt):
            for node, count in snapshot.jobs.placements[snapshot.jobs.row_of[decision.job_id]]:
                free[node] += count
        if isinstance(decision, Start | Resize | Move):
            for node, count in decision.placement:
                free[node] -= count
    problems = [
        f"node {snapshot.nodes.ids[node]} gives out {-int(free[node])} GPUs more than it has"
        for node in np.flatnonzero(free < 0)
    ]
    for decision in decisions:
        if isinstance(decision, Release) and free[decision.node] < nodes.num_gpus[decision.node]:
            problems.append(f"Release: jobs run on node {nodes.ids[decision.node]}")
    return problems


def _check_state(
    snapshot: Snapshot, decision: Start | Resize | Move | Preempt | Refuse, row: int
) -> list[str]:
    runs = bool(snapshot.jobs.is_running[row])
    match decision:
        case Start() | Refuse():
            fits = not runs
        case Resize() | Move() | Preempt():
            fits = runs
        case _:
            assert_never(decision)
    if fits:
        return []
    state = "runs" if runs else "waits"
    return [f"{_name(decision)}: job {decision.job_id} {state}"]


def _check_placement(
    snapshot: Snapshot, decision: Start | Resize | Move, row: int, option: int
) -> list[str]:
    """The placement must be the option: as many GPUs of each type, and enough memory on each."""
    who = f"{_name(decision)}: job {decision.job_id}"
    nodes = snapshot.nodes
    num_options = snapshot.options.samples_per_second.shape[1]
    if not 0 <= option < num_options or snapshot.speed(row, option) <= 0:
        return [f"{who} has no option {option}"]
    if any(not 0 <= node < len(nodes) or count < 1 for node, count in decision.placement):
        return [f"{who} is placed on a node that does not exist, or on less than one GPU"]
    rows = np.array([node for node, _ in decision.placement], dtype=np.int64)
    if len(set(rows.tolist())) != len(rows):
        return [f"{who} names a node twice"]
    counts = np.array([count for _, count in decision.placement], dtype=np.int64)
    placed = np.bincount(
        nodes.type_index[rows], weights=counts, minlength=len(snapshot.gpu_types)
    ).astype(np.int64)
    problems = []
    if not np.array_equal(placed, snapshot.counts(row, option)):
        wanted = snapshot.counts(row, option).tolist()
        problems.append(f"{who} is placed on {placed.tolist()} GPUs by type, but needs {wanted}")
    memory = float(snapshot.options.memory_bytes[snapshot.jobs.option_set[row], option])
    room = nodes.memory_bytes[rows]
    if bool(((room > 0) & (room < memory)).any()):
        problems.append(f"{who} needs {memory:.0f} bytes on a GPU that has {room.min():.0f}")
    return problems


def _check_wake(snapshot: Snapshot, decision: Wake) -> list[str]:
    if snapshot.now_seconds < decision.at_seconds < math.inf:
        return []
    return [f"Wake: at {decision.at_seconds} s, but it is {snapshot.now_seconds} s already"]


def _name(decision: Decision) -> str:
    return type(decision).__name__
