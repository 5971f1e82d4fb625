"""`drystone login`: talk to a service over the network from now on."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def login(
    url: Annotated[
        str, typer.Argument(help="E.g. https://gpus.example.org; none: say who you are.")
    ] = "",
    token: Annotated[
        str, typer.Option(help="Better not here, where others see it: it is asked for.")
    ] = "",
    forget: Annotated[
        bool, typer.Option("--forget", help="Talk to the service of this machine again.")
    ] = False,
) -> None:
    """Talk to a service over the network from now on.

    The token is asked for, or read from standard input. Address and token are kept in
    ~/.config/drystone/login.json, which only you can read. --folder, DRYSTONE_FOLDER and
    DRYSTONE_URL with DRYSTONE_TOKEN come before it.
    """
    from drystone.cli.output import make_console
    from drystone.errors import InvalidSpec, RequestError
    from drystone.service.client import Client, load_login, login_path, save_login, split_url

    console = make_console(stderr=True)
    if forget:
        login_path().unlink(missing_ok=True)
        console.print("Forgotten. Commands talk to the service of this machine.")
        return
    if not url:
        known = load_login()
        if known is None:
            raise InvalidSpec("nobody is logged in", hint="drystone login https://...")
        url, token = known
    else:
        kind, host, _ = split_url(url)
        token = token or _ask_token()
        if kind == "http" and host not in ("localhost", "127.0.0.1", "::1"):
            console.print(
                "This address is not encrypted: the token can be read on the way.", style="yellow"
            )
    with Client(url=url, token=token) as client:
        who = client.get("/v1/session")
    if not who["role"]:
        raise RequestError("this token is not known there", where=url, hint="Ask for a new one")
    save_login(url, token)
    team = f" of team {who['team']}" if who["team"] else ""
    console.print(f"Logged in at {url} as {who['name']}, {who['role']}{team}.", style="bold green")


def _ask_token() -> str:
    if not sys.stdin.isatty():
        return sys.stdin.readline().strip()
    return str(typer.prompt("Token", hide_input=True, err=True)).strip()
