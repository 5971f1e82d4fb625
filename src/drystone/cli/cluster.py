"""The verbs about the cluster and its money: `cluster`, `drain`, `budget`, `waste`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from drystone.cli.columns import counted
from drystone.cli.live import Folder, Table, complete_nodes, connected, format_gpus, quoted
from drystone.cli.options import AsJson
from drystone.cli.output import Column, make_console, print_json, print_table, say_made
from drystone.cli.quick import say_emulated
from drystone.errors import InvalidSpec
from drystone.units import HOUR_SECONDS, format_bytes, format_seconds

_CLUSTER = (
    Column(header="node", justify="left", style="bold green"),
    Column(header="GPU", justify="left", style="cyan"),
    Column(header="GPUs"),
    Column(header="free", style="yellow"),
    Column(header="memory", rank=2),
    Column(header="$/GPU h", rank=2),
    Column(header="state", rank=1, justify="left"),
    Column(header="jobs", rank=1, justify="left"),
)


def cluster(folder: Folder = None, as_json: AsJson = False) -> None:
    """List nodes and GPUs, and who uses them.

    With memory, price and state of each node: in use, drained, lost, emulated.

    With --json: {nodes: [...], gpus: [...], is_emulated, dollars_per_hour, dollars, coming}, see
    docs/api.md.
    """
    with connected(folder) as client:
        answer = client.get("/v1/cluster")
    if as_json:
        print_json(answer)
        return
    prices = {gpu["gpu"]: gpu["dollars_per_hour"] for gpu in answer["gpus"]}
    own = {gpu["gpu"] for gpu in answer["gpus"] if gpu.get("is_own")}
    rows = [
        _cluster_row(node, prices.get(node["gpu"]), is_own=node["gpu"] in own)
        for node in answer["nodes"]
    ]
    total = sum(node["num_gpus"] for node in answer["nodes"])
    free = sum(gpu["free"] for gpu in answer["gpus"])
    spent = f"${answer['dollars_per_hour']:.2f} an hour now, ${answer['dollars']:.2f} so far"
    coming = format_gpus(answer["coming"]) if answer.get("coming") else ""
    on_way = f", {coming} on their way" if coming else ""
    print_table(f"{total} GPUs, {free} free{on_way}; {spent}", _CLUSTER, rows)
    for node in answer["nodes"]:
        if node["drained_reason"]:
            text = f"{node['id']} was drained: {node['drained_reason']}."
            text += f" When it is repaired: drystone drain {node['id']} --undo"
            make_console(stderr=True).print(text, markup=False)
    say_emulated(answer["is_emulated"])


def _cluster_row(node: Table, price: float | None, *, is_own: bool) -> tuple[str, ...]:
    states = ["rented"] if node["id"].startswith("rented-") else []
    states += [word for word in ("emulated", "drained", "lost") if node[f"is_{word}"]]
    return (
        node["id"],
        f"{node['gpu']} (own)" if is_own else node["gpu"],
        str(node["num_gpus"]),
        str(node["free"]),
        format_bytes(node["memory_bytes"]),
        "-" if price is None else f"{price:.2f}",
        ", ".join(states) or "in use",
        ", ".join(node["jobs"]) or "-",
    )


def drain(
    node: Annotated[
        str,
        typer.Argument(
            help="Name of a node, as `drystone cluster` shows it.", autocompletion=complete_nodes
        ),
    ],
    undo: Annotated[bool, typer.Option("--undo", help="Use the node again.")] = False,
    folder: Folder = None,
) -> None:
    """Move jobs away from a node and start none there.

    Jobs on it write a checkpoint, and go on elsewhere when there is room.
    """
    with connected(folder) as client:
        answer = client.post(f"/v1/nodes/{quoted(node)}/{'undrain' if undo else 'drain'}")
    if undo:
        text = f"Node {node} is used again."
    else:
        moved = ", ".join(answer["moved"])
        text = f"Node {node} is drained." + (f" Jobs {moved} leave it." if moved else "")
    make_console(stderr=True).print(text)


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
    limit: Annotated[
        int, typer.Option("--limit", "--most", help="Accounts and nodes to show.", min=1)
    ] = 20,
    export: Annotated[
        Path | None, typer.Option(help="Write every debit into this CSV file instead.")
    ] = None,
    focus: Annotated[
        bool, typer.Option("--focus", help="With --export: the columns of FinOps FOCUS 1.0.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the ledger: spent by job and by node, against the budget.

    Accounts add up to nodes: what was not used is an account of its own. Prices of rented nodes are
    those that the provider bills, those of own GPUs are the cluster file's.

    With --json: {now_seconds, budget_dollars_per_hour, hard_cap_dollars_per_hour,
    rented_dollars_per_hour, rented_dollars, mean_dollars_per_hour, total_dollars, num_rented,
    num_coming, accounts: [{team, job_id, dollars}], nodes: [{node, offer, dollars,
    dollars_per_hour, is_here}], uses: {job, starting, idle, leaving, settled}, offers: [...],
    trouble}.
    """
    if focus and export is None:
        raise InvalidSpec("--focus is for --export FILE", hint="Write --export costs.csv --focus")
    with connected(folder) as client:
        if export is not None:
            answer = client.get("/v1/ledger/export", form="focus" if focus else "csv")
            export.write_text(answer["text"], encoding="utf-8")
            say_made("Written", export)
            return
        answer = client.get("/v1/ledger", most=limit)
    if as_json:
        print_json(answer)
        return
    print_table(_heading(answer), _ACCOUNTS, [_account(row) for row in answer["accounts"]])
    print()
    print_table("Nodes", _NODES, [_node(row) for row in answer["nodes"]])
    if unused := _unused(answer["uses"]):
        print(f"\nPaid for and not used: {unused}")
    if answer["offers"]:
        now = answer["now_seconds"]
        print()
        print_table("To rent", _OFFERS, [_offer(row, now) for row in answer["offers"]])
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


