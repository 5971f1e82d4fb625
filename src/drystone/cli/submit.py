"""`drystone submit`: a dry run that becomes a job when its owner agrees."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from drystone.cli.columns import counted, money
from drystone.cli.live import Folder, connected, format_gpus
from drystone.cli.options import (
    AsJson,
    ConfigFiles,
    complete_gpus,
    complete_models,
    takes_groups,
)
from drystone.cli.quick import say_emulated


@dataclass(frozen=True, kw_only=True)
class Work:
    """What to train, where no file says it."""

    model: Annotated[
        str, typer.Option(help="Without a file: what to train.", autocompletion=complete_models)
    ] = ""
    data: Annotated[str, typer.Option(help="A token or text file; none: made-up tokens.")] = ""
    steps: Annotated[str, typer.Option(help="How many steps, e.g. 1000.")] = ""
    tokens: Annotated[str, typer.Option(help="Or how many tokens, e.g. 2B.")] = ""
    batch: Annotated[int, typer.Option(help="Sequences in a step.", min=0)] = 0
    sequence: Annotated[int, typer.Option(help="Tokens in a sequence.", min=0)] = 0

    def keys(self) -> dict[str, Any]:
        """As a job file has them."""
        train = {"steps": self.steps, "tokens": self.tokens, "batch": self.batch}
        train = _given(train | {"sequence": self.sequence})
        found = _given({"model": self.model, "data": self.data})
        return found | ({"train": train} if train else {})


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What may stand beside a file too, and then goes before what it says."""

    name: Annotated[str, typer.Option(help="For people.")] = ""
    gpus: Annotated[str, typer.Option(help="So many, e.g. 4, or 2-8; none: any number.")] = ""
    min_gpus: Annotated[int, typer.Option(help="At least so many.", min=0)] = 0
    max_gpus: Annotated[int, typer.Option(help="At most so many.", min=0)] = 0
    gpu_type: Annotated[
        list[str] | None,
        typer.Option(help="Only of these types; again for more.", autocompletion=complete_gpus),
    ] = None
    priority: Annotated[float, typer.Option(help="Its weight beside others; 1 is usual.")] = 0.0
    deadline: Annotated[str, typer.Option(help="E.g. 6h or 2026-11-20T18:00 (UTC).")] = ""
    max_cost: Annotated[float, typer.Option(help="Dollars.", min=0)] = 0.0

    def keys(self) -> dict[str, Any]:
        """As a job file has them."""
        low, high = _range(self.gpus) if self.gpus else (self.min_gpus, self.max_gpus)
        found = {"name": self.name, "deadline": self.deadline, "max_cost": self.max_cost}
        gpus = _given({"min": low, "max": high, "allow": self.gpu_type})
        return _given(found | {"priority": self.priority, "gpus": gpus})


