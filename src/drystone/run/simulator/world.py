"""A cluster in virtual time: the world behind `drystone simulate`.

Everything that happens is an event in `log`; the state is their fold (`run/state.py`). Decisions
are taken whenever something has happened, or, with `round_seconds`, at the next round boundary
(with `decides_every_round` at every one of them while there are jobs).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from drystone.describe.job import JobSpec
from drystone.describe.trace_cluster import NodeSpec
from drystone.errors import DrystoneError, InvalidSpec
from drystone.run.events import (
    Event,
    Finished,
    Interrupted,
    NodeBack,
    NodeLost,
    NodeSlowed,
    PhaseChanged,
    Refused,
    SpeedChanged,
    Started,
    StartFailed,
    Stopped,
    Submitted,
)
from drystone.run.lifecycle import JobState
from drystone.run.simulator.faults import Dice, FaultSpec
from drystone.run.simulator.queue import TimeQueue
from drystone.run.snapshots import SnapshotMaker
from drystone.run.state import ClusterState, JobRecord
from drystone.schedule.phases import Options
from drystone.schedule.snapshot import Placement, Snapshot, StartupCost


@dataclass(frozen=True, slots=True)
class _Arrival:
    job: JobSpec


@dataclass(frozen=True, slots=True)
class _End:
    """A job or its phase ends, or a start fails; void if the job was changed again since."""

    job_id: str
    version: int
    fails: bool = False
    is_phase: bool = False


@dataclass(frozen=True, slots=True)
class _NodeFault:
    kind: str  # lose, slow, mend or quicken
    node: int = -1


_Coming = _Arrival | _End | _NodeFault


class SimulatedWorld:
    """Jobs, nodes and faults in virtual time."""

    def __init__(
        self,
        *,
        jobs: Sequence[JobSpec],
        nodes: Sequence[NodeSpec],
        options_of: Callable[[JobSpec], Options],
        gpu_types: Sequence[str],
        startup: StartupCost | None = None,
        round_seconds: float = 0.0,
        decides_every_round: bool = False,
        horizon_seconds: float = math.inf,
        faults: FaultSpec | None = None,
        knows_lengths: bool = True,
        on_time: Callable[[float, int], None] | None = None,
    ) -> None:
        if not nodes:
            raise InvalidSpec("a cluster needs at least one node")
        self.log: list[Event] = []
        self.state = ClusterState(tuple(nodes))
        self.now_seconds = 0.0
        self._startup = startup or StartupCost()
        self._maker = SnapshotMaker(
            tuple(nodes),
            tuple(gpu_types),
            options_of,
            self._startup,
            knows_lengths=knows_lengths,
        )
        self._gpu_types = tuple(gpu_types)
        self._speed_factors: dict[str, dict[str, float]] = {}  # by job and GPU type
        self._round_seconds, self._horizon_seconds = round_seconds, horizon_seconds
        self._decides_every_round = decides_every_round
        self._coming: TimeQueue[_Coming] = TimeQueue()
        self._versions: dict[str, int] = {}
        self._dice = Dice(faults or FaultSpec())
        self._num_unsettled = self._num_to_come = len(jobs)
        self._on_time = on_time
        self._is_stuck = False
        for job in sorted(jobs, key=lambda one: one.submit_seconds):
            self._coming.push(job.submit_seconds, _Arrival(job))
        self._push_fault("lose")
        self._push_fault("slow")
        if jobs:
            self.advance()

    def has_work(self) -> bool:
        """Whether a job is unsettled, time is left, and something can still happen."""
        return (
            self._num_unsettled > 0
            and self.now_seconds < self._horizon_seconds
            and not self._is_stuck
        )

    def observe(self) -> Snapshot:
        """What is the case now."""
        return self._maker.make(self.state, self.now_seconds)

    def launch(self, job_id: str, option: int, placement: Placement, reason: str) -> None:
        """Start a waiting job."""
        record = self.state.jobs[job_id]
        speed = self._true_speed(record, option, placement)
        delay = record.spec.startup_seconds
        if delay < 0:
            num_gpus = sum(count for _, count in placement)
            delay = float(self._startup.seconds(np.array(num_gpus)))
        self._record(
            Started(
                time_seconds=self.now_seconds,
                job_id=job_id,
                option=option,
                placement=placement,
                samples_per_second=speed,
                productive_seconds=self.now_seconds + delay,
                reason=reason,
            )
        )
        self._push_end(record, fails=self._dice.start_fails())

    def stop(self, job_id: str, reason: str) -> None:
        """Take a running job's GPUs; its progress is kept."""
        self._record(Stopped(time_seconds=self.now_seconds, job_id=job_id, reason=reason))

    def refuse(self, job_id: str, reason: str) -> None:
        """Turn a waiting job away."""
        self._record(Refused(time_seconds=self.now_seconds, job_id=job_id, reason=reason))
        self._num_unsettled -= 1

    def rent(self, offer: str, num_nodes: int, reason: str) -> None:
        """Not yet: this world has a fixed set of nodes."""
        raise DrystoneError(f"the simulator cannot rent yet ({num_nodes} of {offer}: {reason})")

    def release(self, node: int, reason: str) -> None:
        """Not yet: this world has a fixed set of nodes."""
        raise DrystoneError(f"the simulator cannot release nodes yet ({node}: {reason})")

    def advance(self) -> None:
        """Jump to the next event, or to the first round boundary after it."""
        if self._waits_for_nothing():
            self._is_stuck = True
            return
        then = self._coming.next_seconds()
        if self._round_seconds > 0:
            then = math.ceil(then / self._round_seconds - 1e-9) * self._round_seconds
            if self._decides_every_round and self.state.active:
                then = min(then, self.now_seconds + self._round_seconds)
        then = min(then, self._horizon_seconds)
        while self._coming.next_seconds() <= then + 1e-9:
            time_seconds, item = self._coming.pop()
            self._happen(max(time_seconds, self.state.now_seconds), item)
        self.now_seconds = max(self.now_seconds, then)
        self.state.now_seconds = self.now_seconds
        if self._on_time is not None:
            self._on_time(self.now_seconds, self._num_unsettled)

    def _waits_for_nothing(self) -> bool:
        """Whether nobody runs, nobody will come, and no node is away: nothing will change."""
        return (
            self._num_to_come == 0
            and not self.state.lost
            and not any(job.option >= 0 for job in self.state.active.values())
        )

    def _record(self, event: Event) -> None:
        touched = self.state.record(event)
        self.log.append(event)
        if touched is not None:
            self._maker.update(touched)

    def _happen(self, time_seconds: float, item: _Coming) -> None:
        if isinstance(item, _Arrival):
            self._num_to_come -= 1
            factors = self._dice.speed_factors(len(self._gpu_types)).tolist()
            named = zip(self._gpu_types, factors, strict=True)
            self._speed_factors[item.job.id] = dict(named)
            self._record(Submitted(time_seconds=time_seconds, job=item.job))
        elif isinstance(item, _End):
            self._end(time_seconds, item)
        elif item.kind in ("lose", "slow"):
            self._strike(time_seconds, item.kind)
        elif item.kind == "mend":
            self._record(NodeBack(time_seconds=time_seconds, node=item.node))
        else:
            self._set_speed(time_seconds, item.node, 1.0)

    def _end(self, time_seconds: float, end: _End) -> None:
        record = self.state.jobs[end.job_id]
        is_void = self._versions[end.job_id] != end.version
        if is_void or record.state is not JobState.RUNNING:
            return
        if end.fails:
            self._record(
                StartFailed(time_seconds=time_seconds, job_id=end.job_id, reason="drawn fault")
            )
            return
        if end.is_phase:
            self._enter_next_phase(time_seconds, record)
            return
        self._record(Finished(time_seconds=time_seconds, job_id=end.job_id))
        self._num_unsettled -= 1

    def _push_end(self, record: JobRecord, *, fails: bool = False) -> None:
        job_id = record.spec.id
        version = self._versions[job_id] = self._versions.get(job_id, 0) + 1
        phase_end = self._maker.phase_end_samples(record.spec, record.phase)
        is_phase = phase_end < record.spec.total_samples
        end = record.counted_seconds
        if not fails:
            left = min(phase_end, record.spec.total_samples) - record.done_samples
            end += max(left, 0.0) / record.samples_per_second
        self._coming.push(end, _End(job_id, version, fails, is_phase))

    def _enter_next_phase(self, time_seconds: float, record: JobRecord) -> None:
        done = self._maker.phase_end_samples(record.spec, record.phase)
        phase = record.phase + 1
        self._record(
            PhaseChanged(
                time_seconds=time_seconds,
                job_id=record.spec.id,
                samples_per_second=self._true_speed(
                    record, record.option, record.placement, phase=phase
                ),
                phase=phase,
                done_samples=done,
            )
        )
        self._push_end(record)

    def _push_fault(self, kind: str) -> None:
        spec = self._dice.spec
        rate = spec.node_losses_per_hour if kind == "lose" else spec.node_slowdowns_per_hour
        if rate > 0:
            self._coming.push(self.now_seconds + self._dice.seconds_until(rate), _NodeFault(kind))

    def _strike(self, time_seconds: float, kind: str) -> None:
        """A node is lost or slowed, and the next such fault is drawn."""
        spec, node = self._dice.spec, self._dice.pick_node(len(self.state.nodes))
        rate = spec.node_losses_per_hour if kind == "lose" else spec.node_slowdowns_per_hour
        self._coming.push(time_seconds + self._dice.seconds_until(rate), _NodeFault(kind))
        if node in self.state.lost:
            return
        if kind == "slow":
            self._set_speed(time_seconds, node, spec.slow_speed_share)
            self._coming.push(time_seconds + spec.slow_seconds, _NodeFault("quicken", node))
            return
        for record in self._jobs_on(node):
            self._record(
                Interrupted(
                    time_seconds=time_seconds,
                    job_id=record.spec.id,
                    lost_samples=self._samples_since_checkpoint(record, time_seconds),
                    reason=f"node {self.state.nodes[node].id} was lost",
                )
            )
        self._record(NodeLost(time_seconds=time_seconds, node=node))
        self._coming.push(time_seconds + spec.repair_seconds, _NodeFault("mend", node))

    def _set_speed(self, time_seconds: float, node: int, share: float) -> None:
        self._record(NodeSlowed(time_seconds=time_seconds, node=node, speed_share=share))
        for record in self._jobs_on(node):
            speed = self._true_speed(record, record.option, record.placement)
            self._record(
                SpeedChanged(
                    time_seconds=time_seconds, job_id=record.spec.id, samples_per_second=speed
                )
            )
            self._push_end(record)

    def _samples_since_checkpoint(self, record: JobRecord, now_seconds: float) -> float:
        ran = max(0.0, now_seconds - record.counted_seconds)
        return record.samples_per_second * math.fmod(ran, self._dice.spec.checkpoint_seconds)

    def _jobs_on(self, node: int) -> list[JobRecord]:
        return [
            record
            for record in self.state.active.values()
            if any(one == node for one, _ in record.placement)
        ]

    def _true_speed(
        self, job: JobRecord, option: int, placement: Placement, phase: int | None = None
    ) -> float:
        """What the option says, times how wrong it is, times how slow the nodes are."""
        factors, shares, nodes = (
            self._speed_factors[job.spec.id],
            self.state.speed_share,
            self.state.nodes,
        )
        slowest = min(factors[nodes[node].gpu] * shares.get(node, 1.0) for node, _ in placement)
        now = job.phase if phase is None else phase
        return self._maker.speed(job.spec, option, now) * slowest
