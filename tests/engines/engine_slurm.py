"""The Slurm engine under test: real daemons on this machine, a slurmd for each node."""

from pathlib import Path

from slurm_fixture import SlurmCluster, SlurmNode, missing_slurm, skip_without_slurm
from under_test import PATIENCE, EngineUnderTest

from drystone.describe.files.cluster import ClusterSpec, parse_cluster
from drystone.run.control.controller import Controller, ControllerSettings
from drystone.run.control.runs import Patience
from drystone.run.control.world import Pace
from drystone.run.engines.slurm.engine import SlurmEngine, SlurmSettings

NODES = (
    SlurmNode("w1", "a100", 2),
    SlurmNode("s1", "t4", 1),
    SlurmNode("s2", "t4", 1),
    SlurmNode("v1", "v100", 1),
)
# Heterogeneous jobs are started by the backfill scheduler alone, which looks every 30 s by default.
# The node is given up soon, so that it can come back soon.
CONFIG = "SchedulerParameters=bf_interval=1,bf_window=60\nSlurmdTimeout=15"


def emulated() -> ClusterSpec:
    """Slurm's nodes are real; their GPUs are emulated on the processor."""
    rows = (f"{{gpu: {gpu}, emulate: {{speed: 0.0003, memory: 4GiB}}}}" for gpu in _TYPES)
    return parse_cluster(f"nodes: [{', '.join(rows)}]")


_TYPES = ("A100", "V100", "T4")


def slurm_controller(cluster: SlurmCluster, folder: Path, **more) -> Controller:
    """A controller of this cluster, not running yet; `more` goes to `SlurmSettings`."""
    soon = {"look_seconds": 2.0, "busy_seconds": 0.3, "silence_seconds": 3.0}
    given = soon | {"slurmd_seconds": 0.2} | more
    patience = given.pop("patience", PATIENCE)
    settings = SlurmSettings(environment=cluster.environment, **given)
    engine = SlurmEngine(folder, settings, emulated())
    return Controller(
        ControllerSettings(
            folder=folder,
            cluster=engine.discover(),
            engine=engine,
            pace=Pace(tick_seconds=0.05, startup_seconds=0.5, round_seconds=2.0),
            patience=Patience(**patience),
        )
    )


class SlurmUnderTest(EngineUnderTest):
    """Nodes are slurmds, each a process of its own."""

    name = "slurm"
    num_nodes = len(NODES)

    def start(self, folder: Path) -> None:
        skip_without_slurm()
        self._killed: set[str] = set()
        self._cluster = SlurmCluster(folder / "slurm", NODES, config=CONFIG)
        self._cluster.start()

    def close(self) -> None:
        if not missing_slurm():
            self._cluster.close()

    def make_controller(self, folder: Path) -> Controller:
        return slurm_controller(self._cluster, folder)

    def kill_node(self, node: str) -> None:
        self._cluster.kill_node(node)
        self._killed.add(node)

    def hang_node(self, node: str) -> None:
        self._cluster.stop_node(node)

    def revive_node(self, node: str) -> None:
        self._cluster.continue_node(node)
        if node in self._killed:
            self._killed.discard(node)
            self._cluster.revive_node(node)
