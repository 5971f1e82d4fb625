"""What the loop needs of a world, simulated or real, and how decisions reach it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol, assert_never, cast

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

_STARTS: Final = frozenset((Start,))


class World(Protocol):
    """A cluster that can be looked at, changed, and waited for."""

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to decide, now or later."""
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
    carry_out(decisions, world, moved_options(decisions, snapshot))


def moved_options(decisions: Sequence[Decision], snapshot: Snapshot) -> dict[str, int]:
    """By job that is moved: the option that it keeps."""
    found: dict[str, int] = {}
    if Move not in map(type, decisions):
        return found
    for decision in decisions:
        if isinstance(decision, Move):
            status = snapshot.job_status(decision.job_id)
            assert status is not None, "a checked list moves jobs that run"
            found[decision.job_id] = status.option
    return found


def carry_out(decisions: Sequence[Decision], world: World, moved: Mapping[str, int]) -> None:
    """The same, for whoever holds the snapshot no longer."""
    launch = world.launch
    if _STARTS.issuperset(map(type, decisions)):
        for start in cast("Sequence[Start]", decisions):
            launch(start.job_id, start.option, start.placement, start.reason)
        return
    for decision in decisions:
        _free(decision, world)
    for decision in decisions:
        if isinstance(decision, Release):
            world.release(decision.node, decision.reason)
    for decision in decisions:
        _take(decision, world, moved)


def _free(decision: Decision, world: World) -> None:
    match decision:
        case Preempt() | Resize() | Move():
            world.stop(decision.job_id, decision.reason)
        case Refuse():
            world.refuse(decision.job_id, decision.reason)
        case Start() | Rent() | Release() | Wake():
            pass
        case _:
            assert_never(decision)


def _take(decision: Decision, world: World, moved: Mapping[str, int]) -> None:
    match decision:
        case Start() | Resize():
            world.launch(decision.job_id, decision.option, decision.placement, decision.reason)
        case Move():
            option = moved[decision.job_id]
            world.launch(decision.job_id, option, decision.placement, decision.reason)
        case Rent():
            world.rent(decision.offer, decision.num_nodes, decision.reason)
        case Wake():
            world.wake(decision.at_seconds, decision.reason)
        case Preempt() | Refuse() | Release():
            pass
        case _:
            assert_never(decision)
