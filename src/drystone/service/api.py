"""The HTTP API: strict bodies in, the shapes of docs/api.md out."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from fastapi import Body, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from drystone import __version__
from drystone.describe.job_file import make_job, parse_job
from drystone.describe.training_job import TrainingJob
from drystone.errors import DrystoneError, InvalidSpec, NothingFits, RequestError, UnknownName
from drystone.run.controller import Controller
from drystone.run.lifecycle import TERMINAL, JobState
from drystone.run.store import LeaseLost, StoreBusy
from drystone.service.views import cluster_view, job_details, job_view, plan_view
from drystone.service.why import explain

_LONGEST_WAIT: Final = 30.0
_MOST_EVENTS: Final = 10_000
_MOST_SEQUENCE: Final = 2**53


class NotFound(RequestError):
    """There is no such job or node."""


class Conflict(RequestError):
    """It cannot be done in this state."""


_STATUS: Final = (
    (NotFound, 404), (Conflict, 409), (NothingFits, 507), (StoreBusy, 503), (LeaseLost, 503),
    (RequestError, 422),
)  # fmt: skip


class JobBody(BaseModel):
    """A job to plan or to submit: a file's text, or its keys as a table."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text: str | None = Field(default=None, max_length=262_144)
    job: dict[str, Any] | None = None
    folder: str = Field(default="/", max_length=4096)
    owner: str = Field(default="", max_length=80)
    client_key: str = Field(default="", max_length=200)

    def training_job(self) -> TrainingJob:
        """The job, checked."""
        if (self.text is None) == (self.job is None):
            raise InvalidSpec("give either text or job")
        if "\0" in self.folder or not self.folder.startswith("/"):
            raise InvalidSpec("folder must be a whole path", where="folder")
        folder = Path(self.folder)
        if self.text is not None:
            return parse_job(self.text, folder=folder, owner=self.owner)
        return make_job(self.job or {}, folder=folder, owner=self.owner)


JobId = Annotated[str, Field(max_length=64)]


def make_app(controller: Controller) -> FastAPI:
    """The application over a controller that runs in another thread."""
    app = FastAPI(title="Drystone", version=__version__, docs_url="/docs", redoc_url=None)
    app.add_exception_handler(DrystoneError, _answer_error)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    _add_submission(app, controller)
    _add_jobs(app, controller)
    _add_changes(app, controller)
    _add_cluster(app, controller)
    return app


def _add_submission(app: FastAPI, controller: Controller) -> None:
    journal = controller.journal

    @app.post("/v1/plan")
    def plan(body: Annotated[JobBody, Body()]) -> Response:
        """What submitting would do; nothing is kept."""
        job = body.training_job()
        with journal.lock:
            view = plan_view(controller, job)
        if not view["options"]:
            raise NothingFits(f"{job.name}: no GPUs of this cluster suffice")
        return _json(view)

    @app.post("/v1/jobs", status_code=201)
    def submit(body: Annotated[JobBody, Body()]) -> Response:
        """Take a job in."""
        job_id, is_new = controller.submit(body.training_job(), client_key=body.client_key)
        return _json({"id": job_id, "is_new": is_new}, status=201 if is_new else 200)


def _add_jobs(app: FastAPI, controller: Controller) -> None:
    journal = controller.journal

    @app.get("/v1/jobs")
    def jobs(
        state: Annotated[list[JobState] | None, Query()] = None,
        owner: Annotated[str, Query(max_length=80)] = "",
        most: Annotated[int, Query(ge=1, le=100_000)] = 1000,
        skip: Annotated[int, Query(ge=0, le=_MOST_SEQUENCE)] = 0,
    ) -> Response:
        """Jobs by submission."""
        with journal.lock:
            now, states = journal.now(), set(state or ())
            found = [
                record
                for record in journal.live.state.jobs.values()
                if (not states or record.state in states)
                and (not owner or journal.live.jobs[record.spec.id].job.owner == owner)
            ]
            rows = [job_view(controller, one, now) for one in found[skip : skip + most]]
        return _json(
            {
                "jobs": rows,
                "total": len(found),
                "now_seconds": now,
                "sequence": journal.sequence,
                "is_emulated": controller.settings.cluster.is_emulated,
            }
        )

    @app.get("/v1/jobs/{job_id}")
    def job(job_id: JobId) -> Response:
        """One job in full."""
        with journal.lock:
            record = _found(lambda: controller.find(job_id))
            return _json(job_details(controller, record, journal.now()))

    @app.get("/v1/jobs/{job_id}/why")
    def why(job_id: JobId) -> Response:
        """Why it waits, or why it got this."""
        return _json(_found(lambda: explain(controller, job_id)))

    @app.get("/v1/jobs/{job_id}/logs")
    def logs(
        job_id: JobId,
        rank: Annotated[int, Query(ge=0, le=1_000_000)] = 0,
        epoch: Annotated[int, Query(ge=0, le=1_000_000)] = 0,
        offset: Annotated[int, Query(ge=0, le=_MOST_SEQUENCE)] = 0,
        stream: Annotated[Literal["log", "out"], Query()] = "log",
    ) -> Response:
        """Lines of a log from an offset on."""
        record = _found(lambda: controller.find(job_id))
        text, end, of_epoch = controller.read_log(
            job_id, rank=rank, epoch=epoch, offset=offset, stream=stream
        )
        is_over = record.state in TERMINAL
        return _json({"text": text, "offset": end, "is_over": is_over, "epoch": of_epoch})


