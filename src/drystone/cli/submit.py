"""`drystone submit`: a dry run that becomes a job when its owner agrees."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from drystone.cli.columns import counted, money
from drystone.cli.live import Folder, connected, format_gpus
from drystone.cli.options import AsJson, ConfigFiles, complete_models
from drystone.cli.quick import say_emulated


def submit(
    file: Annotated[Path | None, typer.Argument(help="A job file (docs/jobs.md).")] = None,
    config: ConfigFiles = None,
    model: Annotated[
        str, typer.Option(help="Without a file: what to train.", autocompletion=complete_models)
    ] = "",
    data: Annotated[str, typer.Option(help="A token or text file; none: made-up tokens.")] = "",
    steps: Annotated[str, typer.Option(help="How many steps, e.g. 1000.")] = "",
    tokens: Annotated[str, typer.Option(help="Or how many tokens, e.g. 2B.")] = "",
    batch: Annotated[int, typer.Option(help="Sequences in a step.", min=0)] = 0,
    sequence: Annotated[int, typer.Option(help="Tokens in a sequence.", min=0)] = 0,
    name: Annotated[str, typer.Option(help="For people.")] = "",
    deadline: Annotated[str, typer.Option(help="E.g. 6h or 2026-11-20T18:00.")] = "",
    max_cost: Annotated[float, typer.Option(help="Dollars.", min=0)] = 0.0,
    include: Annotated[
        list[Path] | None,
        typer.Option(help="For a service on another machine: more files or folders to send."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what it would get.")
    ] = False,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Show what a job would get and cost, and submit it.

    No hardware is named: the plan, what else would do, and the price are shown first, and nothing
    is started before you agree.

    With --json nothing is asked: {id, is_new}; with --dry-run what it would get (docs/api.md).
    """
    import getpass
    import uuid

    from drystone.cli.output import make_console, print_json
    from drystone.service.submission import with_files

    body: dict[str, Any] = {"client_key": uuid.uuid4().hex, "owner": getpass.getuser()}
    train = {"steps": steps, "tokens": tokens, "batch": batch, "sequence": sequence}
    table = {"model": model, "data": data, "name": name, "deadline": deadline, "max_cost": max_cost}
    if config:
        table, train = _from_config(config, table, train)
    body |= _described(file, table, train)
    with connected(folder) as client:
        body = with_files(client, body, include or ())
        if dry_run and as_json:
            print_json(client.post("/v1/plan", body))
            return
        if not as_json:
            _show_plan(client.post("/v1/plan", body))
            say_emulated(client.get("/v1/health")["is_emulated"])
        if dry_run or not (yes or as_json or _agrees()):
            return
        answer = client.post("/v1/jobs", body)
    if as_json:
        print_json(answer)
    else:
        job = answer["id"]
        told = f"Submitted as job {job}. Follow it with: drystone logs -f {job}"
        make_console(stderr=True).print(told, style="bold green")


def _from_config(
    paths: list[Path], table: dict[str, Any], train: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What another trainer's config says of a job; options of the command line count for it."""
    from drystone.describe.recipe import Tuning
    from drystone.errors import InvalidSpec
    from drystone.plan.configs.read import read_configs

    asked = read_configs(paths)
    setup = asked.setup
    if setup.tuning is Tuning.QLORA or setup.offload.value != "none":
        what = "4-bit weights" if setup.tuning is Tuning.QLORA else f"offload {setup.offload.value}"
        raise InvalidSpec(f"asks for {what}, which our runtime does not do", where=str(paths[0]))
    said = {"batch": setup.global_batch(), "sequence": setup.seq_len}
    table = table | {"model": table["model"] or setup.model}
    if setup.tuning is Tuning.LORA:
        table["tune"] = {"method": "lora", "rank": setup.lora_rank}
    told = f"{said['batch']} sequences a step" + ("" if setup.num_gpus else ", as on one GPU")
    typer.echo(f"From the config: {table['model']}, {told}", err=True)
    if asked.unused:
        typer.echo("Keys that were not used: " + ", ".join(asked.unused), err=True)
    return table, train | {key: value for key, value in said.items() if not train[key]}


def _described(file: Path | None, table: dict[str, Any], train: dict[str, Any]) -> dict[str, Any]:
    from drystone.describe.files.job import make_job
    from drystone.errors import InvalidSpec
    from drystone.service.submission import file_body

    given = {key: value for key, value in table.items() if value}
    trained = {key: value for key, value in train.items() if value}
    here = Path.cwd()
    if file is None:
        job = given | {"train": trained}
        make_job(job, folder=here, knows_gpus=False)  # what is wrong is said here, with its place
        return {"job": job, "folder": str(here)}
    if given or trained:
        raise InvalidSpec("give a job file or options, not both", where=str(file))
    return file_body(file)


def _show_plan(plan: dict[str, Any]) -> None:
    from drystone.cli.live import print_options
    from drystone.cli.output import make_console
    from drystone.units import format_seconds

    chosen, job = plan["chosen"], plan["job"]
    what = job["model"] or " ".join(job["command"])
    print_options(f"{job['name']}: {counted(plan['steps'], 'step')} of {what}", plan["options"])
    console = make_console(stderr=True)
    cost = "" if chosen["dollars"] is None else f", about {money(chosen['dollars'])}"
    if chosen["is_free"]:
        begins, note = "Now it would get", "It may grow and shrink while it runs."
    else:
        begins, note = "What suffices is taken; alone it would get", "It waits, or others shrink."
    takes = f"{format_seconds(chosen['seconds'])}{cost}"
    console.print(
        f"{begins} {format_gpus(chosen['gpus'])}: {takes}. {note}",
        style="bold",
        soft_wrap=True,
    )
    if plan["num_waiting"]:
        console.print(f"Already waiting: {counted(plan['num_waiting'], 'job')}.", style="yellow")


def _agrees() -> bool:
    from drystone.errors import InvalidSpec

    if not sys.stdin.isatty():
        raise InvalidSpec(
            "cannot ask: standard input is not a terminal", hint="Add -y to submit without asking"
        )
    return typer.confirm("Submit?", default=True, err=True)
