"""The engine of one machine: agents are started when needed, and replaced when they hang."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from drystone.describe.files.cluster import ClusterSpec
from drystone.errors import UnknownName
from drystone.run.engines.agent.client import (
    AgentClient,
    AgentGone,
    AgentPool,
    AgentRefused,
    start_agent,
)
from drystone.run.engines.agent.network import free_port
from drystone.run.engines.contract import Key, Poll, Rendezvous

_MOST_SILENCES: Final = 3
_LOOPBACK: Final = "127.0.0.1"


class LocalEngine:
    """One agent for each node of a cluster that is one machine."""

    def __init__(
        self,
        folder: Path,
        cluster: ClusterSpec,
        *,
        timeout_seconds: float = 2.0,
        idle_seconds: float = 600.0,
    ) -> None:
        self._folder, self._cluster = folder, cluster
        self._idle_seconds = idle_seconds
        self._pool = AgentPool(timeout_seconds=timeout_seconds)
        self._pids: dict[str, int] = {}
        self._silences: dict[str, int] = {}
        self._has_changed = False
        self._left: dict[str, str] = {}

    def discover(self) -> ClusterSpec:
        """The cluster that it was made with, and what was added since."""
        return self._cluster

    def start(self, controller: int) -> None:
        """Find or start every agent."""
        self._pool.controller = controller
        for node in self._cluster.nodes:
            self._pool.put(node.id, self._folder / node.id)
            self._start(node.id)

    def close(self) -> None:
        """Let go of the connections; the agents stay."""
        self._pool.close()

    def quit(self) -> None:
        """End all agents, and with them everything that runs."""
        self._pool.quit()

    def add(self, more: ClusterSpec) -> None:
        """More emulated nodes, or GPUs that were put in: they are used from the next look on."""
        self._cluster = replace(
            self._cluster,
            nodes=self._cluster.nodes + more.nodes,
            emulations={**self._cluster.emulations, **more.emulations},
            dollars_per_gpu_hour={
                **more.dollars_per_gpu_hour,
                **self._cluster.dollars_per_gpu_hour,
            },
        )
        for node in more.nodes:
            self._pool.put(node.id, self._folder / node.id)
            self._start(node.id)
        self._has_changed = True

    def remove(self, node: str, reason: str) -> None:
        """A node leaves for good, with whatever runs there."""
        names = [one.id for one in self._cluster.nodes]
        if node not in names:
            raise UnknownName("node", node, names)
        with suppress(AgentGone, AgentRefused):
            self._pool.ask(node, "quit")
        self._pool.drop(node)
        kept = tuple(one for one in self._cluster.nodes if one.id != node)
        self._cluster = replace(self._cluster, nodes=kept)
        self._left[node] = reason
        self._has_changed = True

    def poll(self, offsets: Mapping[Key, int], renew: Iterable[Key], lease_seconds: float) -> Poll:
        """Ask every agent how its launches stand."""
        launches, silent, _ = self._pool.poll(offsets, renew, lease_seconds)
        for node in self._cluster.nodes:
            if node.id in silent:
                self._revive(node.id)
            else:
                self._silences[node.id] = 0
        cluster = self._cluster if self._has_changed else None
        left, self._left, self._has_changed = self._left, {}, False
        return Poll(tuple(launches), frozenset(silent), cluster, left)

    def ask(self, node: str, op: str, **values: Any) -> dict[str, Any]:
        """One request to one agent."""
        return self._pool.ask(node, op, **values)

    def read(self, node: str, *, job_id: str, epoch: int, name: str, offset: int) -> dict[str, Any]:
        """A part of a file of a launch, over a connection of its own."""
        client = AgentClient(self._folder / node)
        try:
            return client.ask("read", job_id=job_id, epoch=epoch, name=name, offset=offset)
        finally:
            client.close()

    def rendezvous(self, node: str) -> Rendezvous:
        """All ranks are on this machine."""
        return Rendezvous(address=_LOOPBACK, port=free_port(_LOOPBACK))

    def reserve(self, key: Key, gpus: Mapping[str, int]) -> bool:
        """Nobody else gives this machine's devices away."""
        return True

    def held(self) -> frozenset[Key]:
        """There are no locks here."""
        return frozenset()

    def release(self, key: Key) -> None:
        """There are no locks here."""

    def pid(self, node: str) -> int:
        """The process of a node's agent."""
        return self._pids[node]

    def _start(self, node: str) -> None:
        self._pids[node] = start_agent(
            self._folder / node, node=node, idle_seconds=self._idle_seconds
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
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        # Agents outlive controllers: an older release started them under another module name.
        return b"drystone.run." in command and b".agent" in command
    except OSError:
        return False
