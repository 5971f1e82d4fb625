"""What did the launches of a job report, and how is its work divided? Read from what they wrote."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from drystone.run.engines.agent.launches import open_plain
from drystone.run.job_output import BadReport, parse_report

Table = dict[str, Any]
_MOST_BYTES: Final = 2_000_000  # of the reports of one launch, from the end
_MOST_LAUNCHES: Final = 40  # whose reports are read, the last ones


def read_curves(folder: Path, job_id: str, details: Table, *, most: int) -> list[Table]:
    """`[{epoch, points: [[step, loss, step_seconds]]}]` of all launches, from their reports.

    Where reports lie elsewhere (another machine's disk), what the controller heard of the last one.
    """
    found = []
    for launch in details["launches"][-_MOST_LAUNCHES:]:
        points = read_reports(_report_file(folder, job_id, details, launch))
        if points:
            found.append({"epoch": launch["epoch"], "points": points})
    if details["curve"] and details["launches"]:
        epoch = details["launches"][-1]["epoch"]
        if not any(one["epoch"] == epoch for one in found):
            found.append({"epoch": epoch, "points": details["curve"]})
    total = sum(len(one["points"]) for one in found)
    for one in found:
        share = max(2, round(most * len(one["points"]) / max(total, 1)))
        one["points"] = thin_out(one["points"], share)
    return found


def _report_file(folder: Path, job_id: str, details: Table, launch: Table) -> Path:
    epoch = launch["epoch"]
    if details["description"].get("command") or not launch["devices"]:
        return folder / "jobs" / job_id / f"epoch-{epoch}" / "progress.jsonl"
    node = str(launch["devices"][0][0])
    return folder / "agents" / node / "launches" / f"{job_id}.{epoch}" / "rank-0.out"


def read_reports(path: Path) -> list[list[Any]]:
    """`[step, loss, step_seconds]` of the steps that a launch reported, without torn lines."""
    try:
        with open_plain(path) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _MOST_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    found: list[list[Any]] = []
    for line in text.split("\n"):
        if not line.startswith("{"):
            continue
        try:
            report = parse_report(line)
        except BadReport:
            continue  # counted where the controller reads them
        if report.event == "step":
            found.append([report.step, _shown(report.loss), _shown(report.step_seconds)])
    return found


def thin_out(points: Sequence[Any], most: int) -> list[Any]:
    """Evenly fewer points; the first and the last stay."""
    if len(points) <= most:
        return list(points)
    last = len(points) - 1
    return [points[round(number * last / (most - 1))] for number in range(most)]


def read_picture(folder: Path, job_id: str, launch: Table, gpus: Mapping[str, str]) -> Table:
    """Who computes what and holds what in a launch (docs/page.md)."""
    seats = [
        {"rank": rank, "node": node, "device": device, "gpu": gpus.get(node, "gone")}
        for rank, (node, device) in enumerate(launch["devices"])
    ]
    made = {"epoch": launch["epoch"], "plan": launch["plan"]}
    path = folder / "jobs" / job_id / f"epoch-{launch['epoch']}" / "plan.json"
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))["plan"]
        return made | _divided(plan, seats)
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        ranks = [seat | dict.fromkeys(_SHARES) for seat in seats]
        stage = {"first_layer": None, "num_layers": None, "ranks": ranks}
        none = dict.fromkeys(("step_seconds", "samples_per_second", "num_layers"))
        return made | none | {"way": "script", "stages": [stage]}


_SHARES: Final = (
    "batch", "micro_batch", "compute_share", "state_share", "memory_bytes", "memory_capacity_bytes",
)  # fmt: skip


def _divided(plan: Table, seats: Sequence[Table]) -> Table:
    batch = plan["recipe"]["global_batch"]
    left, stages = list(seats), []
    for number, stage in enumerate(plan["stages"]):
        ranks = []
        for share in stage["ranks"]:
            need = _need(plan["needs"], share["gpu"], number)
            for _ in range(share["count"]):
                shares = (
                    share["batch"], share["micro_batch"], share["batch"] / batch,
                    share["state_share"], need.get("required_bytes"), need.get("usable_bytes"),
                )  # fmt: skip
                ranks.append(left.pop(0) | dict(zip(_SHARES, shares, strict=True)))
        first = stage["first_layer"]
        stages.append(
            {"first_layer": first, "num_layers": stage["end_layer"] - first, "ranks": ranks}
        )
    seconds = plan["step_seconds"]
    return {
        "way": plan["way"],
        "step_seconds": seconds,
        "samples_per_second": batch / seconds if seconds else None,
        "num_layers": sum(one["num_layers"] for one in stages),
        "stages": stages,
    }


def _need(needs: Sequence[Table], gpu: str, stage: int) -> Table:
    mine = [one for one in needs if one["gpu"] == gpu]
    exact = [one for one in mine if one.get("stage", 0) == stage]
    return (exact or mine or [{}])[0]


def _shown(value: float) -> float | None:
    return value if math.isfinite(value) else None
