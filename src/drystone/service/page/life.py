"""What is a job's life so far? Spans from its events, for a timeline (docs/page.md)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

Table = dict[str, Any]
_PROGRESS: Final = '{"event": "Progressed"'
_NEXT: Final[Mapping[str, str]] = {
    "Submitted": "queued", "Started": "planned", "Stopped": "queued", "Interrupted": "queued",
    "StartFailed": "queued", "Unpaused": "queued", "Paused": "paused", "Finished": "done",
    "Failed": "failed", "Refused": "refused", "Cancelled": "cancelled",
}  # fmt: skip
_MOST_SPANS: Final = 400  # of a job that was interrupted very often, the last ones


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
    return life.spans[-_MOST_SPANS:]


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
