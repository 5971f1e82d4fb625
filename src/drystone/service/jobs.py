"""Requests about jobs: plan, submit, list, look, change."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, Self

from fastapi import APIRouter, Body, Query
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response

from drystone.describe.job import TrainingJob, count_steps, make_spec
from drystone.errors import InvalidSpec, NothingFits
from drystone.run.control.admission import OverLimit, check_account, check_hard_cap
from drystone.run.control.controller import Controller
from drystone.run.lifecycle import TERMINAL, JobState
from drystone.schedule.limits import options_within
from drystone.service.answers import Conflict, answer_json, found
from drystone.service.auth.callers import SUBMITTER, VIEWER, caller_now, check_touch
from drystone.service.looks import LookPool
from drystone.service.shapes import (
    MAX_SEQUENCE,
    Failure,
    JobBody,
    JobId,
    Responses,
    Shape,
)
from drystone.service.uploads import Uploads
from drystone.service.views import Job, JobDetails, JobPage, Option, description_of, options_of
from drystone.service.why import Why, explain
from drystone.units import format_seconds

MAX_ROWS: Final = 100_000
PAGE_ROWS: Final = 5000  # the loop waits while a page is made; who asks for more is told to go on


class SubmittedJob(Shape):
    """A job that was accepted."""

    id: str
    is_new: bool


class Planned(Shape):
    """What submitting would do."""

    job: dict[str, Any]
    steps: int
    options: list[Option]
    chosen: Option
    num_waiting: int

    @classmethod
    def of(cls, controller: Controller, job: TrainingJob) -> Self:
        """What submitting a job would do; refused where none of its options could be chosen."""
        journal = controller.journal
        journal.book.check(job)
        shape = journal.book.shape(job)
        steps = count_steps(job, shape)
        left_samples = float(steps * job.global_batch)
        options = journal.book.options(job)
        # What the cap, its money or its time does not allow is said now, not when it waits.
        options = check_hard_cap(journal, job.name, options)
        shown = options_of(controller, job, left_samples)
        if not shown:
            raise NothingFits(f"{job.name}: no GPUs of this cluster suffice")
        within = options_within(
            make_spec(job, shape, job_id="planned", submit_seconds=0.0),
            options,
            journal.gpu_types,
            controller.cluster.dollars_per_gpu_hour,
        )
        usable = options_of(controller, job, left_samples, limit=len(within), allowed=within)
        active = journal.live.state.active.values()
        return cls(
            job=description_of(job),
            steps=steps,
            options=shown,
            chosen=next((option for option in usable if option.is_free), usable[0]),
            num_waiting=sum(record.state is JobState.QUEUED for record in active),
        )


class LogPart(Shape):
    """A stretch of a log."""

    text: str
    offset: int
    is_over: bool
    epoch: int


def job_routes(controller: Controller, uploads: Uploads) -> APIRouter:
    """All of them."""
    router = APIRouter(tags=["jobs"])
    _add_submission(router, controller, uploads)
    _add_again(router, controller)
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

    looks = LookPool(lambda: journal.book)

    async def looked_at(body: JobBody) -> TrainingJob:
        """The job, with what a look at its code and its data tells."""
        job = await run_in_threadpool(described, body)
        _refuse_past_deadline(job, journal.now())
        check_account(controller.settings.run_as, job)
        return await looks.look(job, caller_now().actor)

    def plan_now(job: TrainingJob) -> Response:
        with journal.lock:
            return answer_json(Planned.of(controller, job))

    @router.post(
        "/v1/plan",
        dependencies=[SUBMITTER],
        response_model=Planned,
        responses={409: {"model": Failure}},
    )
    async def plan(body: Annotated[JobBody, Body()]) -> Response:
        """What submitting would do; nothing is kept."""
        return await run_in_threadpool(plan_now, await looked_at(body))

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
    async def submit(body: Annotated[JobBody, Body()]) -> Response:
        """Submit a job. The same `client_key` never makes a second job."""
        caller, key = caller_now(), body.client_key
        if key and caller.token_id:
            # Keys are one's own: nobody learns of, or gets in the way of, another's jobs.
            key = hashlib.sha256(f"{caller.team}\n{caller.name}\n{key}".encode()).hexdigest()
        return await run_in_threadpool(_take_in, controller, await looked_at(body), key)


def _take_in(controller: Controller, job: TrainingJob, key: str) -> Response:
    try:
        with controller.journal.acting(caller_now().actor):
            job_id, is_new = controller.take_in(job, client_key=key)
    except OverLimit as error:
        raise Conflict(error.message, hint=error.hint) from None
    return answer_json(SubmittedJob(id=job_id, is_new=is_new), status=201 if is_new else 200)


def _add_again(router: APIRouter, controller: Controller) -> None:
    journal = controller.journal

    @router.post(
        "/v1/jobs/{job_id}/again",
        status_code=201,
        dependencies=[SUBMITTER],
        response_model=SubmittedJob,
        responses={404: {"model": Failure}, 409: {"model": Failure}},
    )
    def again(job_id: JobId) -> Response:
        """Submit the same job once more, as one of the caller's own; it begins from its start."""
        caller = caller_now()
        with journal.lock:
            found(lambda: controller.find(job_id))
            job = journal.live.jobs[job_id].job
            check_touch(job, job_id)
        _refuse_past_deadline(job, journal.now())
        if not caller.is_admin:
            job = dataclasses.replace(job, owner=caller.name, team=caller.team)
        return _take_in(controller, job, "")


