"""How does a policy do on a trace? Simulate it and sum up; all policies get the same scenario."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from drystone.describe.job import JobSpec
from drystone.describe.trace_cluster import NodeSpec
from drystone.observe.metrics import RunReport, summarise_run
from drystone.run.events import Event
from drystone.run.loop import drive
from drystone.run.simulator.faults import FaultSpec
from drystone.run.simulator.world import SimulatedWorld
from drystone.schedule.measured import types_of
from drystone.schedule.phases import Options, fastest_seconds
from drystone.schedule.policy import find_policy
from drystone.schedule.snapshot import StartupCost


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


def simulate_policy(
    scenario: Scenario,
    policy: str,
    *,
    on_time: Callable[[float, int], None] | None = None,
) -> tuple[RunReport, list[Event]]:
    """Run one policy; its report and its event log."""
    world = SimulatedWorld(
        jobs=scenario.jobs,
        nodes=scenario.nodes,
        options_of=scenario.options_of,
        gpu_types=types_of(scenario.nodes),
        startup=scenario.startup,
        round_seconds=scenario.round_seconds,
        decides_every_round=scenario.decides_every_round,
        horizon_seconds=scenario.horizon_seconds,
        faults=scenario.faults,
        knows_lengths=scenario.knows_lengths,
        on_time=on_time,
    )
    seconds: list[float] = []
    drive(world, find_policy(policy), on_decision=lambda _, spent: seconds.append(spent))
    report = summarise_run(
        policy=policy,
        jobs=scenario.jobs,
        nodes=scenario.nodes,
        log=world.log,
        end_seconds=world.now_seconds,
        alone_seconds=alone_seconds(scenario),
        decision_seconds=seconds,
    )
    return report, world.log


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
