"""`drystone cluster`: which nodes there are, and who uses them."""

from __future__ import annotations

from drystone.cli.live import Folder, Table, connected, say_emulated
from drystone.cli.options import AsJson
from drystone.cli.output import Column

_COLUMNS = (
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

    With --json: {nodes: [...], gpus: [...], is_emulated, dollars_per_hour, dollars}, see
    docs/api.md.
    """
    from drystone.cli.output import print_json, print_table

    with connected(folder) as client:
        answer = client.get("/v1/cluster")
    if as_json:
        print_json(answer)
        return
    prices = {one["gpu"]: one["dollars_per_hour"] for one in answer["gpus"]}
    own = {one["gpu"] for one in answer["gpus"] if one.get("is_own")}
    rows = [
        _row(node, prices.get(node["gpu"]), is_own=node["gpu"] in own) for node in answer["nodes"]
    ]
    total = sum(node["num_gpus"] for node in answer["nodes"])
    free = sum(one["free"] for one in answer["gpus"])
    spent = f"${answer['dollars_per_hour']:.2f} an hour now, ${answer['dollars']:.2f} so far"
    print_table(f"{total} GPUs, {free} free; {spent}", _COLUMNS, rows)
    say_emulated(answer["is_emulated"])


def _row(node: Table, price: float | None, *, is_own: bool) -> tuple[str, ...]:
    from drystone.units import format_bytes

    states = [word for word in ("emulated", "drained", "lost") if node[f"is_{word}"]]
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
