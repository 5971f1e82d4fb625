"""Which states a job goes through, as a table: what may happen to it, and where that leads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from drystone.errors import DrystoneError
from drystone.run.events import (
    Cancelled,
    Event,
    Failed,
    Finished,
    Interrupted,
    Paused,
    PhaseChanged,
    Progressed,
    Refused,
    SpeedChanged,
    Started,
    StartFailed,
    Stopped,
    Unpaused,
)


class JobState(StrEnum):
    """Where a job stands."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    DONE = "done"
    FAILED = "failed"
    REFUSED = "refused"
    CANCELLED = "cancelled"


TERMINAL: Final = frozenset({JobState.DONE, JobState.FAILED, JobState.REFUSED, JobState.CANCELLED})

TRANSITIONS: Final[Mapping[tuple[JobState, type[Event]], JobState]] = MappingProxyType(
    {
        (JobState.QUEUED, Started): JobState.RUNNING,
        (JobState.QUEUED, Refused): JobState.REFUSED,
        (JobState.QUEUED, Cancelled): JobState.CANCELLED,
        (JobState.RUNNING, SpeedChanged): JobState.RUNNING,
        (JobState.RUNNING, PhaseChanged): JobState.RUNNING,
        (JobState.RUNNING, Stopped): JobState.QUEUED,
        (JobState.RUNNING, Interrupted): JobState.QUEUED,
        (JobState.RUNNING, StartFailed): JobState.QUEUED,
        (JobState.RUNNING, Finished): JobState.DONE,
        (JobState.RUNNING, Cancelled): JobState.CANCELLED,
        (JobState.RUNNING, Failed): JobState.FAILED,
        (JobState.QUEUED, Failed): JobState.FAILED,
        (JobState.RUNNING, Progressed): JobState.RUNNING,
        (JobState.QUEUED, Progressed): JobState.QUEUED,
        (JobState.PAUSED, Progressed): JobState.PAUSED,
        (JobState.RUNNING, Paused): JobState.PAUSED,
        (JobState.QUEUED, Paused): JobState.PAUSED,
        (JobState.PAUSED, Unpaused): JobState.QUEUED,
        (JobState.PAUSED, Cancelled): JobState.CANCELLED,
        (JobState.PAUSED, Failed): JobState.FAILED,
    }
)


def moves_on(kind: type[Event]) -> dict[JobState, JobState]:
    """From which state to which a kind of event leads."""
    return {before: after for (before, one), after in TRANSITIONS.items() if one is kind}


class IllegalTransition(DrystoneError):
    """Something happened to a job that cannot happen in its state; tells its whole story."""

    def __init__(
        self, job_id: str, state: JobState, event: Event, history: Sequence[Event]
    ) -> None:
        story = "; ".join(f"{type(one).__name__} at {one.time_seconds:.0f} s" for one in history)
        super().__init__(
            f"job {job_id} is {state} and cannot take {type(event).__name__} "
            f"at {event.time_seconds:.0f} s. So far: {story or 'nothing'}"
        )


def next_state(
    job_id: str, state: JobState, event: Event, history: Sequence[Event] = ()
) -> JobState:
    """The state after an event; an event that is not in the table is an error."""
    after = TRANSITIONS.get((state, type(event)))
    if after is None:
        raise IllegalTransition(job_id, state, event, history)
    return after
