"""What every request passes before a route sees it, and every answer after.

Where it was sent (Host), which site it comes from (Origin), who asks (token, cookie, socket), how
much they ask, how large the body is. Written against ASGI itself: it costs tens of microseconds.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from drystone.errors import DrystoneError
from drystone.run.control.access import Access
from drystone.service.answers import (
    LOG,
    Forbidden,
    Misdirected,
    RequestStalled,
    TooLarge,
    TooMany,
    answer_failure,
    safe,
)
from drystone.service.auth.callers import (
    COOKIE,
    NOBODY,
    OWNER,
    Caller,
    Sessions,
    caller_of,
    set_caller,
)
from drystone.service.auth.peers import PEER_PREFIX, is_job_process
from drystone.service.prometheus import Metrics

_MAX_BUCKETS: Final = 10_000  # the one that was used longest ago goes first


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What one process reads and answers."""

    requests_per_second: float = 50.0  # by token
    burst: float = 200.0
    unknown_per_second: float = 2.0  # by address, of requests that nobody vouches for
    unknown_burst: float = 40.0
    max_body_bytes: int = 1 << 20
    max_file_bytes: int = 64 << 20
    max_bundle_bytes: int = 256 << 20
    max_bundle_files: int = 500
    max_uploads_of_caller_bytes: int = 2 << 30  # of a team, or of all who are in none
    max_uploads_bytes: int = 16 << 30
    min_free_bytes: int = 1 << 30  # of the disk: the log is there too
    max_streams: int = 512


class Buckets:
    """Buckets by name."""

    def __init__(
        self, per_second: float, burst: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_second, self._burst, self._clock = per_second, burst, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # level, when

    def take(self, name: str, *, message: str = "too many requests") -> None:
        """One request; `TooMany` when the bucket is empty."""
        now = self._clock()
        level, at = self._buckets.pop(name, (self._burst, now))
        level = min(self._burst, level + (now - at) * self._per_second)
        if level < 1.0:
            self._buckets[name] = (level, now)
            raise TooMany(message, retry_seconds=(1.0 - level) / self._per_second)
        self._buckets[name] = (level - 1.0, now)
        if len(self._buckets) > _MAX_BUCKETS:
            self._buckets.popitem(last=False)


_PROXY_HEADERS: Final = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip")
_BODY_SECONDS: Final = 30.0  # between two parts of a body
_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "[::1]", "::1"})
_FILES_PATH: Final = "/v1/files"
_PAGE_PATH: Final = "/page/"
_POLICY: Final = (
    "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
)
_HEADERS: Final = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRules:
    """How the service can be reached, and under which names."""

    limits: RequestLimits = field(default_factory=RequestLimits)
    names: frozenset[str] = frozenset()  # of hosts, beyond addresses and this machine's own name
    is_loopback: bool = True  # whether nobody from another machine can get here

    def allows(self, host: str, *, needs_token: bool) -> bool:
        """Whether a request that was sent to this host is meant for us.

        Without tokens only names of loopback are: whatever else a browser sends here, it was made
        to by a name that somebody else controls.
        """
        name = _host_name(host)
        if name in _LOOPBACK_NAMES:
            return True
        return needs_token and (name in self.names or _is_address(name) or name in own_names())


