"""What a running system knows beyond the state of its cluster: a fold over the same log.

`ClusterState` is what policies need. Here is what people and the engine need besides: who described
which job how, what was spent on it, how often it failed and why, which nodes are drained, and what
runs have taught. All of it comes from the log, so a controller that starts again knows it all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from drystone.describe.cluster import NodeSpec
from drystone.describe.files.cluster import ClusterSpec
from drystone.describe.job import TrainingJob
from drystone.errors import DrystoneError
from drystone.run.control.access import Access, Spending
from drystone.run.control.changes import Changes
from drystone.run.control.lesson import Lesson
from drystone.run.control.notes import (
    ClusterDescribed,
    Decided,
    Described,
    Drained,
    FilesKept,
    Launched,
    Learned,
    MarketDescribed,
    Note,
    Remembered,
    TeamSet,
    TokenMade,
    TokenRevoked,
    Undrained,
    Warned,
    job_of,
    log_damage,
)
from drystone.run.events import (
    Event,
    Failed,
    Finished,
    Interrupted,
    Paused,
    PriceChanged,
    Progressed,
    Refused,
    Started,
    StartFailed,
    Stopped,
    Submitted,
)
from drystone.run.lifecycle import JobState, next_state
from drystone.run.renting.ledger import Ledger
from drystone.run.state import ClusterState, JobRecord
from drystone.schedule.snapshot import Placement
from drystone.units import HOUR_SECONDS

# The event of a node that joins, given its row and the time; None: it is not to be used.
Joining = Callable[[int, NodeSpec, float], Event | None]
# Faults that say nothing about the job: they do not count against it.
BLAMELESS: Final = frozenset({"node-lost", "preempted", "cluster-changed", "hardware"})


@dataclass(slots=True, kw_only=True)
class LiveJob:
    """What else is known about one job."""

    job: TrainingJob
    reason: str = ""  # of the last thing that happened to it, for people
    plan: str = ""  # of the last launch, in a few words
    devices: tuple[tuple[str, int], ...] = ()
    launched_epoch: int = 0  # of the last launch in the log
    dollars: float = 0.0  # of the runs that ended, and of this one until `priced_seconds`
    run_seconds: float = 0.0  # of the runs that ended
    dollars_per_hour: float = 0.0  # while it runs
    priced_seconds: float = 0.0  # since when it costs that
    faults: dict[str, int] = field(default_factory=dict)  # by kind, since it last got further
    num_faults: int = 0  # in all
    blamed_nodes: tuple[str, ...] = ()  # drained because their hardware failed under this job
    retry_seconds: float = 0.0  # not to be tried before
    furthest_samples: float = 0.0
    last_decision: Decided | None = None

    @property
    def num_blamed(self) -> int:
        """Faults since it last got further that count against it."""
        return sum(count for kind, count in self.faults.items() if kind not in BLAMELESS)


class LiveState:
    """The fold: `check` an event, write it to the log, then `record` it."""

    def __init__(self, cluster: ClusterSpec) -> None:
        self.cluster = cluster
        self.state = ClusterState([])  # the first line of a log says which nodes there are
        self.jobs: dict[str, LiveJob] = {}
        self.remembered: Remembered | None = None  # by the policy, at one of its last decisions
        self.folder_id = ""  # of where jobs' files are
        self.drained: dict[str, str] = {}  # nodes, and why
        self.lessons: dict[str, Lesson] = {}
        self.described = ClusterDescribed(time_seconds=0.0, nodes=())
        self.market: MarketDescribed | None = None  # None: nothing can be rented
        self.ledger = Ledger()
        self.access = Access()
        self.spending = Spending()
        self.num_events = 0
        self._described: dict[str, TrainingJob] = {}

    def check(self, events: Sequence[Event]) -> dict[str, JobState]:
        """The states of jobs after these events; raises if they cannot follow.

        What is in the log must be foldable for ever, so this comes before writing.
        """
        states: dict[str, JobState] = {}
        rows = Changes(self.state)
        for event in events:
            job_id = job_of(event)
            if isinstance(event, Note) or not job_id:
                rows.check(event, states)
                continue
            if event.time_seconds < self.state.now_seconds - 1e-6:
                raise DrystoneError(f"{type(event).__name__} of job {job_id} comes from the past")
            if isinstance(event, Submitted):
                if job_id in self.state.jobs or job_id in states:
                    raise DrystoneError(f"job {job_id} is submitted twice")
                states[job_id] = JobState.QUEUED
                continue
            if job_id not in states and job_id not in self.state.jobs:
                raise DrystoneError(f"there is no job {job_id!r}")
            before = states.get(job_id) or self.state.jobs[job_id].state
            states[job_id] = next_state(job_id, before, event)
        return states

    def record(self, event: Event) -> JobRecord | None:
        """Fold one event; the job that it changed, if any."""
        self.num_events += 1
        self.ledger.record(event)
        if isinstance(event, Note):
            self._take_note(event)
            return None
        job_id = job_of(event)
        live = self.jobs.get(job_id)
        if live is not None:
            self._before(live, self.state.jobs[job_id], event)
        record = self.state.record(event)
        if isinstance(event, PriceChanged):
            self._reprice_running(event.time_seconds)
        if isinstance(event, Submitted):
            described = self._described.pop(job_id, None)
            self.jobs[job_id] = LiveJob(job=described or TrainingJob(name=event.job.model))
        elif live is not None and record is not None:
            self._after(live, record, event)
        return record

    def record_all(self, events: Iterable[tuple[int, Event]]) -> int:
        """Fold a whole log; the last sequence number, 0 where it is empty."""
        last = 0
        for last, event in events:
            self.ledger.num_events = last - 1  # debits name the event that they come from
            try:
                self.record(event)
            except Exception as error:
                raise log_damage(last, error) from error
        return last

    @property
    def last_seconds(self) -> float:
        """When it was written last: what a policy remembers may be newer than all that happened."""
        noted = self.remembered.time_seconds if self.remembered is not None else 0.0
        return max(self.state.now_seconds, noted)

    def missing_rows(self, cluster: ClusterSpec) -> list[int]:
        """The nodes of the log that are not in a cluster any more."""
        there = {(node.id, node.gpu, node.num_gpus) for node in cluster.nodes}
        return [
            row
            for row, node in enumerate(self.state.nodes)
            if row not in self.state.gone and (node.id, node.gpu, node.num_gpus) not in there
        ]

    def joining_events(self, cluster: ClusterSpec, joining: Joining, now: float) -> list[Event]:
        """An event for every node that the log does not have; rows that are gone are used first."""
        nodes, spare = self.state.nodes, sorted(self.state.gone)
        known = {node.id for row, node in enumerate(nodes) if row not in self.state.gone}
        next_row, events = len(nodes), []
        for spec in cluster.nodes:
            if spec.id in known:
                continue
            row = next((gone for gone in spare if nodes[gone].gpu == spec.gpu), next_row)
            event = joining(row, spec, now)
            if event is None:
                continue
            events.append(event)
            if row == next_row:
                next_row += 1
            else:
                spare.remove(row)
        return events

    def dollars_at(self, job_id: str, now_seconds: float) -> float:
        """Spent on a job by now."""
        live, record = self.jobs[job_id], self.state.jobs[job_id]
        if record.state is not JobState.RUNNING:
            return live.dollars
        held = max(0.0, now_seconds - live.priced_seconds)
        return live.dollars + live.dollars_per_hour * held / HOUR_SECONDS

    def run_seconds_at(self, job_id: str, now_seconds: float) -> float:
        """Seconds with GPUs by now."""
        live, record = self.jobs[job_id], self.state.jobs[job_id]
        if record.state is not JobState.RUNNING:
            return live.run_seconds
        return live.run_seconds + max(0.0, now_seconds - record.started_seconds)

    def _before(self, live: LiveJob, record: JobRecord, event: Event) -> None:
        """What a run cost, when it ends."""
        if record.state is JobState.RUNNING and _leaves_running(record, event):
            if isinstance(event, Stopped | Paused):
                record.samples_per_second = 0.0  # it has done what it reported, not what it might
            live.run_seconds += max(0.0, event.time_seconds - record.started_seconds)
            self._reprice(live, event.time_seconds, 0.0)

    def _reprice(self, live: LiveJob, now_seconds: float, dollars_per_hour: float) -> None:
        """What it cost until now is counted; from now on it costs so much."""
        held = max(0.0, now_seconds - live.priced_seconds)
        live.dollars += live.dollars_per_hour * held / HOUR_SECONDS
        self.spending.add(live.job.team, live.priced_seconds, now_seconds, live.dollars_per_hour)
        live.dollars_per_hour, live.priced_seconds = dollars_per_hour, now_seconds

    def _after(self, live: LiveJob, record: JobRecord, event: Event) -> None:
        match event:
            case Started(time_seconds=now, placement=placement, reason=reason):
                live.dollars_per_hour = self._dollars_per_hour(placement)
                live.priced_seconds = now
                live.reason, live.retry_seconds = reason, 0.0
            case Progressed(done_samples=done):
                if done > live.furthest_samples:
                    live.furthest_samples = done
                    live.faults.clear()
            case Interrupted(reason=reason, kind=kind, retry_seconds=retry):
                live.reason, live.retry_seconds = reason, retry
                live.faults[kind] = live.faults.get(kind, 0) + 1
                live.num_faults += 1
            case Stopped() | StartFailed() | Refused() | Paused() | Failed():
                live.reason = event.reason
            case Finished():
                live.reason = ""
            case _:
                pass

    def _reprice_running(self, now_seconds: float) -> None:
        """The price of an offer is another: so are those of the jobs on its nodes."""
        for job_id, record in self.state.active.items():
            live = self.jobs[job_id]
            if record.state is JobState.RUNNING:
                price = self._dollars_per_hour(record.placement)
                if price != live.dollars_per_hour:
                    self._reprice(live, now_seconds, price)

    def _dollars_per_hour(self, placement: Placement) -> float:
        """What GPUs cost now: shares of rented nodes, the owner's own at their listed prices."""
        prices, rented = dict(self.described.dollars_per_gpu_hour), self.state.rentals.rented
        total = 0.0
        for row, count in placement:
            node, one = self.state.nodes[row], rented.get(row)
            price = one.price_dollars_per_hour / node.num_gpus if one else prices.get(node.gpu, 0.0)
            total += count * price
        return total

    def _take_note(self, note: Note) -> None:
        match note:
            case Described(job_id=job_id, job=job):
                self._described[job_id] = job
            case ClusterDescribed():
                self._change_cluster(note)
            case MarketDescribed():
                self.market = note
            case Drained() | Undrained():
                self._drain(note)
            case Launched() | Decided() | Warned():
                _note_of_job(self.jobs[note.job_id], note)
            case Learned():
                self.lessons[note.work] = self.lessons.get(note.work, Lesson()).after(note)
            case FilesKept(folder_id=folder_id):
                self.folder_id = folder_id
            case Remembered():
                self.remembered = note
            case TokenMade() | TokenRevoked() | TeamSet():
                self.access.record(note)

    def _drain(self, note: Drained | Undrained) -> None:
        if isinstance(note, Undrained):
            self.drained.pop(note.node, None)
            return
        self.drained[note.node] = note.reason
        if note.blamed_by in self.jobs:
            self.jobs[note.blamed_by].blamed_nodes += (note.node,)

    def _change_cluster(self, note: ClusterDescribed) -> None:
        """Other nodes, where there are other ones; nothing may run then."""
        if note.nodes != self.described.nodes:
            if self.state.num_running:
                raise DrystoneError("the nodes of the cluster change while jobs run on them")
            known = {node.id: node for node in self.cluster.nodes}
            made = [NodeSpec(id=name, gpu=gpu, num_gpus=count) for name, gpu, count in note.nodes]
            nodes = [
                known[one.id]
                if one.id in known
                and (known[one.id].gpu, known[one.id].num_gpus) == (one.gpu, one.num_gpus)
                else one
                for one in made
            ]
            now, jobs, active = self.state.now_seconds, self.state.jobs, self.state.active
            self.state = ClusterState(nodes, now_seconds=now, jobs=jobs, active=active)
        self.described = note


def _leaves_running(record: JobRecord, event: Event) -> bool:
    if isinstance(event, Progressed | Started):
        return False
    return next_state(record.spec.id, record.state, event) is not JobState.RUNNING


def _note_of_job(live: LiveJob, note: Launched | Decided | Warned) -> None:
    match note:
        case Launched():
            live.plan, live.devices, live.launched_epoch = note.plan, note.devices, note.epoch
        case Decided():
            live.last_decision = note
        case Warned():
            live.reason = note.reason
