"""Talk to agents, and start them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drystone.errors import DrystoneError
from drystone.run.engines.agent.secret import proof_of
from drystone.run.engines.agent.socket_path import short_path


class AgentGone(DrystoneError):
    """The agent does not answer."""


class AgentRefused(DrystoneError):
    """The agent answered that it does not do that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """Where the agent of another machine listens, and the secret that it asks for."""

    host: str
    port: int
    secret: str

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class AgentClient:
    """One connection to one agent; made when first needed, and again when it broke.

    An agent of this machine is known by its folder, one of another machine by its address.
    """

    def __init__(
        self, where: Path | Remote, *, controller: int = 0, timeout_seconds: float = 5.0
    ) -> None:
        self.where, self._controller = where, controller
        self._timeout_seconds = timeout_seconds
        self._socket: socket.socket | None = None
        self._rest = b""

    def ask(self, op: str, **values: Any) -> dict[str, Any]:
        """One request, one answer."""
        self.send(op, **values)
        return self.receive()

    def send(self, op: str, **values: Any) -> None:
        """The request alone; `receive` must follow before the next one."""
        request = {"op": op, "controller": self._controller, **values}
        try:
            if self._socket is None:
                self._connect()
            assert self._socket is not None
            self._socket.sendall(json.dumps(request).encode() + b"\n")
        except (OSError, ValueError) as error:
            self._give_up(error)

    def receive(self, timeout_seconds: float | None = None) -> dict[str, Any]:
        """The answer to what was sent."""
        try:
            if self._socket is None:
                raise ConnectionResetError("there is no connection")
            seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
            self._socket.settimeout(max(seconds, 0.001))
            answer = self._read_line()
            self._socket.settimeout(self._timeout_seconds)
        except (OSError, ValueError) as error:
            self._give_up(error)
        if not answer.pop("ok", False):
            raise AgentRefused(str(answer.get("error", "refused")))
        return answer

    def close(self) -> None:
        """Let go of the connection."""
        if self._socket is not None:
            self._socket.close()
        self._socket, self._rest = None, b""

    def _give_up(self, error: Exception) -> Any:
        self.close()
        raise AgentGone(f"the agent at {self.where} does not answer: {error}") from None

    def _connect(self) -> None:
        if isinstance(self.where, Remote):
            address = (self.where.host, self.where.port)
            self._socket = socket.create_connection(address, self._timeout_seconds)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            greeting = self._read_line()
            proof = proof_of(self.where.secret, str(greeting["nonce"]))
            self._socket.sendall(json.dumps({"proof": proof}).encode() + b"\n")
            return
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.settimeout(self._timeout_seconds)
        try:
            with short_path(self.where / "agent.sock") as name:
                made.connect(name)
        except OSError:
            made.close()
            raise
        self._socket = made

    def _read_line(self) -> dict[str, Any]:
        assert self._socket is not None
        parts = [self._rest]
        while b"\n" not in parts[-1]:
            chunk = self._socket.recv(1 << 16)
            if not chunk:
                raise ConnectionResetError("the connection was closed")
            parts.append(chunk)
        head, _, self._rest = b"".join(parts).partition(b"\n")
        answer = json.loads(head)
        if not isinstance(answer, dict):
            raise ValueError("no JSON object")
        return answer


def start_agent(
    folder: Path, *, node: str, idle_seconds: float = 600.0, wait_seconds: float = 10.0
) -> int:
    """Start an agent that outlives us, unless one answers already; its pid."""
    folder.mkdir(parents=True, exist_ok=True)
    client = AgentClient(folder)
    try:
        return int(client.ask("hello")["pid"])
    except AgentGone:
        pass
    finally:
        client.close()
    arguments = [
        sys.executable,
        "-m",
        "drystone.run.engines.agent",
        str(folder),
        node,
        str(idle_seconds),
    ]
    with (folder / "agent.log").open("ab") as log:
        subprocess.run(
            arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
    deadline = time.monotonic() + wait_seconds
    while time.monotonic() < deadline:
        try:
            return int(client.ask("hello")["pid"])
        except AgentGone:
            time.sleep(0.02)
        finally:
            client.close()
    log_text = (folder / "agent.log").read_text(encoding="utf-8", errors="replace")[-500:]
    raise AgentGone(f"the agent of {node} did not start: {log_text.strip()}")
