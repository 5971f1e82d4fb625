"""Faults that end a run, and what follows: another try, another plan, or the end of the job.

Exit codes and the ends of logs are told apart so as to be treated apart.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from drystone.run.control.hardware import find_hardware_sign
from drystone.run.control.journal import Journal
from drystone.run.control.launches import LaunchOrder
from drystone.run.control.lessons import memory_lesson
from drystone.run.control.live_state import LiveJob
from drystone.run.control.notes import Drained
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
    HARDWARE = "hardware"  # a machine is broken, whatever runs on it
    DEVICE = "device-error"  # a GPU failed: its fault, or that of a kernel of the job
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
    FaultKind.HARDWARE: 3,
    FaultKind.DEVICE: 3,
}
# A job that has had so many nodes drained is itself the suspect when it names another.
MAX_NODES_BLAMED: Final = 2
_FIRST_WAIT_SECONDS: Final[Mapping[FaultKind, float]] = {
    FaultKind.OUT_OF_MEMORY: 0.0,  # another plan is tried, no need to wait
    FaultKind.PREEMPTED: 0.0,
    FaultKind.NODE_LOST: 0.0,
    FaultKind.CLUSTER_CHANGED: 0.0,
    FaultKind.HARDWARE: 0.0,  # the node is drained: it starts elsewhere
    FaultKind.DISK: 10.0,
}
_WAIT_SECONDS: Final = 2.0
_MOST_WAIT_SECONDS: Final = 300.0

_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|can't allocate memory|cannot allocate memory|"
    r"MemoryError|std::bad_alloc|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)
_DISK = re.compile(
    r"No space left on device|Disk quota exceeded|\[Errno 5\] Input/output error|"
    r"Stale file handle|Remote I/O error|Read-only file system|"
    r"Transport endpoint is not connected|Cannot send after transport endpoint shutdown",
    re.IGNORECASE,
)
_NETWORK = re.compile(
    r"Connection (?:closed|reset|refused|aborted)|connection was closed|address already in use|"
    r"EADDRINUSE|Timed out waiting|timed out after|Broken pipe|DistNetworkError|"
    r"NCCL (?:error|communicator|timeout)|Socket Timeout|collective operation timeout|"
    r"nccl(?:Remote|System|Internal)Error|unhandled system error|"
    r"NET/IB[^\n]{0,40}(?:Got completion|async (?:fatal )?event)|"
    r"ibv_\w+ failed|No route to host|Network is unreachable|Connection timed out",
    re.IGNORECASE,
)
# A process that loads data for the rank died as the rank itself might have.
_LOADER = re.compile(r"DataLoader worker \(pid[^\n]{0,40}\) is killed by signal")
_SIGNALS: Final = {int(number): number.name for number in signal.Signals}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What ended a run, in a word and in a sentence."""

    kind: FaultKind
    reason: str
    rank: int = -1  # the rank to blame; -1: none in particular

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
    rank = min(bad, key=lambda rank: (_suspicion(bad[rank], logs.get(rank, "")), rank))
    code, log = bad[rank], logs.get(rank, "")
    kind = _kind(code, log)
    how = f"died of {_SIGNALS.get(-code, f'signal {-code}')}" if code < 0 else f"exit code {code}"
    lines = last_lines(log)
    sign = find_hardware_sign(log)
    remarks = [remark for remark in (note, sign.meaning if sign else "") if remark]
    told = f"rank {rank}: {how}" + (f" ({'; '.join(remarks)})" if remarks else "")
    return Fault(kind=kind, reason=f"{told}\n{lines}" if lines else told, rank=rank)


