"""The order of micro-batches in a pipeline: GPipe, 1F1B, interleaved 1F1B.

Every stage has an order of its own (`stage_actions`), and there is one of all stages together
(`pipeline_order`). Each rank computes, sends and starts to receive in that common order: whichever
operation comes first among those that have not ended, all ranks that take part in it have done
everything before it and arrive there. So no order of stages can hang, even where a send blocks
until it is received, where both directions of a pair of ranks share a stream, and where the first
message of a pair waits for both of them: NCCL does all of this. Tests walk through the orders.
"""

from __future__ import annotations

from dataclasses import dataclass

from drystone.describe.layout import Schedule
from drystone.errors import InvalidSpec


@dataclass(frozen=True, slots=True)
class Action:
    """One micro-batch through one chunk of layers, forward or backward."""

    is_forward: bool
    chunk: int  # of the whole pipeline
    micro: int


def stage_actions(
    schedule: Schedule, *, stage: int, num_stages: int, num_chunks: int, num_micro: int
) -> list[Action]:
    """What one stage does in a step, in order."""
    if num_chunks > num_stages:
        if num_micro % num_stages:
            raise InvalidSpec(
                f"{num_micro} micro-batches cannot be interleaved over {num_stages} stages",
                hint="Their number must be a multiple of that of the stages",
            )
        forward, backward = _interleaved(stage, num_stages, num_chunks // num_stages, num_micro)
        ahead = 2 * (num_stages - stage - 1) + num_chunks - num_stages
    else:
        forward = [Action(True, stage, micro) for micro in range(num_micro)]
        backward = [Action(False, stage, micro) for micro in range(num_micro)]
        ahead = num_stages - stage - 1
    if schedule is Schedule.GPIPE:
        ahead = len(forward)
    ahead = min(ahead, len(forward))
    actions = forward[:ahead]
    for one, other in zip(forward[ahead:], backward, strict=False):
        actions += [one, other]
    return actions + backward[len(forward) - ahead :]


def pipeline_order(
    schedule: Schedule, *, num_stages: int, num_chunks: int, num_micro: int
) -> list[Action]:
    """What all stages do in a step, in the order in which it would end if all were equally fast.

    That is how a planner balances them. Where it is so, a stage starts to receive what arrives
    during an action before that action. A backward pass counts as two forward passes. What ends at
    the same time does not depend on each other; what is nearer to its source comes first, so that
    the one after it can receive early.
    """
    left = [
        stage_actions(
            schedule, stage=stage, num_stages=num_stages, num_chunks=num_chunks, num_micro=num_micro
        )[::-1]
        for stage in range(num_stages)
    ]
    ends: dict[Action, int] = {}
    now = [0] * num_stages
    while any(left):
        for stage, actions in enumerate(left):
            while actions and needed_actions(actions[-1], num_chunks) <= ends.keys():
                action = actions.pop()
                inputs = needed_actions(action, num_chunks)
                start = max(now[stage], *(ends[one] for one in inputs), 0)
                now[stage] = ends[action] = start + (1 if action.is_forward else 2)
    return sorted(ends, key=lambda one: (ends[one], one.is_forward, _depth(one)))


def needed_actions(action: Action, num_chunks: int) -> set[Action]:
    """What must have ended before."""
    if action.is_forward:
        return {Action(True, action.chunk - 1, action.micro)} if action.chunk else set()
    needed = {Action(True, action.chunk, action.micro)}
    if action.chunk < num_chunks - 1:
        needed.add(Action(False, action.chunk + 1, action.micro))
    return needed


def _depth(action: Action) -> int:
    """How far from the source of its direction, up to a constant."""
    return action.chunk if action.is_forward else -action.chunk


def _interleaved(
    stage: int, num_stages: int, chunks_each: int, num_micro: int
) -> tuple[list[Action], list[Action]]:
    """Rounds of as many micro-batches as there are stages, through one chunk after another.

    The order of arXiv:2104.04473, section 2.2.
    """
    forward, backward = [], []
    for start in range(0, num_micro, num_stages):
        for turn in range(chunks_each):
            for micro in range(start, start + num_stages):
                ahead, behind = turn, chunks_each - 1 - turn
                forward.append(Action(True, ahead * num_stages + stage, micro))
                backward.append(Action(False, behind * num_stages + stage, micro))
    return forward, backward
