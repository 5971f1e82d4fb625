"""A plan: one way to run one job, with who computes what, who holds what, and at what cost."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from drystone.describe.files.json_shapes import from_plain, to_plain
from drystone.describe.layout import Layout, Schedule, Sharding
from drystone.describe.model import ModelSpec, ModuleSpec
from drystone.describe.recipe import Recipe
from drystone.errors import InvalidSpec, UnreadableFile, reason_of
from drystone.units import HOUR_SECONDS

FORMAT = 1
_HOW_TO_SAVE = "Write one with: drystone plan MODEL --gpus ... --save plan.json"


class Way(StrEnum):
    """How the work is divided."""

    CELL = "cell"  # equal GPUs, equal shares
    UNEVEN = "uneven"  # data parallel over unlike GPUs: batch and state divided apart
    GROUPS = "groups"  # a pipeline over groups of equal GPUs, each with its own layers


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """Equal ranks of one stage: what each computes in a step, and what it holds."""

    gpu: str
    count: int
    batch: int  # sequences in a step, per data-parallel rank
    micro_batch: int
    num_micro_batches: int
    state_share: float  # of the stage's weights, gradients and optimizer state, per rank

    def __post_init__(self) -> None:
        if self.count < 1 or self.batch < 0 or not 0 <= self.state_share <= 1:
            raise InvalidSpec(f"a share of {self.gpu}: count >= 1, batch >= 0, 0 <= state <= 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One pipeline stage: consecutive layers on some ranks."""

    first_layer: int
    end_layer: int  # one past the last
    ranks: tuple[RankShare, ...]
    tp: int = 1
    cp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.first_layer < self.end_layer:
            raise InvalidSpec(f"a stage of layers {self.first_layer} to {self.end_layer}")
        if self.num_gpus % (self.tp * self.cp):
            raise InvalidSpec(f"{self.num_gpus} GPUs cannot form groups of tp x cp")

    @property
    def num_gpus(self) -> int:
        """GPUs of the stage."""
        return sum(share.count for share in self.ranks)

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.num_gpus // (self.tp * self.cp)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNeed:
    """What the hungriest rank of one GPU type needs."""

    gpu: str
    count: int
    required_bytes: float
    high_bytes: float  # the upper end: this is what must be there
    usable_bytes: float
    stage: int = 0
    items: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One way to run one job."""

    way: Way
    model: ModelSpec | ModuleSpec
    recipe: Recipe  # with the recomputation that the plan needs
    stages: tuple[StagePlan, ...]
    needs: tuple[GpuNeed, ...]
    step_seconds: float
    time_items: dict[str, float]
    layout: Layout | None = None  # of a Cell
    sharding: Sharding = Sharding.NONE
    sequence_parallel: bool = False
    schedule: Schedule = Schedule.ONE_F_ONE_B
    virtual_stages: int = 1
    dollars_per_hour: float | None = None
    reason: str = ""
    not_executable: str = ""  # why the runtime cannot execute it; empty when it can

    @property
    def num_gpus(self) -> int:
        """GPUs that it takes."""
        return sum(stage.num_gpus for stage in self.stages)

    @property
    def gpus(self) -> dict[str, int]:
        """GPUs by type."""
        counts: dict[str, int] = {}
        for stage in self.stages:
            for share in stage.ranks:
                counts[share.gpu] = counts.get(share.gpu, 0) + share.count
        return counts

    @property
    def tokens_per_second(self) -> float:
        """The pace of the whole job."""
        return self.recipe.global_batch * self.recipe.seq_len / self.step_seconds

    @property
    def dollars_per_billion_tokens(self) -> float | None:
        """What a billion tokens cost to rent."""
        if self.dollars_per_hour is None:
            return None
        return self.dollars_per_hour / HOUR_SECONDS / self.tokens_per_second * 1e9

    @property
    def fits(self) -> bool:
        """Whether the upper end of every need is there."""
        return all(need.high_bytes <= need.usable_bytes for need in self.needs)

    def to_json(self) -> dict[str, Any]:
        """The documented shape of a plan file; `load_plan` reads it back."""
        plain: dict[str, Any] = to_plain(self)
        derived = {
            "gpus": self.gpus,
            "tokens_per_second": self.tokens_per_second,
            "dollars_per_billion_tokens": self.dollars_per_billion_tokens,
        }
        return {"format": FORMAT, "plan": plain, "derived": derived}


def save_plan(plan: Plan, path: Path) -> None:
    """Write the plan that the runtime executes; whole or not at all."""
    text = json.dumps(plan.to_json(), indent=2, allow_nan=False)
    scratch = path.with_name(f".{path.name}.part")
    try:
        scratch.write_text(text + "\n", encoding="utf-8")
        scratch.replace(path)
    except OSError as error:
        raise UnreadableFile(f"cannot be written: {error.strerror}", where=str(path)) from None


def load_plan(path: Path) -> Plan:
    """Read a plan file, checked."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        told = f"is no plan: {reason_of(error)}"
        raise UnreadableFile(told, where=str(path), hint=_HOW_TO_SAVE) from None
    if not isinstance(table, dict) or "format" not in table or "plan" not in table:
        raise UnreadableFile("is not a plan file", where=str(path), hint=_HOW_TO_SAVE)
    if table["format"] != FORMAT:
        told = f"is a plan of format {table['format']}, this version reads {FORMAT}"
        raise UnreadableFile(told, where=str(path), hint=_HOW_TO_SAVE)
    return from_plain(Plan, table["plan"], where=str(path))
