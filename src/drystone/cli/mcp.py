"""`drystone mcp`: plans, estimates and jobs for assistants (Model Context Protocol)."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from drystone.cli.live import Folder
from drystone.errors import InvalidSpec, MissingExtra

if TYPE_CHECKING:
    from mcp.server import MCPServer

_WIDTH: Final = "200"  # columns; nobody reads the tables on a terminal
_MAX_SECONDS: Final = 300
_MAX_CHARACTERS: Final = 60_000
_INSTRUCTIONS: Final = (
    "Drystone predicts memory and speed of training large models, plans how to split it over "
    "GPUs, and schedules jobs. Each tool answers as the command of its name does. Numbers of "
    "plan and estimate are estimates; why and jobs tell what a running service says."
)


def mcp(
    allow_writes: Annotated[
        bool,
        typer.Option(
            "--allow-writes", help="Also submit, cancel, pause and resume; needs DRYSTONE_TOKEN."
        ),
    ] = False,
    folder: Folder = None,
) -> None:
    """Answer assistants over standard input and output (MCP).

    Tools: plan, estimate, why, jobs, simulate. They read and change nothing, and run no code of
    models. With --allow-writes also submit, cancel, pause and resume, as far as the token in
    DRYSTONE_TOKEN may. An assistant starts this command itself: docs/howto/assistant.md.
    """
    import importlib.util

    from drystone.service.client import FOLDER_VARIABLE, TOKEN_VARIABLE

    if importlib.util.find_spec("mcp") is None:
        raise MissingExtra("answering assistants needs the package mcp", "mcp")
    if allow_writes and not os.environ.get(TOKEN_VARIABLE):
        raise InvalidSpec(
            "needs a token, so that it is told whose jobs these are",
            where="--allow-writes",
            hint=f"Set {TOKEN_VARIABLE}; `drystone token create --role submitter` makes one",
        )
    if folder is not None:
        os.environ[FOLDER_VARIABLE] = str(folder.expanduser().absolute())
    make_server(allows_writes=allow_writes).run("stdio")


def make_server(*, allows_writes: bool) -> MCPServer:
    """The server with its tools, not yet listening."""
    from mcp.server import MCPServer
    from mcp.types import ToolAnnotations

    from drystone import __version__

    server = MCPServer("drystone", version=__version__, instructions=_INSTRUCTIONS)
    reads = ToolAnnotations(read_only_hint=True, open_world_hint=False)
    writes = ToolAnnotations(read_only_hint=False, open_world_hint=False)
    for tool in (plan, estimate, why, jobs, simulate):
        server.tool(annotations=reads, structured_output=False)(tool)
    for change in (submit, cancel, pause, resume) if allows_writes else ():
        server.tool(annotations=writes, structured_output=False)(change)
    return server


async def plan(
    model: str = "",
    gpus: str = "",
    batch: int = 0,
    sequence: int = 0,
    tuning: str = "",
    config: str = "",
    limit: int = 5,
) -> str:
    """Rank the ways to train a model on GPUs: split, memory, step time, tokens/s, dollars.

    model: a known name such as llama-3-8b, or the path of a Hugging Face config.json; it may be
    left out where config, the path of a training config (Axolotl, TRL, LLaMA-Factory, torchtitan,
    Megatron, NeMo ...), names it. gpus: such as 8xA100-80G,8xV100-32G; none: which would do?
    batch: sequences in a step. sequence: tokens in one. tuning: full, lora or qlora.
    """
    told: dict[str, Any] = {"gpus": gpus, "batch": batch, "sequence": sequence, "tuning": tuning}
    return await _answer("plan", _model(model), **told, config=_path(config), limit=limit)


async def estimate(
    gpu: str,
    model: str = "",
    layout: str = "",
    batch: int = 0,
    sequence: int = 0,
    recompute: str = "",
    tuning: str = "",
    config: str = "",
) -> str:
    """Estimate memory (by item, with a range) and step time of one layout on one GPU type.

    layout: such as dp=8,tp=1,pp=1,micro=2,zero=3. recompute: none, selective or full. The other
    arguments are those of plan.
    """
    told: dict[str, Any] = {"gpu": gpu, "layout": layout, "batch": batch, "sequence": sequence}
    told |= {"recompute": recompute, "tuning": tuning, "config": _path(config)}
    return await _answer("estimate", _model(model), **told)


async def why(job: str) -> str:
    """Say why a job waits, or why it has the GPUs that it has. job: its number or name."""
    return await _answer("why", job)


async def jobs(state: str = "", owner: str = "", limit: int = 50) -> str:
    """List jobs: state, GPUs, progress, end, cost, reason.

    state: waiting, running, done, failed, refused, cancelled or paused; none: all.
    """
    return await _answer("jobs", state=state, owner=owner, limit=limit)


async def simulate(
    trace: str, cluster: str, policy: str = "", unknown_lengths: bool = False
) -> str:
    """Compare scheduling policies on a trace of jobs.

    trace: the path of a CSV of jobs, of sacct's output or of a public trace. cluster: of a YAML
    file of nodes. policy: names joined by commas, such as prices,cells,fifo.
    """
    flags = ("--unknown-lengths",) if unknown_lengths else ()
    told = {"trace": _path(trace), "cluster": _path(cluster), "policy": policy}
    return await _answer("simulate", flags=flags, **told)


async def submit(file: str) -> str:
    """Submit a job; it spends GPU time and perhaps money. file: the path of a job file (YAML)."""
    return await _answer("submit", _path(file), flags=("--yes",))


async def cancel(job: str) -> str:
    """Cancel a job for good. job: its number or name."""
    return await _change("cancel", job)


async def pause(job: str) -> str:
    """Take a job's GPUs away until it is resumed. job: its number or name."""
    return await _change("pause", job)


