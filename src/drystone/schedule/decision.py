"""What to do now: decisions as data, each with a reason a person can read and its numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from drystone.errors import UnknownName
from drystone.schedule.snapshot import BoolArray, JobTable, Placement, Snapshot

Numbers = Mapping[str, float]
NO_SINGLE_TYPE: Final = "it has no option with GPUs of one type"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoned:
    """Every decision says why, in words and with the numbers behind it."""

    reason: str
    numbers: Numbers = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start(Reasoned):
    """Give a waiting job GPUs."""

    job_id: str
    option: int
    placement: Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize(Reasoned):
    """Give a running job another option: other types or another number of GPUs."""

    job_id: str
    option: int
    placement: Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Move(Reasoned):
    """Give a running job the same option on other nodes."""

    job_id: str
    placement: Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempt(Reasoned):
    """Take the GPUs from a running job; it keeps its progress and waits."""

    job_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse(Reasoned):
    """Turn a waiting job away for good."""

    job_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rent(Reasoned):
    """Rent nodes of an offer."""

    offer: str
    num_nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Release(Reasoned):
    """Give a rented node back."""

    node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wake(Reasoned):
    """Decide again at this time at the latest, even if nothing happens until then."""

    at_seconds: float


Decision = Start | Resize | Move | Preempt | Refuse | Rent | Release | Wake


def change_job(
    jobs: JobTable,
    row: int,
    option: int,
    placement: Placement,
    *,
    reason: str,
    move_reason: str = "",  # where it keeps its option and changes its nodes; else `reason`
    numbers: Numbers = MappingProxyType({}),
) -> Start | Resize | Move | None:
    """What gives a job this option on these nodes; None where it has just that."""
    job_id, before = jobs.specs[row].id, int(jobs.option[row])
    if before < 0:
        return Start(
            job_id=job_id, option=option, placement=placement, reason=reason, numbers=numbers
        )
    if option != before:
        return Resize(
            job_id=job_id, option=option, placement=placement, reason=reason, numbers=numbers
        )
    if placement != jobs.placements[row]:
        reason = move_reason or reason
        return Move(job_id=job_id, placement=placement, reason=reason, numbers=numbers)
    return None


def refuse_jobs(jobs: JobTable, hopeless: BoolArray, reason: str) -> list[Decision]:
    """Refuse those of the hopeless jobs that wait."""
    rows = np.flatnonzero(hopeless & ~jobs.is_running).tolist()
    return [Refuse(job_id=jobs.specs[row].id, reason=reason) for row in rows]


Memory = Any  # each policy knows the shape of its own
Policy = Callable[[Snapshot, Memory], tuple[list[Decision], Memory]]

# The name, and what is imported when it is asked for.
POLICIES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "fifo": "drystone.schedule.baselines.queues:fifo",
        "shortest": "drystone.schedule.baselines.queues:shortest",
        "prices": "drystone.schedule.prices.policy:prices",
        "cells": "drystone.schedule.baselines.cells.policy:cells",
        "serverless": "drystone.schedule.baselines.serverless:serverless",
        "elasticflow": "drystone.schedule.baselines.elasticflow:elasticflow",
        "gavel": "drystone.schedule.baselines.gavel.policy:gavel",
        "gavel-throughput": "drystone.schedule.baselines.gavel.policy:gavel_throughput",
        "gavel-each-round": "drystone.schedule.baselines.gavel.policy:gavel_each_round",
        "gavel-admission": "drystone.schedule.baselines.gavel.admission:gavel_admission",
        "gavel-finish-time": "drystone.schedule.baselines.gavel.policy:gavel_finish_time",
        "cells-deadline": "drystone.schedule.baselines.cells.policy:cells_deadline",
        "pollux": "drystone.schedule.baselines.pollux.policy:pollux",
        "pollux-freed": "drystone.schedule.baselines.pollux.policy:pollux_freed",
        "pollux-autoscale": "drystone.schedule.baselines.pollux.autoscale:pollux_autoscale",
        "sia": "drystone.schedule.baselines.sia:sia",
        "sia-freed": "drystone.schedule.baselines.sia:sia_freed",
        "budget": "drystone.schedule.budget.policy:budget",
        "least-attained": "drystone.schedule.baselines.queues:least_attained",
        "constant": "drystone.schedule.baselines.constant:constant",
    }
)


# Policies with a setting in their name, `constant:8`: what makes them of it.
SETTINGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "constant": "drystone.schedule.baselines.constant:make_constant",
        "steady": "drystone.schedule.budget.steady:make_steady",
    }
)


def find_policy(name: str) -> Policy:
    """The policy of that name."""
    family, _, setting = name.partition(":")
    if setting and family in SETTINGS:
        module, _, function = SETTINGS[family].partition(":")
        made: Policy = getattr(import_module(module), function)(setting)
        return made
    if name not in POLICIES:
        raise UnknownName("policy", name, POLICIES)
    module, _, function = POLICIES[name].partition(":")
    policy: Policy = getattr(import_module(module), function)
    return policy
