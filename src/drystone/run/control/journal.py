"""The log and what follows from it, kept in step: nothing is believed before it is written.

An event is checked, appended to the store under the controller's lease, and only then folded into
the state. If writing fails, nothing has changed; if nobody knows whether it failed, the log is read
again before anything else is written. Threads may share a journal: whoever changes or
reads several things at once holds `lock`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import fields, replace

import numpy as np

from drystone.describe.cluster import NodeSpec
from drystone.describe.files.cluster import ClusterSpec
from drystone.describe.job import JobSpec
from drystone.describe.market import Offer
from drystone.describe.option import OptionSet
from drystone.plan.plan import Plan
from drystone.run.control.live_state import Joining, LiveState
from drystone.run.control.notes import (
    ClusterDescribed,
    Decided,
    Described,
    Launched,
    Learned,
    Remembered,
    TokenMade,
    TokenRevoked,
)
from drystone.run.control.options import OptionBook
from drystone.run.control.steady_clock import SteadyClock
from drystone.run.control.store import (
    CommitUnclear,
    Lease,
    LogConflict,
    LogMoved,
    Store,
    StoreBusy,
)
from drystone.run.control.troubles import Troubles
from drystone.run.events import (
    Event,
    Interrupted,
    NodeAdded,
    NodeReclaimed,
    NodeReleased,
    NodeRemoved,
    Progressed,
)
from drystone.run.job_rows import job_rows
from drystone.run.lifecycle import TERMINAL, JobState
from drystone.run.renting.provider import Renting, with_rentable
from drystone.run.snapshots import SnapshotMaker
from drystone.run.state import JobRecord
from drystone.schedule.snapshot import JobTable, Placement, Snapshot, StartupCost

_NO_CHANGE = (Progressed, Decided, Remembered, Launched, Described, TokenMade, TokenRevoked)


def node_added(row: int, spec: NodeSpec, now_seconds: float) -> Event:
    """A node joined that nobody rented."""
    return NodeAdded(time_seconds=now_seconds, node=row, spec=spec)


class Journal:
    """The one writer of the log."""

    def __init__(
        self,
        store: Store,
        lease: Lease,
        cluster: ClusterSpec,
        *,
        startup: StartupCost | None = None,
        joining: Joining = node_added,
        renting: Renting | None = None,
        recover: Callable[[LiveState], ClusterSpec] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store, self.lease = store, lease
        self.cluster = cluster  # of now: the nodes that there are
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.live = LiveState(cluster)
        self.gpu_types: tuple[str, ...] = ()  # also of nodes that are gone: their rows stay
        self.version = 0  # grows with every event that may change a decision
        self.sequence = 0  # of the last event in the log
        self._is_unclear = False  # whether the log may hold more than that
        self._conflict: LogConflict | None = None  # why nothing more may be written
        self.taken: dict[str, int] = {}  # GPUs of nodes that others use; not in the log
        self._actor = ""  # who is behind what is written now
        self._startup, self._clock, self._joining = startup or StartupCost(), clock, joining
        self._maker: SnapshotMaker | None = None
        # Jobs whose options cannot be worked out, such as for want of their model's config.json.
        self.unplannable = Troubles()
        self.renting = renting  # None: nothing can be rented
        with closing(store.read_needed()) as events:
            self.sequence = self.live.record_all(events)
        if isinstance(clock, SteadyClock):
            clock.start_after(self.live.last_seconds)
        if recover is not None:  # with the nodes that are rented and still run
            cluster = recover(self.live)
        if not self.live.state.nodes:
            self._describe(tuple((one.id, one.gpu, one.num_gpus) for one in cluster.nodes))
        types = dict.fromkeys((*self._all_types(), *cluster.gpu_types))
        self.book = OptionBook(self._reachable(cluster), tuple(types), self.live.lessons)
        self.adopt(cluster, reason="the controller was started with other nodes")

    def now(self) -> float:
        """Seconds since 1970; never before the last event, whatever the clock does."""
        return max(self._clock(), self.live.state.now_seconds)

    def commit(self, events: Sequence[Event]) -> None:
        """Write events, then believe them; all or nothing."""
        if not events:
            return
        with self.lock:
            self.settle()
            rows = job_rows(self.live, events, self.live.check(events))
            before = self.sequence
            try:
                last = self.store.append(self.lease, events, rows, after=before, actor=self._actor)
            except (CommitUnclear, LogMoved) as error:
                self._is_unclear = True
                try:
                    self.settle()
                except StoreBusy:
                    raise error from None  # later, before the next write
                if isinstance(error, CommitUnclear) and self.sequence == before + len(events):
                    return  # it was written, and is believed by now
                raise StoreBusy(f"nothing was written: {error.message}") from None
            self._believe(events, last)

    def settle(self) -> None:
        """Look what is in the log after a write whose answer was lost, and believe that.

        While the database does not say, `StoreBusy` is raised: nothing may be written before.
        """
        with self.lock:
            if self._conflict is not None:
                raise self._conflict
            if self._is_unclear:
                found = self.store.read_settled(self.lease, after=self.sequence)
                last = found[-1][0] if found else self.sequence
                self._believe([event for _, event in found], last)
                self._is_unclear = False

    def _believe(self, events: Sequence[Event], last: int) -> None:
        """Fold what is in the log up to `last`; what cannot be folded ends this controller."""
        try:
            for event in events:
                record = self.live.record(event)
                if record is not None and record.state in TERMINAL:
                    self.unplannable.solve(record.spec.id)
                if isinstance(event, Learned) or self._has_lost_options(record):
                    self._maker = None
                elif record is not None and self._maker is not None:
                    self._maker.update(record)
        except Exception as error:
            self._conflict = LogConflict(f"the log says what cannot follow: {error}")
            raise self._conflict from error
        self.sequence = last
        self.version += any(not isinstance(event, _NO_CHANGE) for event in events)
        self.changed.notify_all()

    def _has_lost_options(self, record: JobRecord | None) -> bool:
        """Whether a job that cannot be planned does not run on what it had any more."""
        return (
            record is not None
            and record.state is not JobState.RUNNING
            and record.spec.id in self.unplannable.by_job
        )

    @contextmanager
    def acting(self, actor: str) -> Iterator[None]:
        """What this thread writes meanwhile is somebody's doing; nobody else writes meanwhile."""
        with self.lock:
            before, self._actor = self._actor, actor
            try:
                yield
            finally:
                self._actor = before

    def wake(self) -> None:
        """Let whoever waits for a change look again."""
        with self.lock:
            self.changed.notify_all()

    def snapshot(self) -> Snapshot:
        """What a policy sees: without jobs that are held back, and without drained nodes."""
        with self.lock:
            now = self.now()
            made = self._ready_maker().make(self.live.state, now)
            kept = np.array(
                [not self.is_held_back(spec.id, now) for spec in made.jobs.specs], dtype=bool
            )
            if not kept.all():
                made = replace(made, jobs=_take_jobs(made.jobs, np.flatnonzero(kept)))
            return self._without_unusable(made) if self.live.drained or self.taken else made

    def is_held_back(self, job_id: str, now_seconds: float) -> bool:
        """Whether a job is not to be started now: paused, failed just before, or unplannable."""
        state = self.live.state.jobs[job_id].state
        if state is JobState.RUNNING:
            return False
        is_unplannable = job_id in self.unplannable.by_job
        is_too_early = self.live.jobs[job_id].retry_seconds > now_seconds
        return state is JobState.PAUSED or is_unplannable or is_too_early

    def free_gpus(self, row: int) -> int:
        """GPUs of a node that nobody has, neither our jobs nor other people."""
        state = self.live.state
        return max(0, int(state.free[row]) - self.taken.get(state.nodes[row].id, 0))

    def take_away(self, taken: Mapping[str, int]) -> None:
        """Other people use so many GPUs of nodes now: nothing is planned with them."""
        with self.lock:
            if self.taken != taken:
                self.taken = dict(taken)
                self.version += 1
                self.changed.notify_all()

    def options_of(self, spec: JobSpec) -> OptionSet:
        """What a job can choose from, with what was learned.

        Where that cannot be worked out, a job that runs has what it runs on, and one that waits has
        nothing: it is held back, and tried again later.
        """
        job = self.live.jobs[spec.id].job
        try:
            options = self.book.options(job)
        except Exception as error:
            self.unplannable.put_aside(spec.id, error)
            record = self.live.state.jobs[spec.id]
            num_options = int(record.state is JobState.RUNNING)
            counts = np.array([*self._gpus_by_type(record.placement).values()], dtype=np.int64)
            return OptionSet(
                counts=np.tile(counts, (num_options, 1)),
                samples_per_second=np.full(num_options, record.samples_per_second),
                memory_bytes=np.zeros(num_options),
            )
        self.unplannable.solve(spec.id)
        return options

    def plan_of(self, spec: JobSpec, option: int) -> Plan | None:
        """Who computes what once a job has this option; None for a script of unknown model."""
        self.options_of(spec)
        job = self.live.jobs[spec.id].job
        return self.book.plan(job, self.book.counts_of(job, option))

    def offers(self) -> tuple[Offer, ...]:
        """What can be rented, at the prices of now."""
        return self._ready_maker().offers(self.live.state.rentals, self.now())

    def next_retry(self) -> float:
        """When the next job that was held back after a fault may run again; infinity: none."""
        now = self.now()
        with self.lock:
            waits = [
                self.live.jobs[job_id].retry_seconds
                for job_id, record in self.live.state.active.items()
                if record.state is JobState.QUEUED and self.live.jobs[job_id].retry_seconds > now
            ]
        return min(waits, default=float("inf"))

    def _ready_maker(self) -> SnapshotMaker:
        if self._maker is None or self.unplannable.is_any_due:
            rent = self.renting
            self._maker = SnapshotMaker(
                self.gpu_types,
                self.options_of,
                self._startup,
                offers=rent.offers if rent else (),
                budget_dollars_per_hour=rent.budget_dollars_per_hour if rent else math.inf,
                hard_cap_dollars_per_hour=rent.hard_cap_dollars_per_hour if rent else math.inf,
            )
            for record in self.live.state.active.values():
                if record.state is JobState.RUNNING:
                    record.option = self._row_of_placement(record.spec, record.placement)
                self._maker.update(record)
        # Each time: a cluster may be described anew with other prices and the same nodes.
        self._maker.gpu_dollars_per_hour = dict(self.live.described.dollars_per_gpu_hour)
        return self._maker

    def _row_of_placement(self, spec: JobSpec, placement: Placement, speed: float = 0.0) -> int:
        """The option that a running job has: after a restart rows may stand elsewhere."""
        self.options_of(spec)
        if spec.id in self.unplannable.by_job:
            return 0
        counts = self._gpus_by_type(placement)
        return self.book.row_of(self.live.jobs[spec.id].job, tuple(counts.values()), speed)

    def _gpus_by_type(self, placement: Placement) -> dict[str, int]:
        counts = dict.fromkeys(self.gpu_types, 0)
        for node, count in placement:
            counts[self.live.state.nodes[node].gpu] += count
        return counts

    def _without_unusable(self, made: Snapshot) -> Snapshot:
        """Without drained nodes, and without GPUs that others use; what runs there stays."""
        nodes = made.nodes
        taken = np.array([self.taken.get(name, 0) for name in nodes.ids], dtype=np.int64)
        is_usable = np.array([name not in self.live.drained for name in nodes.ids], dtype=bool)
        lacking = np.minimum(nodes.free, taken)
        num_gpus, free = (nodes.num_gpus - lacking) * is_usable, (nodes.free - lacking) * is_usable
        return replace(made, nodes=replace(nodes, num_gpus=num_gpus, free=free))

    def adopt(
        self, cluster: ClusterSpec, *, reason: str, left: Mapping[str, str] | None = None
    ) -> None:
        """From now on these are the nodes: the log is told who joined, and who left for good.

        What runs on nodes that are missing is interrupted first. `left` says why, by node.
        """
        with self.lock:
            now, state = self.now(), self.live.state
            missing = self.live.missing_rows(cluster)
            events: list[Event] = [
                Interrupted(
                    time_seconds=now,
                    job_id=job_id,
                    lost_samples=max(0.0, record.done_at(now) - record.done_samples),
                    reason=reason,
                    kind="cluster-changed",
                )
                for job_id, record in state.active.items()
                if any(row in missing for row, _ in record.placement)
            ]
            for row in missing:
                why = (left or {}).get(state.nodes[row].id, reason)
                kind: type[NodeReclaimed | NodeReleased | NodeRemoved] = NodeRemoved
                if row in state.rentals.rented:
                    kind = NodeReleased if row in state.closing else NodeReclaimed
                events.append(kind(time_seconds=now, node=row, reason=why))
            self.commit([*events, *self.live.joining_events(cluster, self._joining, now)])
            used = {one.id for row, one in enumerate(state.nodes) if row not in state.gone}
            kept = tuple(one for one in cluster.nodes if one.id in used)
            self.cluster = replace(cluster, nodes=kept)
            self._describe(self.live.described.nodes)
            self._open_book()

    def _open_book(self) -> None:
        """Other options, where the nodes make a difference; running jobs keep the one they have."""
        types, cluster = self._all_types(), self._reachable(self.cluster)
        before, self.gpu_types = self.book, types
        if types == before.types and _sizes(cluster) == _sizes(before.cluster):
            before.cluster = cluster
            return
        self.book, self._maker = before.for_cluster(cluster, types), None
        for record in self.live.state.active.values():
            if record.state is JobState.RUNNING:
                speed = record.samples_per_second
                record.option = self._row_of_placement(record.spec, record.placement, speed)

    def _all_types(self) -> tuple[str, ...]:
        """Those of the first nodes, of what can be rented, and of all that came later."""
        first = (gpu for _, gpu, _ in self.live.described.nodes)
        offers = (offer.gpu for offer in (self.renting.offers if self.renting else ()))
        here = (node.gpu for node in self.live.state.nodes)
        return tuple(dict.fromkeys((*first, *offers, *here)))

    def _reachable(self, cluster: ClusterSpec) -> ClusterSpec:
        """The nodes that a job could get: those there are, and those that could be rented."""
        return with_rentable(cluster, self.renting.offers) if self.renting else cluster

    def _describe(self, nodes: tuple[tuple[str, str, int], ...]) -> None:
        """Write down which nodes there are and what their GPUs cost, where that is new."""
        prices = tuple(sorted(self.cluster.dollars_per_gpu_hour.items()))
        known, now = self.live.described, self.now()
        if (nodes, prices) != (known.nodes, known.dollars_per_gpu_hour):
            self.commit(
                [ClusterDescribed(time_seconds=now, nodes=nodes, dollars_per_gpu_hour=prices)]
            )


def _sizes(cluster: ClusterSpec) -> object:
    """What options depend on: by type how many GPUs, on how large nodes, how emulated."""
    sizes: dict[str, tuple[int, int]] = {}
    for node in cluster.nodes:
        total, largest = sizes.get(node.gpu, (0, 0))
        sizes[node.gpu] = (total + node.num_gpus, max(largest, node.num_gpus))
    return sizes, dict(cluster.emulations), dict(cluster.dollars_per_gpu_hour)


def _take_jobs(jobs: JobTable, rows: np.ndarray) -> JobTable:
    """Some rows of a table of jobs."""
    columns = {field.name: getattr(jobs, field.name) for field in fields(JobTable)}
    for name, column in columns.items():
        if isinstance(column, tuple):
            columns[name] = tuple(column[row] for row in rows)
        elif column is not None:
            columns[name] = column[rows]
    return JobTable(**columns)
