"""How rented machines join the cluster: as local agents, as raylets, or by themselves."""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from drystone.describe.files.cluster import ClusterSpec
from drystone.describe.market import Offer
from drystone.errors import MissingExtra
from drystone.run.engines.agent.keeper import birth_of
from drystone.run.engines.agent.launches import read_json, write_whole
from drystone.run.engines.local import LocalEngine


class LocalJoiner:
    """Nodes of a simulated cloud are emulated here."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine

    def attach(self, name: str, offer: Offer) -> None:
        """Start an agent under that name, unless there is one."""
        if any(node.id == name for node in self._engine.discover().nodes):
            return
        emulations = {offer.gpu: offer.emulation} if offer.emulation is not None else {}
        self._engine.add(
            ClusterSpec(
                nodes=(offer.node(name),),
                emulations=emulations,
                dollars_per_gpu_hour={offer.gpu: offer.price_dollars_per_hour / offer.num_gpus},
            )
        )

    def detach(self, name: str, reason: str) -> None:
        """End the agent, and with it all that it started."""
        if any(node.id == name for node in self._engine.discover().nodes):
            self._engine.remove(name, reason)


class SelfJoiner:
    """Machines that join by themselves, as those of a cloud do: nothing is to be done here."""

    def attach(self, name: str, offer: Offer) -> None:
        """Its own start script joined the cluster under that name."""

    def detach(self, name: str, reason: str) -> None:
        """The provider ended it, and the engine will see that."""


_FIRST_ADDRESS: Final = "127.0.64.1"  # of rented nodes; others on this machine begin lower
_STORE_BYTES: Final = 80 * 2**20  # Ray's minimum


class RayJoiner:
    """Raylets that this machine plays for a simulated cloud."""

    def __init__(self, address: str, folder: Path) -> None:
        self._address, self._folder = address, folder
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def attach(self, name: str, offer: Offer) -> None:
        """Start a raylet under that name, unless one runs."""
        if self._pid(name):
            return
        file = self._folder / f"{name}.json"
        environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
        environment.pop("CUDA_VISIBLE_DEVICES", None)  # its GPUs are the offer's, not ours
        with (self._folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                start_command(self._address, name, offer, self._free_address()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=environment,
            )
        self._children[name] = process
        write_whole(file, {"pid": process.pid, "birth": birth_of(process.pid)})

    def detach(self, name: str, reason: str) -> None:
        """End a raylet, with all that it started."""
        pid = self._pid(name)
        if pid:
            kill_session(pid)
        child = self._children.pop(name, None)
        if child is not None:
            child.wait()
        (self._folder / f"{name}.json").unlink(missing_ok=True)

    def _pid(self, name: str) -> int:
        child = self._children.get(name)
        if child is not None:
            child.poll()
        known = read_json(self._folder / f"{name}.json")
        if not known or birth_of(int(known["pid"])) != known["birth"] or not known["birth"]:
            return 0
        return int(known["pid"])

    def _free_address(self) -> str:
        """Addresses on loopback are plenty: each node gets the next one."""
        counter = self._folder / "addresses"
        number = int(json.loads(counter.read_text())) if counter.exists() else 0
        write_whole(counter, number + 1)
        return str(ipaddress.IPv4Address(_FIRST_ADDRESS) + number)


def kill_session(session: int) -> None:
    """End all processes of a session: Ray puts its own into groups of their own."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError):
            fields = path.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
            if int(fields[3]) == session:
                os.kill(int(path.parent.name), signal.SIGKILL)


def start_command(address: str, name: str, offer: Offer, own_address: str) -> list[str]:
    """How a machine joins a Ray cluster as a node of an offer."""
    labels = {"drystone-node": name, "drystone-gpu": offer.gpu}
    if offer.emulation is not None:
        labels |= {
            "drystone-speed": repr(offer.emulation.speed),
            "drystone-memory": f"{offer.emulation.memory_bytes // 2**20}MiB",
        }
    return [
        *(_ray_command(), "start", f"--address={address}", f"--node-ip-address={own_address}"),
        *(f"--num-gpus={offer.num_gpus}", "--num-cpus=0"),
        f"--object-store-memory={_STORE_BYTES}",
        *("--labels", ",".join(f"{key}={value}" for key, value in labels.items())),
        *("--disable-usage-stats", "--include-log-monitor=false", "--block"),
    ]


def _ray_command() -> str:
    beside = Path(sys.executable).with_name("ray")
    found = str(beside) if beside.exists() else shutil.which("ray")
    if found is None:
        raise MissingExtra("there is no command `ray`", "ray")
    return found
