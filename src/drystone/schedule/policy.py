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
        "fifo": "drystone.schedule.policies.fifo:fifo",
        "shortest": "drystone.schedule.policies.shortest:shortest",
        "prices": "drystone.schedule.policies.prices:prices",
        "cells": "drystone.schedule.policies.cells:cells",
        "serverless": "drystone.schedule.policies.serverless:serverless",
        "elasticflow": "drystone.schedule.policies.elasticflow:elasticflow",
        "gavel": "drystone.schedule.policies.gavel:gavel",
        "gavel-throughput": "drystone.schedule.policies.gavel:gavel_throughput",
        "gavel-each-round": "drystone.schedule.policies.gavel:gavel_each_round",
        "gavel-admission": "drystone.schedule.policies.gavel_admission:gavel_admission",
        "gavel-finish-time": "drystone.schedule.policies.gavel:gavel_finish_time",
        "cells-deadline": "drystone.schedule.policies.cells:cells_deadline",
        "pollux": "drystone.schedule.policies.pollux:pollux",
        "pollux-autoscale": "drystone.schedule.policies.pollux_autoscale:pollux_autoscale",
        "sia": "drystone.schedule.policies.sia:sia",
        "budget": "drystone.schedule.policies.budget:budget",
        "least-attained": "drystone.schedule.policies.least_attained:least_attained",
    }
)


def find_policy(name: str) -> Policy:
    """The policy of that name."""
    if name not in POLICIES:
        raise UnknownName("policy", name, POLICIES)
    module, _, function = POLICIES[name].partition(":")
    policy: Policy = getattr(import_module(module), function)
    return policy
