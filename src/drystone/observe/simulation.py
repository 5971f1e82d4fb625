"""How does a policy do on a trace? Simulate it and sum up; all policies get the same scenario."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from drystone.describe.job import JobSpec
from drystone.describe.market import Offer
from drystone.describe.node import NodeSpec
from drystone.observe.metrics import RunReport, summarise_run
from drystone.observe.record import RunRecord
from drystone.run.events import Event
from drystone.run.loop import drive
from drystone.run.simulate.collection import rare_collection
from drystone.run.simulate.faults import FaultSpec
from drystone.run.simulate.world import SimulatedWorld
from drystone.schedule.measured import types_of
from drystone.schedule.phases import Options, fastest_seconds
from drystone.schedule.policies import Policy, find_policy
from drystone.schedule.snapshot import StartupCost

# Offers without a limit: nobody plans a job on more rented GPUs of one kind than this.
MOST_RENTED_GPUS: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What every policy of a comparison is given."""

    jobs: tuple[JobSpec, ...]
    nodes: tuple[NodeSpec, ...]
    options_of: Callable[[JobSpec], Options]
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
        for index in range(min(offer.most_nodes, max(1, MOST_RENTED_GPUS // offer.num_gpus)))
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
    return [{name: _jsonable(value) for name, value in asdict(one).items()} for one in reports]


def _jsonable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
