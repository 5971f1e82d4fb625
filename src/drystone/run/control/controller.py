"""The controller: the one loop in real time, and what people may ask of it.

One process holds the lease and runs the loop; requests come from other threads. Everything that
happens goes through the journal, so the controller can be killed at any instant: the next one reads
the log, asks the agents what runs, and goes on.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from drystone.describe.files.cluster import ClusterSpec
from drystone.describe.job import TrainingJob, make_spec
from drystone.errors import DrystoneError, InvalidSpec, NothingFits, UnknownName
from drystone.run.control.admission import Admission, check_account, check_hard_cap
from drystone.run.control.folder import check_files, keep_private, lock_folder, note_folder
from drystone.run.control.health import Health
from drystone.run.control.journal import Journal, node_added
from drystone.run.control.live_state import LiveState
from drystone.run.control.notes import Decided, Described, Drained, Launched, Undrained
from drystone.run.control.policy_memory import MemoryKeeper
from drystone.run.control.progress import Curves
from drystone.run.control.reconcile import Reconciler
from drystone.run.control.run import Patience
from drystone.run.control.steady_clock import SteadyClock
from drystone.run.control.store import Lease, LeaseLost, Store, StoreBusy
from drystone.run.control.world import LiveWorld, Pace
from drystone.run.engines.agent.client import AgentGone, AgentRefused
from drystone.run.engines.agent.launches import read_lines
from drystone.run.engines.contract import Engine
from drystone.run.engines.local import LocalEngine
from drystone.run.events import Cancelled, Event, Paused, Stopped, Submitted, Unpaused
from drystone.run.job_output import clean_text
from drystone.run.lifecycle import TERMINAL, IllegalTransition
from drystone.run.loop import drive
from drystone.run.renting.desk import RentalDesk
from drystone.run.renting.joining import LocalJoiner
from drystone.run.renting.provider import ProviderTrouble, Renting, check_emulations
from drystone.run.state import JobRecord
from drystone.schedule.decision import (
    Decision,
    Memory,
    Move,
    Policy,
    Preempt,
    Refuse,
    Resize,
    Start,
    find_policy,
)
from drystone.schedule.limits import options_within
from drystone.schedule.snapshot import Snapshot, StartupCost


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """What a controller is started with."""

    folder: Path  # log, jobs and agents
    cluster: ClusterSpec  # as it is found at first; nodes may join and leave
    engine: Engine | None = None  # none: this machine
    database: str = ""  # an address for SQLAlchemy; empty: SQLite in the folder
    policy: str = "prices"
    pace: Pace = field(default_factory=Pace)
    patience: Patience = field(default_factory=Patience)
    renting: Renting | None = None  # None: nothing can be rented
    job_environment: Mapping[str, str] = field(default_factory=dict)  # that every job gets
    run_as: str = ""  # an account, or "submitter": that of each job's owner; empty: our own
    clock: Callable[[], float] = field(default_factory=SteadyClock)  # that the log goes by


class Controller:
    """Everything together, from opening to closing."""

    def __init__(self, settings: ControllerSettings) -> None:
        self.settings = settings
        folder = settings.folder
        keep_private(folder, is_passed=bool(settings.run_as))  # jobs and the log hold secrets
        self._lock = lock_folder(folder)
        self._store: Store | None = None
        lease: Lease | None = None
        try:
            self.store = self._store = Store(settings.database or f"sqlite:///{folder / 'log.db'}")
            lease = self._take_lease()
            seconds = settings.pace.startup_seconds
            self.engine = settings.engine or LocalEngine(folder / "agents", settings.cluster)
            self.desk = self._make_desk()
            self.journal = Journal(
                self.store,
                lease,
                settings.cluster,
                startup=StartupCost(seconds_per_gpu=seconds, most_seconds=seconds),
                joining=self.desk.joining if self.desk else node_added,
                renting=settings.renting,
                recover=self._recover,
                clock=settings.clock,
            )
            note_folder(self.journal, folder)
        except BaseException:
            if lease is not None:
                self._let_go(lease)
            if self._store is not None:
                self._store.close()
            os.close(self._lock)
            raise
        self.reconciler = Reconciler(
            self.journal,
            self.engine,
            folder / "jobs",
            settings.patience,
            settings.job_environment,
            settings.run_as,
        )
        self.health = Health(folder)
        self.world = LiveWorld(self.journal, self.reconciler, settings.pace, self.desk, self.health)
        self.admission = Admission(self.journal)
        self._keeper = MemoryKeeper(self.journal, settings.policy)
        self.curves = Curves(self.read_reports)
        self.decision_seconds = 0.0  # that the last one took
        self._log = logging.getLogger("drystone.controller")

    @property
    def cluster(self) -> ClusterSpec:
        """The nodes of now."""
        return self.journal.cluster

    @property
    def last_error(self) -> str:
        """What is wrong now, in one line; empty where nothing is."""
        told = [self.health.error] if self.health.error else []
        told += [reason for reason in self.troubles().values() if reason not in told]
        return "; ".join(told)

    def troubles(self) -> dict[str, str]:
        """What of that which it depends on cannot be used now, and why: store, disk, engine ..."""
        found = self.health.troubles()
        nodes = {node.id for node in self.cluster.nodes}
        if nodes and self.health.is_watched and nodes <= self.reconciler.silent:
            found["engine"] = "no agent answers"
        if self.engine.trouble:
            found["engine"] = self.engine.trouble
        if self.desk is not None and self.desk.trouble:
            found["provider"] = self.desk.trouble
        return found

    # --- running --------------------------------------------------------------------------------

    def run(self) -> None:
        """Start the agents, then decide and act until `leave`."""
        self.engine.start(self.journal.lease.epoch)
        if self.desk is not None:
            self.desk.open(self.journal)
        policy = self._noting(self.admission.limited(find_policy(self.settings.policy)))
        self.health.round_done()
        self.health.is_watched = True
        memory = self._keeper.recall()
        while not self.world.is_leaving:
            try:
                drive(self.world, policy, memory=memory, on_decision=self._on_decision)
            except LeaseLost:
                raise
            except StoreBusy as error:
                self.world.hold(error)
                memory = self._keeper.recall()
            except Exception as error:  # a fault of one round must not end the service
                is_known = isinstance(error, DrystoneError)
                told = str(error) if is_known else f"{type(error).__name__}: {error}"
                if told != self.health.error:
                    self._log.warning("a round failed: %s", told, exc_info=not is_known)
                # What it remembers may be why: where no round has been done since, without it.
                memory = None if self.health.error else self._keeper.recall()
                self.health.round_failed(told)
                time.sleep(1.0)

    def leave(self) -> None:
        """End the loop; what runs goes on, and waits for the next controller."""
        self.world.is_leaving = True
        self.journal.wake()

    def close(self, *, ends_agents: bool = False) -> None:
        """Let go of everything; with `ends_agents` nothing is left running."""
        if self.desk is not None:
            self.desk.close()
        trouble: ProviderTrouble | None = None
        if ends_agents:
            try:
                if self.desk is not None:
                    self.desk.end_all()
            except ProviderTrouble as error:
                trouble = error
            self.engine.quit()
        self.engine.close()
        self._let_go(self.journal.lease)
        self.store.close()
        os.close(self._lock)
        if trouble is not None:
            raise trouble

    # --- what people ask ------------------------------------------------------------------------

    def submit(self, job: TrainingJob, *, client_key: str = "") -> tuple[str, bool]:
        """Take a job in; its id, and whether it is new. The same key gives the same job."""
        check_account(self.settings.run_as, job)
        return self.take_in(self.journal.book.looked_at(job), client_key=client_key)

    def take_in(self, job: TrainingJob, *, client_key: str = "") -> tuple[str, bool]:
        """The same with a job that was looked at."""
        with self.journal.lock:
            self.journal.settle()  # an id is given after all that were given before
            known = self.store.find_key(client_key) if client_key else None
            if known is not None:
                return known, False
            self.journal.book.check(job)
            job, shape = self.journal.book.settled(job), self.journal.book.shape(job)
            options = self.journal.book.options(job)
            if not len(options) or not (options.samples_per_second > 0).any():
                raise NothingFits(
                    f"{job.name}: no GPUs of this cluster suffice",
                    hint="`drystone plan` shows what would; or allow more GPUs",
                )
            options = check_hard_cap(self.journal, job.name, options)
            self.admission.check(job, options)
            now = self.journal.now()
            job_id = str(len(self.journal.live.state.jobs) + 1)
            spec = make_spec(job, shape, job_id=job_id, submit_seconds=now)
            prices = self.cluster.dollars_per_gpu_hour
            options_within(spec, options, self.journal.gpu_types, prices)
            self.journal.commit(
                [
                    Described(time_seconds=now, job_id=job_id, job=job, client_key=client_key),
                    Submitted(time_seconds=now, job=spec),
                ]
            )
            return job_id, True

    def cancel(self, job_id: str) -> None:
        """Take a job back, whether it waits or runs."""
        self._change(job_id, lambda now: Cancelled(time_seconds=now, job_id=job_id), "cancelled")

    def pause(self, job_id: str, reason: str = "paused by its owner") -> None:
        """Let a job wait until it is resumed; it writes a checkpoint if it runs."""
        self._change(
            job_id, lambda now: Paused(time_seconds=now, job_id=job_id, reason=reason), "paused"
        )

    def resume(self, job_id: str) -> None:
        """Let a paused job run again."""
        self._change(job_id, lambda now: Unpaused(time_seconds=now, job_id=job_id), "resumed")

    def drain(self, node: str) -> list[str]:
        """Start nothing more on a node, and move away what runs there; the jobs that must move."""
        journal = self.journal
        with journal.lock:
            row = self._find_node(node)
            now, moved = journal.now(), []
            events: list[Event] = [Drained(time_seconds=now, node=node)]
            for job_id, record in journal.live.state.active.items():
                if any(one == row for one, _ in record.placement):
                    moved.append(job_id)
                    reason = f"node {node} is drained"
                    events.append(Stopped(time_seconds=now, job_id=job_id, reason=reason))
            journal.commit(events)
            return moved

    def undrain(self, node: str) -> None:
        """Use a drained node again."""
        with self.journal.lock:
            self._find_node(node)
            self.journal.commit([Undrained(time_seconds=self.journal.now(), node=node)])

    def find(self, job_id: str) -> JobRecord:
        """The record of a job."""
        jobs = self.journal.live.state.jobs
        if job_id not in jobs:
            raise UnknownName("job", job_id, list(jobs)[-12:])
        return jobs[job_id]

    def launches_of(self, job_id: str) -> list[Launched]:
        """Every launch of a job so far."""
        events = self.store.read(job_id=job_id)
        return [event for _, event in events if isinstance(event, Launched)]

    def read_log(
        self, job_id: str, *, rank: int = 0, epoch: int = 0, offset: int = 0, stream: str = "log"
    ) -> tuple[str, int, int]:
        """Lines of one rank, where the next ones begin, and of which launch they are.

        The stream `log` is what it wrote to standard error, `out` what to standard output.
        """
        launches = self.launches_of(job_id)
        wanted = [one for one in launches if epoch in (0, one.epoch)]
        if not wanted:
            return "", offset, epoch
        launch = wanted[-1]
        if not 0 <= rank < len(launch.devices):
            raise InvalidSpec(f"job {job_id} has ranks 0 to {len(launch.devices) - 1}")
        try:
            answer = self.engine.read(
                launch.devices[rank][0], job_id=job_id, epoch=launch.epoch,
                name=f"rank-{rank}.{stream}", offset=offset,
            )  # fmt: skip
        except (AgentGone, AgentRefused):
            return "", offset, launch.epoch
        return clean_text(str(answer["text"])), int(answer["offset"]), launch.epoch

    def read_reports(self, job_id: str, epoch: int, offset: int) -> tuple[str, int]:
        """Lines that a launch reported, and where the next ones begin."""
        if self.journal.live.jobs[job_id].job.is_command:
            home = self.reconciler.folder_of(job_id) / f"epoch-{epoch}"
            return read_lines(home / "progress.jsonl", offset)
        text, after, _ = self.read_log(job_id, epoch=epoch, offset=offset, stream="out")
        return text, after

    def _change(self, job_id: str, make: Callable[[float], Event], done: str) -> None:
        with self.journal.lock:
            record = self.find(job_id)
            try:
                self.journal.commit([make(self.journal.now())])
            except IllegalTransition:
                hint = "It is over" if record.state in TERMINAL else ""
                raise InvalidSpec(
                    f"job {job_id} is {record.state.value} and cannot be {done}", hint=hint
                ) from None

    def _find_node(self, name: str) -> int:
        state = self.journal.live.state
        rows = {node.id: row for row, node in enumerate(state.nodes) if row not in state.gone}
        if name not in rows:
            raise UnknownName("node", name, rows)
        return rows[name]

    # --- inside ---------------------------------------------------------------------------------

    def _make_desk(self) -> RentalDesk | None:
        renting = self.settings.renting
        if renting is None:
            return None
        check_emulations(self.settings.cluster, renting.offers)
        joiner = renting.joiner
        if joiner is None:
            assert isinstance(self.engine, LocalEngine), "other engines come with a joiner"
            joiner = LocalJoiner(self.engine)
        return RentalDesk(renting, self.engine, joiner, self.settings.folder)

    def _let_go(self, lease: Lease) -> None:
        with suppress(DrystoneError):  # it runs out by itself
            self.store.release(lease)

    def _recover(self, live: LiveState) -> ClusterSpec:
        """What there is for a log that was read, before anything is written to it."""
        check_files(self.settings.folder, live)
        return self.desk.recover(live) if self.desk else self.settings.cluster

    def _take_lease(self) -> Lease:
        """The right to act. On this machine the lock on the folder says that nobody else has it."""
        seconds = self.settings.pace.controller_lease_seconds
        holder = f"{socket.gethostname()}:{self.settings.folder}"
        lease = self.store.acquire(holder, lease_seconds=seconds)
        deadline = time.monotonic() + 2 * seconds
        while lease is None:
            if time.monotonic() > deadline:
                raise DrystoneError("another controller holds the lease on this database")
            time.sleep(0.1)
            lease = self.store.acquire(holder, lease_seconds=seconds)
        return lease

    def _on_decision(self, _: float, policy_seconds: float) -> None:
        self.decision_seconds = policy_seconds

    def _noting(self, policy: Policy) -> Policy:
        """The policy, with the numbers behind its decisions written down."""

        def decide(snapshot: Snapshot, memory: Memory) -> tuple[list[Decision], Memory]:
            decisions, after = policy(snapshot, memory)
            notes = [
                Decided(
                    time_seconds=self.journal.now(),
                    job_id=one.job_id,
                    decision=type(one).__name__,
                    reason=one.reason,
                    numbers={
                        name: value for name, value in one.numbers.items() if math.isfinite(value)
                    },
                )
                for one in decisions
                if isinstance(one, Start | Resize | Move | Preempt | Refuse)
            ]
            self.journal.commit([*notes, *self._keeper.note(decisions, after)])
            return decisions, after

        return decide
