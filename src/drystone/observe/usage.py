"""Which GPUs were there, and who held them when? Folds over the events of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from drystone.describe.node import NodeSpec
from drystone.run.events import (
    Cancelled,
    Event,
    Failed,
    Finished,
    Interrupted,
    NodeJoined,
    NodeReclaimed,
    NodeReleased,
    Paused,
    Started,
    StartFailed,
    Stopped,
)

_ENDS = (Stopped, Interrupted, StartFailed, Finished, Cancelled, Paused, Failed)


def held_intervals(log: Sequence[Event], end_seconds: float) -> list[tuple[Started, float]]:
    """Every start, and until when its GPUs were held."""
    open_starts: dict[str, Started] = {}
    found = []
    for event in log:
        if isinstance(event, Started):
            open_starts[event.job_id] = event
        elif isinstance(event, _ENDS) and event.job_id in open_starts:
            found.append((open_starts.pop(event.job_id), event.time_seconds))
    return found + [(start, end_seconds) for start in open_starts.values()]


def rows_of_nodes(nodes: Sequence[NodeSpec], log: Sequence[Event]) -> list[NodeSpec]:
    """The node of every row that a placement may name: those of the start, then rented ones.

    A row may have had several rented nodes, one after the other, all of one type and size.
    """
    rows = list(nodes)
    for event in log:
        if isinstance(event, NodeJoined) and event.node >= len(rows):
            rows.append(event.spec)
    return rows


@dataclass(frozen=True, slots=True)
class Stay:
    """A node, and from when until when it was there."""

    row: int
    node: NodeSpec
    since_seconds: float
    until_seconds: float


def node_stays(nodes: Sequence[NodeSpec], log: Sequence[Event], end_seconds: float) -> list[Stay]:
    """Every node's time; lost ones count as there, since they are owned."""
    found = [Stay(row, node, 0.0, end_seconds) for row, node in enumerate(nodes)]
    rented: dict[int, NodeJoined] = {}
    for event in log:
        if isinstance(event, NodeJoined):
            rented[event.node] = event
        elif isinstance(event, NodeReleased | NodeReclaimed):
            joined = rented.pop(event.node)
            found.append(Stay(event.node, joined.spec, joined.time_seconds, event.time_seconds))
    left = [Stay(row, one.spec, one.time_seconds, end_seconds) for row, one in rented.items()]
    return found + left


def provided_gpu_seconds(
    nodes: Sequence[NodeSpec], log: Sequence[Event], end_seconds: float
) -> dict[str, float]:
    """GPU time that was there, by type."""
    total: dict[str, float] = defaultdict(float)
    for stay in node_stays(nodes, log, end_seconds):
        seconds = stay.until_seconds - stay.since_seconds
        total[stay.node.gpu] += stay.node.num_gpus * seconds
    return dict(total)
