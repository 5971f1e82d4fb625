"""What to do now: decisions as data, each with a reason a person can read and its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from drystone.schedule.snapshot import Placement

Numbers = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Give a waiting job GPUs."""

    job_id: str
    option: int
    placement: Placement
    reason: str
    numbers: Numbers = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """Give a running job another option: other types or another number of GPUs."""

    job_id: str
    option: int
    placement: Placement
    reason: str
    numbers: Numbers = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Give a running job the same option on other nodes."""

    job_id: str
    placement: Placement
    reason: str
    numbers: Numbers = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempt:
    """Take the GPUs from a running job; it keeps its progress and waits."""

    job_id: str
    reason: str
    numbers: Numbers = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """Turn a waiting job away for good."""

    job_id: str
    reason: str
    numbers: Numbers = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rent:
    """Rent nodes of an offer."""

    offer: str
    num_nodes: int
    reason: str
    numbers: Numbers = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Give a rented node back."""

    node: int
    reason: str
    numbers: Numbers = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wake:
    """Decide again at this time at the latest, even if nothing happens until then."""

    at_seconds: float
    reason: str
    numbers: Numbers = field(default_factory=dict)


Decision = Start | Resize | Move | Preempt | Refuse | Rent | Release | Wake
