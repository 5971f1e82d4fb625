"""Simulation of a policy on a scenario, summed up; all policies get the same scenario."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from drystone.describe.cluster import NodeSpec
from drystone.describe.job import JobSpec
from drystone.describe.market import Offer
from drystone.describe.option import OptionSet
from drystone.observe.metrics import RunReport, summarise_run
from drystone.run.events import Event
from drystone.run.loop import drive
from drystone.run.simulate.collection import rare_collection
from drystone.run.simulate.faults import FaultSpec
from drystone.run.simulate.world import SimulatedWorld
from drystone.schedule.decision import Decision, Memory, Policy, find_policy
from drystone.schedule.options import fastest_seconds, types_of
from drystone.schedule.snapshot import Snapshot, StartupCost


@dataclass(slots=True)
class RunRecord:
    """One entry a decision."""

    gpu_types: tuple[str, ...] = ()
    times_seconds: list[float] = field(default_factory=list)
    decision_seconds: list[float] = field(default_factory=list)
    spent_dollars: list[float] = field(default_factory=list)
    price_times_seconds: list[float] = field(default_factory=list)
    prices: list[list[float]] = field(default_factory=list)  # by GPU type, in the policy's units

    def note_decision(self, now_seconds: float, policy_seconds: float) -> None:
        """For the loop to call."""
        self.decision_seconds.append(policy_seconds)

    def listen(self, policy: Policy) -> Policy:
        """The same policy, overheard."""

        def overheard(snapshot: Snapshot, memory: Memory) -> tuple[list[Decision], Memory]:
            decisions, after = policy(snapshot, memory)
            self._note(snapshot, after)
            return decisions, after

        return overheard

    def _note(self, snapshot: Snapshot, memory: Memory) -> None:
        self.gpu_types = snapshot.gpu_types
        self.times_seconds.append(snapshot.now_seconds)
        self.spent_dollars.append(snapshot.spent_dollars)
        prices = getattr(memory, "prices", None)
        if isinstance(prices, np.ndarray) and prices.shape == (len(snapshot.gpu_types),):
            self.price_times_seconds.append(snapshot.now_seconds)
            self.prices.append([float(price) for price in prices])


# Offers without a limit: nobody plans a job on more rented GPUs of one kind than this.
MAX_RENTED_GPUS: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What every policy of a comparison is given."""

    jobs: tuple[JobSpec, ...]
    nodes: tuple[NodeSpec, ...]
    options_of: Callable[[JobSpec], OptionSet]
    startup: StartupCost = field(default_factory=StartupCost)
    round_seconds: float = 0.0
    decides_every_round: bool = False  # even if nothing happened in it
    horizon_seconds: float = math.inf
    faults: FaultSpec = field(default_factory=FaultSpec)
    knows_lengths: bool = True
    offers: tuple[Offer, ...] = ()
    budget_dollars_per_hour: float = math.inf  # to be kept on average
    hard_cap_dollars_per_hour: float = math.inf

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """Of the nodes that are there, then of those that can be rented."""
        return types_of(reachable_nodes(self.nodes, self.offers))


def reachable_nodes(
    nodes: Sequence[NodeSpec], offers: Sequence[Offer] = ()
) -> tuple[NodeSpec, ...]:
    """The nodes that a job could get: those there are, and those that could be rented."""
    rented = [
        NodeSpec(
            id=f"{offer.name}-{index}",
            gpu=offer.gpu,
            num_gpus=offer.num_gpus,
            memory_bytes=offer.memory_bytes,
        )
        for offer in offers
        for index in range(min(offer.most_nodes, max(1, MAX_RENTED_GPUS // offer.num_gpus)))
    ]
    return (*nodes, *rented)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRun:
    """One policy on a scenario: what it amounted to, what happened, what was overheard."""

    report: RunReport
    log: list[Event]
    record: RunRecord
    end_seconds: float


def run_policy(
    scenario: Scenario,
    policy: str,
    *,
    on_time: Callable[[float, int], None] | None = None,
    alone: Mapping[str, float] | None = None,
    decide: Policy | None = None,
) -> PolicyRun:
    """Run one policy; `alone` is the lower bound of each job where somebody has worked it out.

    `decide` is a policy that has no name of its own, such as one with other settings.
    """
    market: dict[str, Any] = {}
    if scenario.offers:
        market = {
            "offers": scenario.offers,
            "budget_dollars_per_hour": scenario.budget_dollars_per_hour,
            "hard_cap_dollars_per_hour": scenario.hard_cap_dollars_per_hour,
        }
    world = SimulatedWorld(
        jobs=scenario.jobs,
        nodes=scenario.nodes,
        options_of=scenario.options_of,
        gpu_types=scenario.gpu_types,
        startup=scenario.startup,
        round_seconds=scenario.round_seconds,
        decides_every_round=scenario.decides_every_round,
        horizon_seconds=scenario.horizon_seconds,
        faults=scenario.faults,
        knows_lengths=scenario.knows_lengths,
        on_time=on_time,
        **market,
    )
    record = RunRecord()
    heard = record.listen(decide or find_policy(policy))
    with rare_collection():
        drive(world, heard, on_decision=record.note_decision)
    report = summarise_run(
        policy=policy,
        jobs=scenario.jobs,
        nodes=scenario.nodes,
        log=world.log,
        end_seconds=world.now_seconds,
        alone_seconds=alone_seconds(scenario) if alone is None else alone,
        decision_seconds=record.decision_seconds,
        spent_dollars=world.spent_dollars if scenario.offers else 0.0,
        budget_dollars_per_hour=scenario.budget_dollars_per_hour,
    )
    return PolicyRun(report=report, log=world.log, record=record, end_seconds=world.now_seconds)


def simulate_policy(
    scenario: Scenario,
    policy: str,
    *,
    on_time: Callable[[float, int], None] | None = None,
) -> tuple[RunReport, list[Event]]:
    """Run one policy; its report and its event log."""
    run = run_policy(scenario, policy, on_time=on_time)
    return run.report, run.log


def alone_seconds(scenario: Scenario) -> dict[str, float]:
    """The lower bound: what each job takes alone on its fastest option, starts not counted."""
    return {
        job.id: fastest_seconds(scenario.options_of(job), job.total_samples)
        for job in scenario.jobs
    }


def report_table(reports: Sequence[RunReport]) -> list[dict[str, Any]]:
    """The reports as JSON knows them: what is not a number is null."""
    return [
        {name: _jsonable(value) for name, value in asdict(report).items()} for report in reports
    ]


def _jsonable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


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
        "pollux-freed": frozenset({"speeds"}),
        "pollux-autoscale": frozenset({"speeds"}),
        "sia": frozenset({"speeds"}),
        "sia-freed": frozenset({"speeds"}),
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
