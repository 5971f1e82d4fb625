"""`drystone events`: what happened, in sentences, and what happens from now on."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final

import typer

from drystone.cli.live import Folder, connected
from drystone.cli.options import AsJson
from drystone.cli.output import make_console, print_json, printable
from drystone.cli.quick import find_job
from drystone.service.sentences import QUIET, job_of

_WAIT_SECONDS: Final = 20.0  # that one request waits for news; the service allows 30


def events(
    job: Annotated[str, typer.Argument(help="Only of this job, by number or name.")] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more.")] = False,
    limit: Annotated[
        int, typer.Option(help="How many of the newest to begin with.", min=1, max=10_000)
    ] = 50,
    everything: Annotated[
        bool, typer.Option("--all", help="Progress and the numbers of decisions, too.")
    ] = False,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Show what happened, in sentences.

    The newest last. Ctrl-C leaves --follow; everything goes on.

    With --json: {events: [...], last}, see docs/api.md; with --follow one event a line.
    """
    with connected(folder) as client:
        asked = {"job": find_job(client, job) if job else ""}
        answer = client.get("/v1/events", **asked, newest="true", most=limit)
        if as_json and not follow:
            print_json(answer)
            return
        show_events(answer["events"], everything=everything, as_json=as_json)
        try:
            while follow:
                answer = client.get("/v1/events", **asked, after=answer["last"], wait=_WAIT_SECONDS)
                show_events(answer["events"], everything=everything, as_json=as_json)
        except KeyboardInterrupt:
            make_console(stderr=True).print("Left. Everything goes on.", style="dim")


def show_events(
    found: Iterable[Mapping[str, Any]], *, everything: bool, as_json: bool = False
) -> None:
    """One line an event."""
    import json

    for event in found:
        if as_json:
            print(json.dumps(event, ensure_ascii=False, allow_nan=False), flush=True)
        elif everything or event["event"] not in QUIET:
            at = datetime.datetime.fromtimestamp(event["time_seconds"]).astimezone()
            print(f"{at:%Y-%m-%d %H:%M:%S}  {printable(sentence(event))}", flush=True)


def sentence(event: Mapping[str, Any]) -> str:
    """An event as a whole sentence, with who did it."""
    job = job_of(event)
    told = f"Job {job} {event['told']}" if job else event["told"]
    return f"{told}, by {event['actor']}" if event["actor"] else str(told)
