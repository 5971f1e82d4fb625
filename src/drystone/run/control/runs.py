"""Launches that should run: ordered, locked, made, listened to, and judged when they end.

`RunSupervisor.supervise` is one step for one job, in that order. A launch is ordered in a file
before it is made, and agents make each only once, so a step may be cut off anywhere.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from drystone.describe.job import TrainingJob
from drystone.errors import DrystoneError, NothingFits
from drystone.run.control.failures import (
    Fault,
    FaultKind,
    ending_events,
    judge,
    left_early,
    read_log_ends,
)
from drystone.run.control.journal import Journal
from drystone.run.control.launches import (
    LaunchOrder,
    busy_devices,
    check_checkpoints,
    load_order,
    order_launch,
)
from drystone.run.control.lessons import pace_lesson, peak_lesson, speed_lesson, trial_lesson
from drystone.run.control.notes import Launched, Warned, job_of
from drystone.run.control.progress import RunProgress
from drystone.run.control.store import LeaseLost, StoreBusy
from drystone.run.control.troubles import Troubles
from drystone.run.engines.agent.client import AgentGone, AgentRefused
from drystone.run.engines.agent.network import RefusalKind
from drystone.run.engines.contract import Engine, Key, Poll, Seen
from drystone.run.events import Event, Finished, Progressed, Stopped
from drystone.run.state import JobRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long to wait for what."""

    lease_seconds: float = 120.0  # processes outlive a controller by this much
    grace_seconds: float = 30.0  # to write a checkpoint and leave
    start_seconds: float = 120.0  # until a launch reports that it has started
    hang_seconds: float = 120.0  # without a report; and at least so many times a step:
    hang_steps: float = 20.0
    progress_seconds: float = 10.0  # between events about progress
    silence_seconds: float = 10.0  # a node whose agent says nothing for so long is lost
    lock_seconds: float = 60.0  # for GPUs that the cluster has given to somebody else

    def of_job(self, job: TrainingJob) -> Patience:
        """The same with what the owner of a job says of it; a script may start as late as it likes.

        A silence that the owner allows is meant as it is, however long a step takes.
        """
        asked, start_seconds = job.patience, math.inf if job.is_command else self.start_seconds
        if asked.start_seconds is not None:
            start_seconds = asked.start_seconds
        found = replace(self, start_seconds=start_seconds)
        if asked.silence_seconds is not None:
            found = replace(found, hang_seconds=asked.silence_seconds, hang_steps=0.0)
        if asked.grace_seconds is not None:
            found = replace(found, grace_seconds=asked.grace_seconds)
        return found


@dataclass(slots=True)
class Run:
    """A launch that should be there."""

    order: LaunchOrder
    ordered_at: float  # by the monotonic clock; from when the lock is held, since then
    has_lock: bool = False
    progress: RunProgress = field(default_factory=RunProgress)
    written_seconds: float = 0.0  # when its progress was last written to the log
    written_step: int = -1
    written_checkpoint: int = -1
    exits: dict[int, int | None] = field(default_factory=dict)
    note: str = ""
    fault: Fault | None = None  # why we end it

    @property
    def key(self) -> Key:
        """Job and epoch."""
        return self.order.job_id, self.order.epoch


class Observation:
    """What all agents said in one round."""

    def __init__(self, poll: Poll) -> None:
        self.poll, self.silent = poll, poll.silent
        self.launches: dict[Key, list[Seen]] = {}
        for part in poll.launches:
            self.launches.setdefault((part.job_id, part.epoch), []).append(part)


