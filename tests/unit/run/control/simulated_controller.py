"""A controller with its store, its agents and its clock in one process, and faults by seed.

It is killed between any two writes and requests, answers of the store and of agents are lost before
or after the deed, requests come twice, reports come late and between lines of poison, disks are
full, the clock is set forward and back, nodes fall silent, die and come back, jobs exchange their
nodes, people pause, cancel and drain. Whatever the seed: no job is lost, none runs twice or after
its end, and the log says what memory says.
"""

import os
import shutil
import tempfile
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from simulated_agents import SAVE_EVERY, Faults, Killed, SimulatedAgents

from drystone.describe.files.cluster import parse_cluster
from drystone.describe.files.job import make_job
from drystone.run.control import launches
from drystone.run.control.controller import Controller, ControllerSettings
from drystone.run.control.live_state import LiveState
from drystone.run.control.log_tools import _essence
from drystone.run.control.steady_clock import SteadyClock
from drystone.run.control.store import CommitUnclear, Store, StoreBusy
from drystone.run.events import Finished, Submitted
from drystone.run.lifecycle import TERMINAL, JobState
from drystone.run.world import apply
from drystone.schedule.check import check_decisions
from drystone.schedule.decision import Move, find_policy

CLUSTER = parse_cluster(
    "nodes: [{gpu: A100, gpus_per_node: 2}, {gpu: T4, gpus_per_node: 2, count: 2}]"
)
NUM_JOBS, BAD_ROUNDS, MAX_ROUNDS = 5, 40, 600
CONTROL = "drystone.run.control."
IN_MEMORY = Path("/dev/shm")  # where there is one: a seed is hundreds of commits


class LossyStore(Store):
    """A store whose answers get lost."""

    faults: Faults

    def append(self, *arguments, **options) -> int:
        self.faults.maybe_kill()
        if self.faults.strike(0.02):
            raise StoreBusy("the database is locked")
        if self.faults.strike(0.02):
            raise CommitUnclear("the commit was lost")
        last = super().append(*arguments, **options)
        self.faults.maybe_kill()
        if self.faults.strike(0.02):
            raise CommitUnclear("the answer to the commit was lost")
        return last


