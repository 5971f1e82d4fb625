"""Reconciliation: each round brings what runs one step nearer to what the log says should run.

`Reconciler.tick` is one round, from top to bottom: ask the agents what runs; write down which nodes
joined, left or are lost (`nodes.py`); stop launches that should not run any more; bring on those
that should (`runs.py`); give back what nobody needs. Everything is derived from the log and from
what agents say, so a round may be cut off anywhere and begun again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from drystone.run.control.admission import limit_reached
from drystone.run.control.failures import Fault, FaultKind, ending_events
from drystone.run.control.handover import Handovers
from drystone.run.control.journal import Journal
from drystone.run.control.nodes import NodeWatch
from drystone.run.control.progress import RunProgress
from drystone.run.control.round_writer import RoundWriter
from drystone.run.control.run import Observation, Patience, Run
from drystone.run.control.runs import RunSupervisor
from drystone.run.control.troubles import Troubles
from drystone.run.engines.agent.client import AgentGone, AgentRefused
from drystone.run.engines.contract import Engine, Key, Poll, Seen
from drystone.run.events import Progressed
from drystone.run.lifecycle import TERMINAL, JobState
from drystone.run.state import JobRecord

_MAX_CURVES: Final = 50  # of launches that are over, kept in memory


@dataclass(slots=True)
class StaleLaunch:
    """A launch that should not run any more."""

    progress: RunProgress = field(default_factory=RunProgress)
    has_lost_node: bool = False  # then what is left of it cannot save anything


class Reconciler:
    """What is known about launches between rounds."""

    def __init__(
        self,
        journal: Journal,
        engine: Engine,
        folder: Path,
        patience: Patience | None = None,
        owner_variables: Mapping[str, str] | None = None,
        run_as: str = "",
    ) -> None:
        self._journal, self._engine, self._folder = journal, engine, folder
        self._patience = patience or Patience()
        self.runs: dict[str, Run] = {}  # by job: launches that should run
        self._stale: dict[Key, StaleLaunch] = {}
        self._past: dict[str, RunProgress] = {}  # by job: of its last launch that ended
        self._renewed_at = -math.inf
        self._untold: Poll | None = None  # the last one, until its round is written down
        self.silent: frozenset[str] = frozenset()  # nodes that did not answer in the last round
        # Nodes where processes were in the last round, or may have been: not those that are lost.
        self.busy: frozenset[str] = frozenset()
        self.troubles = Troubles(also=journal.unplannable)
        self._writer = RoundWriter(journal, self.troubles)
        self._nodes = NodeWatch(journal, self._patience.silence_seconds, self._end_jobs_on)
        self._handovers = Handovers(journal, folder, self._patience)
        self._supervisor = RunSupervisor(
            journal, engine, folder, self._patience, self._writer, self.runs, owner_variables or {},
            run_as, self._handovers,
        )  # fmt: skip

    def progress(self, job_id: str) -> RunProgress | None:
        """What the running launch of a job reported, or the last one since the controller began."""
        run = self.runs.get(job_id)
        if run is None:
            return self._past.get(job_id)
        if run.progress.step >= 0:
            return run.progress
        before = self._stale.get((job_id, run.order.replaces))
        return run.progress if before is None else before.progress

    def folder_of(self, job_id: str) -> Path:
        """Where a job's plans and checkpoints are."""
        return self._folder / job_id

    def tick(self) -> None:
        """One round: ask the agents, then act on what they say."""
        seen = self._observe()
        with self._journal.lock:
            self._writer.begin_round()
            self._nodes.update(seen.poll)
            active = self._journal.live.state.active
            wanted = {
                job_id: record
                for job_id, record in active.items()
                if record.state is JobState.RUNNING
            }
            self._retire_runs(wanted)
            self._stop_stale_launches(wanted, seen)
            self._supervise(wanted, seen)
            self._forget_what_is_gone(seen)
            self._writer.commit()
            self.troubles.end_round(active.keys() | {job_id for job_id, _ in seen.launches})
            self._untold = None

    def hold(self) -> None:
        """Let what runs go on; everything else waits until the log can be written again."""
        self._observe()

    # --- what agents say ------------------------------------------------------------------------

    def _observe(self) -> Observation:
        offsets = {key: launch.progress.offset for key, launch in self._stale.items()}
        offsets |= {run.key: run.progress.offset for run in self.runs.values()}
        poll = self._engine.poll(offsets, self._due_renewals(), self._patience.lease_seconds)
        poll = self._untold = _with_changes(poll, self._untold)
        self.silent = poll.silent
        state = self._journal.live.state
        lost = {state.nodes[row].id for row in state.lost}
        self.busy = (poll.silent - lost) | {part.node for part in poll.launches if not part.is_over}
        return Observation(poll)

    def _due_renewals(self) -> list[Key]:
        if time.monotonic() - self._renewed_at < self._patience.lease_seconds / 6:
            return []
        self._renewed_at = time.monotonic()
        return [run.key for run in self.runs.values()] + self._handovers.open()

    # --- nodes that are lost --------------------------------------------------------------------

    def _end_jobs_on(self, row: int, reason: str) -> bool:
        """End what runs on a node that is lost; whether all of it could be ended.

        A job whose reports cannot be written ends as far as the log has it.
        """
        records = [
            record
            for record in self._journal.live.state.active.values()
            if any(node == row for node, _ in record.placement)
        ]
        fault = Fault(kind=FaultKind.NODE_LOST, reason=reason)
        for record in records:
            job_id = record.spec.id
            self._stale_launch((job_id, record.num_starts)).has_lost_node = True
            run = self.runs.get(job_id)
            for progress in (run.progress if run is not None else None, None):
                if record.state is JobState.RUNNING:
                    with self.troubles.guard(job_id):
                        self._writer.commit(*ending_events(self._journal, record, fault, progress))
        return all(record.state is not JobState.RUNNING for record in records)

    # --- launches that should not run -----------------------------------------------------------

    def _stale_launch(self, key: Key) -> StaleLaunch:
        return self._stale.setdefault(key, StaleLaunch())

    def _retire_runs(self, wanted: Mapping[str, JobRecord]) -> None:
        """Give up runs that are not wanted any more, all of them before any new one is ordered.

        Two jobs may have exchanged their nodes: each would wait for ever for what the other had.
        While processes of a launch are left, agents keep their devices from being given away.
        """
        for job_id, run in list(self.runs.items()):
            if not _is_wanted(run.key, wanted):
                del self.runs[job_id]
                self._stale_launch(run.key).progress = run.progress
                self._past.pop(job_id, None)  # so that it is the newest
                self._past[job_id] = run.progress
                if len(self._past) > _MAX_CURVES:
                    list(self._past.values())[-_MAX_CURVES - 1].drop_curve()

    def _stop_stale_launches(self, wanted: Mapping[str, JobRecord], seen: Observation) -> None:
        state = self._journal.live.state
        lost = {state.nodes[row].id for row in state.lost}
        may_run_elsewhere = bool(seen.silent - lost)
        for key, parts in seen.launches.items():
            if not _is_wanted(key, wanted):
                with self.troubles.guard(key[0]):  # without back-off: it holds devices
                    launch = self._listen(key, parts)
                    if not self._goes_on(key, launch, wanted.get(key[0]), seen):
                        self._stop_stale(key, parts, may_run_elsewhere=may_run_elsewhere)

    def _listen(self, key: Key, parts: Sequence[Seen]) -> StaleLaunch:
        launch = self._stale_launch(key)
        for part in parts:
            launch.progress.read(part.reports, time.monotonic())
            launch.progress.offset = max(launch.progress.offset, part.offset)
        return launch

    def _goes_on(
        self, key: Key, launch: StaleLaunch, record: JobRecord | None, seen: Observation
    ) -> bool:
        """Whether it trains on until the next launch of its job takes over."""
        is_over = all(part.is_over for part in seen.launches[key])
        if record is None or is_over or launch.has_lost_node:
            return False
        run = self.runs.get(key[0])
        return self._handovers.goes_on(key, launch.progress, run, seen)

    def _stop_stale(self, key: Key, parts: Sequence[Seen], *, may_run_elsewhere: bool) -> None:
        """Ask a launch to leave; once it has left, write down how far it came, and forget it."""
        job_id, epoch = key
        launch = self._stale_launch(key)
        running = [part for part in parts if not part.is_over]
        if running:
            grace, note = self._grace_seconds(job_id, launch), "it should not run any more"
            for part in running:
                with suppress(AgentGone, AgentRefused):
                    self._engine.ask(
                        part.node,
                        "stop",
                        job_id=job_id,
                        epoch=epoch,
                        grace_seconds=grace,
                        note=note,
                    )
        elif not may_run_elsewhere:
            self._record_checkpoint(job_id, launch.progress)
            for part in parts:
                with suppress(AgentGone, AgentRefused):
                    self._engine.ask(part.node, "forget", job_id=job_id, epoch=epoch)
            self._handovers.forget([key])
            del self._stale[key]

    def _grace_seconds(self, job_id: str, launch: StaleLaunch) -> float:
        """How long it may take to save a checkpoint and leave."""
        if launch.has_lost_node:
            return 0.0
        record = self._journal.live.state.jobs.get(job_id)
        is_dropped = record is None or record.state is JobState.CANCELLED
        if is_dropped:
            return 1.0
        return self._patience.of_job(self._journal.live.jobs[job_id].job).grace_seconds

    def _record_checkpoint(self, job_id: str, progress: RunProgress) -> None:
        """A job that waits is as far as its last checkpoint."""
        record = self._journal.live.state.jobs.get(job_id)
        if record is None or record.state in TERMINAL or record.state is JobState.RUNNING:
            return
        step = max(progress.checkpoint_step, progress.first_step)
        done = min(float(step * record.spec.global_batch), record.spec.total_samples)
        if step >= 0 and done != record.done_samples:
            now = self._journal.now()
            self._writer.commit(Progressed(time_seconds=now, job_id=job_id, done_samples=done))

    # --- launches that should run ---------------------------------------------------------------

    def _supervise(self, wanted: Mapping[str, JobRecord], seen: Observation) -> None:
        """Each job by itself: what goes wrong with one does not end the round."""
        for job_id, record in wanted.items():
            if self.troubles.is_waiting(job_id):
                continue
            with self.troubles.guard(job_id):
                over_limit = limit_reached(self._journal, record)
                if over_limit is not None:
                    self._writer.commit(over_limit)
                else:
                    self._supervisor.supervise(record, seen)

    # --- what nobody needs any more -------------------------------------------------------------

    def _forget_what_is_gone(self, seen: Observation) -> None:
        """Forget launches of which no agent knows any more, and give their locks back."""
        if seen.silent:
            return  # a node that says nothing may still run a part of one
        gone = self._stale.keys() - seen.launches.keys()
        self._handovers.forget(gone)
        for key in gone:
            del self._stale[key]
        wanted = {run.key for run in self.runs.values()}
        for key in self._engine.held() - wanted:
            if all(part.is_over for part in seen.launches.get(key, ())):
                self._engine.release(key)


def _with_changes(poll: Poll, untold: Poll | None) -> Poll:
    """Engines tell once which nodes joined or left: what no round has written down is kept."""
    if untold is None:
        return poll
    return replace(poll, cluster=poll.cluster or untold.cluster, left={**untold.left, **poll.left})


def _is_wanted(key: Key, wanted: Mapping[str, JobRecord]) -> bool:
    """Whether a launch is the one that the log wants of its job."""
    record = wanted.get(key[0])
    return record is not None and record.num_starts == key[1]
