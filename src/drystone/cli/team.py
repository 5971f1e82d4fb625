"""`drystone team`: quotas and budgets."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from drystone.cli.columns import counted
from drystone.cli.live import Folder, connected, quoted
from drystone.cli.options import AsJson

group = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)
NO_LIMIT = "none"
Name = Annotated[str, typer.Argument(help="Of the team.")]
Quota = Annotated[
    str, typer.Option(help="GPUs of the most valuable type that it may hold, or none.")
]
Budget = Annotated[str, typer.Option(help="Dollars that it may spend, or none.")]
Period = Annotated[str, typer.Option(help="Of the budget: day, week, month or ever.")]


@group.callback()
def team() -> None:
    """Make teams, list them, set their quotas and budgets."""


@group.command()
def create(
    name: Name,
    quota: Quota = NO_LIMIT,
    budget: Budget = NO_LIMIT,
    period: Period = "month",
    folder: Folder = None,
) -> None:
    """Make a team.

    Tokens and jobs name it. Its quota counts GPUs by value, so that an A100 is more than a T4.
    """
    body = {"name": name, "quota": _amount(quota, "--quota"), "budget_period": period}
    body["budget_dollars"] = _amount(budget, "--budget")
    with connected(folder) as client:
        _say(client.post("/v1/teams", body))


@group.command("set")
def change(
    name: Name,
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
        _say(client.patch(f"/v1/teams/{quoted(name)}", body))


@group.command("list")
def show(folder: Folder = None, as_json: AsJson = False) -> None:
    """List teams, their limits and what they use of them.

    GPUs count by value: one of the most valuable type is 1.

    With --json: {teams: [Team]}, see docs/api.md.
    """
    from drystone.cli.output import Column, print_json, print_table

    with connected(folder) as client:
        found = client.get("/v1/teams")
    if as_json:
        print_json(found)
        return
    headers = ("team", "holds", "quota", "spent", "budget", "running", "waiting")
    columns = [Column(header=one, justify="left" if one == "team" else "right") for one in headers]
    rows = []
    for one in found["teams"]:
        budget, quota = one["budget_dollars"], one["quota"]
        period = "" if one["budget_period"] == "ever" else f" a {one['budget_period']}"
        rows.append(
            (
                one["name"],
                f"{one['used_value']:.3g}",
                "-" if quota is None else f"{quota:g}",
                f"${one['spent_dollars']:.2f}",
                "-" if budget is None else f"${budget:.2f}{period}",
                str(one["num_running"]),
                str(one["num_waiting"]),
            )
        )
    print_table(counted(len(rows), "team"), columns, rows)


def _amount(text: str, where: str) -> float | None:
    from drystone.errors import InvalidSpec

    if text == NO_LIMIT:
        return None
    try:
        return float(text)
    except ValueError:
        raise InvalidSpec(f"{text!r} is no number", where=where, hint="Or write: none") from None


def _say(made: dict[str, Any]) -> None:
    from drystone.cli.output import make_console

    quota = "no quota" if made["quota"] is None else f"a quota of {made['quota']:g}"
    budget = "no budget"
    if made["budget_dollars"] is not None:
        budget = f"${made['budget_dollars']:.2f} ({made['budget_period']})"
    make_console(stderr=True).print(f"Team {made['name']}: {quota}, {budget}.")
