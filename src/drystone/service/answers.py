"""How the service answers: JSON, and errors that say what was wrong without saying too much."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Match

from drystone.errors import DrystoneError, NothingFits, RequestError, UnknownName
from drystone.run.control.store import LeaseLost, StoreBusy
from drystone.service.shapes import Failure, Problem

LOG: Final = logging.getLogger("drystone.service")
_MAX_MESSAGE: Final = 1000  # characters
Found = TypeVar("Found")


class NotFound(RequestError):
    """There is no such job, node, team or token."""


class Conflict(RequestError):
    """It cannot be done in this state."""


class Unauthorized(RequestError):
    """Nobody knows who asks."""


class Forbidden(RequestError):
    """Who asks may not do this."""


class TooLarge(RequestError):
    """A body is larger than is read."""


class RequestStalled(RequestError):
    """A body was begun and not sent on."""


class NotJson(RequestError):
    """A body is of another type than this request reads."""


class Misdirected(RequestError):
    """The request was meant for, or made by, another site."""


class TooMany(RequestError):
    """Too many requests; try again later."""

    def __init__(self, message: str, *, retry_seconds: float) -> None:
        super().__init__(message, hint=f"Try again in {max(1, round(retry_seconds))} s")
        self.retry_seconds = retry_seconds


_STATUS: Final[Mapping[type[DrystoneError], int]] = {  # the first that an error is one of
    Unauthorized: 401,
    Forbidden: 403,
    NotFound: 404,
    Conflict: 409,
    TooLarge: 413,
    RequestStalled: 408,
    NotJson: 415,
    Misdirected: 421,
    TooMany: 429,
    NothingFits: 409,
    StoreBusy: 503,
    LeaseLost: 503,
    RequestError: 422,
}


def add_answers(app: FastAPI) -> None:
    """Every failure is answered in the same shape."""
    app.add_exception_handler(DrystoneError, _answer_error)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    app.add_exception_handler(HTTPException, _answer_http)
    app.add_exception_handler(Exception, _answer_fault)


def status_of(error: DrystoneError) -> int:
    """The status that goes with an error."""
    return next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 500)


def found(look: Callable[[], Found]) -> Found:
    """What is looked for; a name that nobody knows is "not found"."""
    try:
        return look()
    except UnknownName as error:
        raise NotFound(error.message, hint=error.hint) from None


def answer_json(value: Any, *, status: int = 200) -> Response:
    """One document."""
    return Response(to_json(value), status_code=status, media_type="application/json")


def to_json(value: Any) -> bytes:
    """JSON text of plain tables and of answers, which checked themselves when they were made."""
    # `vars` of a model is the table of its fields.
    text = json.dumps(
        value, default=vars, allow_nan=False, ensure_ascii=False, separators=(",", ":")
    )
    # A lone half of a surrogate pair is legal in JSON's escapes, and in no encoding.
    return text.encode("utf-8", errors="backslashreplace")


def answer_failure(error: DrystoneError) -> Response:
    """An error as an answer."""
    status = status_of(error)
    if status == 500:
        LOG.error("a request failed: %s", safe(str(error)))
    kind = type(error).__name__
    answer = _answer_problem(status, kind, error.message, where=error.where, hint=error.hint)
    if isinstance(error, TooMany):
        answer.headers["Retry-After"] = str(max(1, round(error.retry_seconds)))
    if isinstance(error, Unauthorized):
        answer.headers["WWW-Authenticate"] = "Bearer"
    return answer


def _answer_problem(
    status: int, kind: str, message: str, *, where: str = "", hint: str = ""
) -> Response:
    """A failure. Its texts may quote what somebody sent, halves of surrogate pairs included."""
    texts = {"message": message, "where": where, "hint": hint}
    shown = {
        name: text[:_MAX_MESSAGE].encode("utf-8", errors="backslashreplace").decode()
        for name, text in texts.items()
    }
    return answer_json(Failure(error=Problem(kind=kind, **shown)), status=status)


def safe(text: str) -> str:
    """Text from outside in one line of a log: nobody can write lines of his own."""
    return text.encode("unicode_escape").decode("ascii")[:300]


def _answer_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, DrystoneError)
    return answer_failure(error)


def _answer_fault(_: Request, error: Exception) -> Response:
    """A mistake of ours: the framework logs it in full, people are told that it is one."""
    return _answer_problem(
        500,
        "Fault",
        f"the service failed to answer: {type(error).__name__} in its own code",
        hint="The output of `drystone serve` has the details; please report it with them",
    )


def _answer_invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return answer_failure(RequestError(str(first["msg"]), where=where))


def _answer_http(request: Request, error: Exception) -> Response:
    """What the framework itself refuses: an unknown address, a method that is not there."""
    assert isinstance(error, HTTPException)
    kind = {404: "NotFound", 405: "NotAllowed"}.get(error.status_code, "RequestError")
    status = 422 if error.status_code == 400 else error.status_code  # a body that is not text
    answer = _answer_problem(status, kind, str(error.detail))
    answer.headers.update(error.headers or {})
    if status == 405:
        # Each method is a route of its own here; the framework names those of the first.
        methods = {
            method
            for route in request.app.routes
            if route.matches(request.scope)[0] is not Match.NONE
            for method in getattr(route, "methods", None) or ()
        }
        answer.headers["Allow"] = ", ".join(sorted(methods))
    return answer
