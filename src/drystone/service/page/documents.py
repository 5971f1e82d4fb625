"""What do the views of the page show? Small documents, each just what one view needs.

A view asks again when something happened, at most once a second. What all viewers share is made
once for each state of the log and each second, so that fifty of them cost about as much as one.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from drystone.run.control.controller import Controller
from drystone.run.control.live_state import LiveJob
from drystone.run.lifecycle import JobState
from drystone.run.state import JobRecord
from drystone.service.answers import Forbidden, found
from drystone.service.page.curves import PriceHistory, life_of, read_curves, read_picture
from drystone.service.views import cluster_view, job_details, job_view, money_view

Table = dict[str, Any]
_MOST_RUNNING: Final = 12  # that the cluster's view lists
_MOST_POINTS: Final = 400  # of a job's curves
_MOST_KEPT: Final = 64  # documents

GROUPS: Final[Mapping[str, frozenset[JobState]]] = {
    "live": frozenset({JobState.RUNNING, JobState.QUEUED, JobState.PAUSED}),
    "running": frozenset({JobState.RUNNING}),
    "waiting": frozenset({JobState.QUEUED}),
    "paused": frozenset({JobState.PAUSED}),
    "done": frozenset({JobState.DONE}),
    "failed": frozenset({JobState.FAILED, JobState.REFUSED}),
    "cancelled": frozenset({JobState.CANCELLED}),
    "all": frozenset(JobState),
}
_RANK: Final = {JobState.RUNNING: 0, JobState.QUEUED: 1, JobState.PAUSED: 2}


class PageData:
    """The documents of the page over one controller."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.price_history = PriceHistory(controller.store)
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[tuple[int, int], bytes]] = {}

    def overview(self) -> bytes:
        """Nodes, devices and who has them; the largest that run; counts."""
        return self._shared("overview", self._make_overview)

    def prices(self, hours: float) -> bytes:
        """Worth and dollars by GPU type over the last hours."""
        return self._shared(
            f"prices {hours}",
            lambda: (
                self.price_history.view(self.controller.journal.now(), hours) | self._make_types()
            ),
        )

    def types(self) -> bytes:
        """GPU types in the order of the cluster, and which are emulated."""
        return self._shared("types", self._make_types)

    def jobs(self, group: str, search: str, *, most: int, skip: int) -> bytes:
        """One page of a list: what runs first, then the queue; what is over newest first."""
        key = f"jobs {group} {most} {skip} {search}"
        return self._shared(key, lambda: self._make_jobs(group, search, most, skip))

    def job(self, job_id: str) -> Table:
        """One job: its life for everybody; curves and plan for those who may see its details."""
        controller, journal = self.controller, self.controller.journal
        with journal.lock:
            now = journal.now()
            record = found(lambda: controller.find(job_id))
            shown = job_view(controller, record, now)
            gpus = {node.id: node.gpu for node in journal.live.state.nodes}
            try:
                details: Table | None = job_details(controller, record, now)
            except Forbidden:
                details = None
        lines = controller.store.read_lines(job_id=job_id)
        made = {
            "job": (details or shown) | {"timeline": life_of((one for _, one in lines), gpus)},
            "is_open": details is not None,
            "curves": {"launches": []},
            "plan": None,
            "types": self._make_types(),
            "now_seconds": now,
        }
        if details is not None:
            folder = controller.settings.folder
            launches = read_curves(folder, job_id, details, most=_MOST_POINTS)
            made["curves"] = {"launches": launches}
            if details["launches"]:
                made["plan"] = read_picture(folder, job_id, details["launches"][-1], gpus)
        return made

    # --- documents ------------------------------------------------------------------------------

    def _make_overview(self) -> Table:
        controller, journal = self.controller, self.controller.journal
        with journal.lock:
            now, live = journal.now(), journal.live
            view = cluster_view(controller, now) | money_view(controller, now)
            holders = [one for one in live.state.active.values() if one.num_gpus]
            largest = sorted(holders, key=lambda one: -one.num_gpus)[:_MOST_RUNNING]
            return view | {
                "held": {one.spec.id: _brief(live.jobs[one.spec.id]) for one in holders},
                "running": [job_view(controller, one, now) for one in largest],
                "counts": count_groups(live.state.jobs.values()),
                "policy": controller.settings.policy,
                "now_seconds": now,
                "sequence": journal.sequence,
            }

    def _make_types(self) -> Table:
        cluster, journal = self.controller.cluster, self.controller.journal
        return {
            "gpus": list(cluster.gpu_types),
            "emulated": sorted(cluster.emulations),
            "policy": self.controller.settings.policy,
            "now_seconds": journal.now(),
        }

    def _make_jobs(self, group: str, search: str, most: int, skip: int) -> Table:
        controller, journal = self.controller, self.controller.journal
        states, text = GROUPS[group], search.strip().lower()
        is_live = states <= GROUPS["live"]
        with journal.lock:
            now, live = journal.now(), journal.live
            pool = live.state.active if is_live else live.state.jobs
            matching = [
                one
                for one in (pool.values() if is_live else reversed(pool.values()))
                if one.state in states
                and (not text or _matches(live.jobs[one.spec.id], one.spec.id, text))
            ]
            if is_live:
                matching.sort(key=lambda one: _RANK[one.state])
            rows = [job_view(controller, one, now) for one in matching[skip : skip + most]]
            waiting = [
                one.spec.id for one in live.state.active.values() if one.state is JobState.QUEUED
            ]
            counts = count_groups(live.state.jobs.values())
            sequence = journal.sequence
        place = {job_id: number for number, job_id in enumerate(waiting, start=1)}
        for row in rows:
            row["why"] = reason_in_short(row, place.get(row["id"], 0), len(waiting), now)
        return {
            "jobs": rows,
            "total": len(matching),
            "counts": counts,
            "is_emulated": controller.cluster.is_emulated,
            "now_seconds": now,
            "sequence": sequence,
        }

    def _shared(self, key: str, make: Callable[[], Table]) -> bytes:
        """A document for everybody, made once for a state of the log and a second."""
        journal = self.controller.journal
        version = (journal.sequence, int(journal.now()))
        with self._lock:
            known = self._kept.get(key)
            if known is None or known[0] != version:
                text = json.dumps(make(), allow_nan=False, ensure_ascii=False)
                known = (version, text.encode("utf-8", errors="backslashreplace"))
                if len(self._kept) >= _MOST_KEPT:
                    self._kept.clear()
                self._kept[key] = known
        return known[1]


def reason_in_short(row: Table, place: int, num_waiting: int, now: float) -> str:
    """Why a job stands where it does, in a line; `why` has the whole answer."""
    if row["state"] != JobState.QUEUED.value:
        return str(row["reason"])
    if row["retry_seconds"]:
        return f"tried again in {max(1, round(row['retry_seconds'] - now))} s: {row['reason']}"
    if row["phase"] == "held":
        return str(row["reason"])
    before = f"; it had to give its GPUs back: {row['reason']}" if row["num_starts"] else ""
    return f"number {place} of {num_waiting} that wait for GPUs{before}"


def count_groups(records: Iterable[JobRecord]) -> dict[str, int]:
    """How many jobs each list has."""
    by_state = dict.fromkeys(JobState, 0)
    for one in records:
        by_state[one.state] += 1
    return {group: sum(by_state[one] for one in states) for group, states in GROUPS.items()}


def _brief(live: LiveJob) -> Table:
    return {"name": live.job.name, "owner": live.job.owner, "model": live.job.model}


def _matches(live: LiveJob, job_id: str, text: str) -> bool:
    job = live.job
    return text == job_id or any(text in one.lower() for one in (job.name, job.owner, job.model))