def _unused(uses: dict[str, float]) -> str:
    """`$0.12 while starting, $0.30 idle`."""
    words = {
        "starting": "before a job came",
        "idle": "idle",
        "leaving": "while given back",
        "settled": "by the provider's own bill",
    }
    return ", ".join(
        f"${uses[use]:.4f} {told}" for use, told in words.items() if uses.get(use, 0.0)
    )


def _account(row: Table) -> tuple[str, ...]:
    is_idle = not row["team"] and not row["job_id"]
    return (
        "(unused)" if is_idle else row["team"] or "-",
        row["job_id"] or "-",
        f"${row['dollars']:.4f}",
    )


def _node(row: Table) -> tuple[str, ...]:
    state = "rented" if row["is_here"] else "given back" if row["offer"] else "own"
    price = row["dollars_per_hour"]
    return (
        row["node"],
        row["offer"] or "-",
        "-" if price is None else f"{price:.2f}",
        f"${row['dollars']:.4f}",
        state,
    )


def _offer(row: Table, now: float) -> tuple[str, ...]:
    state = "in stock, as far as is known"
    if row["is_short"]:
        left = format_seconds(max(row["short_until_seconds"] - now, 0.0))
        state = f"was out of stock; tried again in {left}"
    if row["is_spot"]:
        stays = format_seconds(row["believed_hours"] * HOUR_SECONDS)
        state += f"; spot, {row['num_taken_back']} taken back, a node stays about {stays}"
    return (
        row["name"],
        row["gpu"],
        str(row["num_gpus"]),
        f"{row['dollars_per_hour']:.2f}",
        state,
    )


_WASTE = (
    Column(header="job", justify="left", style="bold green"),
    Column(header="team", rank=2, justify="left"),
    Column(header="GPUs", justify="left", style="cyan"),
    Column(header="unused"),
    Column(header="$/h"),
    Column(header="why", rank=1, justify="left"),
)


def waste(folder: Folder = None, as_json: AsJson = False) -> None:
    """List GPUs that are paid for and not used, in dollars.

    Jobs that hold GPUs and report no step, or train far slower than estimated, and GPUs that no job
    holds; the dearest first.

    With --json: {rows: [{job_id, name, team, gpu, num_gpus, unused_share, dollars_per_hour,
    reason}], dollars_per_hour}.
    """
    with connected(folder) as client:
        answer = client.get("/v1/waste")
    if as_json:
        print_json(answer)
        return
    rows = [
        (
            f"{row['job_id']} {row['name']}".strip() or "-",
            row["team"],
            f"{row['num_gpus']} x {row['gpu']}",
            f"{row['unused_share']:.0%}",
            f"{row['dollars_per_hour']:.2f}",
            row["reason"],
        )
        for row in answer["rows"]
    ]
    print_table(f"${answer['dollars_per_hour']:.2f} an hour is not used", _WASTE, rows)
