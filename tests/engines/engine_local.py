"""The local engine under test: agents of emulated nodes on this machine."""

import os
import signal
from pathlib import Path

from under_test import PATIENCE, EngineUnderTest

from drystone.describe.files.cluster import parse_cluster
from drystone.run.control.controller import Controller, ControllerSettings
from drystone.run.control.runs import Patience
from drystone.run.control.world import Pace
from drystone.run.engines.agent.client import AgentClient, AgentGone

CLUSTER = """
nodes:
  - {gpu: A100, gpus_per_node: 2, emulate: {speed: 0.0003, memory: 4GiB}}
  - {gpu: T4, count: 2, gpus_per_node: 1, emulate: {speed: 0.0003, memory: 4GiB}}
"""


class LocalUnderTest(EngineUnderTest):
    """Nodes are agents, each a process of its own."""

    name = "local"
    num_nodes = 3

    def start(self, folder: Path) -> None:
        self._agents = folder
        self._stopped: dict[str, list[int]] = {}

    def close(self) -> None:
        for node in list(self._stopped):
            self.revive_node(node)

    def make_controller(self, folder: Path) -> Controller:
        self._agents = folder / "agents"
        return Controller(
            ControllerSettings(
                folder=folder,
                cluster=parse_cluster(CLUSTER),
                pace=Pace(tick_seconds=0.05, startup_seconds=0.5, round_seconds=2.0),
                patience=Patience(**PATIENCE),
            )
        )

    def kill_node(self, node: str) -> None:
        self._signal([self._pid(node)], signal.SIGKILL)

    def hang_node(self, node: str) -> None:
        agent = self._pid(node)
        if not agent:
            return  # it is being started again
        self._stopped[node] = [agent, *children_of(agent)]
        self._signal(self._stopped[node], signal.SIGSTOP)

    def revive_node(self, node: str) -> None:
        """An agent that died is started again by the controller."""
        self._signal(self._stopped.pop(node, []), signal.SIGCONT)

    def _pid(self, node: str) -> int:
        client = AgentClient(self._agents / node)
        try:
            return int(client.ask("hello")["pid"])
        except AgentGone:
            return 0
        finally:
            client.close()

    def _signal(self, pids: list[int], number: int) -> None:
        for pid in filter(None, pids):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue


def children_of(parent: int) -> list[int]:
    """The processes that one started."""
    found = []
    for path in Path("/proc").iterdir():
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            found.append(int(path.name))
    return found
