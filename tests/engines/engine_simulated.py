"""The simulator under test: the same cases in virtual time, where there are no processes."""

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
from under_test import BATCH, EngineUnderTest, Steering, System

from drystone.describe.cluster import NodeSpec
from drystone.describe.job import JobSpec
from drystone.describe.option import OptionSet
from drystone.run.control.notes import job_of
from drystone.run.events import Event, Finished, Interrupted, NodeBack, Started, Submitted
from drystone.run.lifecycle import JobState
from drystone.run.loop import drive
from drystone.run.simulate.faults import Dice, FaultSpec
from drystone.run.simulate.node_faults import NodeFaults
from drystone.run.simulate.world import SimulatedWorld
from drystone.run.world import apply
from drystone.schedule.check import check_decisions
from drystone.schedule.decision import find_policy
from drystone.schedule.snapshot import StartupCost

NODES = (
    NodeSpec(id="a0", gpu="A100", num_gpus=2),
    NodeSpec(id="t0", gpu="T4", num_gpus=1),
    NodeSpec(id="t1", gpu="T4", num_gpus=1),
)
TYPES = ("A100", "T4")
_COUNTS = ((1, 0), (2, 0), (0, 1), (0, 2), (2, 2))
_NO_PROCESSES = "a simulation has no processes"


class SimulatedUnderTest(EngineUnderTest):
    """Virtual time. What is about processes, logs and controllers has no meaning there."""

    name = "simulated"
    lacks = MappingProxyType(
        {
            "logs": _NO_PROCESSES,
            "worker_crash": f"{_NO_PROCESSES}: nodes fail there, and starts",
            "hung_node": "a simulated node is there, slow or lost",
            "controller_restart": "its log and its state live in one process",
            "orphan": _NO_PROCESSES,
            "cancel": "nobody takes a job of a trace back",
        }
    )

    def __init__(self) -> None:
        self.world: SimulatedWorld | None = None

    def start(self, folder: Path) -> None:
        """Nothing to bring up."""

    def close(self) -> None:
        """Nothing to end."""

    def make_controller(self, folder: Path):
        raise NotImplementedError

    def kill_node(self, node: str) -> None:
        """As the simulator's own dice would, but this node."""
        world = self.world
        row = [one.id for one in NODES].index(node)

        class Loaded(Dice):
            def pick_node(self, num_nodes: int) -> int:
                return row

        faults = NodeFaults(world._time, Loaded(FaultSpec(repair_seconds=5.0)), world._runs)
        faults._lose(world.now_seconds)

    def hang_node(self, node: str) -> None:
        raise NotImplementedError

    def revive_node(self, node: str) -> None:
        """It is repaired by itself, later."""


class SimulatedSystem(System):
    """A simulated world that is driven step by step."""

    def __init__(self, faults: FaultSpec | None = None) -> None:
        self.engine, self.steering = SimulatedUnderTest(), Steering()
        self._num_jobs = 0
        self.world = self.engine.world = SimulatedWorld(
            jobs=[],
            nodes=NODES,
            options_of=self._options_of,
            gpu_types=TYPES,
            startup=StartupCost(seconds_per_gpu=0.5, most_seconds=0.5),
            faults=faults or FaultSpec(checkpoint_seconds=0.15),
        )
        # Another job that never comes keeps the world waiting for more.
        self.world._runs.num_jobs = 1

    def _options_of(self, spec: JobSpec) -> OptionSet:
        pace = BATCH / float(spec.model.removeprefix("m") or 1)
        return OptionSet(
            counts=np.array(_COUNTS),
            samples_per_second=pace * np.array([1.0, 1.8, 0.5, 0.9, 2.5]),
            memory_bytes=np.zeros(len(_COUNTS)),
        )

    @property
    def nodes(self) -> list[NodeSpec]:
        return [node for row, node in enumerate(NODES) if row not in self.world.state.lost]

    def submit(
        self, *, steps: int = 20, seconds: float = 0.03, fault: str = "", mixed: bool = False
    ) -> str:
        self._num_jobs += 1
        spec = JobSpec(
            id=str(self._num_jobs), submit_seconds=self.world.now_seconds, model=f"m{seconds}",
            total_samples=float(steps * BATCH), global_batch=BATCH,
        )  # fmt: skip
        self.world._runs.num_jobs += 1
        self.world._runs.submit(self.world.now_seconds, spec)
        return spec.id

    def state(self, job_id: str) -> JobState:
        return self.world.state.jobs[job_id].state

    def num_starts(self, job_id: str) -> int:
        return self.world.state.jobs[job_id].num_starts

    def step(self, job_id: str) -> int:
        record = self.world.state.jobs[job_id]
        return int(record.done_at(self.world.now_seconds)) // BATCH

    def events(self, job_id: str = "") -> list[Event]:
        return [one for one in self.world.log if not job_id or job_of(one) == job_id]

    def wake(self) -> None:
        """The next round of `until` decides."""

    def until(self, condition, what: str):
        for _ in range(10_000):
            snapshot = self.world.observe()
            decisions, _ = self.steering(snapshot, None)
            assert not check_decisions(snapshot, decisions)
            apply(decisions, self.world, snapshot)
            if found := condition():
                return found
            self.world.wake(self.world.now_seconds + 0.01, "to look again")
            self.world.advance()
        raise AssertionError(f"waited in vain for {what}")

    def random_faults(self, seed: int) -> None:
        """Nodes lost and slow, starts that fail: every job is done, once, and the log adds up."""
        spec = JobSpec(id="x", submit_seconds=0.0, model="m0.03", total_samples=400.0)
        jobs = [
            replace(spec, id=str(number), submit_seconds=float(number), global_batch=BATCH)
            for number in range(60)  # a node is lost every 6 s on average: some surely are
        ]
        faults = FaultSpec(
            seed=seed, node_losses_per_hour=600, repair_seconds=5, node_slowdowns_per_hour=600,
            slow_seconds=5, failed_start_share=0.2, checkpoint_seconds=0.5,
        )  # fmt: skip
        world = SimulatedWorld(
            jobs=jobs, nodes=NODES, options_of=self._options_of, gpu_types=TYPES, faults=faults
        )
        drive(world, find_policy("prices"))
        for job in jobs:
            record = world.state.jobs[job.id]
            mine = [one for one in world.log if job_of(one) == job.id]
            assert record.state is JobState.DONE
            assert isinstance(mine[0], Submitted)
            assert [type(one) for one in mine].count(Finished) == 1
            assert isinstance(mine[-1], Finished)
            check_order(mine)
        assert [one for one in world.log if isinstance(one, NodeBack)]


def check_order(events: list[Event]) -> None:
    """Started and ended in turn; work is lost by interruptions alone, and never more than done."""
    is_running = False
    for event in events:
        if isinstance(event, Started):
            assert not is_running
            is_running = True
        elif isinstance(event, Interrupted):
            assert is_running
            assert event.lost_samples >= 0
            is_running = False
        elif type(event).__name__ in ("Stopped", "StartFailed", "Finished"):
            assert is_running
            is_running = False
    assert not is_running
