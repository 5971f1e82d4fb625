"""What the conformance suite needs of an engine, and what its cases ask of a running system.

An engine takes part with a subclass of `EngineUnderTest` and one line in `ENGINES` of
`test_conformance.py`. The suite starts its cluster once, opens controllers in one folder, and lets
every case begin with all nodes there and nothing running (`LiveSystem.reset`).

The cluster needs one node with two GPUs of one type or more, and two nodes of another type.
"""

import json
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from drystone.describe.cluster import NodeSpec
from drystone.describe.files.job import make_job
from drystone.run.control.controller import Controller
from drystone.run.events import Event, Progressed
from drystone.run.lifecycle import TERMINAL, JobState
from drystone.schedule.decision import Move, Preempt, Resize, Start, find_policy

WORKER = Path(__file__).parent / "worker.py"
BATCH = 4  # samples in a step of every job
SAVE_EVERY = 5  # steps between checkpoints of the worker

Counts = Mapping[str, int]  # GPUs by node


class EngineUnderTest(ABC):
    """One engine with a cluster of its own. `start` may raise `pytest.skip` with the reason."""

    name: str
    num_nodes: int
    # Cases that make no sense on this engine, and why: they are skipped with that sentence.
    lacks: Mapping[str, str] = MappingProxyType({})
    # Waiting for anything takes at most this long, on a busy machine.
    patience_seconds: float = 60.0

    @abstractmethod
    def start(self, folder: Path) -> None:
        """Bring the cluster up; `folder` is its own, and empty."""

    @abstractmethod
    def close(self) -> None:
        """End the cluster and everything that runs on it, whatever happened before."""

    @abstractmethod
    def make_controller(self, folder: Path) -> Controller:
        """A controller of this engine, not running yet; always of the same folder.

        It should look often (`Pace(tick_seconds=0.05, startup_seconds=0.5, round_seconds=2.0)`) and
        lose patience soon (`PATIENCE` below), so that cases take seconds.
        """

    @abstractmethod
    def kill_node(self, node: str) -> None:
        """Let the node's daemons die at once (SIGKILL), as in a crash; nothing else is tidied up.

        Which processes go with them is what is tested: do not end them here.
        """

    @abstractmethod
    def hang_node(self, node: str) -> None:
        """Let the node's daemons and its training processes stop in the middle (SIGSTOP)."""

    @abstractmethod
    def revive_node(self, node: str) -> None:
        """Let a killed node come up again, or a hung one go on (SIGCONT); else do nothing.

        It may come back under another name, but with the same GPUs.
        """

    def heal(self, nodes: list[str]) -> None:
        """Bring every node back, also one that nobody killed: a busy machine loses some."""
        for node in nodes:
            self.revive_node(node)


PATIENCE = {
    "lease_seconds": 20.0,
    "grace_seconds": 5.0,
    "start_seconds": 60.0,
    "hang_seconds": 15.0,
    "hang_steps": 5.0,
    "progress_seconds": 0.2,
    "silence_seconds": 3.0,
}


class Steering:
    """A policy for trials: jobs get the GPUs that were named for them, or what `prices` gives."""

    def __init__(self) -> None:
        self.wishes: dict[str, list[Counts]] = {}  # the first one that can be had
        self.is_free = False  # let `prices` decide

    def __call__(self, snapshot, memory):
        if self.is_free:
            return find_policy("prices")(snapshot, memory)
        free = dict(zip(snapshot.nodes.ids, snapshot.nodes.free.tolist(), strict=True))
        rows = {name: row for row, name in enumerate(snapshot.nodes.ids)}
        moving = []
        for spec in snapshot.jobs.specs:
            placement = snapshot.job_status(spec.id).placement
            own = {snapshot.nodes.ids[row]: count for row, count in placement}
            wishes = self.wishes.get(spec.id, [])
            if own in wishes:
                continue  # it stays where it is
            moving.append((spec, own, wishes))
            for node, count in own.items():
                free[node] += count  # for whoever moves in this round
        decisions = []
        for spec, own, wishes in moving:
            for wish in wishes:
                if all(count <= free.get(node, 0) for node, count in wish.items()):
                    decisions.append(self._decide(snapshot, spec.id, wish, rows))
                    for node, count in wish.items():
                        free[node] -= count
                    break
            else:
                if own:
                    decisions.append(Preempt(job_id=spec.id, reason="no GPUs are wished for"))
        return decisions, None

    def _decide(self, snapshot, job_id, wish, rows):
        status = snapshot.job_status(job_id)
        kinds = snapshot.nodes.type_index
        counts = [0] * len(snapshot.gpu_types)
        for node, count in wish.items():
            counts[int(kinds[rows[node]])] += count
        table = snapshot.options.counts[status.option_set]
        speeds = snapshot.options.samples_per_second[status.option_set]
        found = [
            row for row in range(len(table)) if table[row].tolist() == counts and speeds[row] > 0
        ]
        assert found, f"job {job_id} has no option of {counts} {snapshot.gpu_types}"
        placement = tuple(sorted((rows[node], count) for node, count in wish.items()))
        if status.option == found[0]:
            return Move(job_id=job_id, placement=placement, reason="wished for")
        kind = Start if status.option < 0 else Resize
        return kind(job_id=job_id, option=found[0], placement=placement, reason="wished for")


