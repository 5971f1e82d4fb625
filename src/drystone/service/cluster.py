"""Requests about the cluster and about the service itself: nodes, events, live state, health."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from fastapi import APIRouter, Header, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response, StreamingResponse

from drystone import __version__
from drystone.errors import DrystoneError
from drystone.run.control.controller import Controller
from drystone.service.answers import TooMany, answer_json, found
from drystone.service.auth.callers import ADMIN, VIEWER, caller_now
from drystone.service.feed import Feed, Happenings, events_for
from drystone.service.prometheus import CONTENT_TYPE, Metrics
from drystone.service.shapes import (
    MAX_SEQUENCE,
    Failure,
    JobId,
    Shape,
)
from drystone.service.views import Cluster

_MAX_WAIT: Final = 30.0
_MAX_EVENTS: Final = 10_000


class Moved(Shape):
    """A node that was drained, and who left it."""

    node: str
    moved: list[str]


class Health(Shape):
    """How the controller is."""

    status: Literal["ok", "troubled"]
    version: str
    is_emulated: bool
    policy: str
    epoch: int
    last_sequence: int
    decision_seconds: float
    last_error: str
    troubles: dict[str, str]  # store, disk, engine, provider: what cannot be used now, and why
    round_age_seconds: float  # since the loop completed a round
    num_jobs_put_aside: int  # that could not be looked after, and are tried again
    now_seconds: float


class Alive(Shape):
    """For probes."""

    status: str


def cluster_routes(
    controller: Controller, feed: Feed, metrics: Metrics, *, max_streams: int
) -> APIRouter:
    """All of them."""
    router = APIRouter()
    _add_cluster(router, controller)
    _add_events(router, controller, feed)
    _add_stream(router, controller, feed, metrics, max_streams)
    _add_health(router, controller, metrics)
    return router


def _add_cluster(router: APIRouter, controller: Controller) -> None:
    journal = controller.journal

    @router.get("/v1/cluster", dependencies=[VIEWER], response_model=Cluster, tags=["cluster"])
    def cluster() -> Response:
        """Nodes, GPUs, money."""
        with journal.lock:
            answer = Cluster.of(controller, journal.now())
        return answer_json(answer)

    @router.post(
        "/v1/nodes/{node}/drain",
        dependencies=[ADMIN],
        response_model=Moved,
        responses={404: {"model": Failure}},
        tags=["cluster"],
    )
    def drain(node: JobId) -> Response:
        """Start nothing more there, and move away what runs."""
        with journal.acting(caller_now().actor):
            moved = found(lambda: controller.drain(node))
        return answer_json(Moved(node=node, moved=moved))

    @router.post(
        "/v1/nodes/{node}/undrain",
        dependencies=[ADMIN],
        response_model=Moved,
        responses={404: {"model": Failure}},
        tags=["cluster"],
    )
    def undrain(node: JobId) -> Response:
        """Use it again."""
        with journal.acting(caller_now().actor):
            found(lambda: controller.undrain(node))
        return answer_json(Moved(node=node, moved=[]))


def _add_events(router: APIRouter, controller: Controller, feed: Feed) -> None:
    journal, store = controller.journal, controller.store

    def read(after: int, job: str, most: int, newest: bool) -> tuple[list[dict[str, object]], int]:
        """Events, and the sequence number from which to ask on."""
        last = journal.sequence  # before reading: what comes in between is read again
        lines = store.read_log(after=after, job_id=job, most=most, is_newest=newest)
        if lines and (newest or len(lines) == most):
            last = lines[-1].sequence
        return events_for(controller, caller_now(), lines), max(after, last)

    @router.get("/v1/events", dependencies=[VIEWER], response_model=Happenings, tags=["events"])
    async def events(
        after: Annotated[int, Query(ge=0, le=MAX_SEQUENCE)] = 0,
        job: Annotated[str, Query(max_length=64)] = "",
        most: Annotated[int, Query(ge=1, le=_MAX_EVENTS)] = 1000,
        wait: Annotated[float, Query(ge=0, le=_MAX_WAIT)] = 0.0,
        newest: Annotated[bool, Query()] = False,
    ) -> Response:
        """The log from a sequence number on; with `wait`, until there is something to tell."""
        loop_time = feed.clock()
        deadline, seen = loop_time() + wait, after
        while True:
            rows, last = await run_in_threadpool(read, after, job, most, newest)
            left = deadline - loop_time()
            if rows or left <= 0 or feed.is_closing:
                return answer_json({"events": rows, "last": last})
            seen = max(seen, last)
            await feed.wait(seen, left)

    @router.get("/v1/audit", dependencies=[ADMIN], response_model=Happenings, tags=["people"])
    def audit(
        after: Annotated[int, Query(ge=0, le=MAX_SEQUENCE)] = 0,
        most: Annotated[int, Query(ge=1, le=1000)] = 100,
        newest: Annotated[bool, Query()] = True,
    ) -> Response:
        """What people did."""
        lines = store.read_log(after=after, most=most, is_newest=newest, by_people=True)
        rows = events_for(controller, caller_now(), lines)
        return answer_json({"events": rows, "last": lines[-1].sequence if lines else after})


def _add_stream(
    router: APIRouter, controller: Controller, feed: Feed, metrics: Metrics, max_streams: int
) -> None:
    access = controller.journal.live.access

    @router.get(
        "/v1/stream",
        dependencies=[VIEWER],
        response_class=StreamingResponse,
        responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
        tags=["events"],
    )
    async def stream(
        request: Request,
        after: Annotated[int | None, Query(ge=0, le=MAX_SEQUENCE)] = None,
        last_event_id: Annotated[str, Header(max_length=20)] = "",
    ) -> Response:
        """Live state as server-sent events; goes on after `Last-Event-ID`."""
        del request
        if feed.num_listeners >= max_streams:
            raise TooMany("too many connections listen already", retry_seconds=10.0)
        token_id = caller_now().token_id
        begun = int(last_event_id) if last_event_id.isascii() and last_event_id.isdigit() else after

        def is_welcome() -> bool:
            metrics.num_streams = feed.num_listeners
            return not token_id or access.live(token_id) is not None

        return StreamingResponse(
            feed.listen(begun, is_welcome),
            media_type="text/event-stream",
            headers={"X-Accel-Buffering": "no"},
        )


def _brief(reason: str) -> str:
    """Without what somebody else's message adds: anybody may read it."""
    return reason.partition("\n")[0].partition(": ")[0][:200]


