"""`drystone serve`: run the controller on this machine, until a signal.

With which engine jobs run (this machine, or a cluster that is there), and from whom nodes are
rented, are two groups of options.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from drystone.cli.options import Profiles, WebhookUrls, complete_policies, takes_groups, words
from drystone.cli.output import make_console
from drystone.cli.request import read_profiles
from drystone.describe.files.cluster import ClusterSpec, load_cluster_file
from drystone.errors import InvalidSpec, UnknownName

if TYPE_CHECKING:
    from rich.console import Console

    from drystone.run.engines.contract import Engine
    from drystone.run.renting.provider import NodeJoiner, Renting
    from drystone.run.renting.simulated_cloud import CloudConditions

ENGINES = ("local", "ray", "slurm")
PROVIDERS = ("simulated", "sky", "commands")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Where jobs run."""

    cluster: Annotated[
        Path | None, typer.Option(help="A cluster file; none: the GPUs that are here.")
    ] = None
    profile: Profiles = None
    engine: Annotated[
        str,
        typer.Option(help="Where jobs run: local, ray or slurm.", autocompletion=words(*ENGINES)),
    ] = "local"
    address: Annotated[
        str, typer.Option(help="Ray: host:port of the cluster; none: that of this machine.")
    ] = ""
    partition: Annotated[
        list[str] | None, typer.Option(help="Slurm: use this partition only (repeatable).")
    ] = None
    slurm_option: Annotated[
        list[str] | None,
        typer.Option(help="Slurm: for every sbatch, e.g. --account=physics (repeatable)."),
    ] = None
    any_node: Annotated[
        bool, typer.Option("--any-node", help="Slurm: ask for types and numbers, not for nodes.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class RentOptions:
    """What may be rented, from whom, for how much."""

    market: Annotated[
        Path | None, typer.Option(help="Nodes to rent: a YAML file (docs/renting.md).")
    ] = None
    budget: Annotated[
        float, typer.Option(help="Dollars an hour for renting, on average; 0: no limit.", min=0)
    ] = 0.0
    hard_cap: Annotated[
        float, typer.Option(help="Never rent above so many dollars an hour; 0: no cap.", min=0)
    ] = 0.0
    provider: Annotated[
        str,
        typer.Option(
            help="Whom to rent from: simulated, sky or commands.", autocompletion=words(*PROVIDERS)
        ),
    ] = "simulated"
    commands: Annotated[
        Path | None,
        typer.Option(help="For --provider commands: a folder with create, list and delete."),
    ] = None
    simulated_cloud: Annotated[
        str,
        typer.Option(
            "--simulated-cloud",
            "--weather",
            help="How the simulated cloud behaves: seed=1,stockout_share=0.1,price_swing=0.2.",
        ),
    ] = ""


@takes_groups
def serve(
    *,
    engine: EngineOptions,
    folder: Annotated[
        Path | None, typer.Option(help="Where log, jobs and socket live (DRYSTONE_FOLDER).")
    ] = None,
    database: Annotated[
        str, typer.Option(help="Instead of SQLite in the folder, e.g. postgresql+psycopg://...")
    ] = "",
    policy: Annotated[
        str,
        typer.Option(
            help="How to decide; names as of `simulate`.", autocompletion=complete_policies
        ),
    ] = "prices",
    port: Annotated[int, typer.Option(help="Also answer on this port.", min=0, max=65535)] = 0,
    host: Annotated[
        str, typer.Option(help="Of which address; beyond loopback only once a token exists.")
    ] = "127.0.0.1",
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="A name that people call this service by, e.g. a proxy's."),
    ] = None,
    webhook: WebhookUrls = None,
    rents: RentOptions,
    job_env: Annotated[
        list[str] | None,
        typer.Option(
            help="A variable that every job gets: NAME (its value here) or NAME=VALUE (repeatable)."
        ),
    ] = None,
    run_as: Annotated[
        str,
        typer.Option(
            help="As root: run jobs as this account, or `submitter`: each as its owner's.",
        ),
    ] = "",
    ends_all: Annotated[
        bool, typer.Option("--end-all", help="When ended, end what trains too.")
    ] = False,
) -> None:
    """Run the controller on this machine.

    Jobs run here or, with `--engine`, on a Ray cluster that this machine is a node of (docs/ray.md)
    or a Slurm cluster whose commands are here (docs/slurm.md); then --cluster says by GPU type what
    the cluster cannot know. What trains goes on when the controller ends, for two minutes at least;
    the next one takes it over. Jobs come in by `drystone submit`.
    """
    import logging

    from drystone.run.control.controller import ControllerSettings
    from drystone.schedule.decision import find_policy
    from drystone.service.auth.guard import HostRules
    from drystone.service.client import default_folder
    from drystone.service.server import SOCKET_NAME, Network
    from drystone.service.server import serve as run_service
    from drystone.service.webhooks import Target

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    find_policy(policy)  # refuses a wrong name before anything is started
    where = (folder or default_folder()).expanduser().absolute()
    console = make_console(stderr=True)
    _check_engine(engine)
    _check_run_as(run_as, engine.engine)
    is_local = engine.engine == "local"
    if not is_local:
        console.print(f"Looking at the nodes of {engine.engine} ...", style="dim")
    alone = own_nodes(rents, engine.cluster) if is_local else None
    found, opened = (alone, None) if alone is not None else open_engine(engine, where)
    renting = open_renting(rents, opened, where, engine.address)
    kinds = describe_nodes(found)
    if renting is not None:
        kinds = ", ".join(filter(None, (kinds, describe_renting(renting, rents.provider))))
    page = f", page http://{host}:{port}/" if port else ""
    lines = (f"Serving {kinds}", f"Socket {where / SOCKET_NAME}{page}")
    names = frozenset(name.lower() for name in allow_host or ())
    hooks = tuple(Target.parse(text) for text in webhook or ())
    run_service(
        ControllerSettings(
            folder=where,
            cluster=found,
            engine=opened,
            database=database,
            policy=policy,
            renting=renting,
            job_environment=_variables(job_env or ()),
            run_as=run_as,
        ),
        network=Network(host=host, port=port, host_rules=HostRules(names=names), webhooks=hooks),
        ends_agents=ends_all,
        announce=lambda told: _announce(console, (*lines, told), trains_here=is_local),
    )
    console.print("Ended; what trains goes on." if not ends_all else "Ended.", style="dim")


