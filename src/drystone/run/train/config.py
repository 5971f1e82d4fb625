"""The configuration of a rank: what its job says, and what only whoever starts it knows."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

from drystone.describe.job import TrainConfig, flag_of, option

TIMEOUT_SECONDS: Final = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankConfig(TrainConfig):
    """All that a plan leaves open. Each field is a flag of `python -m drystone.run.train`."""

    num_steps: int = option(10, "in all, resumed ones included", flag="steps", ge=0)
    data: str = option("synthetic", "synthetic, a file of tokens, text or records, or a folder")
    checkpoints: Path | None = option(None, "folder to save to and to resume from")
    keep: int = option(3, "checkpoints that stay")
    waits_for_saves: bool = option(
        False, "do not train while a checkpoint is written", flag="wait-for-saves"
    )
    rebalances: bool = option(
        False, "move samples away from stragglers, between steps", flag="rebalance"
    )
    rivals: Path | None = option(
        None, "folder of other plans: each is tried for a few steps, the fastest is trained"
    )
    timeout_seconds: float = option(TIMEOUT_SECONDS, "of a collective", flag="timeout", gt=0)

    def saves_after(self, step: int, *, best_interval: int) -> bool:
        """Whether a checkpoint is due; `best_interval` is in steps, where the job says nothing."""
        return step % (self.checkpoint_every or best_interval) == 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for every field."""
    hints = get_type_hints(RankConfig)
    for field in fields(RankConfig):
        kind, told = hints[field.name], field.metadata["told"]
        how: dict[str, Any] = {"action": "store_true"}
        if kind is not bool:
            how = {"type": Path if kind == Path | None else kind, "default": field.default}
        if get_origin(kind) is Literal:
            how |= {"type": str, "choices": get_args(kind)}
        parser.add_argument(flag_of(field), dest=field.name, help=told, **how)


def read_flags(given: argparse.Namespace) -> RankConfig:
    """The configuration that the flags say, checked."""
    return RankConfig(**{field.name: getattr(given, field.name) for field in fields(RankConfig)})
