"""Who held which GPUs when? A run as a timeline that Perfetto and chrome://tracing open.

One process a GPU type, one track a GPU; a bar is one job from its start until it lost the GPUs.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from drystone.describe.trace_cluster import NodeSpec
from drystone.observe.metrics import held_intervals
from drystone.run.events import Event

_MICROSECONDS = 1e6


def render_timeline(
    log: Sequence[Event], nodes: Sequence[NodeSpec], end_seconds: float
) -> dict[str, Any]:
    """The run in the trace event format."""
    gpu_types = list(dict.fromkeys(node.gpu for node in nodes))
    first_gpu = list(accumulate((node.num_gpus for node in nodes), initial=0))
    free = [list(range(node.num_gpus)) for node in nodes]
    busy: list[tuple[float, int, int, int]] = []  # until, a number to break ties, node, GPU
    bars: list[dict[str, Any]] = []
    intervals = sorted(held_intervals(log, end_seconds), key=lambda one: one[0].time_seconds)
    for start, until in intervals:
        while busy and busy[0][0] <= start.time_seconds:
            _, _, node_row, gpu = heapq.heappop(busy)
            heapq.heappush(free[node_row], gpu)
        for node_row, count in start.placement:
            for _ in range(count):
                gpu = heapq.heappop(free[node_row])
                heapq.heappush(busy, (until, len(bars), node_row, gpu))
                bars.append(
                    {
                        "name": start.job_id,
                        "ph": "X",
                        "ts": start.time_seconds * _MICROSECONDS,
                        "dur": (until - start.time_seconds) * _MICROSECONDS,
                        "pid": gpu_types.index(nodes[node_row].gpu),
                        "tid": first_gpu[node_row] + gpu,
                        "args": {"node": nodes[node_row].id, "reason": start.reason},
                    }
                )
    names = [
        {"name": "process_name", "ph": "M", "pid": kind, "args": {"name": gpu}}
        for kind, gpu in enumerate(gpu_types)
    ]
    return {"traceEvents": names + bars, "displayTimeUnit": "ms"}