def _refuse_past_deadline(job: TrainingJob, now: float) -> None:
    at = job.deadline_at_seconds
    if at is not None and at <= now:
        raise InvalidSpec(
            f"this deadline was {format_seconds(now - at)} ago",
            where="deadline",
            hint="A time without a zone is UTC; 6h means six hours from now",
        )


def _add_lists(router: APIRouter, controller: Controller) -> None:
    journal = controller.journal

    @router.get("/v1/jobs", dependencies=[VIEWER], response_model=JobPage)
    def jobs(
        state: Annotated[list[JobState] | None, Query()] = None,
        owner: Annotated[str, Query(max_length=80)] = "",
        name: Annotated[str, Query(max_length=80)] = "",
        team: Annotated[str, Query(max_length=80)] = "",
        newest: Annotated[bool, Query()] = False,
        most: Annotated[int, Query(ge=1, le=MAX_ROWS)] = 1000,
        skip: Annotated[int, Query(ge=0, le=MAX_SEQUENCE)] = 0,
    ) -> Response:
        """One page of jobs, by submission."""
        with journal.lock:
            now, live, states = journal.now(), journal.live, set(state or ())
            page_rows = min(most, PAGE_ROWS)
            pool = live.state.jobs if not states or states & TERMINAL else live.state.active
            records = pool.values() if not newest else reversed(pool.values())
            if states or owner or name or team:
                matching = [
                    record
                    for record in records
                    if (not states or record.state in states)
                    and (not owner or live.jobs[record.spec.id].job.owner == owner)
                    and (not name or live.jobs[record.spec.id].job.name == name)
                    and (not team or live.jobs[record.spec.id].job.team == team)
                ]
            else:
                matching = list(records)
            rows = [Job.of(controller, record, now) for record in matching[skip : skip + page_rows]]
            sequence = journal.sequence
        end = skip + len(rows)
        return answer_json(
            JobPage(
                jobs=rows,
                total=len(matching),
                next_skip=end if rows and end < len(matching) else None,
                now_seconds=now,
                sequence=sequence,
                is_emulated=controller.cluster.is_emulated,
            )
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
            details = JobDetails.of(controller, record, journal.now())
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
        offset: Annotated[int, Query(ge=0, le=MAX_SEQUENCE)] = 0,
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
        return answer_json(LogPart(text=text, offset=end, is_over=is_over, epoch=of_epoch))


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
            return answer_json(Job.of(controller, record, journal.now()))

    @router.post(
        "/v1/jobs/{job_id}/cancel", dependencies=[SUBMITTER], response_model=Job, responses=failures
    )
    def cancel(job_id: JobId) -> Response:
        """Cancel it."""
        return change(job_id, controller.cancel)

    @router.post(
        "/v1/jobs/{job_id}/pause", dependencies=[SUBMITTER], response_model=Job, responses=failures
    )
    def pause(job_id: JobId) -> Response:
        """Pause it; it waits until it is resumed."""
        return change(job_id, controller.pause)

    @router.post(
        "/v1/jobs/{job_id}/resume", dependencies=[SUBMITTER], response_model=Job, responses=failures
    )
    def resume(job_id: JobId) -> Response:
        """Let it run again."""
        return change(job_id, controller.resume)
