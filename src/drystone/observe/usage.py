"""Which GPUs were there, and who held them when? Folds over the events of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from drystone.describe.trace_cluster import NodeSpec
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


def provided_intervals(
    nodes: Sequence[NodeSpec], log: Sequence[Event], end_seconds: float
) -> list[tuple[NodeSpec, float, float]]:
    """Every node, and from when until when it was there; lost ones count, since they are owned."""
    found = [(node, 0.0, end_seconds) for node in nodes]
    rented: dict[int, NodeJoined] = {}
    for event in log:
        if isinstance(event, NodeJoined):
            rented[event.node] = event
        elif isinstance(event, NodeReleased | NodeReclaimed):
            joined = rented.pop(event.node)
            found.append((joined.spec, joined.time_seconds, event.time_seconds))
    left = [(one.spec, one.time_seconds, end_seconds) for one in rented.values()]
    return found + left


def provided_gpu_seconds(
    nodes: Sequence[NodeSpec], log: Sequence[Event], end_seconds: float
) -> dict[str, float]:
    """GPU time that was there, by type."""
    total: dict[str, float] = defaultdict(float)
    for node, since, until in provided_intervals(nodes, log, end_seconds):
        total[node.gpu] += node.num_gpus * (until - since)
    return dict(total)
