"""`drystone demo`: the best of what there is, one command after the other, on CPU."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    pass


_ACTS = (
    (
        "You have four L40S and eight RTX 4090. How should Llama-3-8B use all of them at once?",
        "plan llama-3-8b --gpus 4xL40S,8xRTX-4090 --batch 64 --limit 4",
    ),
    (
        "You have no GPUs yet. Which would do, and which is cheapest for a token?",
        "plan mistral-7b-v0.1 --limit 6",
    ),
    (
        "Four T4 for a 70-billion-parameter model? A refusal says what to try.",
        "plan llama-3-70b --gpus 4xT4",
    ),
    (
        "Why believe any of it: estimates against runs that other people published.",
        "check memory --brief",
    ),
)

_LIVE = "Fine-tune on A100 and T4 at once; a job gets in the way, a process dies."


def demo(
    only: Annotated[
        int, typer.Option(help="Show this act alone; 0: all of them.", min=0, max=len(_ACTS) + 1)
    ] = 0,
) -> None:
    """Show the best of what there is, on CPU.

    Each act is a command that you can run yourself; it is shown before its answer. The last one
    fine-tunes a small model on emulated GPUs, resizes it, and kills one of its processes.
    """
    from rich.rule import Rule
    from rich.text import Text

    from drystone.cli.main import run
    from drystone.cli.output import make_console

    console = make_console()
    for number, (question, command) in enumerate(_ACTS, start=1):
        if only and number != only:
            continue
        console.print()
        console.print(Rule(Text(question, style="bold"), align="left", style="cyan"))
        console.print(Text(f"$ drystone {command}", style="dim"))
        console.print()
        run(shlex.split(command))
    if only in (0, len(_ACTS) + 1):
        console.print()
        console.print(Rule(Text(_LIVE, style="bold"), align="left", style="cyan"))
        console.print(
            Text("$ drystone serve; drystone submit tune.yaml (emulated GPUs)", style="dim")
        )
        _show_live(is_asked_for=bool(only))


def _show_live(*, is_asked_for: bool) -> None:
    """Without torch the last act is left out, which is a failure only of who asked for it alone."""
    from importlib.util import find_spec

    from drystone.cli.output import make_console
    from drystone.errors import MissingExtra

    if find_spec("torch") is None:
        missing = MissingExtra("the last act trains, which needs torch", "runtime")
        if is_asked_for:
            raise missing
        make_console(stderr=True).print(f"\nLeft out: {missing}", style="yellow", soft_wrap=True)
        return
    from drystone.cli.demo_live import show_live

    show_live()
