"""Make what runs what should run: one look at the agents, one step nearer.

Everything here is derived from the log and from what agents say, so it may be cut off anywhere and
begun again. A launch is ordered in a file before it is made, and agents make each only once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from drystone.errors import DrystoneError, NothingFits
from drystone.run.control.admission import limits_reached
from drystone.run.control.ends import ending_events, read_log_ends
from drystone.run.control.failures import Fault, FaultKind, judge
from drystone.run.control.journal import Journal
from drystone.run.control.launches import LaunchOrder, busy_devices, load_order, order_launch
from drystone.run.control.lessons import speed_lesson
from drystone.run.control.notes import Launched, job_of
from drystone.run.control.progress import RunProgress
from drystone.run.control.runs import Patience as Patience
from drystone.run.control.runs import Run, silence_fault
from drystone.run.control.store import LeaseLost, StoreBusy
from drystone.run.control.troubles import Troubles
from drystone.run.engines.agent.client import AgentGone, AgentRefused
from drystone.run.engines.agent.network import RefusalKind
from drystone.run.engines.contract import Engine, Key, Poll, Seen
from drystone.run.events import Event, Finished, NodeBack, NodeLost, Progressed
from drystone.run.lifecycle import TERMINAL, JobState
from drystone.run.state import JobRecord


class Reconciler:
    """What is known about launches, by job."""

    def __init__(
        self, journal: Journal, engine: Engine, folder: Path, patience: Patience | None = None
    ) -> None:
        self._journal, self._engine, self._folder = journal, engine, folder
        self._patience = patience or Patience()
        self._runs: dict[str, Run] = {}
        self._past: dict[str, RunProgress] = {}  # of launches that ended
        self._leaving: dict[Key, RunProgress] = {}  # launches that should not be there
        self._broken: set[Key] = set()  # launches that lost a node: the rest cannot save anything
        self._silent_since: dict[str, float] = {}
        self.busy: frozenset[str] = frozenset()  # nodes where processes were at the last look
        self.troubles = Troubles()
        self._waiting: list[Event] = []  # progress of this look: one write for all of it
        self._renewed = -math.inf

    def progress(self, job_id: str) -> RunProgress | None:
        """What the running launch of a job reported, or the last one since the controller began."""
        run = self._runs.get(job_id)
        return run.progress if run is not None else self._past.get(job_id)

    def folder_of(self, job_id: str) -> Path:
        """Where a job's plans and checkpoints are."""
        return self._folder / job_id

    def tick(self) -> None:
        """One look, one step."""
        poll = self._engine.poll(self._offsets(), self._to_renew(), self._patience.lease_seconds)
        seen: dict[Key, list[Seen]] = {}
        for one in poll.launches:
            seen.setdefault((one.job_id, one.epoch), []).append(one)
        self.busy = frozenset(one.node for one in poll.launches if not one.is_over) | poll.silent
        self._waiting = []  # what a look that failed has left
        with self._journal.lock:
            state = self._journal.live.state
            self._note_nodes(poll)
            self._note_silence(poll)
            self._journal.take_away(poll.taken)
            self._commit(*limits_reached(self._journal))
            wanted = {
                job_id: record
                for job_id, record in state.active.items()
                if record.state is JobState.RUNNING
            }
            self._drop_stale_runs(wanted)
            self._look_at_all(wanted, seen, poll.silent)
            self._let_go(seen, is_silent=bool(poll.silent))
            self._commit()
            self.troubles.end_round(state.active.keys() | {job_id for job_id, _ in seen})

    def _drop_stale_runs(self, wanted: Mapping[str, JobRecord]) -> None:
        """Forget launches that are not wanted any more, all before any new one is ordered.

        Two jobs may have exchanged their nodes: each would wait for ever for what the other had.
        While processes of a launch are left, `seen` keeps their devices from being given away.
        """
        for job_id, run in list(self._runs.items()):
            record = wanted.get(job_id)
            if record is None or record.num_starts != run.order.epoch:
                self._past[job_id] = self._runs.pop(job_id).progress

    def _look_at_all(
        self,
        wanted: Mapping[str, JobRecord],
        seen: dict[Key, list[Seen]],
        silent: frozenset[str],
    ) -> None:
        """Each launch and each job by itself: what goes wrong with one does not end the round."""
        is_silent = bool(silent - self._lost())
        for key, parts in seen.items():
            record = wanted.get(key[0])
            if record is None or record.num_starts != key[1]:
                with self.troubles.guard(key[0]):  # without back-off: it holds devices
                    self._see_off(key, parts, is_silent=is_silent)
        for job_id, record in wanted.items():
            if not self.troubles.is_waiting(job_id):
                with self.troubles.guard(job_id):
                    self._look_after(job_id, record, seen, silent)

    def _let_go(self, seen: dict[Key, list[Seen]], *, is_silent: bool) -> None:
        """Forget launches of which no agent knows any more, and give their locks back."""
        if is_silent:
            return  # a node that says nothing may still run a part of one
        for key in [one for one in self._leaving if one not in seen]:
            del self._leaving[key]
        self._broken &= seen.keys()
        wanted = {(job_id, run.order.epoch) for job_id, run in self._runs.items()}
        for key in self._engine.held() - wanted:
            if all(part.is_over for part in seen.get(key, ())):
                self._engine.release(key)

    def _see_off(self, key: Key, parts: Sequence[Seen], *, is_silent: bool) -> None:
        """Ask it to leave; when it has left, take down how far it came, and forget it."""
        job_id, epoch = key
        progress = self._leaving.setdefault(key, RunProgress())
        for part in parts:
            progress.read(part.reports, time.time())
            progress.offset = max(progress.offset, part.offset)
        if not all(part.is_over for part in parts):
            record = self._journal.live.state.jobs.get(job_id)
            is_dropped = record is None or record.state is JobState.CANCELLED
            grace = 1.0 if is_dropped else self._patience.grace_seconds
            grace = 0.0 if key in self._broken else grace
            for part in parts:
                if not part.is_over:
                    self._ask(part.node, "stop", job_id=job_id, epoch=epoch, grace_seconds=grace,
                              note="it should not run any more")  # fmt: skip
            return
        if is_silent:
            return  # some node may still run a part of it
        self._tell_checkpoint(job_id, progress)
        for part in parts:
            self._ask(part.node, "forget", job_id=job_id, epoch=epoch)
        del self._leaving[key]

    def _tell_checkpoint(self, job_id: str, progress: RunProgress) -> None:
        """A job that waits is as far as its last checkpoint."""
        record = self._journal.live.state.jobs.get(job_id)
        if record is None or record.state in TERMINAL or record.state is JobState.RUNNING:
            return
        step = max(progress.checkpoint_step, progress.first_step)
        if step >= 0:
            done = min(float(step * record.spec.global_batch), record.spec.total_samples)
            self._commit(
                Progressed(time_seconds=self._journal.now(), job_id=job_id, done_samples=done)
            )

    def _look_after(
        self, job_id: str, record: JobRecord, seen: dict[Key, list[Seen]], silent: frozenset[str]
    ) -> None:
        key = (job_id, record.num_starts)
        run = self._runs.get(job_id)
        if run is None or run.order.epoch != record.num_starts:
            others = [
                one
                for one, parts in seen.items()
                if one[0] == job_id and one != key and not all(part.is_over for part in parts)
            ]
            run = None if others else self._order(job_id, record, seen)
            if run is None:
                return
            self._runs[job_id] = run
        parts = {part.node: part for part in seen.get(key, ())}
        if self._take_lock(key, run):
            for node in run.order.requests:
                if node not in parts and node not in silent:
                    self._make(run, node)
        self._take_in(job_id, record, run, list(parts.values()))
        self._judge(job_id, record, run, parts)

    def _take_lock(self, key: Key, run: Run) -> bool:
        """Whether the GPUs are ours also in the eyes of the cluster."""
        if not run.has_lock:
            gpus = {node: len(one["ranks"]) for node, one in run.order.requests.items()}
            try:
                run.has_lock = self._engine.reserve(key, gpus)
            except DrystoneError as error:
                kind = FaultKind.CRASH if isinstance(error, AgentGone) else FaultKind.USER_ERROR
                run.fault = run.fault or Fault(kind=kind, reason=str(error))
            waited = time.monotonic() - run.ordered
            if run.has_lock:
                run.ordered = time.monotonic()
            elif waited > self._patience.lock_seconds:
                reason = f"others hold the GPUs of {', '.join(gpus)}: no lock within {waited:.0f} s"
                run.fault = run.fault or Fault(kind=FaultKind.PREEMPTED, reason=reason)
        return run.has_lock

    def _order(self, job_id: str, record: JobRecord, seen: dict[Key, list[Seen]]) -> Run | None:
        """Decide once which rank sits where; None while devices are not free yet."""
        epoch = record.num_starts
        path = self._folder / job_id / f"epoch-{epoch}" / "launch.json"
        order = load_order(path)
        if order is None:
            try:
                order = self._new_order(job_id, record, seen)
            except AgentGone:
                return None  # of the node where the ranks are to meet
            except (DrystoneError, OSError) as error:
                is_full = isinstance(error, OSError)
                is_short = isinstance(error, NothingFits)
                kind = FaultKind.OUT_OF_MEMORY if is_short else FaultKind.USER_ERROR
                kind = FaultKind.DISK if is_full else kind
                self._end(job_id, record, Fault(kind=kind, reason=str(error)))
                return None
            if order is None:
                return None
            order.save(path)
        if self._journal.live.jobs[job_id].launched_epoch != epoch:
            # Also for an order that was saved before: what was to be written then may be lost.
            self._commit(
                Launched(
                    time_seconds=self._journal.now(),
                    job_id=job_id,
                    epoch=epoch,
                    plan=order.plan,
                    devices=tuple((seat.node, seat.device) for seat in order.seats),
                )
            )
        return Run(order=order, ordered=time.monotonic())

    def _new_order(
        self, job_id: str, record: JobRecord, seen: dict[Key, list[Seen]]
    ) -> LaunchOrder | None:
        others = [run.order for run in self._runs.values() if run.order.job_id != job_id]
        return order_launch(
            self._journal,
            record,
            self._engine,
            busy=busy_devices(seen.values(), others),
            folder=self._folder / job_id,
            lease_seconds=self._patience.lease_seconds,
        )

    def _make(self, run: Run, node: str) -> None:
        try:
            self._engine.ask(node, "launch", **run.order.requests[node])
        except AgentGone:
            return  # it is started again, and asked again
        except AgentRefused as error:
            if error.kind not in (RefusalKind.BUSY, RefusalKind.NODE_LOST):
                is_full = error.kind is RefusalKind.DISK_FULL
                run.fault = run.fault or Fault(
                    kind=FaultKind.DISK if is_full else FaultKind.USER_ERROR,
                    reason=f"{node}: {error}",
                )

    def _take_in(self, job_id: str, record: JobRecord, run: Run, parts: Sequence[Seen]) -> None:
        """Reports become progress; now and then, events."""
        progress = run.progress
        for part in parts:
            run.exits.update(part.exits)
            run.note = run.note or part.note
            if part.reports:
                progress.read(part.reports, time.time())
            progress.offset = max(progress.offset, part.offset)
        if progress.step < 0:
            return
        now = self._journal.now()
        is_first = run.told_step < 0
        is_saved = progress.checkpoint_step > run.told_checkpoint
        is_due = progress.step > run.told_step and (
            now - run.told_seconds >= self._patience.progress_seconds
        )
        if not (is_first or is_saved or is_due):
            return
        seconds = progress.step_seconds
        speed = record.spec.global_batch / seconds if seconds > 0 else record.samples_per_second
        done = min(float(progress.step * record.spec.global_batch), record.spec.total_samples)
        events: list[Event] = [
            Progressed(
                time_seconds=now, job_id=job_id, done_samples=done, samples_per_second=speed
            ),
            *speed_lesson(self._journal, job_id, record, speed if seconds > 0 else 0.0),
        ]
        self._waiting += events
        run.told_step, run.told_seconds = progress.step, now
        run.told_checkpoint = max(run.told_checkpoint, progress.checkpoint_step)

    def _judge(self, job_id: str, record: JobRecord, run: Run, parts: dict[str, Seen]) -> None:
        """Whether the run has ended, or must be."""
        codes = {rank: code for rank, code in run.exits.items() if code is not None}
        is_over = len(codes) == len(run.order.seats) and len(parts) == len(run.order.requests)
        is_well = is_over and run.fault is None and not any(codes.values())
        # A script that was asked to leave, not by us, has not finished because it left well.
        is_command = self._journal.live.jobs[job_id].job.is_command
        says_done = is_command and not run.note
        if is_well and (run.progress.is_finished or says_done):
            self._commit(Finished(time_seconds=self._journal.now(), job_id=job_id))
            return
        if is_over or (run.fault is not None and all(one.is_over for one in parts.values())):
            logs = read_log_ends(self._engine, run.order) if any(codes.values()) else {}
            self._end(job_id, record, run.fault or judge(codes, logs, run.note), run)
            return
        run.fault = run.fault or silence_fault(run, self._patience, is_command=is_command)
        if run.fault is not None:
            self._stop_all(run, 0.0)
        elif any(codes.values()):
            self._stop_all(run, 2.0)  # the others wait for a rank that will not come

    def _lost(self) -> frozenset[str]:
        state = self._journal.live.state
        return frozenset(state.nodes[row].id for row in state.lost)

    def _stop_all(self, run: Run, grace_seconds: float) -> None:
        for node in run.order.requests:
            self._ask(node, "stop", job_id=run.order.job_id, epoch=run.order.epoch,
                      grace_seconds=grace_seconds, note="")  # fmt: skip

    def _end(self, job_id: str, record: JobRecord, fault: Fault, run: Run | None = None) -> None:
        """The run is over: try again later, otherwise, or not at all."""
        progress = run.progress if run is not None else None
        self._commit(*ending_events(self._journal, record, fault, progress))

    def _note_nodes(self, poll: Poll) -> None:
        """Nodes joined, or left for good, with what runs on them."""
        if poll.cluster is None:
            return
        nodes = self._journal.live.state.nodes
        for row in self._journal.missing_rows(poll.cluster):
            name = nodes[row].id
            reason = f"{name} left the cluster: {poll.left.get(name, 'it is not there any more')}"
            self._end_on(row, reason)
            self._silent_since.pop(name, None)
        self._journal.adopt(poll.cluster, reason="it left the cluster", left=poll.left)

    def _end_on(self, row: int, reason: str) -> None:
        """What runs on a node has lost it."""
        for job_id, record in list(self._journal.live.state.active.items()):
            if any(one == row for one, _ in record.placement):
                self._broken.add((job_id, record.num_starts))
                fault = Fault(kind=FaultKind.NODE_LOST, reason=reason)
                self._end(job_id, record, fault, self._runs.get(job_id))

    def _note_silence(self, poll: Poll) -> None:
        """Nodes that say nothing for long are lost, with what runs on them; others come back."""
        live, now = self._journal.live, time.monotonic()
        for row, node in enumerate(live.state.nodes):
            if row in live.state.gone:
                continue
            reason = poll.lost.get(node.id, "")
            if node.id not in poll.silent and not reason:
                self._silent_since.pop(node.id, None)
                if row in live.state.lost:
                    self._commit(NodeBack(time_seconds=self._journal.now(), node=row))
                continue
            since = self._silent_since.setdefault(node.id, now)
            is_long = now - since >= self._patience.silence_seconds or bool(reason)
            if not is_long or row in live.state.lost:
                continue
            silence = f"its agent has not answered for {now - since:.0f} s"
            self._end_on(row, f"{node.id} is lost: {reason or silence}")
            self._commit(NodeLost(time_seconds=self._journal.now(), node=row))

    def _offsets(self) -> dict[Key, int]:
        offsets = {key: progress.offset for key, progress in self._leaving.items()}
        for job_id, run in self._runs.items():
            offsets[job_id, run.order.epoch] = run.progress.offset
        return offsets

    def _to_renew(self) -> list[Key]:
        if time.monotonic() - self._renewed < self._patience.lease_seconds / 6:
            return []
        self._renewed = time.monotonic()
        return [(job_id, run.order.epoch) for job_id, run in self._runs.items()]

    def _ask(self, node: str, op: str, **values: object) -> None:
        with suppress(AgentGone, AgentRefused):
            self._engine.ask(node, op, **values)

    def _commit(self, *events: Event) -> None:
        waiting, self._waiting = self._waiting, []
        try:
            self._journal.commit([*waiting, *events])
        except (LeaseLost, StoreBusy):
            raise
        except Exception:
            if not waiting:
                raise
            # What one job reported may be what cannot be written: each by itself, then.
            for job_id in dict.fromkeys(job_of(event) for event in waiting):
                with self.troubles.guard(job_id):
                    self._journal.commit([event for event in waiting if job_of(event) == job_id])
            self._journal.commit(events)
