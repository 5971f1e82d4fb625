"""Stores full of real events: the one loop and a real policy drive a world whose time is virtual.

Nothing here fakes an answer. Events go through the journal, plans are made and saved as for a real
launch, and reports are written where training processes write them. Only the processes are missing.
"""

import json
import random
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import sqlalchemy as sa

from drystone.describe.files.cluster import parse_cluster
from drystone.describe.files.job import make_job
from drystone.describe.job import make_spec
from drystone.run.control.access import make_team
from drystone.run.control.controller import Controller, ControllerSettings
from drystone.run.control.failures import Fault, FaultKind, ending_events
from drystone.run.control.launches import load_order, order_launch
from drystone.run.control.lessons import speed_lesson
from drystone.run.control.notes import Described, Launched
from drystone.run.control.progress import RunProgress
from drystone.run.control.runs import Run
from drystone.run.control.world import LiveWorld, Pace
from drystone.run.engines.contract import Rendezvous
from drystone.run.events import Finished, Progressed, Started, Submitted
from drystone.run.lifecycle import JobState
from drystone.run.loop import drive
from drystone.schedule.decision import find_policy

CLUSTER = """
nodes:
  - {gpu: A100-80G, count: 2, gpus_per_node: 8}
  - {gpu: V100-32G, count: 3, gpus_per_node: 8}
  - {gpu: T4, count: 6, gpus_per_node: 4}
"""
EMULATED = """
nodes:
  - {gpu: A100, gpus_per_node: 2, emulate: {speed: 0.0003, memory: 4GiB}}
  - {gpu: T4, gpus_per_node: 2, emulate: {speed: 0.0003, memory: 4GiB}}
"""
ROUND_SECONDS = 600.0
KINDS = (
    ("pretrain", "gpt2-xl", 64, 1024, 8), ("ablation", "gpt2", 64, 1024, 4),
    ("finetune", "llama-3-8b", 32, 2048, 16), ("distil", "phi-3-mini", 32, 1024, 8),
    ("medium", "gpt2-medium", 128, 512, 4), ("sweep", "gpt2", 32, 1024, 2),
)  # fmt: skip
TEAMS = {
    "ada": "research", "grace": "research", "alan": "product", "edsger": "product",
    "barbara": "platform", "donald": "platform",
}  # fmt: skip
OWNERS = ("ada", "grace", "alan", "edsger", "barbara", "donald")
NAMES = ("heron", "slate", "moss", "tarn", "fell", "beck", "scree", "lark", "wren", "gorse")


@dataclass
class Arrival:
    """A job to come."""

    at_seconds: float
    table: dict
    owner: str


@dataclass
class Story:
    """What is to happen, in seconds from the beginning."""

    arrivals: list[Arrival] = field(default_factory=list)
    faults: list[tuple[float, FaultKind, str]] = field(default_factory=list)
    until_seconds: float = 0.0


class NoEngine:
    """Where ranks would meet, if there were any."""

    def rendezvous(self, node: str) -> Rendezvous:
        return Rendezvous(address="127.0.0.1", port=29500)