class Guard:
    """The middleware."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        access: Callable[[], Access],
        sessions: Sessions,
        host_rules: HostRules,
        metrics: Metrics,
    ) -> None:
        self._app, self._access, self._sessions = app, access, sessions
        self._host_rules, self._metrics = host_rules, metrics
        limits = host_rules.limits
        self._known = Buckets(limits.requests_per_second, limits.burst)
        self._unknown = Buckets(limits.unknown_per_second, limits.unknown_burst)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what is in order."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        started, caller = time.perf_counter(), NOBODY
        answer = _Answer(send)
        try:
            headers = Headers(scope=scope)
            caller = self._admit(scope, headers)
            set_caller(caller)
            body = _Body(receive, self._max_bytes(scope, headers))
            answer.body = body
            await self._app(scope, body.receive, answer.send)
            if body.problem is not None:
                raise body.problem
        except DrystoneError as error:
            answer.body = None
            await answer_failure(error)(scope, receive, answer.send)
        finally:
            if answer.status in (401, 403, 413, 421, 429):
                _log_refusal(scope, answer.status, caller)
            route = getattr(scope.get("route"), "path", "")
            took = time.perf_counter() - started
            self._metrics.observe(scope["method"], route, answer.status, took)

    def _admit(self, scope: Scope, headers: Headers) -> Caller:
        server = scope.get("server")
        if server is not None and server[1] is None:
            return _socket_caller(scope)
        access = self._access()
        host = headers.get("host", "")
        if not self._host_rules.allows(host, needs_token=access.needs_token):
            raise Misdirected(
                f"this service is not called {safe(host)[:80]!r}",
                hint="Use its address, or start it with --allow-host NAME",
            )
        _check_site(scope["method"], headers, host)
        caller = self._identify(access, headers, scope["method"])
        if scope["path"].startswith(_PAGE_PATH):
            return caller  # small files without data, two dozen for a page: they are not counted
        if caller.role is not None:
            self._known.take(caller.token_id or "loopback")
        elif scope["path"] not in ("/healthz", "/readyz"):
            peer = scope.get("client")
            self._unknown.take(
                str(peer[0]) if peer else "", message="too many requests without a token"
            )
        return caller

    def _identify(self, access: Access, headers: Headers, method: str) -> Caller:
        if not access.needs_token:
            _refuse_proxies(headers)
            return OWNER if self._host_rules.is_loopback else NOBODY
        kind, _, text = headers.get("authorization", "").partition(" ")
        if kind:
            token = access.find(text.strip()) if kind.lower() == "bearer" else None
            return caller_of(token) if token is not None else NOBODY
        found = self._sessions.find(access, _cookie(headers), time.time())
        if found is None:
            return NOBODY
        if method not in _SAFE_METHODS and headers.get("x-drystone") is None:
            raise Misdirected(
                "a change that is asked for with a cookie needs the header X-Drystone",
                hint="Send `X-Drystone: 1`; pages of other sites cannot",
            )
        return caller_of(found[0], expires_seconds=found[1])

    def _max_bytes(self, scope: Scope, headers: Headers) -> int:
        """How large the body may be; one that says it is larger is refused unread."""
        limits = self._host_rules.limits
        is_file = scope["path"] == _FILES_PATH
        most = limits.max_file_bytes if is_file else limits.max_body_bytes
        told = headers.get("content-length", "")
        if told.isdigit() and (len(told) > 15 or int(told) > most):
            raise _too_large(most)
        return most


def _socket_caller(scope: Scope) -> Caller:
    """Whoever may open the socket's file is the owner, but for processes of jobs."""
    peer = scope.get("client")
    if peer is None:
        return OWNER  # an application without a server, in the same process
    uid, pid = int(str(peer[0]).removeprefix(PEER_PREFIX)), int(peer[1])
    if uid not in (0, os.getuid()):
        raise Forbidden(f"this socket belongs to another user than uid {uid}")
    if is_job_process(pid):
        raise Forbidden(
            "a job may not use the owner's socket",
            hint="Give the job a token of its own, and the address of the service",
        )
    return OWNER


def _refuse_proxies(headers: Headers) -> None:
    """Without tokens whoever is on this machine may do everything; a proxy's callers are not."""
    for name in _PROXY_HEADERS:
        if name in headers:
            raise Misdirected(
                f"came through a proxy ({name}), and no token exists here: everybody behind it "
                "could run anything",
                hint="Make a token first: drystone token create --role admin",
            )


class _Body:
    """Of one request, up to a size; a larger one is not read to its end."""

    def __init__(self, receive: Receive, max_bytes: int) -> None:
        self._receive, self._max_bytes, self._num_bytes = receive, max_bytes, 0
        self._is_whole = False
        self.problem: DrystoneError | None = None

    async def receive(self) -> Message:
        """What comes next."""
        if self._is_whole:
            return await self._receive()  # until the other side leaves
        try:
            message = await asyncio.wait_for(self._receive(), _BODY_SECONDS)
        except TimeoutError:
            self.problem = RequestStalled(f"the body stopped for {_BODY_SECONDS:.0f} s")
            raise self.problem from None
        self._is_whole = not message.get("more_body", False)
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._max_bytes:
            self.problem = _too_large(self._max_bytes)
            raise self.problem
        return message


class _Answer:
    """To one request, with what every answer carries."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 500
        self.body: _Body | None = None

    async def send(self, message: Message) -> None:
        """Part of it; not where the body was too large, which frameworks take for unreadable."""
        if self.body is not None and self.body.problem is not None:
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
        await self._send(message)


def _too_large(max_bytes: int) -> TooLarge:
    return TooLarge(f"the body is larger than {max_bytes} bytes", hint="Send less at once")


def _check_site(method: str, headers: Headers, host: str) -> None:
    """Refuse what a page of another site made a browser send; programs send neither header."""
    site = headers.get("sec-fetch-site")
    is_link = method in _SAFE_METHODS and headers.get("sec-fetch-mode") == "navigate"
    if site is not None and site not in ("same-origin", "none") and not is_link:
        raise Misdirected("requests from other sites are not answered")
    origin = headers.get("origin")
    if origin is not None and urlsplit_host(origin) != host.lower():
        raise Misdirected("requests from other sites are not answered")


def urlsplit_host(origin: str) -> str:
    """The host and port of an origin; something that is no host where it has none."""
    try:
        return urlsplit(origin).netloc.lower() or "-"
    except ValueError:
        return "-"


def _host_name(host: str) -> str:
    """Without the port."""
    text = host.strip().lower()
    if text.startswith("["):
        return text.partition("]")[0] + "]"
    return text.rpartition(":")[0] if text.count(":") == 1 else text


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def own_names() -> frozenset[str]:
    """What this machine is called."""
    name = socket.gethostname().lower()
    return frozenset({name, name.partition(".")[0]} - {""})


def _cookie(headers: Headers) -> str:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found is not None else ""


def _log_refusal(scope: Scope, status: int, caller: Caller) -> None:
    """Without the query and without any header: both may hold secrets."""
    who = caller.actor or "nobody known"
    LOG.warning("refused %d %s %s of %s", status, scope["method"], safe(scope["path"]), safe(who))
