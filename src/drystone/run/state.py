"""What is the state of the cluster? A fold over events: the log replays to the same state.

Nothing else changes the state, so a world that keeps its log can be started again from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from drystone.describe.job import JobSpec
from drystone.describe.trace_cluster import NodeSpec
from drystone.errors import DrystoneError
from drystone.run.events import (
    Event,
    Interrupted,
    NodeBack,
    NodeJoined,
    NodeLost,
    NodeReclaimed,
    NodeReleased,
    NodeSlowed,
    PhaseChanged,
    PriceChanged,
    Progressed,
    RentalAsked,
    RentalFailed,
    SpeedChanged,
    Started,
    Submitted,
)
from drystone.run.lifecycle import NEXT_STATES, TERMINAL, JobState, next_state
from drystone.run.rentals import RentalState
from drystone.schedule.snapshot import Placement


@dataclass(init=False, eq=False)
class JobRecord:
    """One job as the events left it. What no event has set yet is a default of the class."""

    spec: JobSpec
    state: JobState = JobState.QUEUED
    option: int = -1
    placement: Placement = ()
    num_gpus: int = 0
    done_samples: float = 0.0  # up to `counted_seconds`
    counted_seconds: float = 0.0
    samples_per_second: float = 0.0
    started_seconds: float = math.nan
    waiting_seconds: float = math.nan  # since when it waits
    first_start_seconds: float = math.nan
    end_seconds: float = math.nan
    attained_gpu_seconds: float = 0.0  # of the runs that ended
    num_starts: int = 0
    phase: int = 0  # which of its phases it is in, if it has any
    history: tuple[Event, ...] = ()

    def __init__(self, spec: JobSpec, waiting_seconds: float) -> None:
        self.spec, self.waiting_seconds = spec, waiting_seconds

    def done_at(self, now_seconds: float) -> float:
        """Samples done by now."""
        return self.done_samples + self.samples_per_second * max(
            0.0, now_seconds - self.counted_seconds
        )

    def attained_at(self, now_seconds: float) -> float:
        """GPU seconds held by now."""
        held = now_seconds - self.started_seconds if self.state is JobState.RUNNING else 0.0
        return self.attained_gpu_seconds + self.num_gpus * held


@dataclass(slots=True)
class ClusterState:
    """Jobs, nodes and rentals, changed by `record` alone."""

    nodes: list[NodeSpec]  # a row each; that of a rented node which is gone may be used again
    now_seconds: float = 0.0
    jobs: dict[str, JobRecord] = field(default_factory=dict)
    active: dict[str, JobRecord] = field(default_factory=dict)  # waits or runs, by submission
    num_running: int = 0
    num_requeued: int = 0  # how often a job came back to wait
    free: list[int] = field(default_factory=list)  # GPUs by node
    lost: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)  # rented nodes that left; their rows stay
    rentals: RentalState = field(default_factory=RentalState)
    num_node_changes: int = 0  # of which nodes there are and can be used
    speed_share: dict[int, float] = field(default_factory=dict)  # of nodes that are slow
    keeps_history: bool = False

    def __post_init__(self) -> None:
        self.nodes = list(self.nodes)
        self.free = [node.num_gpus for node in self.nodes]

    def record(self, event: Event) -> JobRecord | None:
        """Fold one event into the state; returns the job that it touched."""
        time_seconds = event.time_seconds
        if time_seconds > self.now_seconds:
            self.now_seconds = time_seconds
        elif time_seconds < self.now_seconds - 1e-6:
            raise DrystoneError(
                f"{type(event).__name__} at {time_seconds} s comes after {self.now_seconds} s"
            )
        fold = _FOLDS.get(type(event), ClusterState._change_job)
        return fold(self, event)

    def _submit(self, event: Submitted) -> JobRecord:
        job = event.job
        if job.id in self.jobs:
            raise DrystoneError(f"job {job.id} is submitted twice")
        record = JobRecord(job, event.time_seconds)
        self.jobs[job.id] = self.active[job.id] = record
        return record

    def _change_rentals(self, event: RentalAsked | RentalFailed | PriceChanged) -> None:
        if isinstance(event, RentalAsked):
            self.rentals.ask(event)
        elif isinstance(event, RentalFailed):
            self.rentals.fail(event)
        else:
            self.rentals.reprice(event)

    def _change_node(
        self, event: NodeLost | NodeBack | NodeSlowed | NodeJoined | NodeReleased | NodeReclaimed
    ) -> None:
        node = event.node
        if isinstance(event, NodeSlowed):
            self.speed_share[node] = event.speed_share
            return
        self.num_node_changes += 1
        if isinstance(event, NodeJoined):
            self._join(event)
        elif isinstance(event, NodeBack):
            self.lost.discard(node)
            self.free[node] = self.nodes[node].num_gpus
        else:
            if node not in self.lost and self.free[node] != self.nodes[node].num_gpus:
                raise DrystoneError(f"node {self.nodes[node].id} goes while jobs run on it")
            self.free[node] = 0
            if isinstance(event, NodeLost):
                self.lost.add(node)
            else:
                self.rentals.leave(node, event.time_seconds)
                self.gone.add(node)
                self.lost.discard(node)
                self.speed_share.pop(node, None)

    def _join(self, event: NodeJoined) -> None:
        """A rented node gets a new row, or that of one which is gone."""
        self.rentals.join(event)
        if event.node == len(self.nodes):
            self.nodes.append(event.spec)
            self.free.append(event.spec.num_gpus)
            return
        if event.node not in self.gone or self.nodes[event.node].gpu != event.spec.gpu:
            raise DrystoneError(f"node {event.spec.id} cannot have row {event.node}")
        self.gone.remove(event.node)
        self.nodes[event.node] = event.spec
        self.free[event.node] = event.spec.num_gpus

    def _job_after(self, event: Any) -> JobRecord:
        """The job that an event is about, in the state that it leads to."""
        try:
            job = self.jobs[event.job_id]
        except (AttributeError, KeyError):
            name = getattr(event, "job_id", "")
            raise DrystoneError(f"{type(event).__name__}: there is no job {name!r}") from None
        after = NEXT_STATES.get((job.state, type(event)))
        job.state = after or next_state(job.spec.id, job.state, event, job.history)
        if self.keeps_history:
            job.history = (*job.history, event)
        return job

    def _start(self, event: Started) -> JobRecord:
        job = self._job_after(event)
        job.option, job.placement = event.option, event.placement
        num_gpus, free = 0, self.free
        for node, count in event.placement:
            num_gpus += count
            free[node] -= count
        job.num_gpus = num_gpus
        job.samples_per_second = event.samples_per_second
        job.counted_seconds = event.productive_seconds
        job.started_seconds, job.waiting_seconds = event.time_seconds, math.nan
        job.num_starts += 1
        self.num_running += 1
        if job.num_starts == 1:
            job.first_start_seconds = event.time_seconds
        return job

    def _change_speed(self, event: SpeedChanged) -> JobRecord:
        job = self._job_after(event)
        job.done_samples = job.done_at(event.time_seconds)
        job.counted_seconds = max(job.counted_seconds, event.time_seconds)
        job.samples_per_second = event.samples_per_second
        if isinstance(event, PhaseChanged):
            job.phase, job.done_samples = event.phase, event.done_samples
        return job

    def _progress(self, event: Progressed) -> JobRecord:
        job = self._job_after(event)
        job.done_samples, job.counted_seconds = event.done_samples, event.time_seconds
        job.samples_per_second = event.samples_per_second
        return job

    def _change_job(self, event: Event) -> JobRecord:
        """A job ends, or goes back to wait; if it had GPUs, they are free again."""
        job = self._job_after(event)
        if job.option >= 0:
            self._stop(job, event)
        if job.state is JobState.QUEUED:
            self.num_requeued += 1
        elif job.state in TERMINAL:
            job.end_seconds = event.time_seconds
            del self.active[job.spec.id]
        return job

    def _stop(self, job: JobRecord, event: Event) -> None:
        time_seconds = event.time_seconds
        self.num_running -= 1
        job.attained_gpu_seconds += job.num_gpus * (time_seconds - job.started_seconds)
        if job.state is JobState.DONE:
            job.done_samples = job.spec.total_samples
        else:
            lost = event.lost_samples if isinstance(event, Interrupted) else 0.0
            job.done_samples = job.done_at(time_seconds) - lost
        free = self.free
        for node, count in job.placement:
            free[node] += count
        job.option, job.placement, job.num_gpus, job.samples_per_second = -1, (), 0, 0.0
        job.started_seconds, job.waiting_seconds = math.nan, time_seconds


# What folds which kind of event; whatever else there is ends a job or sends it back to wait.
_FOLDS: Final[dict[type[Event], Callable[[ClusterState, Any], JobRecord | None]]] = {
    Submitted: ClusterState._submit,
    Started: ClusterState._start,
    SpeedChanged: ClusterState._change_speed,
    PhaseChanged: ClusterState._change_speed,
    Progressed: ClusterState._progress,
    **dict.fromkeys(
        (NodeLost, NodeBack, NodeSlowed, NodeJoined, NodeReleased, NodeReclaimed),
        ClusterState._change_node,
    ),
    **dict.fromkeys((RentalAsked, RentalFailed, PriceChanged), ClusterState._change_rentals),
}


def replay(nodes: Sequence[NodeSpec], events: Iterable[Event]) -> ClusterState:
    """The state that a log leads to."""
    state = ClusterState(list(nodes))
    for event in events:
        state.record(event)
    return state
