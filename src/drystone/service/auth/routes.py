"""Requests about people: sessions, tokens, teams, spending, and the files they bring."""

from __future__ import annotations

import dataclasses
import time
from typing import Annotated, Final

from fastapi import APIRouter, Body, Query, Request
from fastapi.responses import Response

from drystone.errors import DrystoneError, UnknownName
from drystone.run.control.access import Token, make_team, make_token
from drystone.run.control.controller import Controller
from drystone.run.control.notes import TokenRevoked
from drystone.service.answers import Conflict, NotFound, Unauthorized, answer_json, found
from drystone.service.auth.callers import (
    ADMIN,
    COOKIE,
    NOBODY,
    SESSION_SECONDS,
    SUBMITTER,
    VIEWER,
    Sessions,
    caller_now,
    caller_of,
)
from drystone.service.auth.people import (
    FileKept,
    Session,
    SpendPage,
    TeamList,
    TeamShown,
    TokenList,
    TokenNew,
    TokenShown,
)
from drystone.service.shapes import (
    Failure,
    Name,
    Responses,
    SessionBody,
    TeamBody,
    TeamChange,
    TokenBody,
)
from drystone.service.uploads import Uploads

_MISSING: Final[Responses] = {404: {"model": Failure}}
_TAKEN: Final[Responses] = {409: {"model": Failure}}


def people_routes(controller: Controller, sessions: Sessions, uploads: Uploads) -> APIRouter:
    """All of them."""
    router = APIRouter(tags=["people"])
    _add_sessions(router, controller, sessions)
    _add_tokens(router, controller)
    _add_teams(router, controller)
    _add_files(router, uploads)
    return router


