"""What a policy is, and which ones there are.

A policy is a pure function: a snapshot and what it remembered go in, decisions and what it wants to
remember come out. `None` stands for "nothing remembered yet". Ties are broken by the order
of submission, never by an id, so other ids for the same jobs change nothing but ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, Final

from drystone.errors import UnknownName
from drystone.schedule.decision import Decision
from drystone.schedule.snapshot import Snapshot

Memory = Any  # each policy knows the shape of its own
Policy = Callable[[Snapshot, Memory], tuple[list[Decision], Memory]]

# The name, and what is imported when it is asked for.
POLICIES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "fifo": "drystone.schedule.baselines.fifo:fifo",
        "shortest": "drystone.schedule.baselines.shortest:shortest",
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
        "pollux-autoscale": "drystone.schedule.baselines.pollux.autoscale:pollux_autoscale",
        "sia": "drystone.schedule.baselines.sia:sia",
        "budget": "drystone.schedule.budget.policy:budget",
        "least-attained": "drystone.schedule.baselines.least_attained:least_attained",
    }
)


def find_policy(name: str) -> Policy:
    """The policy of that name."""
    if name not in POLICIES:
        raise UnknownName("policy", name, POLICIES)
    module, _, function = POLICIES[name].partition(":")
    policy: Policy = getattr(import_module(module), function)
    return policy