class System(ABC):
    """What cases ask, of a simulated cluster and of a real one."""

    engine: EngineUnderTest
    steering: Steering

    @property
    @abstractmethod
    def nodes(self) -> list[NodeSpec]:
        """The nodes that can be used now."""

    @abstractmethod
    def submit(
        self, *, steps: int = 20, seconds: float = 0.03, fault: str = "", mixed: bool = False
    ) -> str:
        """A job of so many steps, each of which takes about so long; `fault`: see worker.py."""

    @abstractmethod
    def state(self, job_id: str) -> JobState:
        """Where a job stands."""

    @abstractmethod
    def num_starts(self, job_id: str) -> int:
        """How often it was given GPUs."""

    @abstractmethod
    def step(self, job_id: str) -> int:
        """How many steps a job is known to have done."""

    @abstractmethod
    def events(self, job_id: str = "") -> list[Event]:
        """What happened, to one job or at all."""

    @abstractmethod
    def until(self, condition: Callable[[], object], what: str) -> object:
        """Let time pass until something is the case."""

    @abstractmethod
    def wake(self) -> None:
        """Let the policy decide again."""

    def place(self, job_id: str, *wishes: Counts) -> None:
        """Give a job the first of these that can be had, now and after every fault; or none."""
        self.steering.wishes[job_id] = list(wishes)
        self.wake()

    def wait_step(self, job_id: str, step: int) -> None:
        """Until a job has done so many steps."""
        self.until(lambda: self.step(job_id) >= step, f"job {job_id} at step {step}")

    def wait_over(self, *job_ids: str) -> list[str]:
        """How jobs end."""
        self.until(
            lambda: all(self.state(one) in TERMINAL for one in job_ids), f"the end of {job_ids}"
        )
        return [self.state(one).value for one in job_ids]

    def wide_node(self) -> NodeSpec:
        """A node with two GPUs."""
        return next(node for node in self.nodes if node.num_gpus >= 2)

    def small_nodes(self) -> list[NodeSpec]:
        """Two or more nodes of another type."""
        wide = self.wide_node().gpu
        others = [node for node in self.nodes if node.gpu != wide]
        gpu = max({node.gpu for node in others}, key=[node.gpu for node in others].count)
        return [node for node in others if node.gpu == gpu]

    def kinds(self, job_id: str) -> list[str]:
        """Names of what happened to a job."""
        return [type(one).__name__ for one in self.events(job_id)]


@dataclass(frozen=True)
class Process:
    """A training process, found by its environment."""

    pid: int
    job_id: str
    epoch: int
    rank: int


