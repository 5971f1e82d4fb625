"""Connections to the service: how many, from whom, and how long each may take to say what it wants.

The port and the owner's socket share one process. Connections of the port are counted, in all and
by address, and stay below what the process may have open, so that the socket always has room. Where
there are too many, one that has waited longest for its request makes room for the next, of the
address that has most: whoever opens connections and says nothing keeps nobody out.
"""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from drystone.service.auth.peers import peer_of

_WANTED_FILES: Final = 8192
_FILES_KEPT_FREE: Final = 256  # for the socket, the database, agents and logs
_BUSY: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 10\r\nConnection: close\r\n"
    b"Content-Length: 0\r\n\r\n"
)


@dataclass(slots=True, kw_only=True)
class ConnectionLimits:
    """What is open at the port, and how much of it may be."""

    max_connections: int = 2048
    max_per_address: int = 768  # a proxy brings everybody from one
    header_seconds: float = 10.0  # until a whole request is there, from its first byte or before
    by_address: Counter[str] = field(default_factory=Counter)
    waiting: dict[str, dict[LimitedProtocol, None]] = field(default_factory=dict)  # oldest first

    def has_room_for(self, address: str) -> bool:
        """Whether one more may be open, perhaps in the place of one that says nothing."""
        if self.by_address[address] >= self.max_per_address:
            return self._drop_one_of(address)
        if self.by_address.total() < self.max_connections:
            return True
        return self._drop_one_of(self.by_address.most_common(1)[0][0])

    def _drop_one_of(self, address: str) -> bool:
        for connection in self.waiting.get(address, ()):
            connection.drop()
            return True
        return False


def allow_open_files() -> int:
    """Have as many files open as the system lets us; how many connections that leaves room for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(_WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    room = wanted if soft == resource.RLIM_INFINITY else soft
    return max(16, room - min(_FILES_KEPT_FREE, room // 2))


class LimitedProtocol(H11Protocol):
    """HTTP of one connection."""

    limits: ConnectionLimits

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._address = ""  # under which it is counted
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count it and wait for a request, or send it away."""
        super().connection_made(transport)
        is_socket = self.server is not None and self.server[1] is None
        if is_socket:
            self.client = peer_of(transport.get_extra_info("socket"))
        else:
            address = self.client[0] if self.client else "?"
            if not self.limits.has_room_for(address):
                transport.write(_BUSY)
                transport.close()
                return
            self._address = address
            self.limits.by_address[address] += 1
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Count it no more."""
        super().connection_lost(exc)
        self._leave()

    def drop(self) -> None:
        """End it at once, whatever it was about to say."""
        self._leave()
        self.transport.abort()

    def _leave(self) -> None:
        self._expect_nothing()
        if self._address:
            self.limits.by_address[self._address] -= 1
            if self.limits.by_address[self._address] <= 0:
                del self.limits.by_address[self._address]
            self._address = ""

    def data_received(self, data: bytes) -> None:
        """Part of a request, or of several."""
        cycle = self.cycle
        super().data_received(data)
        if self.cycle is not cycle:
            self._expect_nothing()  # a request is there, and being answered
        elif self._deadline is None and (cycle is None or cycle.response_complete):
            self._expect_request()

    def _expect_request(self) -> None:
        self._deadline = self.loop.call_later(self.limits.header_seconds, self.drop)
        if self._address:
            self.limits.waiting.setdefault(self._address, {})[self] = None

    def _expect_nothing(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        waiting = self.limits.waiting.get(self._address, {})
        waiting.pop(self, None)
        if not waiting:
            self.limits.waiting.pop(self._address, None)


def limited_protocol(limits: ConnectionLimits) -> type[LimitedProtocol]:
    """The protocol of a server with these limits."""
    return type("Protocol", (LimitedProtocol,), {"limits": limits})
