"""`python -m drystone.run.engines.slurm.agent FOLDER`: the agent of one node of one Slurm job.

`srun` starts one on every node of an allocation. It is the agent of `run/engines/agent`, and
besides looks after four things. A node whose slurmd is gone is reported as lost. A launch ends
itself when the file of epochs says that a later one has begun, though nobody may reach us to say
so. SIGTERM, SIGUSR1 and the file `leave` mean that Slurm wants the GPUs back: everything is asked
to save and to go. The file `over` means that the controller has given the allocation back.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from drystone.run.engines.agent.keeper import adopt_orphans, birth_of, hide_environment
from drystone.run.engines.agent.launches import Launch, read_json, write_whole
from drystone.run.engines.agent.server import Agent, listen_remote, serve

SETTINGS_FILE = "agents.json"  # what all agents of an allocation are told
# The note of a launch that left because Slurm sent a signal.
RECALLED = "Slurm wants the GPUs back (its time is over, or it was preempted)"
_LOOK_SECONDS = 0.5
_FAREWELL_SECONDS = 10.0  # so long is an end told, before an agent leaves unasked
# Of Slurm's variables training gets these alone: libraries that find the others believe that Slurm
# started each rank, and take its numbers for theirs.
_KEPT = ("SLURM_CONF", "SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_ACCOUNT", "SLURM_CLUSTER_NAME")


class Slurmd:
    """The daemon of a node, as anybody may see it: whether its process is there."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._pid = self._find()
        self._birth = birth_of(self._pid) if self._pid else ""
        self._command, self._configuration = _command(self._pid), _configuration(self._pid)
        self._gone_since = 0.0

    def gone_seconds(self) -> float:
        """For how long it has been gone; 0 if it is there, or if we cannot see processes."""
        if not self._pid or birth_of(self._pid) == self._birth:
            self._gone_since = 0.0
            return 0.0
        now = time.monotonic()
        self._gone_since = self._gone_since or now
        again = self._find_again()
        if again:  # an administrator restarted it: nothing is lost
            self._pid, self._birth, self._gone_since = again, birth_of(again), 0.0
            return 0.0
        return max(now - self._gone_since, 0.001)

    def _find(self) -> int:
        """Its process; several run on one machine only in trials, and are told apart by -N."""
        found = _slurmds()
        named = [pid for pid in found if f"-N{self._node}" in "".join(_command(pid))]
        ours = [pid for pid in named if _configuration(pid) == os.environ.get("SLURM_CONF")]
        return next(iter(ours or named or found), 0)

    def _find_again(self) -> int:
        """A new process in the place of the one that is gone; that of another Slurm is none."""
        for pid in _slurmds():
            if _command(pid) == self._command and _configuration(pid) == self._configuration:
                return pid
        return 0


def _slurmds() -> list[int]:
    """Every slurmd of this machine that lives."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            is_it = (entry / "comm").read_text().startswith("slurmd")
        except OSError:
            continue
        if is_it and birth_of(int(entry.name)):
            found.append(int(entry.name))
    return found


class SlurmAgent(Agent):
    """The launches of one node of one allocation."""

    def __init__(self, folder: Path, *, node: str, host: str, settings: dict[str, float]) -> None:
        super().__init__(folder, node=node, idle_seconds=settings["idle_seconds"], host=host)
        self._slurmd, self._settings = Slurmd(node), settings
        self._looked = self._left = 0.0
        self.is_asked = False  # by a signal

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Slurm's signals reach training too: that it left for them must be known before it has."""
        if self.is_asked:
            self._leave(time.monotonic())
        return super().answer(request)

    def watch(self) -> None:
        """Also what Slurm wants, and whether we are still the ones."""
        now = time.monotonic()
        if self.is_asked:
            self._leave(now)
        super().watch()
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        if (self.folder.parent / "over").exists():
            self.is_leaving = True
            return
        for launch in self._launches.values():
            if not launch.is_over and _newest_epoch(launch) > launch.epoch:
                launch.end(grace_seconds=0, note="a later launch of the job has begun")
        gone = self._slurmd.gone_seconds()
        if gone > self._settings["slurmd_seconds"]:
            self.leaving = f"its slurmd has been gone for {gone:.0f} s"
        elif not gone:
            self.leaving = ""
        if (self.folder.parent / "leave").exists():
            self._leave(now)

    def _leave(self, now: float) -> None:
        """Let everything save and end; then say so for a while, and go."""
        if not self._left:
            self._left = now
            for launch in self._launches.values():
                launch.end(grace_seconds=self._settings["grace_seconds"], note=RECALLED)
        if any(not launch.is_over for launch in self._launches.values()):
            self._left = now
        elif now - self._left > _FAREWELL_SECONDS:
            self.is_leaving = True


def _newest_epoch(launch: Launch) -> int:
    try:
        text = Path(str(launch.request["fence"])).read_text(encoding="ascii").strip()
    except (OSError, KeyError, ValueError):
        return 0
    return int(text) if text.isdigit() else 0


def _command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _configuration(pid: int) -> str | None:
    """Which configuration a daemon of our own user has; None if that is not to be seen."""
    try:
        lines = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    return next((line.partition("=")[2] for line in lines if line.startswith("SLURM_CONF=")), None)


def _listen(folder: Path, address: str) -> tuple[str, socket.socket]:
    """On the address that Slurm has for this node or, where that is not ours, on our own."""
    for host in (address, socket.gethostname()):
        try:
            found = socket.gethostbyname(host)
            return found, listen_remote(folder, found)
        except OSError:
            continue
    raise SystemExit(f"neither {address} nor {socket.gethostname()} is an address of this node")


def main(arguments: list[str]) -> int:
    """Serve until the allocation is given back."""
    home, node = Path(arguments[0]), os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    told = read_json(home / SETTINGS_FILE)
    secret = (home / "secret").read_text(encoding="ascii").strip()
    folder = home / node
    folder.mkdir(exist_ok=True)
    num_gpus = os.environ.get("SLURM_GPUS_ON_NODE", "")
    write_whole(folder / "place.json", {"node": node, "num_gpus": num_gpus})
    for name in list(os.environ):
        if name.startswith(("SLURM_", "PMI")) and name not in _KEPT:
            del os.environ[name]
    adopt_orphans()
    hide_environment()
    host, listener = _listen(folder, str(told["addresses"].get(node, node)))
    agent = SlurmAgent(folder, node=node, host=host, settings=told["settings"])

    def leave(_: int, __: object) -> None:
        agent.is_asked = True

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, leave)
    asyncio.run(serve(agent, listener, secret))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