async def resume(job: str) -> str:
    """Let a paused job run again. job: its number or name."""
    return await _change("resume", job)


async def _change(verb: str, job: str) -> str:
    return await _answer(verb, job) or f"{verb}: job {job} was told"


async def _answer(verb: str, *words: str, flags: tuple[str, ...] = (), **options: Any) -> str:
    """What a command prints, in a process of its own that ends with the request."""
    import subprocess

    import anyio
    from mcp.server.mcpserver.exceptions import ToolError

    given = [f"--{name}={value}" for name, value in options.items() if value not in ("", 0)]
    # After `--` nothing is an option; `submit` takes what stands there for a command, and its
    # only word is an absolute path.
    positional = [word for word in words if word]
    apart = [] if verb == "submit" or not positional else ["--"]
    command = [sys.executable, "-P", "-m", "drystone", verb, *flags, *given, *apart, *positional]
    surroundings = os.environ | {"COLUMNS": _WIDTH, "NO_COLOR": "1", "TERM": "dumb"}
    try:
        with anyio.fail_after(_MAX_SECONDS):
            ended = await anyio.run_process(
                command, check=False, env=surroundings, stdin=subprocess.DEVNULL
            )
    except TimeoutError:
        raise ToolError(f"{verb} took longer than {_MAX_SECONDS} s and was ended") from None
    text = ended.stdout.decode(errors="replace").strip()
    if ended.returncode:
        told = ended.stderr.decode(errors="replace").strip() or text
        raise ToolError(f"{told}\n(exit code {ended.returncode} of drystone {verb})")
    if len(text) > _MAX_CHARACTERS:
        return f"{text[:_MAX_CHARACTERS]}\n... cut: ask for less, by limit, state or owner"
    return text


def _model(text: str) -> str:
    """The model; code of models is not run on behalf of an assistant."""
    from mcp.server.mcpserver.exceptions import ToolError

    if ".py" in text.lower():
        raise ToolError(f"{text!r}: only names and config.json files here, no Python functions")
    return text


def _path(text: str) -> str:
    return str(Path(text).expanduser().absolute()) if text else ""
