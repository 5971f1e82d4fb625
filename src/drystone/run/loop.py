"""The one control loop: look, decide, check, act, wait. Simulated and real clusters share it."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from drystone.errors import DrystoneError
from drystone.run.world import World, apply
from drystone.schedule.check import check_decisions
from drystone.schedule.decision import Memory, Policy


class UnsoundDecisions(DrystoneError):
    """A policy decided what cannot be done; nothing of its list was carried out."""

    def __init__(self, problems: list[str]) -> None:
        shown = "; ".join(problems[:5]) + ("; ..." if len(problems) > 5 else "")
        super().__init__(f"the policy's decisions are unsound: {shown}")


def drive(
    world: World,
    policy: Policy,
    *,
    memory: Memory = None,
    on_decision: Callable[[float, float], None] | None = None,
) -> None:
    """Run a world under a policy until nothing is left to do.

    `memory` is what the policy remembers of decisions before. `on_decision` hears the time in the
    world and the seconds that the policy took.
    """
    observe, advance, clock = world.observe, world.advance, perf_counter
    while not world.is_over:
        snapshot = observe()
        before = clock()
        decisions, memory = policy(snapshot, memory)
        if on_decision is not None:
            on_decision(snapshot.now_seconds, clock() - before)
        if decisions:
            problems = check_decisions(snapshot, decisions)
            if problems:
                raise UnsoundDecisions(problems)
            apply(decisions, world, snapshot)
        advance()
