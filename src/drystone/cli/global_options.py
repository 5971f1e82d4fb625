"""What `drystone` itself takes before a verb."""

from __future__ import annotations

from typing import Annotated

import typer

from drystone import __version__


def show_version(wanted: bool) -> None:
    """Print it and stop."""
    if wanted:
        print(f"drystone {__version__}")
        raise typer.Exit


def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and stop.", is_eager=True, callback=show_version
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show where a failure arose (DRYSTONE_DEBUG=1).")
    ] = False,
) -> None:
    """Train large models on whatever GPUs there are."""