class LiveSystem(System):
    """A controller in a thread, with real processes."""

    def __init__(self, engine: EngineUnderTest, folder: Path) -> None:
        self.engine, self.folder, self.steering = engine, folder, Steering()
        self._run()

    def _run(self) -> None:
        self.controller, self._is_closed = self.engine.make_controller(self.folder), False
        self._thread = threading.Thread(target=self._loop)
        self._thread.start()

    def _loop(self) -> None:
        import drystone.run.control.controller as module

        module.find_policy, known = lambda _: self.steering, module.find_policy
        try:
            self.controller.run()
        finally:
            module.find_policy = known

    def leave(self, *, ends_agents: bool) -> None:
        """End the controller; what runs goes on, unless the agents are ended too."""
        self.controller.leave()
        self._thread.join(timeout=60)
        assert not self._thread.is_alive(), "the controller's loop does not end"
        if not self._is_closed:
            self._is_closed = True
            self.controller.close(ends_agents=ends_agents)

    def restart_controller(self) -> None:
        """Another controller in place of this one, which says no goodbye to anybody."""
        self.leave(ends_agents=False)
        self._run()

    def reset(self) -> None:
        """Nothing runs, and all nodes are there; a case that failed may have left no controller."""
        if not self._thread.is_alive():
            self.restart_controller()
        self.steering.is_free = False
        self.steering.wishes.clear()
        for job_id, record in list(self._live.state.jobs.items()):
            if record.state not in TERMINAL:
                self.controller.cancel(job_id)
        self.heal()
        num_nodes = self.engine.num_nodes
        self.until(
            lambda: not self.processes() and len(self.nodes) >= num_nodes,
            f"all {num_nodes} nodes and no process",
        )

    def heal(self) -> None:
        """Every node that there ever was comes back."""
        self.engine.heal([node.id for node in self._live.state.nodes])

    # --- what is the case -----------------------------------------------------------------------

    @property
    def _live(self):
        return self.controller.journal.live

    @property
    def nodes(self) -> list[NodeSpec]:
        state = self._live.state
        away = state.lost | state.gone
        return [node for row, node in enumerate(state.nodes) if row not in away]

    def state(self, job_id: str) -> JobState:
        return self.controller.find(job_id).state

    def num_starts(self, job_id: str) -> int:
        return self.controller.find(job_id).num_starts

    def step(self, job_id: str) -> int:
        done = [one.done_samples for one in self.events(job_id) if isinstance(one, Progressed)]
        return int(max(done, default=0.0)) // BATCH

    def events(self, job_id: str = "") -> list[Event]:
        return [event for _, event in self.controller.store.read(job_id=job_id)]

    def checkpoints(self, job_id: str) -> Path:
        """Where a job saves, and where the worker writes down what it did."""
        return self.folder / "jobs" / job_id / "checkpoints"

    def audit(self, job_id: str) -> list[str]:
        """What the worker did: `EPOCH started|step|saved NUMBER` a line."""
        path = self.checkpoints(job_id) / "audit"
        return path.read_text().splitlines() if path.exists() else []

    def gang(self, job_id: str, epoch: int) -> list[dict[str, str]]:
        """The variables of every rank of a launch, by rank."""
        files = self.checkpoints(job_id).glob(f"gang-{epoch}-*.json")
        return sorted((json.loads(one.read_text()) for one in files), key=lambda e: int(e["RANK"]))

    def processes(self, job_id: str = "") -> list[Process]:
        """Training processes of this system that are alive on this machine, whoever started them.

        Found by their environment, so that no engine can hide one. Only the ranks themselves count.
        """
        mark = f"DRYSTONE_CHECKPOINTS={self.folder}/"
        found = []
        for path in Path("/proc").iterdir():
            if not path.name.isdigit():
                continue
            try:
                text = (path / "environ").read_bytes().decode(errors="replace")
                is_dead = (path / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
                is_rank = str(WORKER).encode() in (path / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue  # it has ended meanwhile
            if mark not in text or is_dead or not is_rank or "DRYSTONE_ORPHAN=" in text:
                continue
            values = dict(one.partition("=")[::2] for one in text.split("\0") if "=" in one)
            mine = values["DRYSTONE_JOB"]
            if job_id in ("", mine):
                found.append(
                    Process(
                        int(path.name), mine, int(values["DRYSTONE_EPOCH"]), int(values["RANK"])
                    )
                )
        return sorted(found, key=lambda one: (one.job_id, one.epoch, one.rank))

    # --- what is done ---------------------------------------------------------------------------

    def submit(
        self, *, steps: int = 20, seconds: float = 0.03, fault: str = "", mixed: bool = False
    ) -> str:
        table = {
            "command": f"python {WORKER}",
            "train": {"steps": steps, "batch": BATCH},
            "environment": {"FAULT": fault, "STEP_SECONDS": str(seconds)},
        }
        if mixed:  # only where a model is named does Drystone divide a job over types
            table["model"] = "mini-gpt"
            table["train"]["sequence"] = 16
            table["gpus"] = {"min": 2}
        return self.controller.submit(make_job(table, folder=self.folder))[0]

    def wake(self) -> None:
        journal = self.controller.journal
        with journal.lock:
            journal.version += 1
            journal.changed.notify_all()

    def until(self, condition: Callable[[], object], what: str) -> object:
        deadline = time.monotonic() + self.engine.patience_seconds
        while not (found := condition()):
            assert self._thread.is_alive(), "the controller's loop has ended"
            if time.monotonic() > deadline:
                raise AssertionError(self._story(what))
            time.sleep(0.03)
        return found

    def _story(self, what: str) -> str:
        """Why a wait was in vain: what happened last, and what runs."""
        lines = [f"waited in vain for {what}; last error: {self.controller.last_error!r}"]
        lines += [str(one)[:300] for one in self.events()[-8:]]
        lines += [str(one) for one in self.processes()]
        return "\n".join(lines)


def kill(process: Process, number: int) -> None:
    """A signal for a rank; one that has just ended needs none."""
    with suppress(ProcessLookupError):
        os.kill(process.pid, number)
