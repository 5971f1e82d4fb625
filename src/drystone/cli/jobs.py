"""`drystone jobs`: the queue, as people know it from other schedulers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from drystone.cli.live import Folder, connected, watch
from drystone.cli.options import AsJson
from drystone.cli.quick import show_page

if TYPE_CHECKING:
    from drystone.service.client import Client


def jobs(
    state: Annotated[
        list[str] | None, typer.Option(help="Only these, e.g. --state running --state queued.")
    ] = None,
    owner: Annotated[str, typer.Option(help="Only jobs of this owner.")] = "",
    most: Annotated[int, typer.Option(help="How many.", min=1, max=100_000)] = 1000,
    watching: Annotated[bool, typer.Option("--watch", "-w", help="Show again and again.")] = False,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """List the jobs: state, GPUs, progress, end, cost, reason.

    In the order in which they came. Ctrl-C ends --watch; the jobs go on.

    With --json: {jobs: [...], total, now_seconds, sequence, is_emulated}, see docs/api.md.
    """
    with connected(folder) as client:
        if watching and not as_json:
            watch(lambda: _show(client, state, owner, most), every_seconds=2.0)
        elif as_json:
            from drystone.cli.output import print_json

            print_json(client.get("/v1/jobs", state=state or [], owner=owner, most=most))
        else:
            _show(client, state, owner, most)


def _show(client: Client, state: list[str] | None, owner: str, most: int) -> None:
    show_page(client.get("/v1/jobs", state=state or [], owner=owner, most=most))