def _add_changes(app: FastAPI, controller: Controller) -> None:
    journal = controller.journal

    def change(job_id: str, act: Callable[[str], None]) -> Response:
        with journal.lock:
            record = _found(lambda: controller.find(job_id))
            try:
                act(job_id)
            except InvalidSpec as error:
                raise Conflict(error.message, hint=error.hint) from None
            return _json(job_view(controller, record, journal.now()))

    @app.post("/v1/jobs/{job_id}/cancel")
    def cancel(job_id: JobId) -> Response:
        """Take it back."""
        return change(job_id, controller.cancel)

    @app.post("/v1/jobs/{job_id}/pause")
    def pause(job_id: JobId) -> Response:
        """Let it wait."""
        return change(job_id, controller.pause)

    @app.post("/v1/jobs/{job_id}/resume")
    def resume(job_id: JobId) -> Response:
        """Let it run again."""
        return change(job_id, controller.resume)

    @app.post("/v1/nodes/{node}/drain")
    def drain(node: JobId) -> Response:
        """Start nothing more there, and move away what runs."""
        return _json({"node": node, "moved": _found(lambda: controller.drain(node))})

    @app.post("/v1/nodes/{node}/undrain")
    def undrain(node: JobId) -> Response:
        """Use it again."""
        _found(lambda: controller.undrain(node))
        return _json({"node": node, "moved": []})


def _add_cluster(app: FastAPI, controller: Controller) -> None:
    journal = controller.journal

    @app.get("/v1/health")
    def health() -> Response:
        """Whether it works, and how well."""
        return _json(
            {
                "status": "ok" if not controller.last_error else "troubled",
                "version": __version__,
                "is_emulated": controller.settings.cluster.is_emulated,
                "policy": controller.settings.policy,
                "epoch": journal.lease.epoch,
                "last_sequence": journal.sequence,
                "decision_seconds": controller.decision_seconds,
                "last_error": controller.last_error,
                "now_seconds": journal.now(),
            }
        )

    @app.get("/v1/cluster")
    def cluster() -> Response:
        """Nodes, GPUs, money."""
        with journal.lock:
            return _json(cluster_view(controller, journal.now()))

    @app.get("/v1/events")
    def events(
        after: Annotated[int, Query(ge=0, le=_MOST_SEQUENCE)] = 0,
        job: Annotated[str, Query(max_length=64)] = "",
        most: Annotated[int, Query(ge=1, le=_MOST_EVENTS)] = 1000,
        wait: Annotated[float, Query(ge=0, le=_LONGEST_WAIT)] = 0.0,
    ) -> Response:
        """The log from a sequence number on."""
        deadline = time.monotonic() + wait
        with journal.lock:
            while journal.sequence <= after and (left := deadline - time.monotonic()) > 0:
                journal.changed.wait(left)
        lines = controller.store.read_log(after=after, job_id=job, most=most)
        rows = [{"sequence": one.sequence} | _shown(json.loads(one.body)) for one in lines]
        return _json({"events": rows, "last": lines[-1].sequence if lines else after})


def _shown(event: dict[str, Any]) -> dict[str, Any]:
    """An event without what may be secret: the values of a job's variables."""
    job = event.get("job")
    if isinstance(job, dict) and "environment" in job:
        job["environment"] = [name for name, _ in job["environment"]]
    return event


def _found(look: Callable[[], Any]) -> Any:
    try:
        return look()
    except UnknownName as error:
        raise NotFound(error.message, hint=error.hint) from None


def _json(value: Any, *, status: int = 200) -> Response:
    text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    return Response(text, status_code=status, media_type="application/json")


def _answer_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, DrystoneError)
    status = next((code for kind, code in _STATUS if isinstance(error, kind)), 500)
    return _error(type(error).__name__, error.message, error.where, error.hint, status)


def _answer_invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(one) for one in first["loc"])
    return _error("InvalidSpec", str(first["msg"]), where, "", 422)


def _error(kind: str, message: str, where: str, hint: str, status: int) -> Response:
    body = {"kind": kind, "message": message, "where": where, "hint": hint}
    return JSONResponse({"error": body}, status_code=status)