@takes_groups
def submit(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            help="A job file (docs/jobs.md); or, after --, a command.", metavar="[FILE | -- CMD...]"
        ),
    ] = None,
    *,
    work: Work,
    limits: Limits,
    config: ConfigFiles = None,
    include: Annotated[
        list[Path] | None,
        typer.Option(help="For a service on another machine: more files or folders to send."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Show what it writes until it is over.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what it would get.")
    ] = False,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Show what a job would get and cost, and submit it.

    No hardware need be named: the plan, what else would do, and the price are shown first, and
    nothing is started before you agree. With --follow the exit code is 1 if it does not get done.

    With --json nothing is asked: {id, is_new}; with --dry-run what it would get (docs/api.md).
    """
    import getpass
    import uuid

    from drystone.cli.output import make_console, print_json
    from drystone.service.submission import with_files

    body: dict[str, Any] = {"client_key": uuid.uuid4().hex, "owner": getpass.getuser()}
    table = _from_config(config, work.keys()) if config else work.keys()
    body |= _described(words or [], table, limits.keys())
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
        job = answer["id"]
        if as_json:
            print_json(answer)
            return
        told = f"Submitted as job {job}." + ("" if follow else _follow_hint(job))
        make_console(stderr=True).print(told, style="bold green")
        if follow:
            _follow(client, job)


def _follow_hint(job: str) -> str:
    return f" Follow it with: drystone logs -f {job}"


def _follow(client: Any, job: str) -> None:
    from drystone.cli.jobs import follow_log
    from drystone.cli.output import make_console

    follow_log(client, job)
    state = client.get(f"/v1/jobs/{job}")["state"]
    make_console(stderr=True).print(f"Job {job} is {state}.")
    if state in ("failed", "refused", "cancelled"):
        raise typer.Exit(1)


def _given(table: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if value}


def _range(text: str) -> tuple[int, int]:
    """`4` is exactly four, `2-8` two to eight."""
    from drystone.errors import InvalidSpec

    match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", text.strip())
    if match is None or int(match[1]) == 0:
        raise InvalidSpec(
            f"{text!r} is not a number of GPUs",
            where="--gpus",
            hint="Write 4 or 2-8; types go with --gpu-type A100-80G",
        )
    return int(match[1]), int(match[2] or match[1])


def _from_config(paths: list[Path], given: dict[str, Any]) -> dict[str, Any]:
    """What another trainer's config says of a job; options of the command line count for it."""
    from drystone.describe.recipe import TRAINED_WEIGHT_BITS, Tuning
    from drystone.errors import InvalidSpec
    from drystone.plan.configs.read import read_configs

    asked = read_configs(paths)
    setup = asked.setup
    is_packed = setup.weight_bits not in TRAINED_WEIGHT_BITS
    if is_packed or setup.offload.value != "none":
        what = f"weights of {setup.weight_bits:g} bits"
        what = what if is_packed else f"offload {setup.offload.value}"
        raise InvalidSpec(f"asks for {what}, which our runtime does not do", where=str(paths[0]))
    said: dict[str, Any] = {"model": setup.model} if setup.model else {}
    if setup.tuning is not Tuning.FULL:
        said["tune"] = {"method": setup.tuning.value, "rank": setup.lora_rank}
    train = {"batch": setup.global_batch()} | _given({"sequence": setup.seq_len})
    told = f"{train['batch']} sequences a step" + ("" if setup.num_gpus else ", as on one GPU")
    typer.echo(f"From the config: {setup.model or 'no model'}, {told}", err=True)
    if asked.unused:
        typer.echo("Keys that were not used: " + ", ".join(asked.unused), err=True)
    return said | given | {"train": train | given.get("train", {})}


def _described(words: list[str], work: dict[str, Any], limits: dict[str, Any]) -> dict[str, Any]:
    """The job of a file, of a command after `--`, or of options alone."""
    from drystone.describe.files.job import make_job
    from drystone.describe.files.reader import load_yaml
    from drystone.errors import InvalidSpec
    from drystone.service.submission import file_body

    here = Path.cwd()
    file = Path(words[0]) if len(words) == 1 and _is_job_file(words[0]) else None
    if file is None:
        table = work | limits | ({"command": shlex.join(words)} if words else {})
        make_job(table, folder=here, knows_gpus=False)  # what is wrong is said here
        return {"job": table, "folder": str(here)}
    if work:
        given = ", ".join(f"--{key}" for key in work.get("train", {}) | work if key != "train")
        raise InvalidSpec(
            f"the job file says what to train, {given} as well",
            where=str(file),
            hint="Keep one; limits such as --gpus, --deadline or --name may stand beside a file",
        )
    body = file_body(file)
    if not limits:
        return body
    table = {"name": file.stem} | load_yaml(file).value
    gpus = {"gpus": (table.get("gpus") or {}) | limits["gpus"]} if "gpus" in limits else {}
    table |= limits | gpus
    make_job(table, folder=file.resolve().parent, knows_gpus=False)
    return {"job": table, "folder": body["folder"]}


def _is_job_file(word: str) -> bool:
    """A single word is a job file unless it is a program or a script."""
    import os

    path = Path(word)
    return path.suffix not in (".py", ".sh") and not (path.is_file() and os.access(path, os.X_OK))


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
    elif chosen.get("where") in ("to rent", "on its way"):
        begins, note = "Once rented it would get", "Nodes are rented as budget and policy allow."
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
