"""`drystone serve`: run the controller on this machine, until a signal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from drystone.cli.names import complete_policies, words

if TYPE_CHECKING:
    from rich.console import Console


def serve(
    cluster: Annotated[
        Path | None, typer.Option(help="A cluster file; none: the GPUs that are here.")
    ] = None,
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
    engine: Annotated[
        str,
        typer.Option(
            help="Where jobs run: local, ray or slurm.",
            autocompletion=words("local", "ray", "slurm"),
        ),
    ] = "local",
    address: Annotated[
        str, typer.Option(help="Ray: host:port of the cluster; none: that of this machine.")
    ] = "",
    partition: Annotated[
        list[str] | None, typer.Option(help="Slurm: use this partition only (repeatable).")
    ] = None,
    slurm_option: Annotated[
        list[str] | None,
        typer.Option(help="Slurm: for every sbatch, e.g. --account=physics (repeatable)."),
    ] = None,
    any_node: Annotated[
        bool, typer.Option("--any-node", help="Slurm: ask for types and numbers, not for nodes.")
    ] = False,
    market: Annotated[
        Path | None, typer.Option(help="Nodes to rent: a YAML file (docs/renting.md).")
    ] = None,
    budget: Annotated[
        float, typer.Option(help="Dollars an hour for renting, on average; 0: no limit.", min=0)
    ] = 0.0,
    hard_cap: Annotated[
        float, typer.Option(help="Never rent above so many dollars an hour; 0: no cap.", min=0)
    ] = 0.0,
    provider: Annotated[str, typer.Option(help="Whom to rent from: simulated or sky.")] = (
        "simulated"
    ),
    simulated_cloud: Annotated[
        str,
        typer.Option(
            "--simulated-cloud",
            "--weather",  # its name up to release 0.1
            help="Its conditions: seed=1,stockout_share=0.1,price_swing=0.2.",
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

    from drystone.cli.output import make_console
    from drystone.cli.serve_engine import EngineRequest, check_request, describe_nodes, open_engine
    from drystone.cli.serve_renting import RentRequest, describe_renting, open_renting, own_nodes
    from drystone.run.control.controller import ControllerSettings
    from drystone.schedule.decision import find_policy
    from drystone.service.auth.guard import Reachability
    from drystone.service.client import default_folder
    from drystone.service.server import SOCKET_NAME, Network
    from drystone.service.server import serve as run_service

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    find_policy(policy)  # refuse a wrong name before anything is started
    where = (folder or default_folder()).expanduser().absolute()
    console = make_console(stderr=True)
    request = EngineRequest(
        name=engine, cluster=cluster, address=address, partitions=tuple(partition or ()),
        slurm_options=tuple(slurm_option or ()), takes_any_node=any_node,
    )  # fmt: skip
    check_request(request)
    if engine != "local":
        console.print(f"Looking at the nodes of {engine} ...", style="dim")
    rents = RentRequest(
        market=market, provider=provider, simulated_cloud=simulated_cloud, address=address,
        budget_dollars_per_hour=budget, hard_cap_dollars_per_hour=hard_cap,
    )  # fmt: skip
    alone = own_nodes(rents, cluster) if engine == "local" else None
    found, opened = (alone, None) if alone is not None else open_engine(request, where)
    renting = open_renting(rents, opened, where)
    kinds = describe_nodes(found)
    if renting is not None:
        kinds = ", ".join(one for one in (kinds, describe_renting(renting, provider)) if one)
    page = f", page http://{host}:{port}/" if port else ""
    lines = (f"Serving {kinds}", f"Socket {where / SOCKET_NAME}{page}")
    names = frozenset(one.lower() for one in allow_host or ())
    run_service(
        ControllerSettings(
            folder=where,
            cluster=found,
            engine=opened,
            database=database,
            policy=policy,
            renting=renting,
        ),
        network=Network(host=host, port=port, reachability=Reachability(names=names)),
        ends_agents=ends_all,
        announce=lambda told: _announce(console, (*lines, told), trains_here=engine == "local"),
    )
    console.print("Ended; what trains goes on." if not ends_all else "Ended.", style="dim")


def _announce(console: Console, lines: tuple[str, ...], *, trains_here: bool) -> None:
    """What is served where; that torch is missing better now than in the log of the first job."""
    from importlib.util import find_spec

    for line, style in zip(lines, ("bold", "dim", "yellow"), strict=True):
        if line:
            console.print(line, style=style, soft_wrap=True)
    if trains_here and find_spec("torch") is None:
        told = "There is no torch here, which training needs: pip install 'drystone[runtime]'"
        console.print(told, style="yellow", soft_wrap=True)