class Simulation:
    """One run by one seed."""

    cluster, policy_name = CLUSTER, "prices"

    def __init__(self, folder: Path, seed: int, monkeypatch) -> None:
        self.faults, self.folder = Faults(seed), folder
        self.agents = self.make_agents()
        clock = SimpleNamespace(monotonic=lambda: self.agents.now, sleep=lambda seconds: None)
        for module in ("reconcile", "runs", "nodes", "world", "handover"):
            monkeypatch.setattr(f"{CONTROL}{module}.time", clock)
        LossyStore.faults = self.faults
        monkeypatch.setattr(f"{CONTROL}controller.Store", LossyStore)
        self.controller: Controller | None = None
        self.num_exchanges = 0
        self.num_kills, self.wanted, self.cancelled = 0, {}, set()
        self.clock_offset = 0.0  # of the machine's clock, which people set
        write = launches.write_whole

        def write_or_fail(*arguments, **options):
            if self.faults.strike(0.02):
                raise OSError(28, "No space left on device")
            write(*arguments, **options)

        monkeypatch.setattr(f"{CONTROL}launches.write_whole", write_or_fail)

    def make_agents(self) -> SimulatedAgents:
        return SimulatedAgents(self.faults, [node.id for node in self.cluster.nodes])

    def settings(self, **more) -> ControllerSettings:
        return ControllerSettings(
            folder=self.folder, cluster=self.cluster, engine=self.agents, policy=self.policy_name,
            clock=SteadyClock(
                lambda: self.agents.now + self.clock_offset, lambda: self.agents.now
            ),
            **more,
        )  # fmt: skip

    def open(self) -> None:
        """The next controller; it may be killed while it starts."""
        self.controller = Controller(self.settings())
        self.controller.reconciler.troubles._clock = lambda: self.agents.now
        self.controller.engine.start(self.controller.journal.lease.epoch)
        self.memory = self.controller._keeper.recall()
        limited = self.controller.admission.limited(find_policy(self.policy_name))
        self.policy = self.controller._noting(limited)

    def drop(self) -> None:
        if self.controller is not None:
            self.controller.store.close()
            os.close(self.controller._lock)
            self.controller = None

    def round(self) -> None:
        try:
            self.act()
        except Killed:
            self.num_kills += 1
            self.drop()
        self.agents.pass_time(self.faults.random.choice([1, 2, 5, 12]))

    def act(self) -> None:
        try:
            if self.controller is None:
                self.open()
            self.ask_for_things()
            self.decide()
        except StoreBusy as error:
            if self.controller is not None:
                self.controller.world.hold(error)

    def decide(self) -> None:
        world = self.controller.world
        snapshot = world.observe()
        decisions, self.memory = self.policy(snapshot, self.memory)
        problems = check_decisions(snapshot, decisions)
        assert not problems, problems
        decisions = self.exchange(snapshot) or self.move_on(snapshot) or decisions
        apply(decisions, world, snapshot)
        world.tick()
        troubles = self.controller.reconciler.troubles.by_job
        assert all("No space left" in trouble.text for trouble in troubles.values()), troubles

    def exchange(self, snapshot) -> list:
        """Two jobs that run in the same way get each other's nodes, in one round."""
        if not self.faults.strike(0.1):
            return []
        active = self.controller.journal.live.state.active
        running = [job for job in active.values() if job.state is JobState.RUNNING]
        self.faults.random.shuffle(running)
        for first, second in pairwise(running):
            one, two = first.placement, second.placement
            swapped = [
                Move(job_id=first.spec.id, placement=two, reason="an exchange"),
                Move(job_id=second.spec.id, placement=one, reason="an exchange"),
            ]
            if one != two and not check_decisions(snapshot, swapped):
                self.num_exchanges += 1
                return swapped
        return []

    def move_on(self, snapshot) -> list:
        """A job goes to another node, for no reason."""
        if not self.faults.strike(0.2):
            return []
        active = self.controller.journal.live.state.active
        running = [job for job in active.values() if job.state is JobState.RUNNING]
        self.faults.random.shuffle(running)
        for job in running:
            [(row, count), *others] = job.placement
            for node in set(range(len(snapshot.nodes))) - {row}:
                move = Move(job_id=job.spec.id, placement=((node, count),), reason="elsewhere")
                if not others and not check_decisions(snapshot, [move]):
                    return [move]
        return []

    def ask_for_things(self) -> None:
        """Submit the next job, with its key until that is answered; take some back."""
        if len(self.wanted) < NUM_JOBS:
            number = len(self.wanted)
            gpus = {"max": 1 + number % 3}
            table = {
                "name": f"job{number}", "command": "true",
                "train": {"steps": 7 + 11 * number, "batch": 4}, "gpus": gpus,
            }  # fmt: skip
            if number % 2:  # what hands over when it moves
                del table["command"]
                table |= {"model": "mini-gpt", "gpus": gpus | {"allow": ["T4"]}}
                table["train"]["steps"] += 100
            job = make_job(table, folder=self.folder)
            job_id, _ = self.controller.submit(job, client_key=f"key{number}")
            self.wanted[f"key{number}"] = job_id
        elif self.faults.strike(0.15):
            self.meddle()
        elif self.faults.are_over:
            self.make_good()

    def meddle(self) -> None:
        """What people do: take a job back, let it wait or go on, empty a node."""
        controller, random = self.controller, self.faults.random
        job_id = random.choice([*self.wanted.values()])
        state = controller.find(job_id).state
        what = random.choice(["cancel", *["pause", "drain"] * 4])
        if what == "drain":
            nodes = self.nodes()
            for node in random.sample(nodes, min(1, len(nodes))):
                is_drained = node in controller.journal.live.drained
                controller.undrain(node) if is_drained else controller.drain(node)
        elif state is JobState.PAUSED:
            controller.resume(job_id)
        elif what == "pause" and state not in TERMINAL:
            controller.pause(job_id)
        elif state not in TERMINAL:
            self.cancelled.add(job_id)
            controller.cancel(job_id)

    def nodes(self) -> list[str]:
        state = self.controller.journal.live.state
        return [node.id for row, node in enumerate(state.nodes) if row not in state.gone]

    def make_good(self) -> None:
        """So that everything can come to its end."""
        live = self.controller.journal.live
        for node in self.nodes():
            if node in live.drained:
                self.controller.undrain(node)
        for job_id, record in [*live.state.active.items()]:
            if record.state is JobState.PAUSED:
                self.controller.resume(job_id)

    def run(self) -> None:
        for number in range(MAX_ROUNDS):
            self.faults.are_over = number >= BAD_ROUNDS
            if self.faults.strike(0.05):
                self.clock_offset = self.faults.random.choice([-600.0, 0.0, 0.0, 600.0, 86_400.0])
            self.round()
            if self.faults.are_over and self.controller is not None and self.is_over():
                break
        else:
            raise AssertionError(f"no end: {self.states()}")
        self.check()

    def states(self) -> dict:
        return {
            job_id: (record.state.value, self.controller.journal.live.jobs[job_id].reason)
            for job_id, record in self.controller.journal.live.state.jobs.items()
        }

    def is_over(self) -> bool:
        jobs = self.controller.journal.live.state.jobs
        return len(self.wanted) == NUM_JOBS and all(one.state in TERMINAL for one in jobs.values())

    def check(self) -> None:
        live, events = (
            self.controller.journal.live,
            [event for _, event in self.controller.store.read()],
        )
        assert [event.job.id for event in events if isinstance(event, Submitted)] == [*live.jobs]
        assert sorted(self.wanted.values()) == sorted(live.jobs)
        for job_id, record in live.state.jobs.items():
            is_cancelled = record.state is JobState.CANCELLED
            assert record.state is JobState.DONE or (is_cancelled and job_id in self.cancelled), (
                self.states()
            )
            ends = [
                event for event in events if isinstance(event, Finished) and event.job_id == job_id
            ]
            assert len(ends) == (not is_cancelled)
            if not is_cancelled:
                spec = record.spec
                self.check_steps(job_id, round(spec.total_samples / spec.global_batch))
        folded = LiveState(self.cluster)
        folded.record_all(self.controller.store.read())
        assert _essence(folded) == _essence(live)

    def check_steps(self, job_id: str, num_steps: int) -> None:
        """Every step was done; again only those since the last save."""
        job = self.agents.jobs[job_id]
        assert job.is_finished
        assert set(job.ran) == set(range(1, num_steps + 1))
        for before, after in zip(job.ran, job.ran[1:], strict=False):
            assert after == before + 1 or before - SAVE_EVERY < after <= before + 1, job.ran


def run_seed(seed: int, kind: type[Simulation] = Simulation) -> int:
    """How often the controller was killed."""
    folder = Path(tempfile.mkdtemp(dir=IN_MEMORY if IN_MEMORY.is_dir() else None))
    with pytest.MonkeyPatch.context() as monkeypatch:
        simulation = kind(folder, seed, monkeypatch)
        try:
            simulation.run()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        finally:
            simulation.drop()
            shutil.rmtree(folder)
    return simulation.num_kills


def chunks(seeds: range, size: int = 32) -> list[range]:
    """So that several processes may share them."""
    return [range(at, min(at + size, seeds.stop)) for at in range(seeds.start, seeds.stop, size)]
