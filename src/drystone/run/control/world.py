"""The machine as a world of the one loop: decisions are written down, then made true in steps.

`launch` and `stop` only write events. What the log says should run, and what the agents say does
run, are compared at every tick (`reconcile.py`): processes that should not be there are
asked to leave, launches whose devices are free are made, reports become progress, ends become
events. So it does not matter when the controller is killed: the next one compares again.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass

from drystone.errors import DrystoneError, NothingFits
from drystone.run.control.health import Health
from drystone.run.control.journal import Journal
from drystone.run.control.reconcile import Reconciler
from drystone.run.control.store import LeaseLost, StoreBusy
from drystone.run.events import Refused, Started, Stopped
from drystone.run.lifecycle import IllegalTransition, JobState
from drystone.run.renting.desk import RentalDesk
from drystone.schedule.snapshot import Placement, Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often things are done."""

    tick_seconds: float = 0.2  # between looks at the agents
    round_seconds: float = 30.0  # decide at least so often
    startup_seconds: float = 5.0  # expected until a started job makes progress
    controller_lease_seconds: float = 10.0


class LiveWorld:
    """Jobs, devices and time as they are."""

    def __init__(
        self,
        journal: Journal,
        reconciler: Reconciler,
        pace: Pace | None = None,
        desk: RentalDesk | None = None,
        health: Health | None = None,
    ) -> None:
        self._journal, self._reconciler, self._pace = journal, reconciler, pace or Pace()
        self._desk = desk  # None: nothing can be rented
        self._health = health
        self._seen_version = -1
        self._wake_at = float("inf")
        self._renewed = 0.0
        self.is_leaving = False

    @property
    def is_over(self) -> bool:
        """Once somebody ends it."""
        return self.is_leaving

    def observe(self) -> Snapshot:
        """What is the case now."""
        with self._journal.lock:
            self._seen_version = self._journal.version
            return self._journal.snapshot()

    def launch(self, job_id: str, option: int, placement: Placement, reason: str) -> None:
        """Give a waiting job GPUs; its processes follow as soon as the devices are free."""
        journal = self._journal
        with journal.lock, self._reconciler.troubles.guard(job_id):
            state = journal.live.state
            record = state.jobs[job_id]
            if record.state is not JobState.QUEUED or not self._has_room(placement):
                return  # somebody cancelled, paused or drained meanwhile: the next round sees it
            now = journal.now()
            speed = float(journal.options_of(record.spec).samples_per_second[option])
            with suppress(NothingFits):  # said when its processes are to be started
                journal.plan_of(record.spec, option)  # so that launching need not plan
            journal.commit(
                [
                    Started(
                        time_seconds=now,
                        job_id=job_id,
                        option=option,
                        placement=placement,
                        samples_per_second=speed,
                        productive_seconds=now + self._pace.startup_seconds,
                        reason=reason,
                    )
                ]
            )

    def stop(self, job_id: str, reason: str) -> None:
        """Take a running job's GPUs; it writes a checkpoint and leaves."""
        journal = self._journal
        troubles = self._reconciler.troubles
        with journal.lock, troubles.guard(job_id), suppress(IllegalTransition):
            journal.commit([Stopped(time_seconds=journal.now(), job_id=job_id, reason=reason)])

    def refuse(self, job_id: str, reason: str) -> None:
        """Turn a waiting job away."""
        journal = self._journal
        troubles = self._reconciler.troubles
        with journal.lock, troubles.guard(job_id), suppress(IllegalTransition):
            journal.commit([Refused(time_seconds=journal.now(), job_id=job_id, reason=reason)])

    def rent(self, offer: str, num_nodes: int, reason: str) -> None:
        """Ask for nodes; they join once the provider has them."""
        if self._desk is None:
            raise DrystoneError(f"nothing can be rented ({num_nodes} of {offer}: {reason})")
        with self._journal.lock:
            self._desk.ask(offer, num_nodes, reason)

    def release(self, node: int, reason: str) -> None:
        """Give a rented node back, as soon as nobody works there."""
        if self._desk is None:
            raise DrystoneError(f"nothing is rented, so nothing is given back ({node}: {reason})")
        with self._journal.lock:
            self._desk.release(node, reason)

    def wake(self, at_seconds: float, reason: str) -> None:
        """Let `advance` return at this time at the latest."""
        self._wake_at = min(self._wake_at, at_seconds)

    def advance(self) -> None:
        """Look at the agents until something happened that may change a decision."""
        started = time.monotonic()
        while not self.is_leaving:
            self.tick()
            now = self._journal.now()
            is_due = time.monotonic() - started > self._pace.round_seconds or now >= self._wake_at
            with self._journal.lock:
                if self._journal.version != self._seen_version or is_due:
                    self._wake_at = self._journal.next_retry()
                    return
                self._wake_at = min(self._wake_at, self._journal.next_retry())
                self._journal.changed.wait(self._pace.tick_seconds)

    def tick(self) -> None:
        """Hold the lease, and bring what runs nearer to what should."""
        try:
            self._journal.settle()
            if time.monotonic() - self._renewed > self._pace.controller_lease_seconds / 4:
                self._journal.store.renew(
                    self._journal.lease, lease_seconds=self._pace.controller_lease_seconds
                )
                self._renewed = time.monotonic()
            self._reconciler.tick()
            if self._desk is not None:
                self._desk.tick(self._reconciler.busy)
        except LeaseLost:
            self.is_leaving = True
            raise
        except StoreBusy as error:
            self.hold(error)
        else:
            if self._health is not None:
                self._health.round_done()

    def hold(self, error: StoreBusy) -> None:
        """Nothing can be written, so nothing is decided: what runs is told to go on meanwhile.

        If another controller has taken over, the agents refuse to listen to this one.
        """
        self._reconciler.hold()
        if self._health is not None:
            self._health.round_held(error.message)
        time.sleep(self._pace.tick_seconds)

    def _has_room(self, placement: Placement) -> bool:
        live = self._journal.live
        return all(
            self._journal.free_gpus(node) >= count
            and live.state.nodes[node].id not in live.drained
            and node not in live.state.lost
            and node not in live.state.gone
            for node, count in placement
        )
