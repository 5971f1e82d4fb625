"""One process: the controller's loop in one thread, the API on a Unix socket and on a port."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import ipaddress
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from drystone.errors import DrystoneError, InvalidSpec
from drystone.run.control.controller import Controller, ControllerSettings
from drystone.run.engines.agent.keeper import hide_environment
from drystone.run.engines.agent.network import short_path
from drystone.service.app import make_app
from drystone.service.auth.guard import HostRules
from drystone.service.connections import ConnectionLimits, allow_open_files, limited_protocol
from drystone.service.feed import Feed
from drystone.service.webhooks import SECRET_VARIABLE, Target, Webhooks

SOCKET_NAME = "drystone.sock"
LOOPBACK = "127.0.0.1"
# A decision computes for a while, and an answer changes threads a few times: at Python's own 5 ms
# each change would wait that long for it.
_SWITCH_SECONDS = 0.0005


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Where a service listens besides its socket."""

    host: str = LOOPBACK
    port: int = 0  # 0: nowhere
    host_rules: HostRules = field(default_factory=HostRules)
    webhooks: tuple[Target, ...] = ()  # who is told what happened


def serve(
    settings: ControllerSettings,
    *,
    network: Network | None = None,
    ends_agents: bool = False,
    announce: Callable[[str], None] = lambda _: None,
) -> None:
    """Run until a signal; then let what trains go on, or with `ends_agents` end it all.

    `announce` is called once nothing can be in the way any more (lock, port and socket are ours),
    with what has to be warned of, or nothing.
    """
    network = network or Network()
    controller = Controller(settings)
    listeners = []
    try:
        if network.port:
            listeners.append(_listen_on_port(controller, network))
        listeners.append(listen(settings.folder))
        announce(_warning(controller, network))
    except BaseException:
        for listener in listeners:
            listener.close()
        controller.close(ends_agents=ends_agents)
        raise
    server = _make_server(controller, network)
    secret = os.environ.get(SECRET_VARIABLE, "")
    webhooks = Webhooks(controller, network.webhooks, secret)
    hide_environment()  # jobs run as the same user; what is in it may be for the database alone
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.collect()
    gc.freeze()  # what the log left stays: looking through it for garbage stops everything
    failure: list[BaseException] = []

    def control() -> None:
        try:
            controller.run()
        except BaseException as error:
            failure.append(error)
        finally:
            server.should_exit = True

    def leave(_: int, __: object) -> None:
        server.should_exit = True

    # uvicorn raises a signal once more when it has shut down: by then these are the handlers, so
    # that we get to say goodbye.
    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGINT)}
    thread = threading.Thread(target=control, name="controller", daemon=True)
    thread.start()
    try:
        asyncio.run(server.serve(sockets=listeners))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        webhooks.close()
        controller.leave()
        thread.join()
        controller.close(ends_agents=ends_agents)
        for listener in listeners:
            listener.close()
    if failure and not isinstance(failure[0], SystemExit):
        raise failure[0]


class Server(uvicorn.Server):
    """uvicorn, which lets those who listen to live state go before it waits for the others."""

    feed: Feed | None = None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End."""
        if self.feed is not None:
            self.feed.close()
        await super().shutdown(sockets)


def _make_server(controller: Controller, network: Network) -> Server:
    host_rules = dataclasses.replace(network.host_rules, is_loopback=_is_loopback(network.host))
    return make_server(make_app(controller, host_rules))


def make_server(app: FastAPI) -> Server:
    """The server of an application: uvicorn, with limits on connections."""
    limits = ConnectionLimits()
    limits.max_connections = min(limits.max_connections, allow_open_files())
    config = uvicorn.Config(
        app,
        http=limited_protocol(limits),
        log_level="warning",  # and so no access log: addresses may hold what is nobody's business
        lifespan="off",
        timeout_graceful_shutdown=2,
        server_header=False,
    )
    server = Server(config)
    server.feed = app.state.feed
    return server


def listen(folder: Path) -> socket.socket:
    """The socket of the API; only this user may connect. A dead controller's is taken over."""
    path = folder / SOCKET_NAME
    path.unlink(missing_ok=True)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with short_path(path) as name:
        old = os.umask(0o177)
        try:
            made.bind(name)
        finally:
            os.umask(old)
    made.listen(128)
    return made


def _warning(controller: Controller, network: Network) -> str:
    if not network.port or controller.journal.live.access.needs_token:
        return ""
    return (
        f"No token exists: port {network.port} answers on loopback only, and everybody on this "
        "machine may do everything. `drystone token create --role admin` ends that."
    )


def _listen_on_port(controller: Controller, network: Network) -> socket.socket:
    """Beyond loopback only where a token says who may do what."""
    host, port = network.host, network.port
    has_tokens = controller.journal.live.access.has_tokens
    if not has_tokens and controller.settings.run_as:
        raise InvalidSpec(
            "no token exists, so that nobody could say whose account a job runs as",
            hint="Make one first: drystone token create --role submitter --name ACCOUNT",
        )
    if not has_tokens and not _is_loopback(host):
        raise InvalidSpec(
            f"no token exists, so that everybody who reaches {host} could run anything here",
            hint="Make one first: drystone token create --role admin. "
            "Without a token a service listens on loopback only",
        )
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(kind, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise DrystoneError(
            f"port {port} of {host} cannot be used: {error.strerror or error}",
            hint="Choose another --port or --host",
        ) from None
    made.listen(512)
    return made


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
