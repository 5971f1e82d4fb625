"""Callers: who asks, and what they may do; the same for every way in."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from fastapi import Depends
from fastapi.security import APIKeyCookie, HTTPBearer

from drystone.describe.job import TrainingJob
from drystone.errors import DrystoneError
from drystone.run.control.access import Access, Role, Token
from drystone.service.answers import Forbidden, Unauthorized

COOKIE: Final = "drystone_session"
# Only for the description of the API: the guard has looked at both before any route is reached.
_BEARER: Final = HTTPBearer(auto_error=False, scheme_name="token", description="`drystone token`")
_COOKIE: Final = APIKeyCookie(name=COOKIE, auto_error=False, scheme_name="session")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks. Without a role nobody knows."""

    name: str = ""
    role: Role | None = None
    team: str = ""
    token_id: str = ""  # empty: the socket, or loopback while there are no tokens
    expires_seconds: float | None = None  # of a session

    @property
    def actor(self) -> str:
        """As the log has it."""
        return f"{self.name}#{self.token_id}" if self.token_id else self.name

    @property
    def is_admin(self) -> bool:
        """Whether everything is allowed."""
        return self.role is Role.ADMIN


OWNER: Final = Caller(name="owner", role=Role.ADMIN)
NOBODY: Final = Caller()
_CURRENT: ContextVar[Caller] = ContextVar("caller", default=OWNER)
set_caller = _CURRENT.set


def caller_now() -> Caller:
    """Who is behind the request that is being answered; the owner where there is none."""
    return _CURRENT.get()


def caller_of(token: Token, *, expires_seconds: float | None = None) -> Caller:
    """Who a token belongs to."""
    return Caller(
        name=token.name,
        role=token.role,
        team=token.team,
        token_id=token.id,
        expires_seconds=expires_seconds,
    )


def require(role: Role) -> Caller:
    """Who asks, if that is enough for what they ask."""
    caller = caller_now()
    if caller.role is None:
        raise Unauthorized(
            "this needs a token",
            hint="Send it as `Authorization: Bearer ...`; `drystone token create` makes one",
        )
    if not caller.role.covers(role):
        raise Forbidden(
            f"a {caller.role.value} may not do this",
            hint=f"It needs a token with the role {role.value}",
        )
    return caller


async def _viewer(
    _: Annotated[object, Depends(_BEARER)], __: Annotated[object, Depends(_COOKIE)]
) -> Caller:
    return require(Role.VIEWER)


async def _submitter(
    _: Annotated[object, Depends(_BEARER)], __: Annotated[object, Depends(_COOKIE)]
) -> Caller:
    return require(Role.SUBMITTER)


async def _admin(
    _: Annotated[object, Depends(_BEARER)], __: Annotated[object, Depends(_COOKIE)]
) -> Caller:
    return require(Role.ADMIN)


VIEWER: Final = Depends(_viewer)
SUBMITTER: Final = Depends(_submitter)
ADMIN: Final = Depends(_admin)


def may_touch(caller: Caller, team: str) -> bool:
    """Whether the jobs of a team are open to somebody: to read in full, and to change."""
    return caller.is_admin or caller.team == team


def check_touch(job: TrainingJob, job_id: str) -> None:
    """Refuse who asks for another team's job."""
    if not may_touch(caller_now(), job.team):
        whose = f"team {job.team}" if job.team else "nobody's team"
        raise Forbidden(f"job {job_id} belongs to {whose}", hint="Ask one of its team, or an admin")


SESSION_SECONDS: Final = 7 * 24 * 3600
_KEY_NAME: Final = "session.key"
_SESSIONS_COOKIE: Final = re.compile(r"([0-9a-f]{12})\.([0-9]{1,12})\.([0-9a-f]{64})")


class Sessions:
    """Makes and reads cookies."""

    def __init__(self, folder: Path) -> None:
        self._key = _load_key(folder / _KEY_NAME)

    def make(self, token: Token, now_seconds: float) -> tuple[str, float]:
        """A cookie for a token, and when it ends."""
        expires = int(now_seconds) + SESSION_SECONDS
        text = f"{token.id}.{expires}"
        return f"{text}.{self._sign(text)}", float(expires)

    def find(self, access: Access, cookie: str, now_seconds: float) -> tuple[Token, float] | None:
        """The token behind a cookie, and when it ends; None where it is not ours or too old."""
        match = _SESSIONS_COOKIE.fullmatch(cookie)
        if match is None:
            return None
        token_id, expires, signature = match.groups()
        if not hmac.compare_digest(self._sign(f"{token_id}.{expires}"), signature):
            return None
        token = access.live(token_id)
        if token is None or float(expires) <= now_seconds:
            return None
        return token, float(expires)

    def _sign(self, text: str) -> str:
        return hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()


def _load_key(path: Path) -> bytes:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(32))
    except FileExistsError:
        pass
    key = path.read_bytes()
    if len(key) != 32:
        raise DrystoneError(
            "is not a key of 32 bytes", where=str(path), hint="Remove it; people log in again"
        )
    return key
