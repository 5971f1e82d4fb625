"""`drystone logs`: what a job writes, now and as it comes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from drystone.cli.live import Folder, JobId, connected, quoted

if TYPE_CHECKING:
    from drystone.service.client import Client


def logs(
    job: JobId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more.")] = False,
    rank: Annotated[int, typer.Option(help="Of which rank.", min=0)] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Reports as JSON, as they are.")] = False,
    folder: Folder = None,
) -> None:
    """Show what a job writes.

    Of the latest launch, and with -f of those that follow. Ctrl-C leaves; the job goes on.
    """
    import time

    from drystone.cli.output import make_console

    with connected(folder) as client:
        reader = _Reader(client, job, rank, raw)
        try:
            while not reader.read() and follow:
                time.sleep(0.5)
        except KeyboardInterrupt:
            make_console(stderr=True).print("Left. The job goes on.", style="dim")


class _Reader:
    """Both streams of one rank, launch after launch."""

    def __init__(self, client: Client, job: str, rank: int, raw: bool) -> None:
        self._client, self._path, self._rank = client, f"/v1/jobs/{quoted(job)}/logs", rank
        self._raw, self._epoch = raw, 0
        self._offsets = {"log": 0, "out": 0}

    def read(self) -> bool:
        """Print what is new; whether nothing more will come."""
        is_over = True
        for stream in ("log", "out"):
            while True:
                answer = self._ask(stream)
                if answer["epoch"] != self._epoch:
                    self._epoch, self._offsets = answer["epoch"], {"log": 0, "out": 0}
                    answer = self._ask(stream)
                is_over = is_over and answer["is_over"]
                if not answer["text"]:
                    break
                self._offsets[stream] = answer["offset"]
                for line in answer["text"].splitlines():
                    self._print(line)
        return is_over

    def _ask(self, stream: str) -> dict[str, Any]:
        return self._client.get(
            self._path, rank=self._rank, stream=stream, offset=self._offsets[stream]
        )

    def _print(self, line: str) -> None:
        from drystone.cli.output import printable

        print(printable(line if self._raw else _readable(line)), flush=True)


def _readable(line: str) -> str:
    """A report in words; anything else as it is."""
    try:
        report = json.loads(line)
        match report["event"]:
            case "step":
                return (
                    f"step {report['step']:>6}  loss {report['loss']:.4f}  "
                    f"{report['step_seconds']:.3f} s  {report['tokens_per_second']:.0f} tokens/s"
                )
            case "checkpoint":
                return f"checkpoint at step {report['step']}"
            case "started":
                return f"started at step {report['step']} on {report['ranks']} ranks"
            case other:
                return f"{other} at step {report['step']}"
    except (ValueError, KeyError, TypeError):
        return line