def _check_run_as(run_as: str, engine: str) -> None:
    """Other accounts need root, and processes that our own agents start on this machine."""
    from drystone.run.engines.agent.accounts import SUBMITTER, find_account

    if not run_as:
        return
    if engine != "local":
        raise InvalidSpec(
            f"--run-as is for this machine; {engine} has accounts of its own", where="--run-as"
        )
    if os.geteuid() != 0:
        raise InvalidSpec(
            "only root can run jobs under other accounts",
            where="--run-as",
            hint="Without it jobs run as you: SECURITY.md says what that means",
        )
    if run_as != SUBMITTER:
        find_account(run_as)


def _variables(words: Iterable[str]) -> dict[str, str]:
    """What every job gets from who runs the service."""
    found = {}
    for word in words:
        name, is_given, value = word.partition("=")
        if not name or (not is_given and name not in os.environ):
            raise InvalidSpec(
                f"there is no variable {name!r} here", where="--job-env", hint="Say NAME=VALUE"
            )
        found[name] = value if is_given else os.environ[name]
    return found


def _announce(console: Console, lines: tuple[str, ...], *, trains_here: bool) -> None:
    """What is served where; that torch is missing better now than in the log of the first job."""
    from importlib.util import find_spec

    for line, style in zip(lines, ("bold", "dim", "yellow"), strict=True):
        if line:
            console.print(line, style=style, soft_wrap=True)
    if trains_here and find_spec("torch") is None:
        told = "There is no torch here, which training needs: pip install 'drystone[runtime]'"
        console.print(told, style="yellow", soft_wrap=True)


def _check_engine(request: EngineOptions) -> None:
    """Refuse a wrong name, and options of another engine, before anything is looked at."""
    if request.engine not in ENGINES:
        raise UnknownName("engine", request.engine, ENGINES)
    says_slurm = request.partition or request.slurm_option or request.any_node
    if says_slurm and request.engine != "slurm":
        raise InvalidSpec(
            "--partition, --slurm-option and --any-node are for --engine slurm",
            hint=f"Leave them out with --engine {request.engine}",
        )
    if request.address and request.engine != "ray":
        raise InvalidSpec("--address is for --engine ray", hint="Say --engine ray too")


