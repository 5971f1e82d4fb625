"""The engine of one machine: its GPUs, and one agent process for each of its nodes.

GPUs are asked of the driver's own tool, so torch is not needed. Agents are started when needed, and
replaced when they hang.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from drystone.describe.catalogue import find_gpu
from drystone.describe.files.cluster import ClusterSpec, load_cluster_file, parse_cluster
from drystone.errors import InvalidSpec, RequestError, UnknownName
from drystone.run.engines.agent.client import AgentClient, AgentGone, start_agent
from drystone.run.engines.agent.network import free_port
from drystone.run.engines.agents_on_nodes import NodeAgents
from drystone.run.engines.contract import Key, Poll, Rendezvous

_LOOPBACK: Final = "127.0.0.1"
# What `serve` offers where there is no GPU and no cluster file: enough to try everything.
EXAMPLE_CLUSTER = """
nodes:
  - {gpu: A100, gpus_per_node: 2, emulate: {speed: 0.0003, memory: 4GiB}}
  - {gpu: T4, gpus_per_node: 2, emulate: {speed: 0.0003, memory: 4GiB}}
"""


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
        self._agents = NodeAgents(timeout_seconds=timeout_seconds)
        # Silent at three polls in a row: each waits for an answer as long as it may.
        self._hang_seconds = 2 * timeout_seconds
        self._pids: dict[str, int] = {}

    @property
    def trouble(self) -> str:
        """There is no scheduler here but ours."""
        return ""

    def discover(self) -> ClusterSpec:
        """The cluster that it was made with, and what was added since."""
        return self._cluster

    def start(self, controller: int) -> None:
        """Find or start every agent."""
        self._agents.set_controller(controller)
        for node in self._cluster.nodes:
            self._agents.connect(node.id, self._folder / node.id)
            self._start(node.id)

    def close(self) -> None:
        """Let go of the connections; the agents stay."""
        self._agents.close()

    def quit(self) -> None:
        """End all agents, and with them everything that runs."""
        self._agents.quit()

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
            self._agents.join(node.id, self._folder / node.id)
            self._start(node.id)

    def remove(self, node: str, reason: str) -> None:
        """A node leaves for good, with whatever runs there."""
        names = [known.id for known in self._cluster.nodes]
        if node not in names:
            raise UnknownName("node", node, names)
        kept = tuple(known for known in self._cluster.nodes if known.id != node)
        self._cluster = replace(self._cluster, nodes=kept)
        self._agents.leave(node, reason)

    def poll(self, offsets: Mapping[Key, int], renew: Iterable[Key], lease_seconds: float) -> Poll:
        """Ask every agent how its launches stand."""
        answers = self._agents.poll(offsets, renew, lease_seconds)
        for node in self._cluster.nodes:
            if node.id in answers.silent:
                self._revive(node.id)
        has_changed, left = self._agents.take_changes()
        cluster = self._cluster if has_changed else None
        return Poll(tuple(answers.launches), frozenset(answers.silent), cluster, left)

    def ask(self, node: str, op: str, **values: Any) -> dict[str, Any]:
        """One request to one agent."""
        return self._agents.ask(node, op, **values)

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

    def _revive(self, node: str) -> None:
        """Start a dead agent again; end a hung one first, and with it all that it started."""
        pid = self._pids.get(node, 0)
        if pid > 0 and _is_agent(pid):
            if self._agents.silent_seconds(node) < self._hang_seconds:
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


def find_cluster(path: Path | None) -> ClusterSpec:
    """The cluster of a file; without one the GPUs of this machine, or emulated ones."""
    names = local_gpus()
    if path is not None:
        return _numbered(load_cluster_file(path), names)
    if not names:
        return parse_cluster(EXAMPLE_CLUSTER)
    rows = []
    for name, count in Counter(map(_type_of, names)).items():
        if not name:
            unknown = next(name for name in names if not _type_of(name))
            raise InvalidSpec(
                f"this machine has a {unknown}, which the catalogue does not know",
                hint="Name it as a near type in a cluster file: drystone serve --cluster FILE",
            )
        rows.append(f"{{gpu: {name}, gpus_per_node: {count}}}")
    return _numbered(parse_cluster(f"nodes: [{', '.join(rows)}]"), names)


def _numbered(cluster: ClusterSpec, names: Sequence[str]) -> ClusterSpec:
    """Which of the machine's GPUs each node has: those of its type first, then what is left.

    `names` are the driver's, in its order; a file may call a GPU by a near type's name.
    """
    real = [node for node in cluster.nodes if node.gpu not in cluster.emulations]
    wanted = sum(node.num_gpus for node in real)
    if not names or not wanted:
        return cluster
    if wanted > len(names):
        raise InvalidSpec(
            f"the cluster file names {wanted} GPUs, this machine has {len(names)}",
            hint="Leave nodes out, or emulate them: docs/serving.md",
        )
    types = [_type_of(name) for name in names]
    left = list(range(len(names)))
    numbers: dict[str, tuple[int, ...]] = {}
    for is_exact in (True, False):
        for node in real:
            mine = numbers.get(node.id, ())
            missing = node.num_gpus - len(mine)
            more = [gpu for gpu in left if types[gpu] == node.gpu or not is_exact][:missing]
            left = [gpu for gpu in left if gpu not in more]
            numbers[node.id] = (*mine, *more)
    return replace(cluster, device_numbers=numbers)


def _type_of(name: str) -> str:
    """The catalogue's name of a GPU; empty where it has none."""
    try:
        return find_gpu(name).name
    except RequestError:
        return ""


def local_gpus() -> list[str]:
    """The names of the GPUs of this machine, as the driver calls them, by its numbers."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        told = subprocess.run(
            [tool, "--query-gpu=index,name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = {}
    for line in told.stdout.splitlines():
        index, _, name = line.partition(",")
        if index.strip().isdigit() and name.strip():
            found[int(index)] = name.strip()
    return [found[index] for index in sorted(found)]
