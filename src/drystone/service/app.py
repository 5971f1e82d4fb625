"""The HTTP API: strict bodies in, the shapes of docs/api.md out."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, Response

from drystone import __version__
from drystone.run.control.controller import Controller
from drystone.service.answers import add_answers
from drystone.service.auth.callers import VIEWER, Sessions
from drystone.service.auth.guard import Guard, HostRules
from drystone.service.auth.routes import people_routes
from drystone.service.cluster import cluster_routes
from drystone.service.feed import Feed
from drystone.service.jobs import job_routes
from drystone.service.money import money_routes
from drystone.service.page.routes import add_page
from drystone.service.prometheus import Metrics
from drystone.service.shapes import Failure, Responses
from drystone.service.uploads import Uploads
from drystone.service.waste import waste_routes

_FOLDER: Final = Path(__file__).parent / "swagger"
_KINDS: Final = {
    "swagger-ui.css": "text/css",
    "swagger-ui-bundle.js": "text/javascript",
    "start.js": "text/javascript",
    "LICENSE": "text/plain",
    "NOTICE": "text/plain",
}
_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Drystone: the API</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="stylesheet" href="/docs/swagger-ui.css"></head>
<body><div id="swagger-ui"></div>
<script src="/docs/swagger-ui-bundle.js"></script><script src="/docs/start.js"></script>
</body></html>
"""


def add_docs(app: FastAPI) -> None:
    """`/docs` and its files."""

    @app.get("/docs", include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse(_PAGE)

    @app.get("/docs/{name}", include_in_schema=False)
    def file(name: str) -> Response:
        if name not in _KINDS:
            return Response("there is no such file", status_code=404)
        return Response(_read(name), media_type=_KINDS[name])


def _folders_in_use(controller: Controller) -> frozenset[str]:
    """Of jobs that have not ended."""
    with controller.journal.lock:
        live = controller.journal.live
        return frozenset(live.jobs[job_id].job.folder for job_id in live.state.active)


@lru_cache(maxsize=len(_KINDS))
def _read(name: str) -> bytes:
    return (_FOLDER / name).read_bytes()


_FAILURES: Final[Responses] = {
    status: {"model": Failure, "description": told}
    for status, told in (
        (408, "The body was begun and not sent on"),
        (413, "The body is too large"),
        (421, "Not meant for this service, or from another site"),
        (422, "The request is wrong"),
        (429, "Too many requests"),
        (503, "The database is busy"),
    )
}
_REFUSALS: Final = {
    401: {"model": Failure, "description": "No token, or an unknown one"},
    403: {"model": Failure, "description": "The token does not allow it"},
}


def make_app(controller: Controller, host_rules: HostRules | None = None) -> FastAPI:
    """The application over a controller that runs in another thread."""
    host_rules = host_rules or HostRules()
    app = FastAPI(
        title="Drystone",
        version=__version__,
        description="Trains large models on whatever GPUs there are.",
        docs_url=None,
        redoc_url=None,
        responses=_FAILURES,
    )
    metrics, feed = Metrics(), Feed(controller)
    sessions = Sessions(controller.settings.folder)
    uploads = Uploads(
        controller.settings.folder / "uploads",
        host_rules.limits,
        lambda: _folders_in_use(controller),
    )
    app.state.feed = feed
    add_answers(app)
    app.include_router(job_routes(controller, uploads))
    app.include_router(
        cluster_routes(controller, feed, metrics, max_streams=host_rules.limits.max_streams)
    )
    app.include_router(people_routes(controller, sessions, uploads))
    app.include_router(money_routes(controller))
    app.include_router(waste_routes(controller))
    add_page(app, controller, readers=[VIEWER])
    add_docs(app)
    _describe_access(app, controller)
    app.add_middleware(
        Guard,
        access=lambda: controller.journal.live.access,
        sessions=sessions,
        host_rules=host_rules,
        metrics=metrics,
    )
    return app


def _describe_access(app: FastAPI, controller: Controller) -> None:
    """What OpenAPI says about tokens is what is so now: without any, none is needed."""
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        schema = describe()
        access = controller.journal.live.access
        operations = [
            operation
            for path in schema["paths"].values()
            for operation in path.values()
            if isinstance(operation, dict)
        ]
        for operation in operations:
            if "security" in operation:
                for status, told in _REFUSALS.items():
                    content = {"application/json": {"schema": _FAILURE_REFERENCE}}
                    operation["responses"].setdefault(
                        str(status), {"description": told["description"], "content": content}
                    )
        if access.needs_token:
            return schema
        paths = {
            name: {
                method: {key: one for key, one in operation.items() if key != "security"}
                for method, operation in path.items()
            }
            for name, path in schema["paths"].items()
        }
        return schema | {"paths": paths}

    app.openapi = openapi  # type: ignore[method-assign]


_FAILURE_REFERENCE: Final = {"$ref": "#/components/schemas/Failure"}
