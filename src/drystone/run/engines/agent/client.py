"""Connections to agents, and how agents are found and started."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from drystone.errors import DrystoneError
from drystone.run.engines.agent.environment import job_environment
from drystone.run.engines.agent.launches import read_json
from drystone.run.engines.agent.network import RefusalKind, proof_of, short_path

Found = TypeVar("Found")

_KINDS_BY_TEXT: Final = {
    "still runs": RefusalKind.BUSY,
    "is lost": RefusalKind.NODE_LOST,
    "No space": RefusalKind.DISK_FULL,
    "gave orders after you": RefusalKind.SUPERSEDED,
}


class AgentGone(DrystoneError):
    """The agent does not answer."""


class AgentRefused(DrystoneError):
    """The agent answered that it does not do that, and why: a kind to act on, a text to read."""

    def __init__(self, message: str, kind: RefusalKind = RefusalKind.INVALID) -> None:
        super().__init__(message)
        self.kind = kind


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
            raise _refusal(answer)
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


def _refusal(answer: Mapping[str, Any]) -> AgentRefused:
    text = str(answer.get("error", "refused"))
    if "kind" in answer:
        known = answer["kind"] in set(RefusalKind)  # a later agent may know more kinds
        return AgentRefused(text, RefusalKind(answer["kind"]) if known else RefusalKind.INVALID)
    # Agents outlive controllers, and those of earlier versions send the text alone.
    for phrase, kind in _KINDS_BY_TEXT.items():
        if phrase in text:
            return AgentRefused(text, kind)
    return AgentRefused(text)


def find_agent(folder: Path, node: str, secret: str, *, timeout_seconds: float) -> Remote | None:
    """The agent of a node whose address stands in its folder, if it answers and means to stay."""
    address = read_json(folder / "address.json")
    if address is None:
        return None
    remote = Remote(host=address["host"], port=int(address["port"]), secret=secret)
    client = AgentClient(remote, timeout_seconds=timeout_seconds)
    try:
        told = client.ask("hello")
    except (AgentGone, AgentRefused):
        return None
    finally:
        client.close()
    return remote if told["node"] == node and not told["leaving"] else None


def start_agent(
    folder: Path, *, node: str, idle_seconds: float = 600.0, wait_seconds: float = 10.0
) -> int:
    """Start an agent that outlives us, unless one answers already; its pid."""
    folder.mkdir(parents=True, exist_ok=True)

    def find_pid() -> int | None:
        client = AgentClient(folder)
        try:
            return int(client.ask("hello")["pid"])
        except AgentGone:
            return None
        finally:
            client.close()

    return find_pid() or run_agent(
        folder,
        [node, str(idle_seconds)],
        find_pid,
        environment={**job_environment(os.environ), "PYTHONUNBUFFERED": "1"},
        wait_seconds=wait_seconds,
    )


def run_agent(
    folder: Path,
    arguments: Sequence[str],
    find: Callable[[], Found | None],
    *,
    environment: Mapping[str, str],
    wait_seconds: float,
    prepare: Callable[[], None] | None = None,
) -> Found:
    """Start an agent and wait until it is found; `arguments` begin with the name of its node."""
    with (folder / "agent.log").open("ab") as log:
        subprocess.run(
            [sys.executable, "-m", "drystone.run.engines.agent", str(folder), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            check=False,
            env=dict(environment),
            preexec_fn=prepare,
        )
    deadline = time.monotonic() + wait_seconds
    while time.monotonic() < deadline:
        found = find()
        if found is not None:
            return found
        time.sleep(0.02)
    text = (folder / "agent.log").read_text(encoding="utf-8", errors="replace")[-500:]
    raise AgentGone(f"the agent of {arguments[0]} did not start: {text.strip()}")
