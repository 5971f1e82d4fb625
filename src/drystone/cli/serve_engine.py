"""Which engine `drystone serve` runs jobs with: this machine, or a cluster that is there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from drystone.describe.files.cluster import ClusterSpec, load_cluster_file
from drystone.errors import InvalidSpec, UnknownName

if TYPE_CHECKING:
    from drystone.run.engines.contract import Engine

ENGINES = ("local", "ray", "slurm")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """What was said about engines on the command line."""

    name: str = "local"
    cluster: Path | None = None
    address: str = ""  # of a Ray cluster
    partitions: tuple[str, ...] = ()
    slurm_options: tuple[str, ...] = ()
    takes_any_node: bool = False


def check_request(request: EngineRequest) -> None:
    """Refuse a wrong name, and options of another engine, before anything is looked at."""
    if request.name not in ENGINES:
        raise UnknownName("engine", request.name, ENGINES)
    says_slurm = request.partitions or request.slurm_options or request.takes_any_node
    if says_slurm and request.name != "slurm":
        raise InvalidSpec(
            "--partition, --slurm-option and --any-node are for --engine slurm",
            hint=f"Leave them out with --engine {request.name}",
        )
    if request.address and request.name != "ray":
        raise InvalidSpec("--address is for --engine ray", hint="Say --engine ray too")


def open_engine(request: EngineRequest, folder: Path) -> tuple[ClusterSpec, Engine | None]:
    """The nodes there are, and the engine that runs jobs on them; none: this machine."""
    check_request(request)
    file = load_cluster_file(request.cluster) if request.cluster is not None else None
    if request.name == "ray":
        from drystone.run.engines.ray.engine import RayEngine
        from drystone.run.engines.ray.watch import RayConnection

        ray = RayEngine(folder / "agents", RayConnection(request.address or "auto"), file=file)
        return ray.discover(), ray
    if request.name == "slurm":
        from drystone.run.engines.slurm.engine import SlurmEngine, SlurmSettings

        settings = SlurmSettings(
            partitions=request.partitions,
            options=request.slurm_options,
            pins_nodes=not request.takes_any_node,
        )
        slurm = SlurmEngine(folder, settings, file)
        return slurm.discover(), slurm
    from drystone.run.engines.local import find_cluster

    return find_cluster(request.cluster), None


def describe_nodes(cluster: ClusterSpec) -> str:
    """`2 A100, 4 T4`: what there is, in a few words."""
    return ", ".join(
        f"{sum(node.num_gpus for node in cluster.nodes if node.gpu == gpu)} {gpu}"
        + (" (emulated on this processor)" if gpu in cluster.emulations else "")
        + (" (a type of your own)" if cluster.gpu(gpu).is_own else "")
        for gpu in cluster.gpu_types
    )
