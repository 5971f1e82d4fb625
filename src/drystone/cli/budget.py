"""`drystone budget`: what was spent, by account and by node, against the budget."""

from __future__ import annotations

from typing import Annotated

import typer

from drystone.cli.columns import counted
from drystone.cli.live import Folder, Table, connected
from drystone.cli.options import AsJson
from drystone.cli.output import Column

_ACCOUNTS = (
    Column(header="team", justify="left", style="bold green"),
    Column(header="job", justify="right"),
    Column(header="spent", style="yellow"),
)
_NODES = (
    Column(header="node", justify="left", style="bold green"),
    Column(header="offer", justify="left", style="cyan"),
    Column(header="$/h"),
    Column(header="spent", style="yellow"),
    Column(header="state", justify="left"),
)
_OFFERS = (
    Column(header="offer", justify="left", style="bold green"),
    Column(header="GPU", justify="left", style="cyan"),
    Column(header="GPUs"),
    Column(header="$/h", style="yellow"),
    Column(header="state", justify="left"),
)


def budget(
    folder: Folder = None,
    most: Annotated[int, typer.Option(help="Accounts and nodes to show.", min=1)] = 20,
    as_json: AsJson = False,
) -> None:
    """Show the ledger: spent by job and by node, against the budget.

    Accounts add up to nodes: what nobody used is an account of its own. Prices of rented nodes are
    those that the provider bills, those of own GPUs are the cluster file's.

    With --json: {now_seconds, budget_dollars_per_hour, hard_cap_dollars_per_hour,
    rented_dollars_per_hour, rented_dollars, mean_dollars_per_hour, total_dollars, num_rented,
    num_coming, accounts: [{team, job_id, dollars}], nodes: [{node, offer, dollars,
    dollars_per_hour, is_here}], offers: [...], trouble}.
    """
    from drystone.cli.output import make_console, print_json, print_table

    with connected(folder) as client:
        answer = client.get("/v1/ledger", most=most)
    if as_json:
        print_json(answer)
        return
    print_table(_heading(answer), _ACCOUNTS, [_account(one) for one in answer["accounts"]])
    print()
    print_table("Nodes", _NODES, [_node(one) for one in answer["nodes"]])
    if answer["offers"]:
        now = answer["now_seconds"]
        print()
        print_table("To rent", _OFFERS, [_offer(one, now) for one in answer["offers"]])
    if answer["trouble"]:
        make_console(stderr=True).print(f"The provider does not answer: {answer['trouble']}")


def _heading(answer: Table) -> str:
    parts = [f"${answer['total_dollars']:,.2f} spent"]
    if answer["num_rented"] or answer["num_coming"]:
        parts.append(
            f"{counted(answer['num_rented'], 'node')} rented at "
            f"${answer['rented_dollars_per_hour']:.2f}/h, "
            f"{answer['num_coming']} on their way"
        )
    if answer["mean_dollars_per_hour"] is not None:
        parts.append(f"${answer['mean_dollars_per_hour']:.2f}/h rented on average")
    for word in ("budget", "hard_cap"):
        limit = answer[f"{word}_dollars_per_hour"]
        if limit is not None:
            parts.append(f"{word.replace('_', ' ')} ${limit:.2f}/h")
    return "; ".join(parts)


def _account(one: Table) -> tuple[str, ...]:
    is_idle = not one["team"] and not one["job_id"]
    return (
        "nobody's" if is_idle else one["team"] or "-",
        one["job_id"] or "-",
        f"${one['dollars']:.4f}",
    )


def _node(one: Table) -> tuple[str, ...]:
    state = "rented" if one["is_here"] else "given back" if one["offer"] else "own"
    price = one["dollars_per_hour"]
    return (
        one["node"],
        one["offer"] or "-",
        "-" if price is None else f"{price:.2f}",
        f"${one['dollars']:.4f}",
        state,
    )


def _offer(one: Table, now: float) -> tuple[str, ...]:
    from drystone.units import format_seconds

    state = "in stock, as far as is known"
    if one["is_short"]:
        left = format_seconds(max(one["short_until_seconds"] - now, 0.0))
        state = f"was out of stock; tried again in {left}"
    return (
        one["name"],
        one["gpu"],
        str(one["num_gpus"]),
        f"{one['dollars_per_hour']:.2f}",
        state,
    )
