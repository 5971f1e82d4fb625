"""State of the cluster: a fold over events, so that the log replays to the same state.

Nothing else changes the state, so a world that keeps its log can be started again from it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from drystone.describe.cluster import NodeSpec
from drystone.describe.job import JobSpec
from drystone.errors import DrystoneError
from drystone.run.events import (
    BillSettled,
    Event,
    Finished,
    Interrupted,
    NodeAdded,
    NodeBack,
    NodeJoined,
    NodeLost,
    NodeReclaimed,
    NodeReleased,
    NodeRemoved,
    NodeSlowed,
    PhaseChanged,
    PriceChanged,
    Progressed,
    ReleaseAsked,
    RentalAsked,
    RentalFailed,
    SpeedChanged,
    Started,
    Submitted,
)
from drystone.run.lifecycle import (
    TERMINAL,
    TRANSITIONS,
    IllegalTransition,
    JobState,
    moves_on,
)
from drystone.run.rentals import RentalState
from drystone.schedule.snapshot import Placement

_NEVER: Final = math.nan
# Looked up once: a member of an enumeration takes longer to find than the rest of a fold's line.
_QUEUED: Final = JobState.QUEUED
_RUNNING: Final = JobState.RUNNING
_nowhere = partial(deque[Any], maxlen=0)  # takes all, and keeps nothing


@dataclass(init=False, eq=False, slots=True)
class JobRecord:
    """One job as the events left it; `ClusterState._submit` gives it its first values."""

    spec: JobSpec
    state: JobState
    option: int
    placement: Placement
    num_gpus: int
    done_samples: float  # up to `counted_seconds`
    counted_seconds: float
    samples_per_second: float
    started_seconds: float
    waiting_seconds: float  # since when it waits
    first_start_seconds: float
    end_seconds: float
    attained_gpu_seconds: float  # of the runs that ended
    num_starts: int
    num_changes: int  # how often it started, stopped, or went on at another speed
    phase: int  # which of its phases it is in, if it has any

    def done_at(self, now_seconds: float) -> float:
        """Samples done by now."""
        return self.done_samples + self.samples_per_second * max(
            0.0, now_seconds - self.counted_seconds
        )


@dataclass(slots=True)
class ClusterState:
    """Jobs, nodes and rentals, changed by events alone."""

    nodes: list[NodeSpec]  # a row each; that of a rented node which is gone may be used again
    now_seconds: float = 0.0
    jobs: dict[str, JobRecord] = field(default_factory=dict)
    active: dict[str, JobRecord] = field(default_factory=dict)  # waits or runs, by submission
    num_running: int = 0
    num_requeued: int = 0  # how often a job came back to wait
    free: list[int] = field(default_factory=list)  # GPUs by node
    lost: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)  # nodes that left for good; their rows stay
    closing: set[int] = field(default_factory=set)  # rented nodes that are being given back
    rentals: RentalState = field(default_factory=RentalState)
    num_node_changes: int = 0  # of which nodes there are and can be used
    speed_share: dict[int, float] = field(default_factory=dict)  # of nodes that are slow
    # For whoever keeps a log, or tables of the jobs: filled with every event.
    log: MutableSequence[Event] = field(default_factory=_nowhere, repr=False, compare=False)
    changed: MutableSequence[JobRecord] = field(default_factory=_nowhere, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.nodes = list(self.nodes)
        self.free = [node.num_gpus for node in self.nodes]

    def record(self, event: Event) -> JobRecord | None:
        """Fold one event into the state; returns the job that it touched."""
        return _FOLDS[type(event)](self, event)

    # What happens to every job, it comes, starts and ends, has a method each that does all there is
    # to do: a world of many jobs calls them by their names. All else goes the long way below.

    def submit(self, event: Submitted) -> JobRecord:
        """A job came in, and waits."""
        if event.time_seconds != self.now_seconds:
            self._move_clock(event)
        spec, jobs = event.job, self.jobs
        job_id = spec.id
        if job_id in jobs:
            raise DrystoneError(f"job {job_id} is submitted twice")
        # Filled in here: a constructor written in Python would cost more than the fields do.
        job = jobs[job_id] = self.active[job_id] = JobRecord()
        job.spec, job.waiting_seconds = spec, event.time_seconds
        job.state, job.option, job.placement = _QUEUED, -1, ()
        job.num_gpus = job.num_starts = job.num_changes = job.phase = 0
        job.done_samples = job.counted_seconds = job.samples_per_second = 0.0
        job.attained_gpu_seconds = 0.0
        job.started_seconds = job.first_start_seconds = job.end_seconds = _NEVER
        self.log.append(event)
        self.changed.append(job)
        return job

    def start(self, event: Started) -> JobRecord:
        """A waiting job got GPUs."""
        time_seconds, placement = event.time_seconds, event.placement
        if time_seconds != self.now_seconds:
            self._move_clock(event)
        job = self.jobs.get(event.job_id)
        if job is None or job.state is not _BEFORE_START:
            raise self._refusal(event)
        job.state = _AFTER_START
        free, num_gpus = self.free, 0
        for node, count in placement:
            num_gpus += count
            free[node] -= count
        job.option, job.placement, job.num_gpus = event.option, placement, num_gpus
        job.samples_per_second = event.samples_per_second
        job.counted_seconds = event.productive_seconds
        job.started_seconds, job.waiting_seconds = time_seconds, _NEVER
        if not job.num_starts:
            job.first_start_seconds = time_seconds
        job.num_starts += 1
        job.num_changes += 1
        self.num_running += 1
        self.log.append(event)
        self.changed.append(job)
        return job

    def finish(self, event: Finished) -> JobRecord:
        """A running job did all its work; its GPUs are free again."""
        time_seconds = event.time_seconds
        if time_seconds != self.now_seconds:
            self._move_clock(event)
        job = self.jobs.get(event.job_id)
        if job is None or job.state is not _BEFORE_FINISH:
            raise self._refusal(event)
        job.state = _AFTER_FINISH
        free, spec = self.free, job.spec
        for node, count in job.placement:
            free[node] += count
        job.attained_gpu_seconds += job.num_gpus * (time_seconds - job.started_seconds)
        job.done_samples = spec.total_samples
        job.option, job.placement, job.num_gpus, job.samples_per_second = -1, (), 0, 0.0
        job.started_seconds = _NEVER
        job.waiting_seconds = job.end_seconds = time_seconds
        self.num_running -= 1
        del self.active[spec.id]
        self.log.append(event)
        self.changed.append(job)
        return job

    def _record_other(self, event: Event) -> JobRecord | None:
        """The long way: all other kinds of events, by the tables at the end of this file."""
        self._move_clock(event)
        job: JobRecord | None = None
        change = _CHANGES.get(type(event))
        if change is not None:
            change(self, event)
        else:
            job = self._move_job(event)
        self.log.append(event)
        if job is not None:
            self.changed.append(job)
        return job

    def _move_job(self, event: Any) -> JobRecord:
        """Something happens to a job that is there."""
        job = self.jobs.get(event.job_id)
        after = TRANSITIONS.get((job.state, type(event))) if job is not None else None
        if job is None or after is None:
            raise self._refusal(event)
        job.state = after
        _JOB_CHANGES.get(type(event), ClusterState._leave)(self, job, event)
        return job

    def _move_clock(self, event: Event) -> None:
        """On to the time of an event; it never goes back, but for what rounding does."""
        time_seconds, now = event.time_seconds, self.now_seconds
        if time_seconds > now:
            self.now_seconds = time_seconds
        elif time_seconds < now - 1e-6:
            raise DrystoneError(f"{type(event).__name__} at {time_seconds} s comes after {now} s")

    def _refusal(self, event: Any) -> DrystoneError:
        """Why an event cannot happen to its job."""
        job = self.jobs.get(event.job_id)
        if job is None:
            return DrystoneError(f"{type(event).__name__}: there is no job {event.job_id!r}")
        history = [one for one in self.log if getattr(one, "job_id", "") == event.job_id]
        return IllegalTransition(event.job_id, job.state, event, history)

    def _change_rentals(
        self, event: RentalAsked | RentalFailed | PriceChanged | BillSettled
    ) -> None:
        if isinstance(event, RentalAsked):
            self.rentals.ask(event)
        elif isinstance(event, RentalFailed):
            self.rentals.fail(event)
        elif isinstance(event, PriceChanged):
            self.rentals.reprice(event)
        else:
            self.rentals.settle(event)

    def _change_node(
        self,
        event: NodeLost
        | NodeBack
        | NodeSlowed
        | NodeJoined
        | ReleaseAsked
        | NodeReleased
        | NodeReclaimed,
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
            if node not in self.closing:
                self.free[node] = self.nodes[node].num_gpus
        else:
            is_empty = self.free[node] == self.nodes[node].num_gpus
            if not (is_empty or node in self.lost or node in self.closing):
                raise DrystoneError(f"node {self.nodes[node].id} goes while jobs run on it")
            self._take_away(node, event)

    def _take_away(
        self, node: int, event: NodeLost | ReleaseAsked | NodeReleased | NodeReclaimed
    ) -> None:
        """A node, on which nobody runs, can be used no more."""
        self.free[node] = 0
        if isinstance(event, NodeLost):
            self.lost.add(node)
        elif isinstance(event, ReleaseAsked):
            self.rentals.check_rented(node)
            self.closing.add(node)
        else:
            is_reclaimed = isinstance(event, NodeReclaimed)
            self.rentals.leave(node, event.time_seconds, is_reclaimed=is_reclaimed)
            self.gone.add(node)
            self.lost.discard(node)
            self.closing.discard(node)
            self.speed_share.pop(node, None)

    def _join(self, event: NodeJoined) -> None:
        """A rented node gets a new row, or that of one which is gone."""
        self.rentals.join(event)
        self._take_row(event.node, event.spec)

    def _take_row(self, row: int, spec: NodeSpec) -> None:
        if row == len(self.nodes):
            self.nodes.append(spec)
            self.free.append(spec.num_gpus)
            return
        if row not in self.gone or self.nodes[row].gpu != spec.gpu:
            raise DrystoneError(f"node {spec.id} cannot have row {row}")
        self.gone.remove(row)
        self.nodes[row] = spec
        self.free[row] = spec.num_gpus

    def _add_node(self, event: NodeAdded) -> None:
        self.num_node_changes += 1
        self._take_row(event.node, event.spec)

    def _remove_node(self, event: NodeRemoved) -> None:
        row = event.node
        is_empty = row in self.lost or self.free[row] == self.nodes[row].num_gpus
        if row in self.gone or row in self.rentals.rented or not is_empty:
            raise DrystoneError(f"node {self.nodes[row].id} cannot leave: gone, rented or used")
        self.num_node_changes += 1
        self.free[row] = 0
        self.gone.add(row)
        self.lost.discard(row)
        self.speed_share.pop(row, None)

    def _change_speed(self, job: JobRecord, event: SpeedChanged) -> None:
        job.done_samples = job.done_at(event.time_seconds)
        job.counted_seconds = max(job.counted_seconds, event.time_seconds)
        job.samples_per_second = event.samples_per_second
        job.num_changes += 1
        if isinstance(event, PhaseChanged):
            job.phase, job.done_samples = event.phase, event.done_samples

    def _progress(self, job: JobRecord, event: Progressed) -> None:
        job.done_samples, job.counted_seconds = event.done_samples, event.time_seconds
        job.samples_per_second = event.samples_per_second

    def _leave(self, job: JobRecord, event: Event) -> None:
        """A job goes back to wait, or ends undone; if it had GPUs, they are free again."""
        time_seconds, state = event.time_seconds, job.state
        if job.option >= 0:
            self.num_running -= 1
            job.attained_gpu_seconds += job.num_gpus * (time_seconds - job.started_seconds)
            lost = event.lost_samples if isinstance(event, Interrupted) else 0.0
            job.done_samples = job.done_at(time_seconds) - lost
            for node, count in job.placement:
                self.free[node] += count
            job.option, job.placement, job.num_gpus, job.samples_per_second = -1, (), 0, 0.0
            job.started_seconds, job.waiting_seconds = _NEVER, time_seconds
            job.num_changes += 1
        if state is _QUEUED:
            self.num_requeued += 1
        elif state in TERMINAL:
            job.end_seconds = time_seconds
            del self.active[job.spec.id]


# From which state of a job to which: a start and an end have one way each in the table.
((_BEFORE_START, _AFTER_START),) = moves_on(Started).items()
((_BEFORE_FINISH, _AFTER_FINISH),) = moves_on(Finished).items()

# What folds which kind of event that is not about a job that is there.
_CHANGES: Final[dict[type[Event], Callable[[ClusterState, Any], None]]] = {
    NodeAdded: ClusterState._add_node,
    NodeRemoved: ClusterState._remove_node,
    **dict.fromkeys(
        (NodeLost, NodeBack, NodeSlowed, NodeJoined, ReleaseAsked, NodeReleased, NodeReclaimed),
        ClusterState._change_node,
    ),
    **dict.fromkeys(
        (RentalAsked, RentalFailed, PriceChanged, BillSettled), ClusterState._change_rentals
    ),
}

# What changes a job once its state is the next one; all other events end it, or let it wait again.
_JOB_CHANGES: Final[dict[type[Event], Callable[[ClusterState, JobRecord, Any], None]]] = {
    SpeedChanged: ClusterState._change_speed,
    PhaseChanged: ClusterState._change_speed,
    Progressed: ClusterState._progress,
}

_FOLDS: Final[dict[type[Event], Callable[[ClusterState, Any], JobRecord | None]]] = {
    **dict.fromkeys((*_CHANGES, *(kind for _, kind in TRANSITIONS)), ClusterState._record_other),
    Submitted: ClusterState.submit,
    Started: ClusterState.start,
    Finished: ClusterState.finish,
}


def replay(nodes: Sequence[NodeSpec], events: Iterable[Event]) -> ClusterState:
    """The state that a log leads to."""
    state = ClusterState(list(nodes))
    for event in events:
        state.record(event)
    return state
