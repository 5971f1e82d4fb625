"""Talk to agents, and start them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from drystone.errors import DrystoneError
from drystone.run.agent.socket_path import short_path


class AgentGone(DrystoneError):
    """The agent does not answer."""


class AgentRefused(DrystoneError):
    """The agent answered that it does not do that."""


class AgentClient:
    """One connection to one agent; made when first needed, and again when it broke."""

    def __init__(self, folder: Path, *, controller: int = 0, timeout_seconds: float = 5.0) -> None:
        self.folder, self._controller = folder, controller
        self._timeout_seconds = timeout_seconds
        self._socket: socket.socket | None = None
        self._rest = b""

    def ask(self, op: str, **values: Any) -> dict[str, Any]:
        """One request, one answer."""
        request = {"op": op, "controller": self._controller, **values}
        try:
            answer = self._exchange(json.dumps(request).encode() + b"\n")
        except (OSError, ValueError) as error:
            self.close()
            raise AgentGone(f"the agent in {self.folder} does not answer: {error}") from None
        if not answer.pop("ok", False):
            raise AgentRefused(str(answer.get("error", "refused")))
        return answer

    def close(self) -> None:
        """Let go of the connection."""
        if self._socket is not None:
            self._socket.close()
        self._socket, self._rest = None, b""

    def _exchange(self, line: bytes) -> dict[str, Any]:
        if self._socket is None:
            made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            made.settimeout(self._timeout_seconds)
            try:
                with short_path(self.folder / "agent.sock") as name:
                    made.connect(name)
            except OSError:
                made.close()
                raise
            self._socket = made
        self._socket.sendall(line)
        parts = [self._rest]
        while b"\n" not in parts[-1]:
            chunk = self._socket.recv(1 << 16)
            if not chunk:
                raise ConnectionResetError("the connection was closed")
            parts.append(chunk)
        head, _, self._rest = b"".join(parts).partition(b"\n")
        answer = json.loads(head)
        if not isinstance(answer, dict):
            raise TypeError("no JSON object")
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
    arguments = [sys.executable, "-m", "drystone.run.agent", str(folder), node, str(idle_seconds)]
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
