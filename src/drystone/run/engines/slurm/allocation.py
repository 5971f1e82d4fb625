"""One Slurm job for one launch, as a folder: what was asked for, its number, its agents.

slurm/3.1/            launch 1 of job 3
  wanted.json         GPUs by node; job.sh, agents.json and secret are beside it
  number              of the Slurm job
  NODE/               of the agent there: address.json, place.json, launches/3.1
  claimed ended       made by the script; `leave` by whoever wants it to go
  over                made by the controller, when it gives the allocation back
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drystone.run.engines.agent.client import Remote
from drystone.run.engines.agent.launches import LOST_EXIT, Launch, read_json, read_tail, write_whole
from drystone.run.engines.agent.network import keep_secret
from drystone.run.engines.contract import Key, Seen
from drystone.run.engines.slurm.agent import SETTINGS_FILE


@dataclass(slots=True, kw_only=True)
class Allocation:
    """What is known about one Slurm job of ours."""

    key: Key
    folder: Path
    gpus: Mapping[str, int]  # that were asked for, by planned node
    number: int = 0  # of the Slurm job; 0: not submitted yet
    refusal: str = ""
    is_ready: bool = False  # all agents have answered
    is_over: bool = False  # Slurm has ended it
    is_recalled: bool = False  # Slurm asked it to leave
    submitted: float = 0.0  # by the monotonic clock
    actual: dict[str, str] = field(default_factory=dict)  # the node that stands for a planned one
    lost: dict[str, str] = field(default_factory=dict)  # planned nodes, and why
    forgotten: set[str] = field(default_factory=set)  # whose launch the controller has taken down

    def name_of(self, node: str) -> str:
        """The name of the connection to the agent of a planned node."""
        return f"{self.key[0]}.{self.key[1]}@{node}"

    def launch_folder(self, node: str) -> Path:
        """Where the agent of a planned node keeps the files of the launch."""
        name = self.actual.get(node, node)
        return self.folder / name / "launches" / f"{self.key[0]}.{self.key[1]}"

    def has_ended(self) -> bool:
        """Whether its script says that it is over."""
        return (self.folder / "ended").exists()

    def is_absent(self, node: str) -> bool:
        """Whether Slurm gave us a node on which nothing of ours ever came up."""
        is_begun = (self.folder / "claimed").exists()
        return is_begun and not (self.launch_folder(node).parents[1] / "place.json").exists()

    def begin_again(self) -> None:
        """Forget a Slurm job that ended before it did anything, so that another one can be."""
        for path in [*self.folder.glob("*/address.json"), *self.folder.glob("claimed")]:
            path.unlink() if path.is_file() else path.rmdir()
        self.number, self.submitted, self.is_over = 0, 0.0, False

    def complaint(self) -> str:
        """The last that Slurm and the agents wrote."""
        return read_tail(self.folder / "slurm.out", 600).strip()


def create(
    root: Path,
    key: Key,
    gpus: Mapping[str, int],
    *,
    addresses: Mapping[str, str],
    settings: Mapping[str, float],
) -> Allocation:
    """The folder of a launch, with all that its agents need."""
    folder = root / f"{key[0]}.{key[1]}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    keep_secret(folder / "secret")
    told = {"addresses": dict(addresses), "settings": dict(settings)}
    write_whole(folder / SETTINGS_FILE, told)
    write_whole(folder / "wanted.json", {"job_id": key[0], "epoch": key[1], "gpus": dict(gpus)})
    return Allocation(key=key, folder=folder, gpus=dict(gpus))


def recover(folder: Path) -> Allocation | None:
    """What a controller before this one asked for, and has not given back."""
    table = read_json(folder / "wanted.json")
    if table is None or (folder / "over").exists():
        return None
    number = read_json(folder / "number")
    return Allocation(
        key=(str(table["job_id"]), int(table["epoch"])),
        folder=folder,
        gpus={str(node): int(count) for node, count in table["gpus"].items()},
        number=int(number) if isinstance(number, int) else 0,
        submitted=time.monotonic(),
    )


def find_agents(allocation: Allocation, types: Mapping[str, str]) -> dict[str, Remote] | None:
    """The agents by planned node, as soon as all are there; `types` are those of Slurm's nodes.

    Where nodes were asked for by name they are those; else each planned node gets one of its type
    with its number of GPUs.
    """
    there: dict[str, tuple[dict[str, Any], int]] = {}
    # Listing a folder asks the server of a shared disk; looking for a file may ask a cache.
    for entry in sorted(allocation.folder.iterdir()):
        address, place = read_json(entry / "address.json"), read_json(entry / "place.json")
        if address is not None and place is not None:
            count = str(place["num_gpus"])
            there[entry.name] = (address, int(count) if count.isdigit() else 0)
    if len(there) < len(allocation.gpus):
        return None
    actual = _match(allocation.gpus, {name: count for name, (_, count) in there.items()}, types)
    if actual is None:
        return None
    allocation.actual = actual
    secret = keep_secret(allocation.folder / "secret")
    return {
        node: Remote(
            host=str(there[name][0]["host"]), port=int(there[name][0]["port"]), secret=secret
        )
        for node, name in actual.items()
    }


def _match(
    wanted: Mapping[str, int], there: Mapping[str, int], types: Mapping[str, str]
) -> dict[str, str] | None:
    left, actual = dict(there), {}
    for node in [name for name in wanted if name in left]:
        actual[node] = node
        del left[node]
    for node, count in wanted.items():
        if node in actual:
            continue
        fits = [
            name
            for name, has in left.items()
            if types.get(name) == types.get(node) and has in (0, count)
        ]
        if not fits:
            return None
        actual[node] = fits[0]
        del left[fits[0]]
    return actual


def seen_from_files(allocation: Allocation, node: str, offset: int, note: str) -> Seen | None:
    """A launch whose agent is gone: how it ended, if that was written down, else that it is lost.

    None where it was never made.
    """
    folder = allocation.launch_folder(node)
    request = read_json(folder / "launch.json")
    if request is None:
        return None
    launch = Launch(folder, request)
    ended = read_json(folder / "ended.json")
    exits: dict[int, int] = dict.fromkeys(launch.exits, LOST_EXIT)
    if ended is not None:
        exits = {int(rank): int(code) for rank, code in ended["exits"].items()}
        note = str(ended["note"])
    reports, end = launch.read_reports(offset)
    return Seen(
        node=node,
        job_id=launch.job_id,
        epoch=launch.epoch,
        devices=tuple(launch.devices),
        exits=exits,
        is_over=True,
        note=note,
        reports=reports,
        offset=end,
    )
