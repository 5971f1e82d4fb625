"""Serverless: nobody names GPUs; each job runs on the best plan that what is free can satisfy.

After Frenzy (arXiv:2412.14479). Its predictor lists the plans of a job by memory, in order of
training efficiency; here the plans are the job's options, whose memory and speed were estimated
(`plan/options.py`) or measured, and whose order is samples a second, fewer GPUs, less memory left
over. Its scheduler takes the first plan that fits and places it by best fit
(`place_request`). Jobs come in order of submission; one that does not fit lets
others pass. What runs is never touched.

The body of the paper was not to be had: the order of plans and the queue are our reconstruction
from reviews. Where this differs for a reason: an option names its GPU types, so one plan never
takes GPUs of another type with as much memory; and a placement over more nodes than the count needs
is not taken, since an option's speed is that of few nodes. A job without options is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from drystone.schedule.decision import Decision, Memory, Refuse, Start
from drystone.schedule.packing import Room, make_room
from drystone.schedule.snapshot import FloatArray, IntArray, Placement, Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRequest:
    """What a plan needs: so many GPUs with so much memory, in groups that share a node."""

    num_gpus: int
    min_memory_bytes: float = 0.0
    group_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FreeNodes:
    """The nodes that may be used: their rows, free GPUs, and the memory of each GPU."""

    rows: IntArray
    free: IntArray
    memory_bytes: FloatArray


def place_request(request: GpuRequest, nodes: FreeNodes) -> Placement | None:
    """Where a request goes; None if it does not fit."""
    whole = nodes.free - nodes.free % request.group_size
    whole = np.where(nodes.memory_bytes >= request.min_memory_bytes, whole, 0)
    if int(whole.sum()) < request.num_gpus:
        return None
    enough = np.flatnonzero(whole >= request.num_gpus)
    if len(enough):
        order = np.lexsort((nodes.free[enough], nodes.memory_bytes[enough]))
        return ((int(nodes.rows[enough[order[0]]]), request.num_gpus),)
    found: list[tuple[int, int]] = []
    left = request.num_gpus
    for at in np.lexsort((-nodes.free, nodes.memory_bytes)):
        taken = min(int(whole[at]), left)
        if taken > 0:
            found.append((int(nodes.rows[at]), taken))
            left -= taken
    return tuple(sorted(found))


def serverless(snapshot: Snapshot, memory: Memory) -> tuple[list[Decision], Memory]:
    """Start waiting jobs in order of arrival, each on the first of its plans that fits."""
    room = make_room(snapshot)
    decisions: list[Decision] = []
    ranked: dict[int, IntArray] = {}  # by option set
    too_large: set[int] = set()  # option sets of which nothing fits any more: what is free shrinks
    for row in np.flatnonzero(~snapshot.jobs.is_running).tolist():
        table = int(snapshot.jobs.option_set[row])
        if table not in ranked:
            ranked[table] = rank_options(snapshot, table)
        if not len(ranked[table]):
            job_id = snapshot.jobs.specs[row].id
            decisions.append(Refuse(job_id=job_id, reason="it has no option on this cluster"))
            continue
        start = None if table in too_large else _start(snapshot, room, row, ranked[table])
        if start is None:
            too_large.add(table)
        else:
            room.take(start.placement)
            decisions.append(start)
    return decisions, memory


def rank_options(snapshot: Snapshot, table: int) -> IntArray:
    """The options of a set, best first: speed, then fewer GPUs, then less memory left over.

    Speed of each GPU would put one GPU before all others for nearly every job.
    """
    options = snapshot.options
    speeds, num_gpus = options.samples_per_second[table], options.num_gpus[table]
    nodes, counts = snapshot.nodes, options.counts[table]
    smallest = np.full(counts.shape[1], np.inf)  # memory of a GPU, by type
    np.minimum.at(smallest, nodes.type_index, nodes.memory_bytes)
    slack = np.where(counts > 0, smallest, np.inf).min(axis=1) - options.memory_bytes[table]
    order: IntArray = np.lexsort((slack, num_gpus, -speeds))
    ranked: IntArray = order[speeds[order] > 0]
    return ranked


def _start(snapshot: Snapshot, room: Room, row: int, ranked: IntArray) -> Start | None:
    counts = snapshot.options.counts[snapshot.jobs.option_set[row]][ranked]
    for position in np.flatnonzero((counts <= room.free_by_type).all(axis=1)).tolist():
        option = int(ranked[position])
        placement = _place(snapshot, room, row, option)
        if placement is not None:
            return Start(
                job_id=snapshot.jobs.specs[row].id,
                option=option,
                placement=placement,
                reason="of its plans, the fastest that fits what is free",
                numbers={"rank": float(position), "num_plans": float(len(ranked))},
            )
    return None


def _place(snapshot: Snapshot, room: Room, row: int, option: int) -> Placement | None:
    """Best fit, type by type; None where that takes more nodes than the count needs."""
    nodes = snapshot.nodes
    need = float(snapshot.options.memory_bytes[snapshot.jobs.option_set[row], option])
    found: list[tuple[int, int]] = []
    for kind, count in enumerate(snapshot.counts(row, option).tolist()):
        if count == 0:
            continue
        rows = nodes.rows_by_type[kind]
        memory = nodes.memory_bytes[rows]
        part = place_request(
            GpuRequest(num_gpus=count, min_memory_bytes=need),
            FreeNodes(
                rows=rows,
                free=room.free[rows],
                memory_bytes=np.where(memory > 0, memory, np.inf),  # not stated: enough
            ),
        )
        largest = int(nodes.num_gpus[rows].max(initial=0))
        if part is None or len(part) > -(-count // max(largest, 1)):
            return None
        found.extend(part)
    return tuple(sorted(found))
