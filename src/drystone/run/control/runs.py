"""Launches that should run: ordered, locked, made, listened to, and judged when they end.

`RunSupervisor.supervise` is one step for one job, in that order. A launch is ordered in a file
before it is made, and agents make each only once, so a step may be cut off anywhere.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from drystone.errors import DrystoneError, NothingFits
from drystone.run.control.failures import (
    Fault,
    FaultKind,
    ending_events,
    judge,
    left_early,
    read_log_ends,
)
from drystone.run.control.handover import Handovers, running_launches
from drystone.run.control.journal import Journal
from drystone.run.control.launches import (
    LaunchOrder,
    busy_devices,
    check_checkpoints,
    load_order,
    order_launch,
)
from drystone.run.control.lessons import pace_lesson, peak_lesson, speed_lesson, trial_lesson
from drystone.run.control.notes import Launched, Warned
from drystone.run.control.round_writer import RoundWriter
from drystone.run.control.run import Observation, Patience, Run
from drystone.run.engines.agent.client import AgentGone, AgentRefused
from drystone.run.engines.agent.network import RefusalKind
from drystone.run.engines.contract import Engine, Key, Seen
from drystone.run.events import Finished, Progressed, Stopped
from drystone.run.state import JobRecord


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
        handovers: Handovers,
    ) -> None:
        self._handovers = handovers
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
        earlier = [key for key in running_launches(job_id, seen) if key != run.key]
        self._handovers.let_begin(run, earlier, seen)
        if run.has_lock or self._take_lock(run):
            # A node that was lost may be back, and still run what was there before.
            is_alone = run.order.replaces > 0 or not earlier
            for node in run.order.requests:
                if is_alone and node not in parts and node not in seen.silent:
                    self._launch(run, node)
        self._read_reports(record, run, parts.values())
        self._judge(record, run, parts)

    # --- ordering -------------------------------------------------------------------------------

    def _find_order(self, record: JobRecord, seen: Observation) -> LaunchOrder | None:
        """Decide once which rank runs where; None while that cannot be decided."""
        job_id, epoch = record.spec.id, record.num_starts
        earlier = [key for key in running_launches(job_id, seen) if key[1] != epoch]
        if self._may_run_unseen(job_id, epoch, seen):
            return None
        path = self._folder / job_id / f"epoch-{epoch}" / "launch.json"
        order = load_order(path)
        replaced = self._handovers.replaced_by_next(earlier)
        is_standby = replaced is not None if order is None else order.replaces > 0
        if earlier and not is_standby:
            return None  # two launches of one job must never train at the same time
        if order is None:
            order = self._make_order(record, seen, replaced)
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
                    replaces=order.replaces,
                )
            )
        return order

    def _may_run_unseen(self, job_id: str, epoch: int, seen: Observation) -> bool:
        """Whether a launch before this one was on a node that says nothing, and is not lost."""
        live, state = self._journal.live.jobs[job_id], self._journal.live.state
        if live.launched_epoch >= epoch:
            return False
        unknown = seen.silent - {state.nodes[row].id for row in state.lost}
        return any(node in unknown for node, _ in live.devices) or (
            self._handovers.may_run_unseen((job_id, live.launched_epoch), seen)
        )

    def _make_order(
        self, record: JobRecord, seen: Observation, replaced: Key | None
    ) -> LaunchOrder | None:
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
            others = [
                parts
                for key, parts in seen.launches.items()
                if key != replaced or not self._may_share(record, key)
            ]
            order = order_launch(
                self._journal,
                record,
                self._engine,
                busy=busy_devices(others, [run.order for run in self._runs.values()]),
                folder=self._folder / job_id,
                lease_seconds=self._patience.lease_seconds,
                owner_variables=self._owner_variables,
                run_as=self._run_as,
                replaces=0 if replaced is None else replaced[1],
            )
        except AgentGone:
            return None  # of the node where the ranks are to meet
        except NothingFits as error:
            fault = Fault(kind=FaultKind.OUT_OF_MEMORY, reason=str(error))
        except DrystoneError as error:
            fault = Fault(kind=FaultKind.USER_ERROR, reason=str(error))
        except OSError as error:
            fault = Fault(kind=FaultKind.DISK, reason=str(error))
        else:
            if order is None and replaced is not None:
                self._handovers.refuse(replaced, "the GPUs of the next launch are in use")
            return order
        self._writer.commit(*ending_events(self._journal, record, fault, None))
        return None

    def _may_share(self, record: JobRecord, replaced: Key) -> bool:
        """Whether two launches of a job may be on the same devices: those that are emulated.

        On a GPU, the state of the launch before leaves no room for that of the next one.
        """
        nodes, emulations = self._journal.live.state.nodes, self._journal.cluster.emulations
        is_emulated = all(nodes[row].gpu in emulations for row, _ in record.placement)
        return is_emulated and replaced not in self._engine.held()

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
