"""Runs on a node, as a short task of Ray: find or start our agent there, and say where it is.

The agent is a process of its own and needs nothing of Ray. It ends with the node's raylet, and with
it everything that it started: Ray itself leaves such processes behind when a raylet is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from drystone.errors import DrystoneError
from drystone.run.engines.agent.client import AgentClient, AgentGone, AgentRefused, Remote
from drystone.run.engines.agent.launches import read_json

_START_SECONDS: Final = 30.0
_DEATH_SECONDS: Final = 3.0
# What Ray sets for its own workers; training processes are no such workers.
_RAY_VARIABLES: Final = ("RAY_", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTHONBREAKPOINT")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentWish:
    """What is asked of a node."""

    folder: str  # of the agent, on the disk that all share
    node: str
    host: str  # of the node, as the others call it
    secret: str  # the file with it
    token: str  # a file that the controller has just written, and its text
    token_text: str
    version: str
    replaces_hung: bool  # one that is there but does not answer is ended


class NotShared(DrystoneError):
    """The folder is not the controller's folder on this machine."""


def own_version() -> str:
    """Of this package, as it is installed."""
    try:
        return version("drystone")
    except PackageNotFoundError:
        return ""


def begin_agent(wish: AgentWish) -> dict[str, Any]:
    """Find or start the agent; its address."""
    _check(wish)
    folder = Path(wish.folder)
    known = _hello(wish)
    if known is not None:
        return known
    if wish.replaces_hung:
        _end_hung(folder)
    folder.mkdir(parents=True, exist_ok=True)
    raylet = find_raylet(os.getpid())
    arguments = [
        sys.executable, "-m", "drystone.run.engines.agent", wish.folder, wish.node,
        "--listen", wish.host, "--secret", wish.secret, "--life", str(raylet),
    ]  # fmt: skip
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(_RAY_VARIABLES)
    }
    with (folder / "agent.log").open("ab") as log:
        subprocess.run(
            arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False, env=kept,
            preexec_fn=lambda: _be_as_nice_as(raylet),
        )  # fmt: skip
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        known = _hello(wish)
        if known is not None:
            return known
        time.sleep(0.05)
    text = (folder / "agent.log").read_text(encoding="utf-8", errors="replace")[-500:]
    raise AgentGone(f"the agent of {wish.node} did not start: {text.strip()}")


def _be_as_nice_as(raylet: int) -> None:
    """Ray lets its workers wait for everybody else (niceness 15); training should not.

    Where the system does not allow that, they stay as they are: see docs/ray.md.
    """
    with suppress(OSError):
        wanted = os.getpriority(os.PRIO_PROCESS, raylet)
        os.setpriority(os.PRIO_PROCESS, 0, wanted)


def find_raylet(pid: int) -> int:
    """The raylet that a process descends from; 0 where there is none."""
    while pid > 1:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            return 0
        name = fields.partition("(")[2].rpartition(")")[0]
        if name == "raylet":
            return pid
        pid = int(fields.rpartition(")")[2].split()[1])
    return 0


def _check(wish: AgentWish) -> None:
    try:
        text = Path(wish.token).read_text(encoding="ascii")
    except OSError:
        text = ""
    if text != wish.token_text:
        raise NotShared(f"{Path(wish.token).parent} is not the same folder there")
    if own_version() != wish.version:
        raise DrystoneError(f"it has drystone {own_version() or 'none'}, not {wish.version}")


def _hello(wish: AgentWish) -> dict[str, Any] | None:
    """The address of an agent that answers."""
    address = read_json(Path(wish.folder) / "address.json")
    if address is None:
        return None
    secret = Path(wish.secret).read_text(encoding="ascii").strip()
    remote = Remote(host=address["host"], port=int(address["port"]), secret=secret)
    client = AgentClient(remote, timeout_seconds=2.0)
    try:
        told = client.ask("hello")
    except (AgentGone, AgentRefused):
        return None
    finally:
        client.close()
    return dict(address) if told["node"] == wish.node and not told["leaving"] else None


def _end_hung(folder: Path) -> None:
    """An agent that does not answer is killed, and what it started dies with it."""
    pid = int((read_json(folder / "address.json") or {}).get("pid", 0))
    command = Path(f"/proc/{pid}/cmdline")
    try:
        is_agent = str(folder).encode() in command.read_bytes().split(b"\0")
    except OSError:
        return
    if is_agent:
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + _DEATH_SECONDS
        while command.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