def open_engine(request: EngineOptions, folder: Path) -> tuple[ClusterSpec, Engine | None]:
    """The nodes there are, and the engine that runs jobs on them; none: this machine."""
    _check_engine(request)
    file = load_cluster_file(request.cluster) if request.cluster is not None else None
    read_profiles(request.profile)
    if request.engine == "ray":
        from drystone.run.engines.ray.engine import RayEngine
        from drystone.run.engines.ray.watch import RayConnection

        ray = RayEngine(folder / "agents", RayConnection(request.address or "auto"), file=file)
        return ray.discover(), ray
    if request.engine == "slurm":
        from drystone.run.engines.slurm.engine import SlurmEngine, SlurmSettings

        settings = SlurmSettings(
            partitions=tuple(request.partition or ()),
            options=tuple(request.slurm_option or ()),
            pins_nodes=not request.any_node,
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


def own_nodes(request: RentOptions, cluster: Path | None) -> ClusterSpec | None:
    """Where a market is given and no cluster, there may be no own nodes at all; None: look."""
    from drystone.run.engines.local import local_gpus

    if request.market is None or cluster is not None or local_gpus():
        return None
    return ClusterSpec(nodes=())


def open_renting(
    request: RentOptions, engine: Engine | None, folder: Path, address: str
) -> Renting | None:
    """The provider and the offers; None: nothing is rented."""
    if request.provider not in PROVIDERS:
        raise UnknownName("provider", request.provider, PROVIDERS)
    if request.market is None:
        if request.budget or request.hard_cap:
            raise InvalidSpec("a budget needs something to rent", hint="Give --market FILE")
        return None
    from drystone.describe.files.market import load_market
    from drystone.run.renting.provider import Provider, Renting, live_offers
    from drystone.run.renting.simulated_cloud import SimulatedCloud

    if (request.provider == "commands") != (request.commands is not None):
        raise InvalidSpec(
            "--provider commands and --commands FOLDER go together",
            hint="The folder has three programs: create, list and delete (docs/renting.md)",
        )
    is_simulated = request.provider == "simulated"
    offers = live_offers(load_market(request.market), is_simulated=is_simulated)
    provider: Provider
    if is_simulated:
        provider = SimulatedCloud(
            folder / "cloud.json", offers, _cloud_conditions(request.simulated_cloud)
        )
    elif engine is None and not all(offer.emulation for offer in offers):
        raise InvalidSpec(
            "machines of a cloud need a cluster to join",
            hint="Say --engine ray, on the head of a Ray cluster that they can reach",
        )
    elif request.commands is not None:
        from drystone.run.renting.commands import CommandProvider

        provider = CommandProvider(request.commands, offers, address=address)
    else:
        from drystone.run.renting.skypilot import SkyPilot

        provider = SkyPilot(offers, ray_address=address)
    return Renting(
        provider=provider,
        offers=offers,
        joiner=_joiner(request, engine, folder, address),
        budget_dollars_per_hour=request.budget or math.inf,
        hard_cap_dollars_per_hour=request.hard_cap or math.inf,
        look_seconds=2.0 if is_simulated else 15.0,
    )


def describe_renting(renting: Renting, provider: str) -> str:
    """`what can be rented, from whom, for how much`."""
    offers = ", ".join(
        f"{offer.num_gpus} {offer.gpu} at ${offer.price_dollars_per_hour:g}/h"
        for offer in renting.offers
    )
    limits = [
        f"{word} ${dollars:g}/h"
        for word, dollars in (
            ("budget", renting.budget_dollars_per_hour),
            ("hard cap", renting.hard_cap_dollars_per_hour),
        )
        if math.isfinite(dollars)
    ]
    clouds = {"simulated": "a simulated cloud", "sky": "SkyPilot", "commands": "your commands"}
    cloud = clouds[provider]
    return f"rented from {cloud}: {offers}" + (f" ({', '.join(limits)})" if limits else "")


def _joiner(
    request: RentOptions, engine: Engine | None, folder: Path, address: str
) -> NodeJoiner | None:
    from drystone.run.renting.joining import RayJoiner, SelfJoiner

    if engine is None:
        return None
    if request.provider != "simulated":
        return SelfJoiner()
    if not address:
        raise InvalidSpec(
            "nodes of the simulated cloud must know which Ray cluster to join",
            hint="Give --engine ray --address HOST:PORT",
        )
    return RayJoiner(address, folder / "rented")


def _cloud_conditions(text: str) -> CloudConditions:
    """How the simulated cloud behaves: `seed=1,stockout_share=0.1`."""
    from drystone.run.renting.simulated_cloud import CloudConditions

    known = {field.name for field in fields(CloudConditions)}
    values: dict[str, float] = {}
    for word in text.split(",") if text else ():
        name, _, value = (part.strip() for part in word.partition("="))
        if name not in known:
            raise UnknownName("property of the simulated cloud", name, sorted(known))
        try:
            values[name] = float(value)
        except ValueError:
            raise InvalidSpec(f"{word!r} is not a number", where="--simulated-cloud") from None
        if not (math.isfinite(values[name]) and values[name] >= 0):
            raise InvalidSpec(f"{word!r} must be 0 or more", where="--simulated-cloud")
    seed = int(values.pop("seed", 0))
    return CloudConditions(seed=seed, **values)
