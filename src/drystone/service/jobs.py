"""Requests about jobs: plan, submit, list, look, change."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Body, Query
from fastapi.responses import Response

from drystone.describe.job import TrainingJob
from drystone.errors import InvalidSpec, NothingFits
from drystone.run.control.admission import OverLimit
from drystone.run.control.controller import Controller
from drystone.run.lifecycle import TERMINAL, JobState
from drystone.service.answers import Conflict, answer_json, found
from drystone.service.auth.callers import SUBMITTER, VIEWER, caller_now, check_touch
from drystone.service.shapes import (
    MOST_SEQUENCE,
    Failure,
    Job,
    JobBody,
    JobDetails,
    JobId,
    JobPage,
    LogPart,
    Planned,
    Responses,
    SubmittedJob,
    Why,
)
from drystone.service.uploads import Uploads
from drystone.service.views import job_details, job_view, plan_view
from drystone.service.why import explain

MOST_ROWS: Final = 100_000


def job_routes(controller: Controller, uploads: Uploads) -> APIRouter:
    """All of them."""
    router = APIRouter(tags=["jobs"])
    _add_submission(router, controller, uploads)
    _add_lists(router, controller)
    _add_single(router, controller)
    _add_changes(router, controller)
    return router


def _add_submission(router: APIRouter, controller: Controller, uploads: Uploads) -> None:
    journal = controller.journal

    def described(body: JobBody) -> TrainingJob:
        """The job, with an owner and a team that who asks can answer for."""
        caller = caller_now()
        folder = uploads.folder_of(caller, body.files) if body.files else None
        if caller.is_admin:
            journal.live.access.check_team(body.team)
            return dataclasses.replace(body.training_job(folder), team=body.team)
        job = body.training_job(folder or uploads.empty_folder(), caller.name)
        return dataclasses.replace(job, owner=caller.name, team=caller.team)

    @router.post(
        "/v1/plan",
        dependencies=[SUBMITTER],
        response_model=Planned,
        responses={409: {"model": Failure}},
    )
    def plan(body: Annotated[JobBody, Body()]) -> Response:
        """What submitting would do; nothing is kept."""
        job = journal.book.looked_at(described(body))
        with journal.lock:
            view = plan_view(controller, job)
        if not view["options"]:
            raise NothingFits(f"{job.name}: no GPUs of this cluster suffice")
        return answer_json(view)

    @router.post(
        "/v1/jobs",
        status_code=201,
        dependencies=[SUBMITTER],
        response_model=SubmittedJob,
        responses={
            200: {"model": SubmittedJob, "description": "The key was used before"},
            409: {"model": Failure},
        },
    )
    def submit(body: Annotated[JobBody, Body()]) -> Response:
        """Take a job in. The same `client_key` never makes a second job."""
        caller, key = caller_now(), body.client_key
        if key and caller.token_id:
            # Keys are one's own: nobody learns of, or gets in the way of, another's jobs.
            key = hashlib.sha256(f"{caller.team}\n{caller.name}\n{key}".encode()).hexdigest()
        job = described(body)
        try:
            with journal.acting(caller.actor):
                job_id, is_new = controller.submit(job, client_key=key)
        except OverLimit as error:
            raise Conflict(error.message, hint=error.hint) from None
        return answer_json({"id": job_id, "is_new": is_new}, status=201 if is_new else 200)


def _add_lists(router: APIRouter, controller: Controller) -> None:
    journal = controller.journal

    @router.get("/v1/jobs", dependencies=[VIEWER], response_model=JobPage)
    def jobs(
        state: Annotated[list[JobState] | None, Query()] = None,
        owner: Annotated[str, Query(max_length=80)] = "",
        team: Annotated[str, Query(max_length=80)] = "",
        newest: Annotated[bool, Query()] = False,
        most: Annotated[int, Query(ge=1, le=MOST_ROWS)] = 1000,
        skip: Annotated[int, Query(ge=0, le=MOST_SEQUENCE)] = 0,
    ) -> Response:
        """One page of jobs, by submission."""
        with journal.lock:
            now, live, states = journal.now(), journal.live, set(state or ())
            pool = live.state.jobs if not states or states & TERMINAL else live.state.active
            records = pool.values() if not newest else reversed(pool.values())
            if states or owner or team:
                matching = [
                    one
                    for one in records
                    if (not states or one.state in states)
                    and (not owner or live.jobs[one.spec.id].job.owner == owner)
                    and (not team or live.jobs[one.spec.id].job.team == team)
                ]
            else:
                matching = list(records)
            rows = [job_view(controller, one, now) for one in matching[skip : skip + most]]
            sequence = journal.sequence
        end = skip + len(rows)
        return answer_json(
            {
                "jobs": rows,
                "total": len(matching),
                "next_skip": end if rows and end < len(matching) else None,
                "now_seconds": now,
                "sequence": sequence,
                "is_emulated": controller.cluster.is_emulated,
            }
        )


def _add_single(router: APIRouter, controller: Controller) -> None:
    journal = controller.journal
    missing: Responses = {404: {"model": Failure}}

    @router.get(
        "/v1/jobs/{job_id}", dependencies=[VIEWER], response_model=JobDetails, responses=missing
    )
    def job(job_id: JobId) -> Response:
        """One job in full; for its team."""
        with journal.lock:
            record = found(lambda: controller.find(job_id))
            details = job_details(controller, record, journal.now())
        return answer_json(details)

    @router.get(
        "/v1/jobs/{job_id}/why", dependencies=[VIEWER], response_model=Why, responses=missing
    )
    def why(job_id: JobId) -> Response:
        """Why it waits, or why it got this; for its team."""
        return answer_json(found(lambda: explain(controller, job_id)))

    @router.get(
        "/v1/jobs/{job_id}/logs", dependencies=[VIEWER], response_model=LogPart, responses=missing
    )
    def logs(
        job_id: JobId,
        rank: Annotated[int, Query(ge=0, le=1_000_000)] = 0,
        epoch: Annotated[int, Query(ge=0, le=1_000_000)] = 0,
        offset: Annotated[int, Query(ge=0, le=MOST_SEQUENCE)] = 0,
        stream: Annotated[Literal["log", "out"], Query()] = "log",
    ) -> Response:
        """Lines of a log from an offset on; for its team."""
        with journal.lock:
            record = found(lambda: controller.find(job_id))
            check_touch(journal.live.jobs[job_id].job, job_id)
        text, end, of_epoch = controller.read_log(
            job_id, rank=rank, epoch=epoch, offset=offset, stream=stream
        )
        is_over = record.state in TERMINAL
        return answer_json({"text": text, "offset": end, "is_over": is_over, "epoch": of_epoch})


def _add_changes(router: APIRouter, controller: Controller) -> None:
    journal = controller.journal
    failures: Responses = {404: {"model": Failure}, 409: {"model": Failure}}

    def change(job_id: str, act: Callable[[str], None]) -> Response:
        with journal.acting(caller_now().actor):
            record = found(lambda: controller.find(job_id))
            check_touch(journal.live.jobs[job_id].job, job_id)
            try:
                act(job_id)
            except InvalidSpec as error:
                raise Conflict(error.message, hint=error.hint) from None
            return answer_json(job_view(controller, record, journal.now()))

    @router.post(
        "/v1/jobs/{job_id}/cancel", dependencies=[SUBMITTER], response_model=Job, responses=failures
    )
    def cancel(job_id: JobId) -> Response:
        """Take it back."""
        return change(job_id, controller.cancel)

    @router.post(
        "/v1/jobs/{job_id}/pause", dependencies=[SUBMITTER], response_model=Job, responses=failures
    )
    def pause(job_id: JobId) -> Response:
        """Let it wait."""
        return change(job_id, controller.pause)

    @router.post(
        "/v1/jobs/{job_id}/resume", dependencies=[SUBMITTER], response_model=Job, responses=failures
    )
    def resume(job_id: JobId) -> Response:
        """Let it run again."""
        return change(job_id, controller.resume)
