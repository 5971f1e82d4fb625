"""One process: the controller's loop in one thread, the API on a Unix socket and on loopback."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from pathlib import Path

import uvicorn

from drystone.errors import DrystoneError
from drystone.run.agent.socket_path import short_path
from drystone.run.controller import Controller, ControllerSettings
from drystone.service.api import make_app

SOCKET_NAME = "drystone.sock"


def serve(settings: ControllerSettings, *, port: int = 0, ends_agents: bool = False) -> None:
    """Run until a signal; then let what trains go on, or with `ends_agents` end it all."""
    controller = Controller(settings)
    listeners = [listen(settings.folder)]
    if port:
        listeners.append(_listen_on_loopback(port))
    config = uvicorn.Config(
        make_app(controller), log_level="warning", lifespan="off", timeout_graceful_shutdown=2
    )
    server = uvicorn.Server(config)
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
    before = {one: signal.signal(one, leave) for one in (signal.SIGTERM, signal.SIGINT)}
    thread = threading.Thread(target=control, name="controller", daemon=True)
    thread.start()
    try:
        asyncio.run(server.serve(sockets=listeners))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        controller.leave()
        thread.join()
        controller.close(ends_agents=ends_agents)
        for one in listeners:
            one.close()
    if failure and not isinstance(failure[0], SystemExit):
        raise failure[0]


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


def _listen_on_loopback(port: int) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(("127.0.0.1", port))
    except OSError as error:
        made.close()
        raise DrystoneError(
            f"port {port} cannot be used: {error.strerror}", hint="Choose another --port"
        ) from None
    made.listen(128)
    return made
