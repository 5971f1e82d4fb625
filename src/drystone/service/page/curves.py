"""Curves, division of work, life and price history for the page, from files and the event log."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from drystone.run.control.store import Store
from drystone.run.engines.agent.launches import open_plain
from drystone.run.events import load_line
from drystone.run.job_output import BadReport, parse_report
from drystone.service.views import JobDetails, Launch
from drystone.units import HOUR_SECONDS

Table = dict[str, Any]
_MAX_BYTES: Final = 2_000_000  # of the reports of one launch, from the end
_MAX_LAUNCHES: Final = 40  # whose reports are read, the last ones


def read_curves(folder: Path, job: JobDetails, *, most: int) -> list[Table]:
    """`[{epoch, points: [[step, loss, step_seconds]]}]` of all launches, from their reports.

    Where reports lie elsewhere (another machine's disk), what the controller heard of the last one.
    """
    found: list[Table] = []
    for launch in job.launches[-_MAX_LAUNCHES:]:
        points = read_reports(_report_file(folder, job, launch))
        if points:
            found.append({"epoch": launch.epoch, "points": points})
    if job.curve and job.launches:
        epoch = job.launches[-1].epoch
        if not any(curve["epoch"] == epoch for curve in found):
            found.append({"epoch": epoch, "points": job.curve})
    total = sum(len(curve["points"]) for curve in found)
    for curve in found:
        share = max(2, round(most * len(curve["points"]) / max(total, 1)))
        curve["points"] = thin_out(curve["points"], share)
    return found


def _report_file(folder: Path, job: JobDetails, launch: Launch) -> Path:
    if job.description.get("command") or not launch.devices:
        return folder / "jobs" / job.id / f"epoch-{launch.epoch}" / "progress.jsonl"
    node = launch.devices[0][0]
    return folder / "agents" / node / "launches" / f"{job.id}.{launch.epoch}" / "rank-0.out"


def read_reports(path: Path) -> list[list[Any]]:
    """`[step, loss, step_seconds]` of the steps that a launch reported, without torn lines."""
    try:
        with open_plain(path) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _MAX_BYTES))
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


def read_picture(folder: Path, job_id: str, launch: Launch, gpus: Mapping[str, str]) -> Table:
    """Who computes what and holds what in a launch (docs/page.md)."""
    seats = [
        {"rank": rank, "node": node, "device": device, "gpu": gpus.get(node, "gone")}
        for rank, (node, device) in enumerate(launch.devices)
    ]
    made = {"epoch": launch.epoch, "plan": launch.plan}
    path = folder / "jobs" / job_id / f"epoch-{launch.epoch}" / "plan.json"
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))["plan"]
        return made | _divided(plan, seats)
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        shares = ("batch", "micro_batch", "compute_share", "state_share")
        memory = ("memory_bytes", "memory_capacity_bytes")
        ranks = [seat | dict.fromkeys((*shares, *memory)) for seat in seats]
        stage = {"first_layer": None, "num_layers": None, "ranks": ranks}
        none = dict.fromkeys(("step_seconds", "samples_per_second", "num_layers"))
        return made | none | {"way": "script", "stages": [stage]}


def _divided(plan: Table, seats: Sequence[Table]) -> Table:
    batch = plan["recipe"]["global_batch"]
    left, stages = list(seats), []
    for number, stage in enumerate(plan["stages"]):
        ranks = []
        for share in stage["ranks"]:
            need = _need(plan["needs"], share["gpu"], number)
            shares = {
                "batch": share["batch"],
                "micro_batch": share["micro_batch"],
                "compute_share": share["batch"] / batch,
                "state_share": share["state_share"],
                "memory_bytes": need.get("required_bytes"),
                "memory_capacity_bytes": need.get("usable_bytes"),
            }
            ranks += [left.pop(0) | shares for _ in range(share["count"])]
        first = stage["first_layer"]
        stages.append(
            {"first_layer": first, "num_layers": stage["end_layer"] - first, "ranks": ranks}
        )
    seconds = plan["step_seconds"]
    return {
        "way": plan["way"],
        "step_seconds": seconds,
        "samples_per_second": batch / seconds if seconds else None,
        "num_layers": sum(stage["num_layers"] for stage in stages),
        "stages": stages,
    }


def _need(needs: Sequence[Table], gpu: str, stage: int) -> Table:
    mine = [need for need in needs if need["gpu"] == gpu]
    exact = [need for need in mine if need.get("stage", 0) == stage]
    return (exact or mine or [{}])[0]


def _shown(value: float) -> float | None:
    return value if math.isfinite(value) else None


_PROGRESS: Final = '{"event": "Progressed"'
_NEXT: Final[Mapping[str, str]] = {
    "Submitted": "queued",
    "Started": "planned",
    "Stopped": "queued",
    "Interrupted": "queued",
    "StartFailed": "queued",
    "Unpaused": "queued",
    "Paused": "paused",
    "Finished": "done",
    "Failed": "failed",
    "Refused": "refused",
    "Cancelled": "cancelled",
}
_MAX_SPANS: Final = 400  # of a job that was interrupted very often, the last ones


@dataclass(slots=True)
class _Life:
    spans: list[Table] = field(default_factory=list)
    last_gpus: dict[str, int] = field(default_factory=dict)
    is_resized: bool = False

    def enter(self, state: str, at: float, reason: str, **more: Any) -> None:
        """A span begins, and the one before ends."""
        if self.spans:
            self.spans[-1]["end_seconds"] = at
        span = {"state": state, "reason": reason, "start_seconds": at, "end_seconds": None}
        self.spans.append(span | {"gpus": {}, "plan": ""} | more)


def life_of(lines: Iterable[str], gpu_of_node: Mapping[str, str]) -> list[Table]:
    """Its spans; the last one has no end.

    A run counts as running from its first report on. It is `resized` where it has other GPUs than
    the run before.
    """
    life = _Life()
    for line in lines:
        if not line.startswith(_PROGRESS):
            _take(life, json.loads(line), gpu_of_node)
        elif life.spans and life.spans[-1]["state"] == "starting":
            last = life.spans[-1]
            state = "resized" if life.is_resized else "running"
            at = float(json.loads(line)["time_seconds"])
            life.enter(state, at, "", gpus=last["gpus"], plan=last["plan"])
    return life.spans[-_MAX_SPANS:]


def _take(life: _Life, event: Table, gpu_of_node: Mapping[str, str]) -> None:
    at, kind = float(event["time_seconds"]), str(event["event"])
    reason = str(event.get("reason") or "").partition("\n")[0]
    if kind in _NEXT:
        life.enter(_NEXT[kind], at, reason)
    elif kind == "Launched":
        gpus: dict[str, int] = {}
        for node, _ in event["devices"]:
            gpu = gpu_of_node.get(node, "gone")
            gpus[gpu] = gpus.get(gpu, 0) + 1
        life.is_resized = bool(life.last_gpus) and life.last_gpus != gpus
        life.last_gpus = gpus
        life.enter("starting", at, "", gpus=gpus, plan=str(event["plan"]))


Points = list[tuple[float, float]]
_CHUNK: Final = 20_000
_MAX_KEPT: Final = 20_000  # points of one line; then every second of the older half goes
_MAX_SHOWN: Final = 300
_WANTED: Final = ("Decided", "ClusterDescribed", "NodeJoined")


class PriceHistory:
    """Worth and dollars by GPU type, as far as the log was read."""

    def __init__(self, store: Store) -> None:
        self._store, self._lock, self._sequence = store, threading.Lock(), 0
        self._worth: dict[str, Points] = {}
        self._dollars: dict[str, Points] = {}

    def catch_up(self) -> None:
        """Read what is new."""
        with self._lock:
            read = self._store.read_log
            while lines := read(after=self._sequence, most=_CHUNK, kinds=_WANTED):
                for line in lines:
                    self._take(load_line(line.body))
                self._sequence = lines[-1].sequence
                if len(lines) < _CHUNK:
                    return

    def view(self, now_seconds: float, hours: float) -> Table:
        """`{worth: {gpu: [[time, worth]]}, dollars_per_hour: ..., now_seconds}`."""
        self.catch_up()
        since = now_seconds - hours * HOUR_SECONDS
        with self._lock:
            return {
                "worth": {gpu: shown(one, since) for gpu, one in self._worth.items()},
                "dollars_per_hour": {gpu: shown(one, since) for gpu, one in self._dollars.items()},
                "now_seconds": now_seconds,
            }

    def _take(self, event: Table) -> None:
        at = float(event["time_seconds"])
        match event["event"]:
            case "Decided":
                for name, value in event["numbers"].items():
                    if name.startswith("price_") and name != "price_dollars_per_hour":
                        put(self._worth.setdefault(name.removeprefix("price_"), []), at, value)
            case "ClusterDescribed":
                for gpu, price in event["dollars_per_gpu_hour"]:
                    put(self._dollars.setdefault(gpu, []), at, price)
            case "NodeJoined":
                spec, price = event["spec"], float(event["price_dollars_per_hour"])
                put(self._dollars.setdefault(spec["gpu"], []), at, price / spec["num_gpus"])


def put(points: Points, at: float, value: float) -> None:
    """From now on it is this much."""
    if points and points[-1][0] >= at:
        points[-1] = (points[-1][0], value)
    elif not points or points[-1][1] != value:
        points.append((at, value))
    if len(points) > _MAX_KEPT:
        del points[1 : _MAX_KEPT // 2 : 2]


def shown(points: Points, since: float, most: int = _MAX_SHOWN) -> list[list[float]]:
    """The points from a time on, and the one that held then; of very many, evenly fewer."""
    inside = [point for point in points if point[0] >= since]
    before = points[: len(points) - len(inside)][-1:]
    if len(inside) > most:
        last = len(inside) - 1
        inside = [inside[round(number * last / (most - 1))] for number in range(most)]
    return [[round(at, 1), float(f"{value:.5g}")] for at, value in (*before, *inside)]
