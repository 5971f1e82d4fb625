"""Time series and timelines of a run, short enough to draw, from its events and its record."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import numpy as np

from drystone.describe.cluster import NodeSpec
from drystone.describe.job import JobSpec
from drystone.observe.metrics import held_intervals, node_stays, rows_of_nodes
from drystone.observe.simulation import RunRecord
from drystone.run.events import Cancelled, Event, Failed, Finished, Refused, Started
from drystone.schedule.snapshot import FloatArray

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
    intervals = sorted(held_intervals(log, end_seconds), key=lambda held: held[0].time_seconds)
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


NUM_POINTS: Final = 240
MAX_TILES: Final = 5000
_MAX_CDF_POINTS: Final = 400

_SETTLED = (Finished, Refused, Cancelled, Failed)

Step = tuple[float, float, float]  # from, until, how much


def completion_curve(jobs: Sequence[JobSpec], log: Sequence[Event]) -> dict[str, list[float]]:
    """Seconds, and the share of all jobs done within them; unfinished jobs leave a gap to 1."""
    submits = {job.id: job.submit_seconds for job in jobs}
    done = sorted(
        event.time_seconds - submits[event.job_id] for event in log if isinstance(event, Finished)
    )
    shares = [(index + 1) / len(jobs) for index in range(len(done))]
    if len(done) > _MAX_CDF_POINTS:
        rows = np.unique(np.linspace(0, len(done) - 1, _MAX_CDF_POINTS).astype(int)).tolist()
        done, shares = [done[row] for row in rows], [shares[row] for row in rows]
    return {"seconds": _short(done), "share": _short(shares)}


def use_by_type(
    nodes: Sequence[NodeSpec], log: Sequence[Event], end_seconds: float
) -> dict[str, Any]:
    """By GPU type: GPUs held and GPUs there, averaged over equal stretches of time."""
    rows = rows_of_nodes(nodes, log)
    held: dict[str, list[Step]] = defaultdict(list)
    there: dict[str, list[Step]] = defaultdict(list)
    for start, until in held_intervals(log, end_seconds):
        for row, count in start.placement:
            held[rows[row].gpu].append((start.time_seconds, until, count))
    for stay in node_stays(nodes, log, end_seconds):
        step = (stay.since_seconds, stay.until_seconds, stay.node.num_gpus)
        there[stay.node.gpu].append(step)
    edges = np.linspace(0.0, max(end_seconds, 1e-9), NUM_POINTS + 1)
    return {
        "seconds": _short((edges[:-1] + edges[1:]) / 2),
        "types": {
            gpu: {
                "held": _short(_average(held[gpu], edges)),
                "there": _short(_average(total, edges)),
            }
            for gpu, total in there.items()
        },
    }


def waiting_jobs(jobs: Sequence[JobSpec], log: Sequence[Event], end_seconds: float) -> list[float]:
    """Jobs that are there and hold no GPU, averaged over the same stretches."""
    ends = {event.job_id: event.time_seconds for event in log if isinstance(event, _SETTLED)}
    steps: list[Step] = [
        (job.submit_seconds, ends.get(job.id, end_seconds), 1.0)
        for job in jobs
        if job.submit_seconds < end_seconds
    ]
    steps += [
        (start.time_seconds, until, -1.0) for start, until in held_intervals(log, end_seconds)
    ]
    edges = np.linspace(0.0, max(end_seconds, 1e-9), NUM_POINTS + 1)
    return _short(np.maximum(_average(steps, edges), 0.0))


def spend_curve(record: RunRecord, end_seconds: float, spent_dollars: float) -> dict[str, Any]:
    """Dollars paid by each time; empty where nothing was rented."""
    if spent_dollars <= 0:
        return {}
    times = np.array([*record.times_seconds, end_seconds])
    paid = np.array([*record.spent_dollars, spent_dollars])
    grid = np.linspace(0.0, end_seconds, NUM_POINTS)
    return {"seconds": _short(grid), "dollars": _short(np.interp(grid, times, paid))}


def price_curves(record: RunRecord, end_seconds: float) -> dict[str, Any]:
    """The shadow price of each GPU type, averaged like the use; empty where there are none."""
    if not record.prices:
        return {}
    times, prices = np.array(record.price_times_seconds), np.array(record.prices)
    edges = np.linspace(0.0, max(end_seconds, 1e-9), NUM_POINTS + 1)
    until = np.append(times[1:], end_seconds)
    return {
        "seconds": _short((edges[:-1] + edges[1:]) / 2),
        "types": {
            gpu: _short(_average(list(zip(times, until, prices[:, kind], strict=True)), edges))
            for kind, gpu in enumerate(record.gpu_types)
        },
    }


def gpu_tiles(
    nodes: Sequence[NodeSpec], log: Sequence[Event], end_seconds: float, jobs: Sequence[JobSpec]
) -> dict[str, Any]:
    """Who held which GPUs when, as rectangles: type, lane, lanes, from, until, job.

    Of very many, the largest are kept, and `num_left_out` says how many are not.
    """
    rows = rows_of_nodes(nodes, log)
    gpu_types = list(dict.fromkeys(node.gpu for node in rows))
    first_lane = _first_lanes(rows, gpu_types)
    job_row = {job.id: index for index, job in enumerate(jobs)}
    tiles: list[list[float]] = []
    last: tuple[Started, int] | None = None
    for bar in assign_gpus(log, rows, end_seconds):
        lane = first_lane[bar.row] + bar.gpu
        kind = gpu_types.index(rows[bar.row].gpu)
        if last == (bar.start, kind) and tiles[-1][1] + tiles[-1][2] == lane:
            tiles[-1][2] += 1
            continue
        last = (bar.start, kind)
        times = (round(bar.start.time_seconds), round(bar.until_seconds))
        tiles.append([kind, lane, 1, *times, job_row[bar.start.job_id]])
    total = len(tiles)
    if total > MAX_TILES:
        tiles.sort(key=lambda tile: -tile[2] * (tile[4] - tile[3]))
        tiles = sorted(tiles[:MAX_TILES], key=lambda tile: tile[3])
    lanes = [sum(node.num_gpus for node in rows if node.gpu == gpu) for gpu in gpu_types]
    return {
        "types": gpu_types,
        "lanes": lanes,
        "there": _stays(nodes, log, end_seconds, first_lane, gpu_types),
        "tiles": tiles,
        "num_left_out": total - len(tiles),
    }


def _stays(
    nodes: Sequence[NodeSpec],
    log: Sequence[Event],
    end_seconds: float,
    first_lane: Sequence[int],
    gpu_types: Sequence[str],
) -> list[list[int]]:
    """When which lanes were there: type, lane, lanes, from, until; one for all owned of a type."""
    owned = [
        [kind, 0, sum(node.num_gpus for node in nodes if node.gpu == gpu), 0, round(end_seconds)]
        for kind, gpu in enumerate(gpu_types)
    ]
    rented = [
        [
            gpu_types.index(stay.node.gpu),
            first_lane[stay.row],
            stay.node.num_gpus,
            round(stay.since_seconds),
            round(stay.until_seconds),
        ]
        for stay in node_stays(nodes, log, end_seconds)
        if stay.row >= len(nodes)
    ]
    rented.sort(key=lambda lane: lane[3] - lane[4])
    return [lane for lane in owned if lane[2]] + rented[:MAX_TILES]


def _first_lanes(rows: Sequence[NodeSpec], gpu_types: Sequence[str]) -> list[int]:
    """The lane of each node's first GPU, counted within its type."""
    found = [0] * len(rows)
    for gpu in gpu_types:
        mine = [row for row, node in enumerate(rows) if node.gpu == gpu]
        starts = accumulate((rows[row].num_gpus for row in mine), initial=0)
        for row, start in zip(mine, starts, strict=False):
            found[row] = start
    return found


def _average(steps: Sequence[Step], edges: FloatArray) -> FloatArray:
    """The sum of the steps, averaged between each two edges."""
    if not steps:
        return np.zeros(len(edges) - 1)
    table = np.array(steps)
    times = np.concatenate((table[:, 0], table[:, 1]))
    changes = np.concatenate((table[:, 2], -table[:, 2]))
    order = np.argsort(times, kind="stable")
    times, levels = times[order], np.cumsum(changes[order])
    passed = np.concatenate(([0.0], np.cumsum(levels[:-1] * np.diff(times))))
    result: FloatArray = np.diff(np.interp(edges, times, passed)) / np.diff(edges)
    return result


def _short(values: Iterable[float]) -> list[float]:
    """Four digits are enough to draw."""
    return [float(f"{value:.4g}") if math.isfinite(value) else 0.0 for value in values]
