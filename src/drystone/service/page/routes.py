"""The page and its documents: static files from the package, and small JSON for the views."""

from __future__ import annotations

import hashlib
import mimetypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.responses import Response

from drystone.run.control.controller import Controller
from drystone.service.answers import answer_json
from drystone.service.page.documents import PageData
from drystone.service.shapes import MAX_SEQUENCE, Failure, JobId

_FOLDER: Final = Path(__file__).parent / "static"
_KINDS: Final = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
# Everything comes from here, nothing is written into the page, nobody may frame it.
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-cache",
}
Sort = Literal["", "name", "owner", "gpus", "progress", "cost"]
Group = Literal["live", "running", "waiting", "paused", "done", "failed", "cancelled", "all"]


@dataclass(frozen=True, slots=True)
class Asset:
    """One file of the page."""

    body: bytes
    media_type: str
    tag: str  # changes with the file


@lru_cache(maxsize=1)
def assets() -> dict[str, Asset]:
    """All files of the page, by name; only these can be asked for."""
    found = {}
    for path in sorted(_FOLDER.rglob("*")):
        if path.is_file() and not path.name.startswith("."):
            body = path.read_bytes()
            kind = _KINDS.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "text/plain"
            tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
            found[path.relative_to(_FOLDER).as_posix()] = Asset(body, kind, tag)
    return found


def add_page(app: FastAPI, controller: Controller, *, readers: Sequence[Any] = ()) -> None:
    """The page at `/`, its files under `/page`, its documents under `/v1/page`.

    `readers` are the dependencies that every request for data must pass. The files hold no data.
    """
    app.include_router(_files())
    app.include_router(_documents(PageData(controller)), dependencies=list(readers))


def _files() -> APIRouter:
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    def index(request: Request) -> Response:
        """The page itself."""
        return _answer(request, "index.html")

    @router.get("/page/{name:path}")
    def file(request: Request, name: str) -> Response:
        """One of its files."""
        return _answer(request, name)

    @router.get("/favicon.ico")
    def icon(request: Request) -> Response:
        """What browsers ask for unasked."""
        return _answer(request, "stones.svg")

    return router


def _answer(request: Request, name: str) -> Response:
    asset = assets().get(name)
    if asset is None:
        return Response("there is no such file", status_code=404, headers=_HEADERS)
    headers = {**_HEADERS, "ETag": asset.tag}
    if request.headers.get("if-none-match") == asset.tag:
        return Response(status_code=304, headers=headers)
    return Response(asset.body, media_type=asset.media_type, headers=headers)


def _documents(data: PageData) -> APIRouter:
    router = APIRouter(prefix="/v1/page", tags=["page"])

    @router.get("/overview")
    def overview() -> Response:
        """The cluster: nodes, devices and who has them, what runs, counts."""
        return _json(data.overview())

    @router.get("/jobs")
    def jobs(
        group: Annotated[Group, Query()] = "live",
        search: Annotated[str, Query(max_length=80)] = "",
        most: Annotated[int, Query(ge=1, le=200)] = 50,
        skip: Annotated[int, Query(ge=0, le=MAX_SEQUENCE)] = 0,
        sort: Annotated[Sort, Query()] = "",
        owner: Annotated[str, Query(max_length=80)] = "",
    ) -> Response:
        """One page of a list of jobs, each with its reason in short; how many each list has."""
        return _json(data.jobs(group, search, most=most, skip=skip, sort=sort, owner=owner))

    @router.get("/jobs/{job_id}", responses={404: {"model": Failure}})
    def job(job_id: JobId) -> Response:
        """One job with its life; for its team also with its curves and its plan."""
        return answer_json(data.job(job_id))

    @router.get("/prices")
    def prices(hours: Annotated[float, Query(gt=0, le=24 * 366)] = 24.0) -> Response:
        """What a GPU of each type was worth, and what it cost, over time."""
        return _json(data.prices(hours))

    @router.get("/types")
    def types() -> Response:
        """GPU types in the order of the cluster, and which are emulated."""
        return _json(data.types())

    return router


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
