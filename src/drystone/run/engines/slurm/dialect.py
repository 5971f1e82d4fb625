"""Nodes and jobs in Slurm's JSON, in the dialects of its versions, and Slurm's lists of hosts.

Between 22.05 and 24.11 the same fields changed shape: numbers became objects (`{"set": true,
"infinite": false, "number": 3}`), a state became a list of states with its flags among them, lists
written with commas became lists. Both are read by the same code: each helper takes either shape.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Final

from drystone.errors import DrystoneError

_MAX_NAMES: Final = 1_000_000
_BRACKETS: Final = re.compile(r"\[([^\]]*)\]")


def expand_hosts(text: str) -> tuple[str, ...]:
    """The names in a list such as `a[1-3],b7`, in its order."""
    names: list[str] = []
    for part in _split(text):
        pieces = _BRACKETS.split(part)  # fixed text and ranges take turns
        choices = [
            (piece,) if index % 2 == 0 else _range(piece) for index, piece in enumerate(pieces)
        ]
        size = 1
        for choice in choices:
            size *= len(choice)
        if len(names) + size > _MAX_NAMES:
            raise DrystoneError(f"the node list {text[:60]!r} names more than {_MAX_NAMES} nodes")
        names += ["".join(combined) for combined in product(*choices)]
    return tuple(names)


def _split(text: str) -> list[str]:
    """At commas that are not inside brackets."""
    parts, depth, start = [], 0, 0
    for index, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    parts.append(text[start:])
    if depth:
        raise DrystoneError(f"the node list {text[:60]!r} has a bracket too many or too few")
    return [part for part in parts if part]


def _range(text: str) -> tuple[str, ...]:
    """`8,10-12` with as many digits as are written."""
    found: list[str] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        last = last or first
        if not (first.isdigit() and last.isdigit()) or int(last) - int(first) > _MAX_NAMES:
            raise DrystoneError(f"{text[:60]!r} is not a range of node numbers")
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return tuple(found)


# A node in one of these cannot be given work; what runs there is ended, or will be.
_LOST_STATES: Final = frozenset(
    {
        *("DOWN", "ERROR", "FAIL", "FUTURE", "INVALID", "INVALID_REG", "NOT_RESPONDING"),
        *("POWERED_DOWN", "POWERING_DOWN", "REBOOT_ISSUED", "REBOOT_REQUESTED", "UNKNOWN"),
    }
)
# In one of these it finishes what it has, and gets nothing more.
_DRAINED_STATES: Final = frozenset(("DRAIN", "DRAINED", "DRAINING", "MAINTENANCE", "RESERVED"))

WAITING: Final = frozenset(("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"))
RUNNING: Final = frozenset(("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING"))

_GRES: Final = re.compile(r"(?:gres[:/])?gpu(?::(?P<type>[^:=(,]+))?[:=](?P<count>\d+)(?:\(|,|$)")


class NotSlurm(DrystoneError):
    """The text is not what Slurm's commands write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmNode:
    """One node as slurmctld knows it."""

    name: str
    address: str
    gpus: Mapping[str, int]  # by Slurm's name of the type; "" where it has none
    gpus_in_use: Mapping[str, int]
    cpus: int
    memory_mib: int
    partitions: tuple[str, ...]
    features: tuple[str, ...]
    states: frozenset[str]
    reason: str = ""  # why it is down or drained, as an administrator wrote it

    @property
    def num_gpus(self) -> int:
        """Of whatever type."""
        return sum(self.gpus.values())

    @property
    def num_gpus_in_use(self) -> int:
        """By anybody's jobs."""
        return sum(self.gpus_in_use.values())

    @property
    def is_lost(self) -> bool:
        """Whether nothing can run there."""
        return bool(self.states & _LOST_STATES)

    @property
    def is_drained(self) -> bool:
        """Whether nothing new may start there."""
        return bool(self.states & _DRAINED_STATES)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """One job, or one component of a heterogeneous one."""

    id: int
    het_id: int  # of the first component; 0: it is no heterogeneous job
    name: str
    user: str
    states: frozenset[str]
    reason: str  # why it waits
    gpus: Mapping[str, int] = field(default_factory=dict)  # by node that it has

    @property
    def first_id(self) -> int:
        """By which the whole of it is known."""
        return self.het_id or self.id

    @property
    def is_waiting(self) -> bool:
        """Whether it has no nodes yet."""
        return bool(self.states & WAITING)

    @property
    def is_running(self) -> bool:
        """Whether it has its nodes."""
        return bool(self.states & RUNNING) and not self.is_over

    @property
    def is_completing(self) -> bool:
        """Whether it is over, but not gone from all its nodes."""
        return "COMPLETING" in self.states

    @property
    def is_over(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self.is_completing or not self.states & (WAITING | RUNNING)


def parse_nodes(text: str) -> list[SlurmNode]:
    """The nodes of `scontrol show nodes --json` or, before 23.02, of `sinfo --json`."""
    return [_node(row) for row in _list(text, "nodes")]


def parse_jobs(text: str) -> list[SlurmJob]:
    """The jobs of `squeue --json`."""
    return [_job(row) for row in _list(text, "jobs")]


def count_gpus(gres: str) -> dict[str, int]:
    """`gpu:a100:2(S:0-1),gpu:t4:1,tmpdisk:50G`: how many GPUs of which type."""
    counts: dict[str, int] = {}
    for part in _split_gres(gres):
        found = _GRES.match(part)
        if found is not None:
            kind = found["type"] or ""
            counts[kind] = counts.get(kind, 0) + int(found["count"])
    return counts


def _split_gres(gres: str) -> list[str]:
    """At commas outside parentheses: `gpu:a100:2(IDX:0,3),gpu:t4:1`."""
    return re.split(r",(?![^(]*\))", gres or "")


def _list(text: str, name: str) -> list[Mapping[str, Any]]:
    try:
        found = json.loads(text)[name]
    except (ValueError, KeyError, TypeError) as error:
        raise NotSlurm(
            f"this is not Slurm's JSON ({type(error).__name__}): {text[:80]!r}",
            hint="Drystone reads what Slurm 22.05 and later write",
        ) from None
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise NotSlurm(f"{name!r} should be a list of objects in Slurm's JSON")
    return found


def _node(table: Mapping[str, Any]) -> SlurmNode:
    states = {*_words(table.get("state")), *_words(table.get("state_flags"))}
    return SlurmNode(
        name=str(table.get("name", "")),
        address=str(table.get("address") or table.get("hostname") or table.get("name", "")),
        gpus=count_gpus(_text(table.get("gres"))),
        gpus_in_use=count_gpus(_text(table.get("gres_used"))),
        cpus=number(table.get("cpus"), 1),
        memory_mib=number(table.get("real_memory"), 0),
        partitions=tuple(_names(table.get("partitions"))),
        features=tuple(_names(table.get("active_features") or table.get("features"))),
        states=frozenset(state.upper() for state in states),
        reason=_text(table.get("reason")),
    )


def _job(table: Mapping[str, Any]) -> SlurmJob:
    states = frozenset(word.upper() for word in _words(table.get("job_state")))
    return SlurmJob(
        id=number(table.get("job_id"), 0),
        het_id=number(table.get("het_job_id"), 0),
        name=_text(table.get("name")),
        user=_text(table.get("user_name")),
        states=states,
        reason=_text(table.get("state_reason")),
        gpus=_gpus_by_node(table),
    )


def _gpus_by_node(table: Mapping[str, Any]) -> dict[str, int]:
    """What a job has on each of its nodes: `gres_detail` goes along with the list of nodes."""
    nodes = expand_hosts(_text(table.get("nodes")))
    details = table.get("gres_detail") or []
    if len(details) != len(nodes):
        details = [""] * len(nodes)
    return {
        node: sum(count_gpus(_text(detail)).values())
        for node, detail in zip(nodes, details, strict=True)
    }


def number(value: Any, default: int) -> int:
    """A number, or an object that may hold one."""
    if isinstance(value, dict):
        is_there = value.get("set", False) and not value.get("infinite", False)
        value = value.get("number") if is_there else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return default
    return int(value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _names(value: Any) -> list[str]:
    """A list, or names with commas between them."""
    parts = value if isinstance(value, list) else _text(value).split(",")
    return [str(part).strip() for part in parts if str(part).strip()]


def _words(value: Any) -> list[str]:
    """One state, or a list of them; `IDLE+DRAIN` and `down*` as people see them are understood."""
    parts = value if isinstance(value, list) else [_text(value)]
    words = [word for part in parts for word in str(part).replace("*", "+*").split("+")]
    return ["NOT_RESPONDING" if word == "*" else word for word in words if word]
