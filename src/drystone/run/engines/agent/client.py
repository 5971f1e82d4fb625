"""Talk to agents, and start them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from drystone.errors import DrystoneError
from drystone.run.engines.agent.network import RefusalKind, proof_of, short_path
from drystone.run.engines.contract import Key, Seen

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
    module = [sys.executable, "-m", "drystone.run.engines.agent"]
    with (folder / "agent.log").open("ab") as log:
        subprocess.run(
            [*module, str(folder), node, str(idle_seconds)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            check=False,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
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


class AgentPool:
    """One connection to each agent."""

    def __init__(self, *, timeout_seconds: float = 2.0) -> None:
        self.controller = 0  # the epoch that orders carry
        self._timeout_seconds = timeout_seconds
        self._clients: dict[str, AgentClient] = {}
        self._known: dict[str, tuple[Key, ...]] = {}  # launches that each agent told of last

    def put(self, node: str, where: Path | Remote) -> None:
        """The agent of a node is there; a connection to an earlier one is let go."""
        self.drop(node)
        self._clients[node] = AgentClient(
            where, controller=self.controller, timeout_seconds=self._timeout_seconds
        )

    def drop(self, node: str) -> None:
        """Nothing more is asked of a node."""
        self._known.pop(node, None)
        if node in self._clients:
            self._clients.pop(node).close()

    def close(self) -> None:
        """Let go of the connections; the agents stay."""
        for client in self._clients.values():
            client.close()

    def quit(self) -> None:
        """End all agents, and with them everything that runs."""
        for client in self._clients.values():
            with suppress(AgentGone, AgentRefused):
                client.ask("quit")
        self.close()

    def ask(self, node: str, op: str, **values: Any) -> dict[str, Any]:
        """One request to one agent."""
        if node not in self._clients:
            raise AgentGone(f"there is no agent of {node}")
        return self._clients[node].ask(op, **values)

    def poll(
        self, offsets: Mapping[Key, int], renew: Iterable[Key], lease_seconds: float
    ) -> tuple[list[Seen], set[str], dict[str, str]]:
        """Launches of all agents, the nodes that did not answer, and why nodes are to be left."""
        renewed = frozenset(renew)
        launches: list[Seen] = []
        silent: set[str] = set()
        leaving: dict[str, str] = {}
        for node, client in self._clients.items():
            # Only of what it told last time: a thousand nodes need not hear of each other's.
            known = self._known.get(node, ())
            told = {f"{one[0]}.{one[1]}": offsets[one] for one in known if one in offsets}
            longer = [list(one) for one in known if one in renewed]
            try:
                client.send("poll", offsets=told, renew=longer, lease_seconds=lease_seconds)
            except AgentGone:
                silent.add(node)
        deadline = time.monotonic() + self._timeout_seconds
        for node, client in self._clients.items():
            if node in silent:
                continue
            try:
                answer = client.receive(deadline - time.monotonic())
            except AgentGone:
                silent.add(node)
                continue
            except AgentRefused:  # there is a later controller; other answers are on their way
                self.close()
                raise
            seen = [_seen(node, one) for one in answer["launches"]]
            self._known[node] = tuple((one.job_id, one.epoch) for one in seen)
            launches += seen
            if answer.get("leaving"):
                leaving[node] = str(answer["leaving"])
        return launches, silent, leaving


def _seen(node: str, table: Mapping[str, Any]) -> Seen:
    return Seen(
        node=node,
        job_id=table["job_id"],
        epoch=table["epoch"],
        devices=tuple(table["devices"]),
        exits={int(rank): code for rank, code in table["exits"].items()},
        is_over=table["is_over"],
        note=table["note"],
        reports=table["reports"],
        offset=table["offset"],
    )