def _kind(code: int, log: str) -> FaultKind:
    sign = find_hardware_sign(log)
    if sign is not None and sign.is_certain:
        return FaultKind.HARDWARE
    if _MEMORY.search(log):
        return FaultKind.OUT_OF_MEMORY
    if _DISK.search(log):
        return FaultKind.DISK
    if code == Fenced.exit_code:
        return FaultKind.PREEMPTED
    if code == -signal.SIGTERM:
        return FaultKind.PREEMPTED
    if sign is not None:
        return FaultKind.DEVICE
    # NCCL's watchdog aborts the process after a time-out; any other signal is a crash.
    if code < 0 and code != -signal.SIGABRT:
        return FaultKind.CRASH
    if _NETWORK.search(log):
        return FaultKind.NETWORK
    if code < 0 or _LOADER.search(log):
        return FaultKind.CRASH
    return FaultKind.USER_ERROR


def _suspicion(code: int, log: str) -> int:
    """Smaller: rather the one to blame."""
    order = (FaultKind.HARDWARE, FaultKind.OUT_OF_MEMORY, FaultKind.DISK, FaultKind.DEVICE)
    kind = _kind(code, log)
    if kind in order:
        return order.index(kind)
    return len(order) + (kind is FaultKind.NETWORK)


def last_lines(log: str, most: int = MOST_LINES) -> str:
    """The end of a log for people: no empty lines, none endless."""
    lines = [line.rstrip()[:_LONGEST_LINE] for line in clean_text(log).splitlines() if line.strip()]
    return "\n".join(lines[-most:])


def wait_seconds(kind: FaultKind, number: int) -> float:
    """How long to wait before trying again, after that many faults of the kind in a row."""
    first = _FIRST_WAIT_SECONDS.get(kind, _WAIT_SECONDS)
    if kind is FaultKind.PREEMPTED and number > 1:  # again, and it got no further in between
        first, number = _WAIT_SECONDS, number - 1
    return min(first * 2.0 ** max(0, number - 1), _MOST_WAIT_SECONDS)


def is_hopeless(kind: FaultKind, number: int) -> bool:
    """Whether a job that failed so often in this way is given up."""
    return number >= MOST_TRIES.get(kind, 1_000_000)


def ending_events(
    journal: Journal,
    record: JobRecord,
    fault: Fault,
    progress: RunProgress | None,
    broken_node: str = "",
) -> list[Event]:
    """How far it came, what was learned, and whether it is tried again.

    `broken_node` is the one whose hardware failed: nothing more is to start there. A job that
    drained two nodes before and names a third is given up instead: then it is not the machines.
    """
    job_id, now = record.spec.id, journal.now()
    events: list[Event] = []
    live = journal.live.jobs[job_id]
    if broken_node and broken_node not in live.blamed_nodes:
        if len(live.blamed_nodes) >= MAX_NODES_BLAMED:
            nodes = ", ".join((*live.blamed_nodes, broken_node))
            reason = f"{fault.kind.value} on {nodes}, so it is not the nodes: {fault.reason}"
            return [Failed(time_seconds=now, job_id=job_id, reason=reason, kind=fault.kind.value)]
        reason = fault.reason.splitlines()[0]
        events.append(Drained(time_seconds=now, node=broken_node, reason=reason, blamed_by=job_id))
    if fault.kind is FaultKind.OUT_OF_MEMORY and progress is not None:
        events += memory_lesson(journal, record)
    number = live.faults.get(fault.kind.value, 0) + 1
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


def left_early(record: JobRecord, progress: RunProgress, live: LiveJob) -> str:
    """Why a script that ended well has not finished: somebody else asked it to leave.

    A script that ends where it ended before means it, whether it began there or anew: it is done.
    """
    batch = record.spec.global_batch
    num_steps = math.ceil(record.spec.total_samples / batch)
    is_at_end = progress.step + max(1, progress.largest_stride) >= num_steps
    has_left_before = live.faults.get(FaultKind.PREEMPTED.value, 0) > 0
    ends_there_again = has_left_before and progress.step * batch == live.furthest_samples
    if progress.step <= progress.first_step or is_at_end or ends_there_again:
        return ""
    return (
        f"it left at step {progress.step} of {num_steps}, with exit code 0 and without a report "
        '{"event": "finished"}'
    )


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
