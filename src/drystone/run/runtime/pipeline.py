"""In which order does a stage compute its micro-batches? GPipe, 1F1B, interleaved 1F1B.

Only the order is decided here. Sends never wait, so any order in which every stage can go on once
its inputs are there ends; tests walk through all of them.
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
