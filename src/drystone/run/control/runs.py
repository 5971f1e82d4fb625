"""A launch that should be there, as it is known; and how long to wait for what."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from drystone.run.control.failures import Fault, FaultKind
from drystone.run.control.launches import LaunchOrder
from drystone.run.control.progress import RunProgress


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


@dataclass(slots=True)
class Run:
    """A launch that should be there."""

    order: LaunchOrder
    ordered: float  # by the monotonic clock
    has_lock: bool = False
    progress: RunProgress = field(default_factory=RunProgress)
    told_seconds: float = 0.0
    told_step: int = -1
    told_checkpoint: int = -1
    exits: dict[int, int | None] = field(default_factory=dict)
    note: str = ""
    fault: Fault | None = None  # why we end it


def silence_fault(run: Run, patience: Patience, *, is_command: bool) -> Fault | None:
    """Whether it has been silent for too long; a script need not say anything at all."""
    progress = run.progress
    if progress.step < 0:
        waited = time.monotonic() - run.ordered
        if is_command or waited <= patience.start_seconds:
            return None
        return Fault(kind=FaultKind.HANG, reason=f"it did not start within {waited:.0f} s")
    seconds = progress.step_seconds
    limit = max(patience.hang_seconds, patience.hang_steps * seconds if seconds > 0 else 0.0)
    silent = time.time() - progress.heard_seconds
    if silent <= limit:
        return None
    reason = f"no report for {silent:.0f} s after step {progress.step}"
    if progress.num_bad_reports:
        number = progress.num_bad_reports
        reason += f"; {number} could not be read, the last was {progress.bad_report}"
    return Fault(kind=FaultKind.HANG, reason=reason)
