"""Who held which GPUs when? A run as a timeline that Perfetto and chrome://tracing open.

One process a GPU type, one track a GPU; a bar is one job from its start until it lost the GPUs.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from drystone.describe.node import NodeSpec
from drystone.observe.usage import held_intervals, rows_of_nodes
from drystone.run.events import Event, Started

_MICROSECONDS = 1e6


@dataclass(frozen=True, slots=True)
class Bar:
    """One job on one GPU for a while."""

    start: Started
    until_seconds: float
    row: int  # of the node
    gpu: int  # on that node


def assign_gpus(
    log: Sequence[Event], rows: Sequence[NodeSpec], end_seconds: float
) -> Iterator[Bar]:
    """Which GPU of its nodes each job had: the lowest that were free, in order of starting."""
    free = [list(range(node.num_gpus)) for node in rows]
    busy: list[tuple[float, int, int, int]] = []  # until, a number to break ties, node, GPU
    intervals = sorted(held_intervals(log, end_seconds), key=lambda one: one[0].time_seconds)
    number = 0
    for start, until in intervals:
        while busy and busy[0][0] <= start.time_seconds:
            _, _, row, gpu = heapq.heappop(busy)
            heapq.heappush(free[row], gpu)
        for row, count in start.placement:
            for _ in range(count):
                gpu = heapq.heappop(free[row])
                heapq.heappush(busy, (until, number, row, gpu))
                number += 1
                yield Bar(start, until, row, gpu)


def render_timeline(
    log: Sequence[Event], nodes: Sequence[NodeSpec], end_seconds: float
) -> dict[str, Any]:
    """The run in the trace event format."""
    rows = rows_of_nodes(nodes, log)
    gpu_types = list(dict.fromkeys(node.gpu for node in rows))
    first_gpu = list(accumulate((node.num_gpus for node in rows), initial=0))
    bars = [
        {
            "name": bar.start.job_id,
            "ph": "X",
            "ts": bar.start.time_seconds * _MICROSECONDS,
            "dur": (bar.until_seconds - bar.start.time_seconds) * _MICROSECONDS,
            "pid": gpu_types.index(rows[bar.row].gpu),
            "tid": first_gpu[bar.row] + bar.gpu,
            "args": {"node": rows[bar.row].id, "reason": bar.start.reason},
        }
        for bar in assign_gpus(log, rows, end_seconds)
    ]
    names = [
        {"name": "process_name", "ph": "M", "pid": kind, "args": {"name": gpu}}
        for kind, gpu in enumerate(gpu_types)
    ]
    return {"traceEvents": names + bars, "displayTimeUnit": "ms"}
