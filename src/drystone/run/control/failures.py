"""Why did a run end, and what follows? Another try, another plan, or the end of the job.

Exit codes and the ends of logs are told apart so as to be treated apart.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from drystone.run.control.journal import Journal
from drystone.run.control.launches import LaunchOrder
from drystone.run.control.lessons import memory_lesson
from drystone.run.control.progress import RunProgress
from drystone.run.engines.agent.client import AgentGone, AgentRefused
from drystone.run.engines.agent.launches import LOST_EXIT
from drystone.run.engines.contract import Engine
from drystone.run.events import Event, Failed, Interrupted, Progressed
from drystone.run.fence import Fenced
from drystone.run.job_output import clean_text
from drystone.run.state import JobRecord

MOST_LINES: Final = 12
_LONGEST_LINE: Final = 300
_MAX_REASON_CHARS: Final = 5000


class FaultKind(StrEnum):
    """What kind of fault ended a run."""

    USER_ERROR = "user-error"  # the same would happen again
    OUT_OF_MEMORY = "out-of-memory"
    PREEMPTED = "preempted"  # somebody else asked it to leave
    NODE_LOST = "node-lost"
    HANG = "hang"
    CRASH = "crash"  # killed, or died of a signal
    NETWORK = "network"
    DISK = "disk"
    CLUSTER_CHANGED = "cluster-changed"


# How often a job may fail in this way without getting further, before it is given up. Faults of
# nodes and of others do not count against a job.
MOST_TRIES: Final[Mapping[FaultKind, int]] = {
    FaultKind.USER_ERROR: 1,
    FaultKind.OUT_OF_MEMORY: 4,
    FaultKind.HANG: 3,
    FaultKind.CRASH: 5,
    FaultKind.NETWORK: 5,
    FaultKind.DISK: 5,
}
_FIRST_WAIT_SECONDS: Final[Mapping[FaultKind, float]] = {
    FaultKind.OUT_OF_MEMORY: 0.0,  # another plan is tried, no need to wait
    FaultKind.PREEMPTED: 0.0,
    FaultKind.NODE_LOST: 0.0,
    FaultKind.CLUSTER_CHANGED: 0.0,
    FaultKind.DISK: 10.0,
}
_WAIT_SECONDS: Final = 2.0
_MOST_WAIT_SECONDS: Final = 300.0

_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|can't allocate memory|cannot allocate memory|"
    r"MemoryError|std::bad_alloc",
    re.IGNORECASE,
)
_DISK = re.compile(r"No space left on device|Disk quota exceeded", re.IGNORECASE)
_NETWORK = re.compile(
    r"Connection (?:closed|reset|refused|aborted)|connection was closed|address already in use|"
    r"EADDRINUSE|Timed out waiting|timed out after|Broken pipe|DistNetworkError|"
    r"NCCL (?:error|communicator)|Socket Timeout",
    re.IGNORECASE,
)
_SIGNALS: Final = {int(one): one.name for one in signal.Signals}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What ended a run, in a word and in a sentence."""

    kind: FaultKind
    reason: str

    def __post_init__(self) -> None:
        # Whatever a job or a node said: what is kept of it is printable, and not endless.
        object.__setattr__(self, "reason", clean_text(self.reason, _MAX_REASON_CHARS))


def judge(exits: Mapping[int, int], logs: Mapping[int, str], note: str = "") -> Fault:
    """The fault behind exit codes by rank; `logs` are the ends of the ranks' logs.

    When one rank fails the others fail for want of it, so the rank whose log does not only speak of
    lost connections is the one to blame.
    """
    bad = {rank: code for rank, code in exits.items() if code != 0}
    if not bad:
        return Fault(kind=FaultKind.PREEMPTED, reason=note or "it left before it had finished")
    if LOST_EXIT in bad.values():
        return Fault(kind=FaultKind.NODE_LOST, reason=note or "its node was lost")
    rank = min(bad, key=lambda one: (_suspicion(bad[one], logs.get(one, "")), one))
    code, log = bad[rank], logs.get(rank, "")
    kind = _kind(code, log)
    how = f"died of {_SIGNALS.get(-code, f'signal {-code}')}" if code < 0 else f"exit code {code}"
    lines = last_lines(log)
    told = f"rank {rank}: {how}" + (f" ({note})" if note else "")
    return Fault(kind=kind, reason=f"{told}\n{lines}" if lines else told)


