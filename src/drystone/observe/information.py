"""What was each policy told? Said in every report, so that nobody compares the incomparable.

All policies of a comparison get the same snapshots; what differs is how much of them each uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Information:
    """What the snapshots of a scenario say."""

    speeds: str  # where they are from: measured, estimated, or as the trace's durations
    speed_error_share: float = 0.0
    knows_lengths: bool = True


# What a policy looks at, of those that do not look at everything.
_USES: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "fifo": frozenset(),
        "least-attained": frozenset(),
        "shortest": frozenset({"speeds", "lengths"}),
        "serverless": frozenset({"speeds"}),
        "cells": frozenset({"speeds"}),
        "pollux": frozenset({"speeds"}),
        "pollux-autoscale": frozenset({"speeds"}),
        "sia": frozenset({"speeds"}),
        "gavel": frozenset({"speeds"}),
        "gavel-throughput": frozenset({"speeds"}),
        "gavel-each-round": frozenset({"speeds"}),
        "gavel-admission": frozenset({"speeds"}),
        "gavel-finish-time": frozenset({"speeds", "lengths"}),
    }
)
_ALL: Final = frozenset({"speeds", "lengths"})


def policy_information(policy: str, given: Information) -> dict[str, Any]:
    """For programs: what was given, and which of it the policy uses."""
    uses = _USES.get(policy, _ALL)
    return asdict(given) | {
        "uses_speeds": "speeds" in uses,
        "uses_lengths": "lengths" in uses and given.knows_lengths,
    }


def statements(policies: Sequence[str], given: Information) -> list[str]:
    """For people: a line for the policies that were told the same."""
    by_text: dict[str, list[str]] = {}
    for policy in policies:
        by_text.setdefault(_statement(policy, given), []).append(policy)
    return [f"{', '.join(names)}: {text}" for text, names in by_text.items()]


def _statement(policy: str, given: Information) -> str:
    uses = _USES.get(policy, _ALL)
    if not uses:
        return "told nothing about speeds or lengths; keeps to the GPUs that were asked for"
    exact = (
        f"off by up to {given.speed_error_share:.0%}"
        if given.speed_error_share
        else "taken as true"
    )
    speeds = f"speeds {given.speeds}, {exact}"
    if not given.knows_lengths:
        return f"{speeds}; lengths not known"
    return f"{speeds}; lengths {'known' if 'lengths' in uses else 'not asked for'}"
