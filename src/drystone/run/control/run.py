"""One launch that should be there, as the controller knows it, and how long it is waited for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from drystone.describe.job import TrainingJob
from drystone.run.control.failures import Fault
from drystone.run.control.launches import LaunchOrder
from drystone.run.control.progress import RunProgress
from drystone.run.engines.contract import Key, Poll, Seen


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
    may_begin: bool = False  # a standby was told that the launch before it is over
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
