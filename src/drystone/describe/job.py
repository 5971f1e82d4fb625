"""What a training job asks for: how much work, by when, for how much, on which GPUs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from drystone.errors import InvalidSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """One job as it was submitted. Nothing in it changes while the job waits or runs."""

    id: str
    submit_seconds: float
    model: str
    total_samples: float
    global_batch: int = 1
    seq_len: int = 0  # tokens of a sample; 0: not stated
    tuning: str = "full"  # how it is trained: full, lora or qlora
    owner: str = ""
    priority: float = 1.0  # a weight: 2 counts for two jobs of weight 1
    deadline_seconds: float = math.inf
    max_cost_dollars: float = math.inf
    max_duration_seconds: float = math.inf  # of running, all attempts together
    allowed_gpus: frozenset[str] = frozenset()  # empty: any type
    denied_gpus: tuple[str, ...] = ()
    min_gpus: int = 1
    max_gpus: int = 1_000_000
    requested_gpu: str = ""  # what its owner named, for policies that change nothing
    requested_count: int = 0
    startup_seconds: float = -1.0  # without progress after every start; -1: as the cluster says

    def __post_init__(self) -> None:
        object.__setattr__(self, "denied_gpus", tuple(self.denied_gpus))  # JSON knows only lists
        problem = self._problem()
        if problem:
            raise InvalidSpec(f"job {self.id!r}: {problem}")

    def _problem(self) -> str:
        if not self.id:
            return "the id is empty"
        if not (math.isfinite(self.submit_seconds) and self.submit_seconds >= 0):
            return f"submit_seconds is {self.submit_seconds}, must be 0 or more"
        if not (math.isfinite(self.total_samples) and self.total_samples > 0):
            return f"total_samples is {self.total_samples}, must be above 0"
        if not (math.isfinite(self.priority) and self.priority > 0):
            return f"priority is {self.priority}, must be above 0"
        if not 1 <= self.min_gpus <= self.max_gpus:
            return f"min_gpus {self.min_gpus} and max_gpus {self.max_gpus} leave nothing"
        if not (self.max_cost_dollars > 0 and self.max_duration_seconds > 0):
            return "max_cost_dollars and max_duration_seconds must be above 0"
        both = sorted(self.allowed_gpus.intersection(self.denied_gpus))
        if both:
            return f"{both[0]} is both allowed and denied"
        if self.seq_len < 0 or self.global_batch < 1:
            return f"seq_len {self.seq_len} or global_batch {self.global_batch} is too small"
        return ""

    @property
    def is_limited(self) -> bool:
        """Whether its owner limits types, numbers, money or time."""
        return (
            self.max_cost_dollars != math.inf
            or self.max_duration_seconds != math.inf
            or bool(self.allowed_gpus)
            or bool(self.denied_gpus)
            or self.min_gpus > 1
            or self.max_gpus < 1_000_000
        )

    def names(self, gpu: str) -> bool:
        """Whether the job may run on this type."""
        return (not self.allowed_gpus or gpu in self.allowed_gpus) and gpu not in self.denied_gpus

    def allows(self, gpu: str, count: int) -> bool:
        """Whether the job may run on `count` GPUs in all, some of this type."""
        return self.names(gpu) and self.min_gpus <= count <= self.max_gpus
