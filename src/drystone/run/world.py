"""What the loop needs of a world, simulated or real, and how decisions reach it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, assert_never

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
from drystone.schedule.snapshot import Placement, Snapshot


class World(Protocol):
    """A cluster that can be looked at, changed, and waited for."""

    def has_work(self) -> bool:
        """Whether anything is left to decide, now or later."""
        ...

    def observe(self) -> Snapshot:
        """What is the case now."""
        ...

    def launch(self, job_id: str, option: int, placement: Placement, reason: str) -> None:
        """Start a waiting job on these GPUs."""
        ...

    def stop(self, job_id: str, reason: str) -> None:
        """Take a running job's GPUs; its progress is kept."""
        ...

    def refuse(self, job_id: str, reason: str) -> None:
        """Turn a waiting job away."""
        ...

    def rent(self, offer: str, num_nodes: int, reason: str) -> None:
        """Rent nodes."""
        ...

    def release(self, node: int, reason: str) -> None:
        """Give a rented node back."""
        ...

    def wake(self, at_seconds: float, reason: str) -> None:
        """Let `advance` return at this time at the latest."""
        ...

    def advance(self) -> None:
        """Let time pass until there is something new to decide."""
        ...


def apply(decisions: Sequence[Decision], world: World, snapshot: Snapshot) -> None:
    """Carry decisions out: first everything that frees GPUs, then everything that takes them.

    Nodes are given back in between: by then nobody runs on them.
    """
    for decision in decisions:
        _free(decision, world)
    for decision in decisions:
        if isinstance(decision, Release):
            world.release(decision.node, decision.reason)
    for decision in decisions:
        _take(decision, world, snapshot)


def _free(decision: Decision, world: World) -> None:
    match decision:
        case Preempt(job_id=job_id, reason=reason):
            world.stop(job_id, reason)
        case Resize(job_id=job_id, reason=reason) | Move(job_id=job_id, reason=reason):
            world.stop(job_id, reason)
        case Refuse(job_id=job_id, reason=reason):
            world.refuse(job_id, reason)
        case Start() | Rent() | Release() | Wake():
            pass
        case _:
            assert_never(decision)


def _take(decision: Decision, world: World, snapshot: Snapshot) -> None:
    match decision:
        case Start() | Resize():
            world.launch(decision.job_id, decision.option, decision.placement, decision.reason)
        case Move(job_id=job_id, placement=placement, reason=reason):
            option = int(snapshot.jobs.option[snapshot.jobs.row_of[job_id]])
            world.launch(job_id, option, placement, reason)
        case Rent(offer=offer, num_nodes=num_nodes, reason=reason):
            world.rent(offer, num_nodes, reason)
        case Wake(at_seconds=at_seconds, reason=reason):
            world.wake(at_seconds, reason)
        case Preempt() | Refuse() | Release():
            pass
        case _:
            assert_never(decision)
