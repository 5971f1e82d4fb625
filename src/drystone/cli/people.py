"""The verbs about people: `login`, `token` (who may ask a service what), `team` (their limits)."""

from __future__ import annotations

import datetime
import getpass
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from drystone.cli.live import Folder, connected, quoted
from drystone.cli.options import AsJson
from drystone.cli.output import Column, counted, make_console, print_json, print_table
from drystone.errors import InvalidSpec, RequestError

if TYPE_CHECKING:
    from drystone.service.auth.offline import OfflineTokens
    from drystone.service.client import Client


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
    from drystone.service.client import Client, load_login, login_path, save_login, split_url

    console = make_console(stderr=True)
    if forget:
        login_path().unlink(missing_ok=True)
        console.print("Forgotten. Commands talk to the service of this machine.")
        return
    if not url:
        known = load_login()
        if known is None:
            raise InvalidSpec("not logged in", hint="drystone login https://...")
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


token_group = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)
Database = Annotated[
    str, typer.Option(help="While no service runs: where its log lives, if not in the folder.")
]


@token_group.callback()
def token() -> None:
    """Make, list and revoke tokens for a service."""


@token_group.command("create")
def create_token(
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


@token_group.command("list")
def list_tokens(folder: Folder = None, database: Database = "", as_json: AsJson = False) -> None:
    """List tokens, without their secrets.

    Whose each is, its role and team, when it was made, and whether it was revoked.

    With --json: {tokens: [{id, name, role, team, created_seconds, revoked_seconds}]}.
    """
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
    for token in found["tokens"]:
        at = datetime.datetime.fromtimestamp(token["created_seconds"]).astimezone()
        state = "revoked" if token["revoked_seconds"] is not None else ""
        whose = (token["id"], token["name"], token["role"], token["team"] or "-")
        rows.append((*whose, f"{at:%Y-%m-%d %H:%M}", state))
    print_table(counted(len(rows), "token"), columns, rows)


@token_group.command("revoke")
def revoke_token(
    token_id: Annotated[
        str, typer.Argument(help="Its id, as `token list` shows it.", metavar="ID")
    ],
    folder: Folder = None,
    database: Database = "",
) -> None:
    """Revoke a token at once; its sessions end with it."""
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


team_group = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)
_NO_LIMIT = "none"
TeamName = Annotated[str, typer.Argument(help="Of the team.")]
Quota = Annotated[
    str, typer.Option(help="GPUs of the most valuable type that it may hold, or none.")
]
Budget = Annotated[str, typer.Option(help="Dollars that it may spend, or none.")]
Period = Annotated[str, typer.Option(help="Of the budget: day, week, month or ever.")]


@team_group.callback()
def team() -> None:
    """Make teams, list them, set their quotas and budgets."""


@team_group.command("create")
def create_team(
    name: TeamName,
    quota: Quota = _NO_LIMIT,
    budget: Budget = _NO_LIMIT,
    period: Period = "month",
    folder: Folder = None,
) -> None:
    """Make a team.

    Tokens and jobs name it. Its quota counts GPUs by value, so that an A100 is more than a T4.
    """
    body = {"name": name, "quota": _amount(quota, "--quota"), "budget_period": period}
    body["budget_dollars"] = _amount(budget, "--budget")
    with connected(folder) as client:
        _print_team(client.post("/v1/teams", body))


@team_group.command("set")
def change_team(
    name: TeamName,
    quota: Quota = "",
    budget: Budget = "",
    period: Period = "",
    folder: Folder = None,
) -> None:
    """Change a team's limits; what is left out stays.

    After a quota was lowered, the jobs that came last are stopped with a checkpoint, and wait.
    """
    body: dict[str, Any] = {}
    if quota:
        body["quota"] = _amount(quota, "--quota")
    if budget:
        body["budget_dollars"] = _amount(budget, "--budget")
    if period:
        body["budget_period"] = period
    with connected(folder) as client:
        _print_team(client.patch(f"/v1/teams/{quoted(name)}", body))


@team_group.command("list")
def list_teams(folder: Folder = None, as_json: AsJson = False) -> None:
    """List teams, their limits and what they use of them.

    GPUs count by value: one of the most valuable type is 1.

    With --json: {teams: [Team]}, see docs/api.md.
    """
    with connected(folder) as client:
        found = client.get("/v1/teams")
    if as_json:
        print_json(found)
        return
    headers = ("team", "holds", "quota", "spent", "budget", "running", "waiting")
    columns = [
        Column(header=name, justify="left" if name == "team" else "right") for name in headers
    ]
    rows = []
    for team in found["teams"]:
        budget, quota = team["budget_dollars"], team["quota"]
        period = "" if team["budget_period"] == "ever" else f" a {team['budget_period']}"
        rows.append(
            (
                team["name"],
                f"{team['used_value']:.3g}",
                "-" if quota is None else f"{quota:g}",
                f"${team['spent_dollars']:.2f}",
                "-" if budget is None else f"${budget:.2f}{period}",
                str(team["num_running"]),
                str(team["num_waiting"]),
            )
        )
    print_table(counted(len(rows), "team"), columns, rows)


def _amount(text: str, where: str) -> float | None:
    if text == _NO_LIMIT:
        return None
    try:
        return float(text)
    except ValueError:
        raise InvalidSpec(f"{text!r} is not a number", where=where, hint="Or write: none") from None


def _print_team(made: dict[str, Any]) -> None:
    quota = "no quota" if made["quota"] is None else f"a quota of {made['quota']:g}"
    budget = "no budget"
    if made["budget_dollars"] is not None:
        budget = f"${made['budget_dollars']:.2f} ({made['budget_period']})"
    make_console(stderr=True).print(f"Team {made['name']}: {quota}, {budget}.")
