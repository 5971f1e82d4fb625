"""Which GPUs there are for one job: `8xA100-80G,4xV100-32G`, as groups of equal ones."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from drystone.describe.catalogue import find_gpu
from drystone.describe.gpu import GpuSpec
from drystone.describe.machine import Link, Machine, default_machine
from drystone.errors import InvalidSpec, UnknownName

_MOST_GPUS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuGroup:
    """Equal GPUs on equal nodes."""

    machine: Machine
    count: int

    def __post_init__(self) -> None:
        if not 1 <= self.count <= _MOST_GPUS:
            raise InvalidSpec(f"{self.count} x {self.gpu.name}: a count must be 1 to {_MOST_GPUS}")

    @property
    def gpu(self) -> GpuSpec:
        """The type of the group."""
        return self.machine.gpu

    def __str__(self) -> str:
        return f"{self.count}x{self.gpu.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """All GPUs that one job may use, by type, and the network that joins unlike nodes."""

    groups: tuple[GpuGroup, ...]
    between: Link  # from a node of one type to a node of another, per GPU

    def __post_init__(self) -> None:
        names = [group.gpu.name for group in self.groups]
        if not names:
            raise InvalidSpec("no GPUs are given", hint="Write them like 8xA100-80G,4xV100-32G")
        if len(set(names)) != len(names):
            raise InvalidSpec("a GPU type is given twice", hint="Add the counts up")

    @property
    def num_gpus(self) -> int:
        """All of them."""
        return sum(group.count for group in self.groups)

    def __str__(self) -> str:
        return ",".join(str(group) for group in self.groups)


def parse_pool(text: str, *, between: Link | None = None, gpus_per_node: int | None = None) -> Pool:
    """A pool from `8xA100-80G,4xV100-32G`; a type without a count is one GPU."""
    counts: dict[str, int] = {}
    for part in filter(None, (word.strip() for word in text.split(","))):
        match = re.fullmatch(r"(?:(\d+)\s*[xX*]\s*)?(.+)", part)
        count, name = (match.group(1), match.group(2)) if match else (None, part)
        gpu = _find_gpu(name)
        counts[gpu.name] = counts.get(gpu.name, 0) + int(count or 1)
    groups = [
        GpuGroup(machine=default_machine(find_gpu(name), gpus_per_node), count=count)
        for name, count in counts.items()
    ]
    return make_pool(groups, between=between)


def _find_gpu(name: str) -> GpuSpec:
    """The type; where the x after a count was forgotten (`8A100`), the error says so."""
    try:
        return find_gpu(name)
    except UnknownName as error:
        match = re.fullmatch(r"(\d+)\s*([A-Za-z].*)", name)
        if match:
            error.hint = f"{match[1]} of them are written {match[1]}x{match[2]}"
        raise


def _measured_link(first: GpuGroup, second: GpuGroup) -> Link | None:
    """Between nodes of two types, by the profile of either."""
    for here, there in ((first, second), (second, first)):
        profile = here.machine.profile
        link = profile.link("inter", there.gpu.name) if profile else None
        if link is not None:
            return link
    return None


def make_pool(groups: Sequence[GpuGroup], *, between: Link | None = None) -> Pool:
    """A pool of groups; unlike nodes are joined by the slowest network among them.

    Between two types that is what was measured, or else the slower of their own networks.
    """
    if between is None and groups:
        measured = [_measured_link(*pair) for pair in combinations(groups, 2)]
        own = [group.machine.inter for group in groups]
        links = own if None in measured or not measured else measured
        between = min(filter(None, links), key=lambda link: link.bandwidth_bytes_per_second)
    if between is None:
        raise InvalidSpec("no GPUs are given", hint="Write them like 8xA100-80G,4xV100-32G")
    return Pool(groups=tuple(groups), between=between)