class RoundWriter:
    """Writes to the log in one round: reports of progress are collected, and written together."""

    def __init__(self, journal: Journal, troubles: Troubles) -> None:
        self._journal, self._troubles = journal, troubles
        self._later: list[Event] = []

    def begin_round(self) -> None:
        """Drop what a round that failed has left: agents report it again."""
        self._later = []

    def write_later(self, events: Iterable[Event]) -> None:
        """Write these with the next commit, before its events."""
        self._later += events

    def commit(self, *events: Event) -> None:
        """Write these, after all that was put off."""
        later, self._later = self._later, []
        try:
            self._journal.commit([*later, *events])
        except (LeaseLost, StoreBusy):
            raise
        except Exception:
            if not later:
                raise
            # What one job reported may be what cannot be written: each by itself, then.
            for job_id in dict.fromkeys(job_of(event) for event in later):
                with self._troubles.guard(job_id):
                    self._journal.commit([event for event in later if job_of(event) == job_id])
            self._journal.commit(events)


class RunSupervisor:
    """Brings launches that should run one step further."""

    def __init__(
        self,
        journal: Journal,
        engine: Engine,
        folder: Path,
        patience: Patience,
        writer: RoundWriter,
        runs: dict[str, Run],
        owner_variables: Mapping[str, str],
        run_as: str,
    ) -> None:
        self._journal, self._engine, self._folder = journal, engine, folder
        self._patience, self._writer = patience, writer
        self._run_as = run_as  # an account, or "submitter"; empty: that of the service
        self._owner_variables = owner_variables  # that every job gets from who runs the service
        self._runs = runs  # by job; shared with the reconciler, which retires them

    def supervise(self, record: JobRecord, seen: Observation) -> None:
        """One step for a job that should run."""
        job_id = record.spec.id
        if job_id not in self._runs:
            order = self._find_order(record, seen)
            if order is None:
                return
            self._runs[job_id] = Run(order=order, ordered_at=time.monotonic())
        run = self._runs[job_id]
        parts = {part.node: part for part in seen.launches.get(run.key, ())}
        if run.has_lock or self._take_lock(run):
            # A node that was lost may be back, and still run what was there before.
            is_alone = not _runs_earlier(run.key, seen)
            for node in run.order.requests:
                if is_alone and node not in parts and node not in seen.silent:
                    self._launch(run, node)
        self._read_reports(record, run, parts.values())
        self._judge(record, run, parts)

    # --- ordering -------------------------------------------------------------------------------

    def _find_order(self, record: JobRecord, seen: Observation) -> LaunchOrder | None:
        """Decide once which rank runs where; None while that cannot be decided."""
        job_id, epoch = record.spec.id, record.num_starts
        if _runs_earlier((job_id, epoch), seen) or self._may_run_unseen(job_id, epoch, seen):
            return None
        path = self._folder / job_id / f"epoch-{epoch}" / "launch.json"
        order = load_order(path)
        if order is None:
            order = self._make_order(record, seen)
            if order is None:
                return None
            order.save(path)
        if self._journal.live.jobs[job_id].launched_epoch != epoch:
            # Also for an order that was saved before: what was to be written then may be lost.
            self._writer.commit(
                Launched(
                    time_seconds=self._journal.now(),
                    job_id=job_id,
                    epoch=epoch,
                    plan=order.plan,
                    devices=tuple((seat.node, seat.device) for seat in order.seats),
                )
            )
        return order

    def _may_run_unseen(self, job_id: str, epoch: int, seen: Observation) -> bool:
        """Whether the launch before this one was on a node that says nothing, and is not lost."""
        live, state = self._journal.live.jobs[job_id], self._journal.live.state
        lost = {state.nodes[row].id for row in state.lost}
        nodes = {node for node, _ in live.devices} if live.launched_epoch < epoch else set()
        return bool(nodes & (seen.silent - lost))

    def _make_order(self, record: JobRecord, seen: Observation) -> LaunchOrder | None:
        """None while devices or an agent are not there yet; what cannot be ordered ends the run."""
        job_id = record.spec.id
        trouble = self._journal.unplannable.by_job.get(job_id)
        if trouble is not None:
            now, reason = self._journal.now(), f"it cannot be planned: {trouble.text}"
            self._writer.commit(Stopped(time_seconds=now, job_id=job_id, reason=reason))
            return None
        try:
            launched = self._journal.live.jobs[job_id].launched_epoch
            check_checkpoints(self._folder / job_id, record, launched)
            return order_launch(
                self._journal,
                record,
                self._engine,
                busy=busy_devices(
                    seen.launches.values(), [run.order for run in self._runs.values()]
                ),
                folder=self._folder / job_id,
                lease_seconds=self._patience.lease_seconds,
                owner_variables=self._owner_variables,
                run_as=self._run_as,
            )
        except AgentGone:
            return None  # of the node where the ranks are to meet
        except NothingFits as error:
            fault = Fault(kind=FaultKind.OUT_OF_MEMORY, reason=str(error))
        except DrystoneError as error:
            fault = Fault(kind=FaultKind.USER_ERROR, reason=str(error))
        except OSError as error:
            fault = Fault(kind=FaultKind.DISK, reason=str(error))
        self._writer.commit(*ending_events(self._journal, record, fault, None))
        return None

    # --- starting -------------------------------------------------------------------------------

    def _take_lock(self, run: Run) -> bool:
        """Whether the GPUs are ours also in the eyes of the cluster."""
        gpus = {node: len(request["ranks"]) for node, request in run.order.requests.items()}
        try:
            run.has_lock = self._engine.reserve(run.key, gpus)
        except DrystoneError as error:
            kind = FaultKind.CRASH if isinstance(error, AgentGone) else FaultKind.USER_ERROR
            run.fault = run.fault or Fault(kind=kind, reason=str(error))
        waited = time.monotonic() - run.ordered_at
        if run.has_lock:
            run.ordered_at = time.monotonic()
        elif waited > self._patience.lock_seconds:
            reason = f"others hold the GPUs of {', '.join(gpus)}: no lock within {waited:.0f} s"
            run.fault = run.fault or Fault(kind=FaultKind.PREEMPTED, reason=reason)
        return run.has_lock

    def _launch(self, run: Run, node: str) -> None:
        try:
            self._engine.ask(node, "launch", **run.order.requests[node])
        except AgentGone:
            pass  # it is started again, and asked again
        except AgentRefused as error:
            if error.kind in (RefusalKind.BUSY, RefusalKind.NODE_LOST):
                return  # asked again until the devices are free, or the node is lost
            is_full = error.kind is RefusalKind.DISK_FULL
            kind = FaultKind.DISK if is_full else FaultKind.USER_ERROR
            run.fault = run.fault or Fault(kind=kind, reason=f"{node}: {error}")

    # --- listening ------------------------------------------------------------------------------

    def _read_reports(self, record: JobRecord, run: Run, parts: Iterable[Seen]) -> None:
        """Reports become progress; at checkpoints, and now and then, progress becomes events."""
        progress = run.progress
        for part in parts:
            run.exits.update(part.exits)
            run.note = run.note or part.note
            if part.reports:
                progress.read(part.reports, time.monotonic())
            progress.offset = max(progress.offset, part.offset)
        if progress.step < 0:
            return
        now = self._journal.now()
        is_first = run.written_step < 0
        is_saved = progress.checkpoint_step > run.written_checkpoint
        is_due = now - run.written_seconds >= self._patience.progress_seconds
        if not (is_first or is_saved or (is_due and progress.step > run.written_step)):
            return
        job_id, seconds = record.spec.id, progress.step_seconds
        if is_first:
            self._warn_of_lost_steps(job_id, run)
        speed = record.spec.global_batch / seconds if seconds > 0 else record.samples_per_second
        done = min(float(progress.step * record.spec.global_batch), record.spec.total_samples)
        lesson = speed_lesson(self._journal, record, speed if seconds > 0 else 0.0)
        lesson += pace_lesson(self._journal, record, progress)
        lesson += trial_lesson(self._journal, record, progress)
        lesson += peak_lesson(self._journal, record, progress)
        progressed = Progressed(
            time_seconds=now, job_id=job_id, done_samples=done, samples_per_second=speed
        )
        self._writer.write_later([progressed, *lesson])
        run.written_step, run.written_seconds = progress.step, now
        run.written_checkpoint = max(run.written_checkpoint, progress.checkpoint_step)

    def _warn_of_lost_steps(self, job_id: str, run: Run) -> None:
        """Say so where it begins before the step that it had come to."""
        first, before = run.progress.first_step, run.order.done_steps
        if 0 <= first < before:
            reason = f"it began again at step {first}; it had been at step {before}"
            if first == 0:
                reason += ": its checkpoints are gone, or it does not read or write any"
            if self._journal.live.jobs[job_id].reason != reason:  # by an earlier controller
                now = self._journal.now()
                self._writer.commit(Warned(time_seconds=now, job_id=job_id, reason=reason))

    # --- judging --------------------------------------------------------------------------------

    def _judge(self, record: JobRecord, run: Run, parts: Mapping[str, Seen]) -> None:
        """Whether the run has finished or failed, or must be ended."""
        job_id = record.spec.id
        codes = {rank: code for rank, code in run.exits.items() if code is not None}
        is_over = len(codes) == len(run.order.seats) and len(parts) == len(run.order.requests)
        has_failed = any(codes.values())
        live = self._journal.live.jobs[job_id]
        is_command = live.job.is_command
        # A script that was asked to leave, not by us, has not finished because it left well.
        has_left_early = "" if has_failed else left_early(record, run.progress, live)
        is_done = run.progress.is_finished or (is_command and not (run.note or has_left_early))
        if is_over and run.fault is None and not has_failed and is_done:
            self._writer.commit(Finished(time_seconds=self._journal.now(), job_id=job_id))
            return
        is_ended = run.fault is not None and all(part.is_over for part in parts.values())
        if is_over or is_ended:
            logs = read_log_ends(self._engine, run.order) if has_failed else {}
            fault = run.fault or judge(codes, logs, run.note or has_left_early)
            broken = fault.kind is FaultKind.HARDWARE and fault.rank >= 0
            node = run.order.seats[fault.rank].node if broken else ""
            self._writer.commit(
                *ending_events(self._journal, record, fault, run.progress, broken_node=node)
            )
            return
        run.fault = run.fault or silence_fault(run, self._patience.of_job(live.job))
        if run.fault is not None:
            self._stop(run, 0.0)
        elif has_failed:
            self._stop(run, 2.0)  # the others wait for a rank that will not come

    def _stop(self, run: Run, grace_seconds: float) -> None:
        job_id, epoch = run.key
        for node in run.order.requests:
            with suppress(AgentGone, AgentRefused):
                self._engine.ask(
                    node, "stop", job_id=job_id, epoch=epoch, grace_seconds=grace_seconds, note=""
                )


def _runs_earlier(key: Key, seen: Observation) -> bool:
    """Whether another launch of the job is seen to run: two must never run at the same time."""
    return any(
        other[0] == key[0] and other != key and not all(part.is_over for part in parts)
        for other, parts in seen.launches.items()
    )


def silence_fault(run: Run, patience: Patience) -> Fault | None:
    """Whether it has been silent for longer than the patience with this job."""
    progress = run.progress
    if progress.step < 0:
        waited = time.monotonic() - run.ordered_at
        if waited <= patience.start_seconds:
            return None
        return Fault(kind=FaultKind.HANG, reason=f"it did not start within {waited:.0f} s")
    seconds = progress.step_seconds
    limit = max(patience.hang_seconds, patience.hang_steps * seconds if seconds > 0 else 0.0)
    silent = time.monotonic() - progress.heard_seconds
    if silent <= limit:
        return None
    reason = f"no report for {silent:.0f} s after step {progress.step}"
    if progress.num_bad_reports:
        number = progress.num_bad_reports
        reason += f"; {number} could not be read, the last was {progress.bad_report}"
    return Fault(kind=FaultKind.HANG, reason=reason)