class StoryWorld(LiveWorld):
    """The machine's world with virtual time: what runs gets on at the speed of its estimate."""

    def __init__(self, controller: Controller, story: Story, *, start: float, seed: int) -> None:
        super().__init__(controller.journal, controller.reconciler, Pace(startup_seconds=30.0))
        self.controller, self.journal = controller, controller.journal
        self.now_seconds, self.end_seconds = start, start + story.until_seconds
        self._arrivals = [(start + one.at_seconds, [one]) for one in story.arrivals]
        self._faults = [(start + at, kind, why) for at, kind, why in story.faults]
        self._random = random.Random(seed)
        self._epochs: dict[str, int] = {}  # of the last launch
        self._launched: list = []  # since the last round
        self.journal._clock = lambda: self.now_seconds

    @property
    def is_over(self) -> bool:
        return self.now_seconds >= self.end_seconds

    def advance(self) -> None:
        """All that happens until the next round, in the order of time; then a decision is due."""
        self._launch_all()
        until = min(self.now_seconds + ROUND_SECONDS, self.end_seconds)
        moments = [(at, self._submit, one) for at, one in self._arrivals if at <= until]
        moments += [(at, self._hit, one) for at, *one in self._faults if at <= until]
        moments += [(self.now_seconds + 40.0, self._get_on, [one]) for one in self._launched]
        self._launched = []
        ends = [(self._end_of(one), self._get_on, [one]) for one in self._running()]
        moments += [one for one in ends if one[0] <= until]
        self._arrivals = self._arrivals[sum(one[1] == self._submit for one in moments) :]
        self._faults = self._faults[sum(one[1] == self._hit for one in moments) :]
        for at, happen, about in sorted(moments, key=lambda one: one[0]):
            self.now_seconds = max(at, self.now_seconds)
            self.journal.commit(list(happen(*about)))
        self.now_seconds = until
        self.journal.commit([event for one in self._running() for event in self._get_on(one)])

    def finish(self) -> None:
        """Let real time go on from here."""
        self._launch_all()
        self.journal._clock = time.time

    def _running(self):
        active = self.journal.live.state.active.values()
        return [one for one in active if one.state is JobState.RUNNING]

    def _end_of(self, record) -> float:
        left = record.spec.total_samples - record.done_at(self.now_seconds)
        return max(self.now_seconds, record.counted_seconds) + left / record.samples_per_second

    def _launch_all(self) -> None:
        for record in self._running():
            if self._epochs.get(record.spec.id) != record.num_starts:
                self._launch(record)

    def _launch(self, record) -> None:
        job_id, live = record.spec.id, self.journal.live
        busy: dict[str, set[int]] = {}
        for other in self._running():
            if self._epochs.get(other.spec.id) == other.num_starts:
                for node, device in live.jobs[other.spec.id].devices:
                    busy.setdefault(node, set()).add(device)
        order = order_launch(
            self.journal,
            record,
            NoEngine(),
            busy=busy,
            folder=self._folder(job_id),
            lease_seconds=120.0,
        )
        devices = tuple((seat.node, seat.device) for seat in order.seats)
        note = Launched(
            time_seconds=self.now_seconds, job_id=job_id, epoch=record.num_starts,
            plan=order.plan, devices=devices,
        )  # fmt: skip
        self.journal.commit([note])
        self._epochs[job_id] = record.num_starts
        self._launched.append(record)

    def _submit(self, arrival):
        submit(self.controller, arrival)
        return []

    def _folder(self, job_id: str) -> Path:
        return self.controller.reconciler.folder_of(job_id)

    def _get_on(self, record):
        """Report the steps up to now, and the end if there it is."""
        job_id, spec = record.spec.id, record.spec
        done = min(record.done_at(self.now_seconds), spec.total_samples)
        if record.state is not JobState.RUNNING or self.now_seconds <= record.counted_seconds:
            return []
        is_over = done >= spec.total_samples - 1e-6
        speed = record.samples_per_second * self._random.uniform(0.97, 1.03)
        events = [
            Progressed(
                time_seconds=self.now_seconds, job_id=job_id, done_samples=done,
                samples_per_second=speed,
            )
        ]  # fmt: skip
        self._report(record, int(record.done_samples // spec.global_batch), done, speed)
        events += speed_lesson(self.journal, record, speed)
        if is_over:
            events.append(Finished(time_seconds=self.now_seconds, job_id=job_id))
        return events

    def _report(self, record, first: int, done: float, speed: float) -> None:
        """What a training process writes, thinned out."""
        job_id, batch = record.spec.id, record.spec.global_batch
        last = int(done // batch)
        node = self.journal.live.jobs[job_id].devices[0][0]
        name = f"{job_id}.{record.num_starts}"
        home = self.controller.settings.folder / "agents" / node / "launches" / name
        home.mkdir(parents=True, exist_ok=True)
        every = max(1, (last - first) // 40)
        with (home / "rank-0.out").open("a", encoding="utf-8") as file:
            for step in range(first + 1, last + 1, every):
                loss = 2.1 + 8.0 / (1 + step / 60) ** 0.6 + self._random.gauss(0, 0.05)
                seconds = batch / speed * self._random.uniform(0.93, 1.1)
                line = {"event": "step", "step": step, "loss": loss, "step_seconds": seconds}
                file.write(json.dumps(line) + "\n")

    def _hit(self, kind: FaultKind, why: str):
        """A fault ends the run of the job that has run longest since its start."""
        running = sorted(self._running(), key=lambda one: one.started_seconds)
        if not running:
            return []
        record = running[0]
        step = int(record.done_samples // record.spec.global_batch)
        progress = RunProgress(step=step, first_step=0, checkpoint_step=max(0, step - 7))
        fault = Fault(kind=kind, reason=why)
        return ending_events(self.journal, record, fault, progress)


def submit(controller: Controller, arrival: Arrival) -> str:
    job = make_job(arrival.table, folder=Path("/"), owner=arrival.owner)
    team = TEAMS.get(arrival.owner, "")
    known = controller.journal.live.access.teams
    return controller.submit(replace(job, team=team if team in known else ""))[0]


def set_teams(controller: Controller) -> None:
    """Three teams: one within its budget, one going through it too fast, one without."""
    journal = controller.journal
    limits = {"research": (30.0, 2500.0), "product": (12.0, 420.0), "platform": (None, None)}
    for name, (quota, budget) in limits.items():
        team = make_team(
            name=name, quota=quota, budget_dollars=budget, budget_period="week",
            now_seconds=journal.now(),
        )  # fmt: skip
        journal.commit([team])


def adopt(controller: Controller) -> None:
    """What a controller does with launches that it finds: it reads what they reported."""
    live = controller.journal.live
    for job_id, record in live.state.active.items():
        if record.state is not JobState.RUNNING:
            continue
        node = live.jobs[job_id].devices[0][0]
        name = f"{job_id}.{record.num_starts}"
        path = controller.settings.folder / "agents" / node / "launches" / name / "rank-0.out"
        progress = RunProgress()
        if path.exists():
            progress.read(path.read_text(encoding="utf-8"), time.time())
        order = load_order(controller.reconciler.folder_of(job_id) / f"epoch-{record.num_starts}")
        controller.reconciler.runs[job_id] = Run(order=order, ordered_at=0.0, progress=progress)


def tell(controller: Controller, story: Story, *, policy: str = "prices", seed: int = 7) -> None:
    """Let a story happen so that it ends now."""
    start = time.time() - story.until_seconds
    set_teams(controller)
    world = StoryWorld(controller, story, start=start, seed=seed)
    drive(world, controller._noting(find_policy(policy)))
    world.finish()
    adopt(controller)


def arrival(number: int, at_seconds: float, rng: random.Random, *, hours: float) -> Arrival:
    """One job of a made-up team; `hours` on its fastest GPUs is what it takes, about."""
    kind, model, batch, sequence, most = KINDS[rng.randrange(len(KINDS))]
    speeds = {"gpt2-xl": 14, "gpt2": 90, "llama-3-8b": 5, "phi-3-mini": 8, "gpt2-medium": 50}
    steps = max(20, round(hours * 3600 * speeds[model] / batch * rng.uniform(0.4, 1.6)))
    table = {
        "name": f"{kind}-{NAMES[number % len(NAMES)]}-{number}",
        "model": model,
        "train": {"steps": steps, "batch": batch, "sequence": sequence},
        "gpus": {"max": most},
    }
    if model in ("llama-3-8b", "phi-3-mini"):
        table["gpus"]["deny"] = ["T4"]
    if number % 9 == 0:
        table["priority"] = 2.0
    if number % 7 == 0:
        table["deadline"] = "20h"
    return Arrival(at_seconds, table, OWNERS[number % len(OWNERS)])


def busy_story(num_jobs: int = 200, *, faults: bool = False, hours: float = 10.0) -> Story:
    rng = random.Random(11)
    until = hours * 3600
    times = sorted(rng.uniform(0, until * 0.97) for _ in range(num_jobs))
    story = Story(until_seconds=until)
    story.arrivals = [arrival(i, at, rng, hours=1.1) for i, at in enumerate(times, start=1)]
    if faults:
        story.faults = sorted(_faults(rng, until))
    return story


def _faults(rng: random.Random, until: float):
    told = {
        FaultKind.USER_ERROR: "FileNotFoundError: [Errno 2] No such file or directory: "
        "'corpus/train-00017.bin'",
        FaultKind.OUT_OF_MEMORY: "CUDA out of memory. Tried to allocate 1.50 GiB",
        FaultKind.CRASH: "rank 3 died of SIGKILL",
        FaultKind.NODE_LOST: "the agent of v100-3 has not answered for 11 s",
        FaultKind.NETWORK: "NCCL communicator was aborted on rank 5",
    }
    for number in range(45):
        kind = list(told)[number % len(told)]
        yield rng.uniform(until * 0.1, until), kind, told[kind]


def fill_past(controller: Controller, num_jobs: int) -> None:
    """Jobs that were done long ago: submitted, started, launched, finished; thousands of them."""
    journal, rng = controller.journal, random.Random(5)
    start = time.time() - 14 * 86400
    nodes, events, clock = journal.live.state.nodes, [], start
    journal._clock = lambda: clock
    for number in range(1, num_jobs + 1):
        one = arrival(number, 0.0, rng, hours=0.2)
        one.table["model"], one.table["gpus"] = "gpt2", {"max": 2}
        job = make_job(one.table, folder=Path("/"), owner=one.owner)
        job_id = str(number)
        spec = make_spec(job, None, job_id=job_id, submit_seconds=clock)
        row = number % len(nodes)
        speed = spec.total_samples / 80.0
        events += [
            Described(time_seconds=clock, job_id=job_id, job=job),
            Submitted(time_seconds=clock, job=spec),
            Started(
                time_seconds=clock, job_id=job_id, option=0, placement=((row, 1),),
                samples_per_second=speed, productive_seconds=clock, reason="it was free",
            ),
            Launched(
                time_seconds=clock, job_id=job_id, epoch=1, plan=f"1 {nodes[row].gpu}",
                devices=((nodes[row].id, 0),),
            ),
            Progressed(
                time_seconds=clock + 40, job_id=job_id, done_samples=spec.total_samples / 2,
                samples_per_second=speed,
            ),
            Finished(time_seconds=clock + 80, job_id=job_id),
        ]  # fmt: skip
        clock += 100.0
        if len(events) >= 6000 or number == num_jobs:
            journal.commit(events)
            events = []
    journal._clock = time.time


def crowd(controller: Controller, num_live: int) -> None:
    """So many jobs at once, as many of them running as fit."""
    rng = random.Random(3)
    story = Story(until_seconds=1800.0)
    for number in range(1, num_live + 1):
        one = arrival(number, number * 1e-3, rng, hours=40.0)
        story.arrivals.append(one)
    tell(controller, story)


def open_controller(folder: Path, cluster: str = CLUSTER, **settings) -> Controller:
    made = Controller(ControllerSettings(folder=folder, cluster=parse_cluster(cluster), **settings))
    engine = made.store._engine
    engine.dispose()

    @sa.event.listens_for(engine, "connect")  # thousands of commits, none worth a turn of a disk
    def connected(connection, _) -> None:
        connection.execute("PRAGMA synchronous = OFF")

    return made
