"""The agents of this machine's nodes: started when needed, asked often, replaced when they hang."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from drystone.run.agent.client import AgentClient, AgentGone, AgentRefused, start_agent

Key = tuple[str, int]  # job and epoch
_MOST_SILENCES: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One launch as one agent sees it."""

    node: str
    job_id: str
    epoch: int
    devices: tuple[int, ...]
    exits: Mapping[int, int | None]  # by rank
    is_over: bool
    note: str
    reports: str
    offset: int


@dataclass(frozen=True, slots=True)
class Poll:
    """What all agents say at one time."""

    launches: tuple[Seen, ...]
    silent: frozenset[str]  # nodes whose agents did not answer this time


class AgentPool:
    """One agent a node."""

    def __init__(
        self,
        folder: Path,
        nodes: Sequence[str],
        *,
        controller: int,
        timeout_seconds: float = 2.0,
        idle_seconds: float = 600.0,
    ) -> None:
        self._folders = {node: folder / node for node in nodes}
        self._idle_seconds = idle_seconds
        self._clients = {
            node: AgentClient(path, controller=controller, timeout_seconds=timeout_seconds)
            for node, path in self._folders.items()
        }
        self._pids: dict[str, int] = {}
        self._silences = dict.fromkeys(nodes, 0)

    def start(self) -> None:
        """Find or start every agent."""
        for node in self._folders:
            self._start(node)

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

    def poll(self, offsets: Mapping[Key, int], renew: Iterable[Key], lease_seconds: float) -> Poll:
        """Ask every agent how its launches stand."""
        launches: list[Seen] = []
        silent: set[str] = set()
        request = {
            "offsets": {f"{job_id}.{epoch}": offset for (job_id, epoch), offset in offsets.items()},
            "renew": [list(key) for key in renew],
            "lease_seconds": lease_seconds,
        }
        for node, client in self._clients.items():
            try:
                answer = client.ask("poll", **request)
            except AgentGone:
                silent.add(node)
                self._revive(node)
                continue
            self._silences[node] = 0
            launches += [_seen(node, one) for one in answer["launches"]]
        return Poll(tuple(launches), frozenset(silent))

    def ask(self, node: str, op: str, **values: Any) -> dict[str, Any]:
        """One request to one agent."""
        return self._clients[node].ask(op, **values)

    def pid(self, node: str) -> int:
        """The process of a node's agent."""
        return self._pids[node]

    def _start(self, node: str) -> None:
        self._pids[node] = start_agent(
            self._folders[node], node=node, idle_seconds=self._idle_seconds
        )
        self._silences[node] = 0

    def _revive(self, node: str) -> None:
        """Start a dead agent again; end a hung one first, and with it all that it started."""
        pid = self._pids.get(node, 0)
        is_alive = pid > 0 and Path(f"/proc/{pid}/cmdline").exists() and _is_agent(pid)
        if is_alive:
            self._silences[node] += 1
            if self._silences[node] < _MOST_SILENCES:
                return
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        with suppress(AgentGone):
            self._start(node)


def _is_agent(pid: int) -> bool:
    """Whether that process is still an agent: numbers of processes are used again."""
    try:
        return b"drystone.run.agent" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


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
