"""Launches that train on while the next one of their job comes up, and then hand over to it.

What is remembered here is how far each is; all of it can be found again from orders and agents, or
costs a checkpoint where it cannot. The rules that keep steps from being lost or done twice are
those of `run/succession.py`, and hold whatever is forgotten here.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from drystone.run.control.journal import Journal
from drystone.run.control.launches import load_order
from drystone.run.control.notes import Warned
from drystone.run.control.progress import RunProgress
from drystone.run.control.run import Observation, Patience, Run
from drystone.run.engines.contract import Key
from drystone.run.succession import Successor, let_begin, name_successor

_ORDER_SECONDS: Final = 10.0  # for the next launch to be ordered, and to get its lock


@dataclass(slots=True)
class Handover:
    """One launch that is to be replaced."""

    begun_at: float  # by the monotonic clock
    is_called: bool = False  # it was told its successor, and is asked to leave
    refusal: str = ""  # why it leaves by a checkpoint instead


class Handovers:
    """All of them; asked once a round for each launch that is not wanted any more."""

    def __init__(self, journal: Journal, folder: Path, patience: Patience) -> None:
        self._journal, self._folder, self._patience = journal, folder, patience
        self._by_launch: dict[Key, Handover] = {}

    def open(self) -> list[Key]:
        """Launches that train on: their leases are to be renewed."""
        return [key for key, one in self._by_launch.items() if not one.refusal]

    def forget(self, keys: Collection[Key]) -> None:
        """Launches of which nothing is left."""
        for key in self._by_launch.keys() & set(keys):
            del self._by_launch[key]

    def goes_on(self, key: Key, progress: RunProgress, run: Run | None, seen: Observation) -> bool:
        """Whether a launch trains on: the next one of its job is wanted, and comes up."""
        found = self._by_launch.setdefault(key, Handover(time.monotonic()))
        parts = seen.launches[key]
        has_ended = any(code is not None for part in parts for code in part.exits.values())
        if found.is_called or found.refusal or progress.step < 0 or progress.has_left or has_ended:
            return False
        reason = self._refusal(key[0], found, run)
        if reason:
            self.refuse(key, reason)
            return False
        if run is not None and run.progress.is_ready:
            self._call(key, run)
            found.is_called = True
        return not found.is_called

    def replaced_by_next(self, running: Sequence[Key]) -> Key | None:
        """The launch that the next one of its job can replace while it trains."""
        if len(running) != 1:
            return None
        found = self._by_launch.get(running[0])
        is_open = found is not None and not (found.is_called or found.refusal)
        return running[0] if is_open else None

    def refuse(self, key: Key, reason: str) -> None:
        """Let a launch leave by a checkpoint, and say why."""
        self._by_launch.setdefault(key, Handover(time.monotonic())).refusal = reason
        job_id = key[0]
        if self._journal.live.jobs[job_id].job.is_command:
            return  # scripts always do
        told = f"it is stopped and started again from a checkpoint: {reason}"
        now = self._journal.now()
        self._journal.commit([Warned(time_seconds=now, job_id=job_id, reason=told)])

    def let_begin(self, run: Run, running: Sequence[Key], seen: Observation) -> None:
        """Tell a standby once that nothing of the launch before it runs any more."""
        order = run.order
        if run.may_begin or not order.replaces or running:
            return
        if not self.may_run_unseen((order.job_id, order.replaces), seen):
            let_begin(self._folder / order.job_id, order.epoch)
            run.may_begin = True

    def may_run_unseen(self, key: Key, seen: Observation) -> bool:
        """Whether a launch was on a node that says nothing and is not lost, or one it replaced."""
        state = self._journal.live.state
        unknown = seen.silent - {state.nodes[row].id for row in state.lost}
        job_id, epoch = key
        while unknown and epoch:
            order = load_order(self._folder / job_id / f"epoch-{epoch}" / "launch.json")
            if order is None:
                return False
            if order.requests.keys() & unknown:
                return True
            epoch = order.replaces
        return False

    def _call(self, key: Key, run: Run) -> None:
        """Tell a launch who takes over; it is asked to leave in the same round."""
        job_id, epoch = key
        seat = run.order.seats[0]
        address = run.order.requests[seat.node]["environment"]["MASTER_ADDR"]
        name_successor(self._folder / job_id, epoch, Successor(run.order.epoch, address))
        job = self._journal.live.jobs[job_id].job
        # Its patience begins anew once the launch before it must have left.
        run.ordered_at = time.monotonic() + self._patience.of_job(job).grace_seconds

    def _refusal(self, job_id: str, found: Handover, run: Run | None) -> str:
        """Why a launch cannot hand over; empty where it can."""
        if self._journal.live.jobs[job_id].job.is_command:
            return "a script of one's own saves and loads by itself"
        waited = time.monotonic() - found.begun_at
        if run is None:
            is_late = waited > _ORDER_SECONDS
            return f"the next launch could not be ordered within {waited:.0f} s" if is_late else ""
        if run.fault is not None:
            return run.fault.reason
        if not run.order.replaces:
            return "the next launch was ordered to begin from one"
        if not run.has_lock and waited > _ORDER_SECONDS:
            return f"there was no lock on the next GPUs within {waited:.0f} s"
        return ""


def running_launches(job_id: str, seen: Observation) -> list[Key]:
    """All launches of a job of which something runs."""
    return [
        key
        for key, parts in seen.launches.items()
        if key[0] == job_id and not all(part.is_over for part in parts)
    ]
