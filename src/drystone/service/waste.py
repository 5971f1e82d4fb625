"""Who holds GPUs without using them, and what does that cost? Measured speed against estimate."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter, Response

from drystone.run.control.controller import Controller
from drystone.run.lifecycle import JobState
from drystone.run.state import JobRecord
from drystone.service.answers import answer_json
from drystone.service.auth.callers import VIEWER
from drystone.service.shapes import Shape

_STARTS_IN_SECONDS: Final = 300.0  # a run that has reported no step by then holds GPUs idle
_SLOW_SHARE: Final = 0.7  # of the estimated speed; estimates are seldom as far off


class Waste(Shape):
    """GPUs that somebody pays for and that do little or nothing."""

    job_id: str  # empty: nobody holds them
    name: str
    team: str
    gpu: str
    num_gpus: int
    unused_share: float
    dollars_per_hour: float  # of what is not used
    reason: str


class WasteList(Shape):
    """All of it, the dearest first."""

    rows: list[Waste]
    dollars_per_hour: float


def speed_share(controller: Controller, record: JobRecord) -> float | None:
    """Measured over estimated speed of a running job; None: one of them is not known."""
    journal, job_id = controller.journal, record.spec.id
    if record.state is not JobState.RUNNING or job_id in journal.unplannable.by_job:
        return None
    run = controller.reconciler.progress(job_id)
    if run is None or run.step < 0 or record.samples_per_second <= 0:
        return None
    job = journal.live.jobs[job_id].job
    estimated = journal.book.estimated_speed(job, journal.book.counts_of(job, record.option))
    return record.samples_per_second / estimated if estimated > 0 else None


def find_waste(controller: Controller) -> WasteList:
    """Jobs that hold GPUs and do not train, or far slower than they should; GPUs that are free."""
    journal = controller.journal
    live, now = journal.live, journal.now()
    rows = []
    for job_id, record in live.state.active.items():
        found = _unused(controller, record, now) if record.num_gpus else None
        if found is None:
            continue
        share, reason = found
        job = live.jobs[job_id]
        types = {live.state.nodes[row].gpu for row, _ in record.placement}
        rows.append(
            Waste(
                job_id=job_id,
                name=job.job.name,
                team=job.job.team,
                gpu=", ".join(sorted(types)),
                num_gpus=record.num_gpus,
                unused_share=share,
                dollars_per_hour=share * job.dollars_per_hour,
                reason=reason,
            )
        )
    rows += _free(controller)
    rows.sort(key=lambda row: -row.dollars_per_hour)
    return WasteList(rows=rows, dollars_per_hour=sum(row.dollars_per_hour for row in rows))


def _unused(controller: Controller, record: JobRecord, now: float) -> tuple[float, str] | None:
    run = controller.reconciler.progress(record.spec.id)
    held = now - record.started_seconds
    if (run is None or run.step < 0) and held > _STARTS_IN_SECONDS:
        return 1.0, f"no step in {held / 60:.0f} min"
    share = speed_share(controller, record)
    if share is not None and share < _SLOW_SHARE:
        return 1.0 - share, f"{share:.0%} of the estimated speed"
    return None


def _free(controller: Controller) -> list[Waste]:
    """GPUs that have a price and no job."""
    journal, free = controller.journal, dict[str, int]()
    for row, node in enumerate(journal.live.state.nodes):
        if row not in journal.live.state.gone and row not in journal.live.state.lost:
            free[node.gpu] = free.get(node.gpu, 0) + journal.free_gpus(row)
    prices = controller.cluster.dollars_per_gpu_hour
    return [
        Waste(
            job_id="",
            name="",
            team="",
            gpu=gpu,
            num_gpus=count,
            unused_share=1.0,
            dollars_per_hour=count * prices.get(gpu, 0.0),
            reason="nobody holds them",
        )
        for gpu, count in sorted(free.items())
        if count
    ]


def waste_routes(controller: Controller) -> APIRouter:
    """The one route."""
    router = APIRouter()

    @router.get("/v1/waste", dependencies=[VIEWER], response_model=WasteList, tags=["money"])
    def waste() -> Response:
        """GPUs that are held or paid for, and not used."""
        with controller.journal.lock:
            answer = find_waste(controller)
        return answer_json(answer)

    return router