def _add_health(router: APIRouter, controller: Controller, metrics: Metrics) -> None:
    journal = controller.journal

    @router.get("/v1/health", dependencies=[VIEWER], response_model=Health, tags=["service"])
    def health() -> Response:
        """Whether it works, and how well."""
        dead = controller.health.why_dead()
        return answer_json(
            Health(
                status="troubled" if controller.last_error or dead else "ok",
                version=__version__,
                is_emulated=controller.cluster.is_emulated,
                policy=controller.settings.policy,
                epoch=journal.lease.epoch,
                last_sequence=journal.sequence,
                decision_seconds=controller.decision_seconds,
                last_error=controller.last_error or dead,
                troubles=controller.troubles(),
                round_age_seconds=controller.health.round_age_seconds,
                num_jobs_put_aside=len(controller.reconciler.troubles.by_job),
                now_seconds=journal.now(),
            )
        )

    @router.get(
        "/healthz", response_model=Alive, responses={503: {"model": Alive}}, tags=["service"]
    )
    async def healthz() -> Response:
        """Whether the loop goes on; for probes, without a token."""
        reason = "leaving" if controller.world.is_leaving else controller.health.why_dead()
        return answer_json(Alive(status=reason or "ok"), status=503 if reason else 200)

    @router.get(
        "/readyz", response_model=Alive, responses={503: {"model": Alive}}, tags=["service"]
    )
    async def readyz() -> Response:
        """Whether jobs can be taken in and run: store, disk, engine, provider; without a token."""
        # As the loop found them: probes wait neither for a database nor for a free thread.
        troubles = controller.troubles()
        if not controller.health.is_watched:
            try:
                await run_in_threadpool(controller.store.last_sequence)
            except DrystoneError:
                troubles["store"] = "the database cannot be read"
        told = "; ".join(f"{part}: {_brief(reason)}" for part, reason in troubles.items())
        return answer_json(Alive(status=told or "ok"), status=503 if told else 200)

    @router.get(
        "/metrics",
        dependencies=[VIEWER],
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
        tags=["service"],
    )
    def numbers() -> Response:
        """For Prometheus."""
        return Response(metrics.render(controller), headers={"Content-Type": CONTENT_TYPE})
