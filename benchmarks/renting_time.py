"""What were rented nodes paid for? Their seconds by what they did, from the log of a run."""

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
)

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


def _turn(nodes: dict[int, _Node], rows: list[int], doing: str, now_seconds: float) -> None:
    for row in rows:
        nodes[row].is_used = True
        nodes[row].turn(doing, now_seconds)
