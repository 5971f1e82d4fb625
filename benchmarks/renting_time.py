"""What were rented nodes paid for, and what could their jobs have cost? From the log of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from drystone.run.events import (
    Event,
    Failed,
    Finished,
    Interrupted,
    NodeJoined,
    NodeReclaimed,
    NodeReleased,
    Progressed,
    Started,
    Stopped,
    Submitted,
)
from drystone.units import HOUR_SECONDS

GPU_DOLLARS_PER_HOUR = 0.5
MOST_GPUS = 4  # of a job
SPEEDUP_POWER = 0.85
KINDS = ("joining", "idle", "starting", "training", "never used")


@dataclass(slots=True)
class _Node:
    """A rented node: what it does, since when, and what it did before."""

    doing: str
    since_seconds: float
    seconds: Counter[str] = field(default_factory=Counter)
    is_used: bool = False

    def turn(self, doing: str, now_seconds: float) -> None:
        self.seconds[self.doing] += now_seconds - self.since_seconds
        self.doing, self.since_seconds = doing, now_seconds


def seconds_by_kind(events: Iterable[Event]) -> dict[str, float]:
    """Seconds of rented nodes: until they joined, without a job, with one that starts or trains."""
    nodes: dict[int, _Node] = {}
    jobs: dict[str, list[int]] = {}  # rented nodes of running jobs
    total: Counter[str] = Counter(dict.fromkeys(KINDS, 0.0))
    for event in events:
        now = event.time_seconds
        if isinstance(event, NodeJoined):
            one = nodes[event.node] = _Node("joining", event.billed_since_seconds or now)
            one.turn("idle", now)
        elif isinstance(event, NodeReleased | NodeReclaimed) and event.node in nodes:
            one = nodes.pop(event.node)
            one.turn("", now)
            unused = {"never used": sum(one.seconds.values())}
            total.update(one.seconds if one.is_used else unused)
        elif isinstance(event, Started):
            jobs[event.job_id] = [node for node, _ in event.placement if node in nodes]
            _turn(nodes, jobs[event.job_id], "starting", now)
        elif isinstance(event, Progressed):
            _turn(nodes, jobs.get(event.job_id, []), "training", now)
        elif isinstance(event, Finished | Stopped | Interrupted | Failed):
            _turn(nodes, jobs.pop(event.job_id, []), "idle", now)
    return dict(total)


def demand(
    events: list[Event], paid: dict[str, float], node_gpus: int, hours: float
) -> tuple[float, float]:
    """Dollars an hour for these jobs on one GPU each and on all they may have, as it went here.

    Every GPU of a start is paid for beyond its training for as long as it was on average.
    """
    samples = {one.job.id: one.job.total_samples for one in events if isinstance(one, Submitted)}
    started = [one for one in events if isinstance(one, Started)]
    num_gpus = {one.job_id: sum(count for _, count in one.placement) for one in started}
    trained = sum(gpu_seconds(samples[job_id], number) for job_id, number in num_gpus.items())
    num_started = sum(count for one in started for _, count in one.placement)
    beyond = (sum(paid.values()) * node_gpus - trained) / max(num_started, 1)
    cheapest, fastest = (
        sum(gpu_seconds(one, number) + number * beyond for one in samples.values())
        * GPU_DOLLARS_PER_HOUR / HOUR_SECONDS / hours
        for number in (1, MOST_GPUS)
    )  # fmt: skip
    return cheapest, fastest


def gpu_seconds(samples: float, num_gpus: int) -> float:
    """Of training: one sample a second on one GPU."""
    return samples * num_gpus ** (1 - SPEEDUP_POWER)


def _turn(nodes: dict[int, _Node], rows: list[int], doing: str, now_seconds: float) -> None:
    for row in rows:
        nodes[row].is_used = True
        nodes[row].turn(doing, now_seconds)