def _kind(code: int, log: str) -> FaultKind:
    if _MEMORY.search(log):
        return FaultKind.OUT_OF_MEMORY
    if _DISK.search(log):
        return FaultKind.DISK
    if code == Fenced.exit_code:
        return FaultKind.PREEMPTED
    if code == -signal.SIGTERM:
        return FaultKind.PREEMPTED
    if code < 0:
        return FaultKind.CRASH
    if _NETWORK.search(log):
        return FaultKind.NETWORK
    return FaultKind.USER_ERROR


def _suspicion(code: int, log: str) -> int:
    """Smaller: rather the one to blame."""
    order = list(FaultKind)
    kind = _kind(code, log)
    if kind is FaultKind.NETWORK:
        return len(order)
    return 0 if kind in (FaultKind.OUT_OF_MEMORY, FaultKind.DISK) else 1


def last_lines(log: str, most: int = MOST_LINES) -> str:
    """The end of a log for people: no empty lines, none endless."""
    lines = [line.rstrip()[:_LONGEST_LINE] for line in clean_text(log).splitlines() if line.strip()]
    return "\n".join(lines[-most:])


def wait_seconds(kind: FaultKind, number: int) -> float:
    """How long to wait before trying again, after that many faults of the kind in a row."""
    first = _FIRST_WAIT_SECONDS.get(kind, _WAIT_SECONDS)
    return min(first * 2.0 ** max(0, number - 1), _MOST_WAIT_SECONDS)


def is_hopeless(kind: FaultKind, number: int) -> bool:
    """Whether a job that failed so often in this way is given up."""
    return number >= MOST_TRIES.get(kind, 1_000_000)


def ending_events(
    journal: Journal, record: JobRecord, fault: Fault, progress: RunProgress | None
) -> list[Event]:
    """How far it came, what was learned, and whether it is tried again."""
    job_id, now = record.spec.id, journal.now()
    events: list[Event] = []
    if fault.kind is FaultKind.OUT_OF_MEMORY and progress is not None:
        events += memory_lesson(journal, record)
    number = journal.live.jobs[job_id].faults.get(fault.kind.value, 0) + 1
    if is_hopeless(fault.kind, number):
        tries = f" (tried {number} times)" if number > 1 else ""
        reason = f"{fault.kind.value}{tries}: {fault.reason}"
        return [
            *events,
            Failed(time_seconds=now, job_id=job_id, reason=reason, kind=fault.kind.value),
        ]
    done, saved = record.done_samples, record.done_samples
    if progress is not None and progress.step >= 0:
        batch = record.spec.global_batch
        done = float(progress.step * batch)
        saved = float(max(progress.checkpoint_step, progress.first_step) * batch)
    return [
        *events,
        Progressed(time_seconds=now, job_id=job_id, done_samples=done),
        Interrupted(
            time_seconds=now,
            job_id=job_id,
            lost_samples=max(0.0, done - saved),
            reason=f"{fault.kind.value}: {fault.reason}",
            kind=fault.kind.value,
            retry_seconds=now + wait_seconds(fault.kind, number),
        ),
    ]


def read_log_ends(engine: Engine, order: LaunchOrder) -> dict[int, str]:
    """The end of what each rank wrote, without reports."""
    logs: dict[int, str] = {}
    for rank, seat in enumerate(order.seats):
        is_command = order.requests[seat.node].get("is_command")
        endings = ("out", "log") if is_command else ("log",)
        for name in [f"rank-{rank}.{ending}" for ending in endings]:
            with suppress(AgentGone, AgentRefused):
                found = engine.ask(
                    seat.node, "read_end", job_id=order.job_id, epoch=order.epoch, name=name
                )
                logs[rank] = logs.get(rank, "") + str(found["text"])
    return logs
