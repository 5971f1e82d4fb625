"""`drystone token`: who may ask a service what."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from drystone.cli.live import Folder, connected
from drystone.cli.options import AsJson

if TYPE_CHECKING:
    from drystone.service.auth.offline import OfflineTokens
    from drystone.service.client import Client

group = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)
Database = Annotated[
    str, typer.Option(help="While no service runs: where its log lives, if not in the folder.")
]


@group.callback()
def token() -> None:
    """Make, list and revoke tokens for a service."""


@group.command()
def create(
    role: Annotated[str, typer.Option(help="viewer, submitter or admin.")],
    name: Annotated[str, typer.Option(help="Whose it is; none: yours.")] = "",
    team: Annotated[str, typer.Option(help="Whose jobs it may read in full and change.")] = "",
    folder: Folder = None,
    database: Database = "",
    as_json: AsJson = False,
) -> None:
    """Make a token. Its text is shown this once, and kept nowhere.

    With --json: {id, name, role, team, created_seconds, revoked_seconds, token}.
    """
    import getpass

    from drystone.cli.output import make_console, print_json

    given = {"name": name or getpass.getuser(), "role": role, "team": team}
    made = _ask(
        folder,
        database,
        lambda client: client.post("/v1/tokens", given),
        lambda tokens: tokens.create(**given),
    )
    if as_json:
        print_json(made)
        return
    print(made["token"])
    whose = f"{made['name']}, {made['role']}" + (f" of team {made['team']}" if team else "")
    told = f"Token {made['id']} of {whose}. It is not shown again. Use it with: drystone login URL"
    make_console(stderr=True).print(told, style="bold green")


@group.command("list")
def show(folder: Folder = None, database: Database = "", as_json: AsJson = False) -> None:
    """List tokens, without their secrets.

    Whose each is, its role and team, when it was made, and whether it was revoked.

    With --json: {tokens: [{id, name, role, team, created_seconds, revoked_seconds}]}.
    """
    import datetime

    from drystone.cli.output import Column, counted, print_json, print_table

    found = _ask(
        folder,
        database,
        lambda client: client.get("/v1/tokens"),
        lambda tokens: {"tokens": tokens.list()},
    )
    if as_json:
        print_json(found)
        return
    columns = [
        Column(header=name, justify="left") for name in ("id", "name", "role", "team", "made", "")
    ]
    rows = []
    for one in found["tokens"]:
        at = datetime.datetime.fromtimestamp(one["created_seconds"]).astimezone()
        state = "revoked" if one["revoked_seconds"] is not None else ""
        rows.append(
            (one["id"], one["name"], one["role"], one["team"] or "-", f"{at:%Y-%m-%d %H:%M}", state)
        )
    print_table(counted(len(rows), "token"), columns, rows)


@group.command()
def revoke(
    token_id: Annotated[
        str, typer.Argument(help="Its id, as `token list` shows it.", metavar="ID")
    ],
    folder: Folder = None,
    database: Database = "",
) -> None:
    """Let a token be worth nothing from now on; its sessions end too."""
    from drystone.cli.live import quoted
    from drystone.cli.output import make_console

    gone = _ask(
        folder,
        database,
        lambda client: client.delete(f"/v1/tokens/{quoted(token_id)}"),
        lambda tokens: tokens.revoke(token_id),
    )
    make_console(stderr=True).print(f"Token {gone['id']} of {gone['name']} is revoked.")


def _ask(
    folder: Path | None,
    database: str,
    ask: Callable[[Client], dict[str, Any]],
    otherwise: Callable[[OfflineTokens], dict[str, Any]],
) -> dict[str, Any]:
    """Ask the service; while none runs on this machine, open its log."""
    from drystone.service.client import NotRunning

    with connected(folder) as client:
        try:
            return ask(client)
        except NotRunning:
            if client.is_remote:
                raise
            from drystone.service.auth.offline import OfflineTokens

            return otherwise(OfflineTokens(client.folder, database))
