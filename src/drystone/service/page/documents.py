"""Documents that the views of the page show: small, each just what one view needs.

A view asks again when something happened, at most once a second. What all viewers share is made
once for each state of the log and each second, so that fifty of them cost about as much as one.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from drystone.run.control.controller import Controller
from drystone.run.control.live_state import LiveJob, LiveState
from drystone.run.lifecycle import JobState
from drystone.run.state import JobRecord
from drystone.service.answers import Forbidden, found, to_json
from drystone.service.page.curves import PriceHistory, life_of, read_curves, read_picture
from drystone.service.views import Cluster, Job, JobDetails

Table = dict[str, Any]
_MAX_RUNNING: Final = 12  # that the cluster's view lists
_MAX_POINTS: Final = 400  # of a job's curves
_MAX_KEPT: Final = 64  # documents
_MAX_OWNERS: Final = 200  # that a list can be narrowed to

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

    def jobs(
        self, group: str, search: str, *, most: int, skip: int, sort: str = "", owner: str = ""
    ) -> bytes:
        """One page of a list: what runs first, then the queue; what is over newest first."""
        key = json.dumps(["jobs", group, most, skip, sort, owner, search])
        return self._shared(key, lambda: self._make_jobs(group, search, most, skip, sort, owner))

    def job(self, job_id: str) -> Table:
        """One job: its life for everybody; curves and plan for those who may see its details."""
        controller, journal = self.controller, self.controller.journal
        with journal.lock:
            now = journal.now()
            record = found(lambda: controller.find(job_id))
            shown = Job.of(controller, record, now)
            gpus = {node.id: node.gpu for node in journal.live.state.nodes}
            try:
                details: JobDetails | None = JobDetails.of(controller, record, now)
            except Forbidden:
                details = None
        lines = controller.store.read_lines(job_id=job_id)
        made = {
            "job": vars(details or shown)
            | {"timeline": life_of((line for _, line in lines), gpus)},
            "is_open": details is not None,
            "curves": {"launches": []},
            "plan": None,
            "types": self._make_types(),
            "now_seconds": now,
        }
        if details is not None:
            folder = controller.settings.folder
            launches = read_curves(folder, details, most=_MAX_POINTS)
            made["curves"] = {"launches": launches}
            if details.launches:
                made["plan"] = read_picture(folder, job_id, details.launches[-1], gpus)
        return made

    # --- documents ------------------------------------------------------------------------------

    def _make_overview(self) -> Table:
        controller, journal = self.controller, self.controller.journal
        with journal.lock:
            now, live = journal.now(), journal.live
            holders = [record for record in live.state.active.values() if record.num_gpus]
            largest = sorted(holders, key=lambda record: -record.num_gpus)[:_MAX_RUNNING]
            return vars(Cluster.of(controller, now)) | {
                "held": {record.spec.id: _brief(live.jobs[record.spec.id]) for record in holders},
                "running": [Job.of(controller, record, now) for record in largest],
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

    def _make_jobs(
        self, group: str, search: str, most: int, skip: int, sort: str, owner: str
    ) -> Table:
        controller, journal = self.controller, self.controller.journal
        states, text = GROUPS[group], search.strip().lower()
        is_live = states <= GROUPS["live"]
        with journal.lock:
            now, live = journal.now(), journal.live
            pool = live.state.active if is_live else live.state.jobs
            matching = [
                record
                for record in (pool.values() if is_live else reversed(pool.values()))
                if record.state in states
                and (not owner or live.jobs[record.spec.id].job.owner == owner)
                and (not text or _matches(live.jobs[record.spec.id], record.spec.id, text))
            ]
            if is_live:
                matching.sort(key=lambda record: _RANK[record.state])
            if sort:
                matching.sort(key=lambda record: _sort_key(sort, live, record, now))
            jobs = [Job.of(controller, record, now) for record in matching[skip : skip + most]]
            waiting = [
                record.spec.id
                for record in live.state.active.values()
                if record.state is JobState.QUEUED
            ]
            counts = count_groups(live.state.jobs.values())
            owners = sorted({live.jobs[job_id].job.owner for job_id in pool} - {""})
            sequence = journal.sequence
        place = {job_id: number for number, job_id in enumerate(waiting, start=1)}
        return {
            "jobs": [
                vars(job) | {"why": reason_in_short(job, place.get(job.id, 0), len(waiting), now)}
                for job in jobs
            ],
            "total": len(matching),
            "counts": counts,
            "owners": owners[:_MAX_OWNERS],
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
                known = (version, to_json(make()))
                if len(self._kept) >= _MAX_KEPT:
                    self._kept.clear()
                self._kept[key] = known
        return known[1]


def reason_in_short(job: Job, place: int, num_waiting: int, now: float) -> str:
    """Why a job stands where it does, in a line; `why` has the whole answer."""
    if job.state is not JobState.QUEUED:
        return job.reason
    if job.retry_seconds:
        return f"tried again in {max(1, round(job.retry_seconds - now))} s: {job.reason}"
    if job.phase == "held":
        return job.reason
    before = f"; it had to give its GPUs back: {job.reason}" if job.num_starts else ""
    return f"number {place} of {num_waiting} that wait for GPUs{before}"


def count_groups(records: Iterable[JobRecord]) -> dict[str, int]:
    """How many jobs each list has."""
    by_state = dict.fromkeys(JobState, 0)
    for record in records:
        by_state[record.state] += 1
    return {group: sum(by_state[state] for state in states) for group, states in GROUPS.items()}


def _sort_key(sort: str, live: LiveState, record: JobRecord, now: float) -> Any:
    """Names from A on; of numbers the largest first."""
    job = live.jobs[record.spec.id].job
    if sort == "name":
        return job.name
    if sort == "owner":
        return job.owner
    if sort == "gpus":
        return -record.num_gpus
    if sort == "cost":
        return -live.dollars_at(record.spec.id, now)
    return -record.done_samples / record.spec.total_samples


def _brief(live: LiveJob) -> Table:
    return {"name": live.job.name, "owner": live.job.owner, "model": live.job.model}


def _matches(live: LiveJob, job_id: str, text: str) -> bool:
    job = live.job
    return text == job_id or any(text in word.lower() for word in (job.name, job.owner, job.model))