def _add_sessions(router: APIRouter, controller: Controller, sessions: Sessions) -> None:
    access = controller.journal.live.access

    @router.get("/v1/session", response_model=Session)
    async def session() -> Response:
        """Who asks."""
        return answer_json(Session.of(caller_now(), needs_token=access.needs_token))

    @router.post("/v1/session", response_model=Session, responses={401: {"model": Failure}})
    async def login(request: Request, body: Annotated[SessionBody, Body()]) -> Response:
        """Log in with a token: the answer sets a cookie."""
        token = access.find(body.token)
        if token is None:
            raise Unauthorized("this token is not known", hint="Ask an admin for a new one")
        cookie, expires = sessions.make(token, time.time())
        caller = caller_of(token, expires_seconds=expires)
        answer = answer_json(Session.of(caller, needs_token=True))
        answer.set_cookie(
            COOKIE,
            cookie,
            max_age=SESSION_SECONDS,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return answer

    @router.delete("/v1/session", response_model=Session)
    async def logout() -> Response:
        """Log out: the answer takes the cookie away."""
        answer = answer_json(Session.of(NOBODY, needs_token=access.needs_token))
        answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
        return answer


def _add_tokens(router: APIRouter, controller: Controller) -> None:
    journal = controller.journal

    @router.get("/v1/tokens", dependencies=[ADMIN], response_model=TokenList)
    def tokens() -> Response:
        """All tokens, without their secrets."""
        known = list(journal.live.access.tokens.values())
        return answer_json(TokenList(tokens=[TokenShown.of(token) for token in known]))

    @router.post(
        "/v1/tokens",
        status_code=201,
        dependencies=[ADMIN],
        response_model=TokenNew,
        responses=_MISSING,
    )
    def create(body: Annotated[TokenBody, Body()]) -> Response:
        """Make a token; its text is shown this once."""
        with journal.acting(caller_now().actor):
            found(lambda: journal.live.access.check_team(body.team))
            note, text = make_token(
                name=body.name, role=body.role, team=body.team, now_seconds=journal.now()
            )
            journal.commit([note])
            made = journal.live.access.tokens[note.token_id]
        return answer_json(TokenNew(**vars(TokenShown.of(made)), token=text), status=201)

    @router.delete(
        "/v1/tokens/{token_id}",
        dependencies=[ADMIN],
        response_model=TokenShown,
        responses=_MISSING,
    )
    def revoke(token_id: Annotated[str, "id"]) -> Response:
        """Let a token be worth nothing from now on; its sessions end too."""
        with journal.acting(caller_now().actor):
            known = journal.live.access.tokens.get(token_id)
            if known is None:
                raise NotFound("there is no such token", hint="`drystone token list` shows all")
            if known.revoked_seconds is None:
                journal.commit([TokenRevoked(time_seconds=journal.now(), token_id=token_id)])
            shown: Token = journal.live.access.tokens[token_id]
        return answer_json(TokenShown.of(shown))


def _add_teams(router: APIRouter, controller: Controller) -> None:
    journal = controller.journal

    @router.get("/v1/teams", dependencies=[VIEWER], response_model=TeamList)
    def teams() -> Response:
        """All teams, their limits and what they use of them."""
        with journal.lock:
            now, known = journal.now(), journal.live.access.teams.values()
            shown = [TeamShown.of(controller, team, now) for team in known]
        return answer_json(TeamList(teams=shown))

    @router.post(
        "/v1/teams",
        status_code=201,
        dependencies=[ADMIN],
        response_model=TeamShown,
        responses=_TAKEN,
    )
    def create(body: Annotated[TeamBody, Body()]) -> Response:
        """Make a team."""
        with journal.acting(caller_now().actor):
            if body.name in journal.live.access.teams:
                raise Conflict(f"there is a team {body.name} already", hint="PATCH changes it")
            journal.commit([make_team(**body.model_dump(), now_seconds=journal.now())])
            team = journal.live.access.teams[body.name]
            return answer_json(TeamShown.of(controller, team, journal.now()), status=201)

    @router.patch(
        "/v1/teams/{name}", dependencies=[ADMIN], response_model=TeamShown, responses=_MISSING
    )
    def change(name: Name, body: Annotated[TeamChange, Body()]) -> Response:
        """Change a team's limits; what is left out stays."""
        with journal.acting(caller_now().actor):
            known = journal.live.access.teams.get(name)
            if known is None:
                raise found_no_team(controller, name)
            changes = body.model_dump(exclude_unset=True)
            if changes.get("budget_period", "") is None:
                del changes["budget_period"]
            wanted = dataclasses.asdict(known) | changes
            journal.commit([make_team(**wanted, now_seconds=journal.now())])
            team = journal.live.access.teams[name]
            return answer_json(TeamShown.of(controller, team, journal.now()))

    @router.get("/v1/spend", dependencies=[VIEWER], response_model=SpendPage)
    def spend(hours: Annotated[int, Query(ge=1, le=24 * 366)] = 168) -> Response:
        """What every team spent and spends, against its budget."""
        with journal.lock:
            answer = SpendPage.of(controller, journal.now(), hours)
        return answer_json(answer)


def found_no_team(controller: Controller, name: str) -> DrystoneError:
    """As an error."""
    error = UnknownName("team", name, controller.journal.live.access.teams)
    return NotFound(error.message, hint=error.hint)


def _add_files(router: APIRouter, uploads: Uploads) -> None:
    @router.post(
        "/v1/files",
        status_code=201,
        dependencies=[SUBMITTER],
        response_model=FileKept,
        openapi_extra={
            "requestBody": {
                "required": False,  # a file may be empty
                "content": {"application/octet-stream": {"schema": {"type": "string"}}},
            }
        },
    )
    async def keep(
        request: Request,
        bundle: Annotated[str, Query(pattern="^[0-9a-f]{32}$")],
        name: Annotated[str, Query(min_length=1, max_length=400)],
    ) -> Response:
        """Keep a file of a bundle, for a job that is submitted with `files: bundle`."""
        size, digest = await uploads.keep(caller_now(), bundle, name, request.stream())
        shown = FileKept(bundle=bundle, name=name, num_bytes=size, sha256=digest)
        return answer_json(shown, status=201)
