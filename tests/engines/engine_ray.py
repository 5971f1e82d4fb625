"""The Ray engine under test: a raylet for each node, with our agent beside it."""

from pathlib import Path

from engine_local import children_of
from ray_fixture import NODES, shared_cluster
from under_test import PATIENCE, EngineUnderTest

from drystone.run.control.controller import Controller, ControllerSettings
from drystone.run.control.runs import Patience
from drystone.run.control.world import Pace
from drystone.run.engines.agent.launches import read_json
from drystone.run.engines.ray.engine import RayEngine, RaySettings
from drystone.run.engines.ray.watch import RayConnection


def ray_controller(cluster, folder: Path, **patience) -> Controller:
    """A controller of this cluster, not running yet."""
    settings = RaySettings(look_seconds=0.3, retry_seconds=2.0)
    engine = RayEngine(folder / "agents", RayConnection(cluster.address), settings)
    return Controller(
        ControllerSettings(
            folder=folder,
            cluster=engine.discover(),
            engine=engine,
            pace=Pace(tick_seconds=0.05, startup_seconds=0.5, round_seconds=2.0),
            patience=Patience(**(PATIENCE | patience)),
        )
    )


class RayUnderTest(EngineUnderTest):
    """Nodes are raylets, each a process of its own."""

    name = "ray"
    num_nodes = len(NODES)
    patience_seconds = 120.0  # a raylet starts in ten seconds on a busy machine

    def start(self, folder: Path) -> None:
        self._cluster = shared_cluster()

    def close(self) -> None:
        """The cluster is shared; it ends with the process."""

    def make_controller(self, folder: Path) -> Controller:
        self._folder = folder
        return ray_controller(self._cluster, folder)

    def kill_node(self, node: str) -> None:
        self._cluster.kill(self._cluster.name_of(node))

    def hang_node(self, node: str) -> None:
        address = read_json(self._folder / "agents" / node / "address.json")
        agent = int(address["pid"])
        self._cluster.hang(self._cluster.name_of(node), [agent, *children_of(agent)])

    def revive_node(self, node: str) -> None:
        name = self._cluster.name_of(node)
        if name:
            self._cluster.revive(name)

    def heal(self, nodes: list[str]) -> None:
        """Those too that died before a controller knew them."""
        self._cluster.heal()
