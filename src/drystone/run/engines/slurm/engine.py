"""Slurm as an engine: one Slurm job a launch, with an agent of ours on each of its nodes.

Slurm holds the lock on the GPUs and starts the agents; they listen on their nodes' addresses and
are asked as local ones are, so leases, fences, logs and exit codes are the same. Slurm never starts
anything again by itself: restarts are the controller's. Talk with Slurm goes on in a thread.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from drystone.describe.files.cluster import ClusterSpec
from drystone.run.engines.agent.client import AgentGone, AgentRefused
from drystone.run.engines.agent.launches import read_json, read_tail, write_whole
from drystone.run.engines.agents_on_nodes import (
    LaunchNames,
    NodeAgents,
    read_shared_file,
    silence_reason,
)
from drystone.run.engines.contract import Key, Poll, Rendezvous, Seen
from drystone.run.engines.slurm.agent import RECALLED
from drystone.run.engines.slurm.allocation import (
    Allocation,
    create,
    find_agents,
    recover,
    seen_from_files,
)
from drystone.run.engines.slurm.inventory import Inventory
from drystone.run.engines.slurm.script import ScriptSettings, make_groups, write_script
from drystone.run.engines.slurm.watch import Commands, SlurmRefused, SlurmWatch

_PARTING_SECONDS: Final = 4.0  # a script whose agents have left ends by itself, usually


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSettings:
    """How a site wants to be treated."""

    partitions: tuple[str, ...] = ()  # none: all that have GPUs
    pins_nodes: bool = True  # ask for the nodes that the scheduler chose, else by type and number
    options: tuple[str, ...] = ()  # more of sbatch's, such as --account=physics
    look_seconds: float = 5.0  # between looks at Slurm, when nothing is afoot
    busy_seconds: float = 1.0  # and while something is waited for
    warning_seconds: int = 60  # to be told so long before a time limit
    grace_seconds: float = 25.0  # to save when Slurm wants the GPUs back; its KillWait is 30 s
    slurmd_seconds: float = 2.0  # a node whose slurmd is gone for longer is lost
    silence_seconds: float = 5.0  # a node whose agent says nothing for longer is lost
    idle_seconds: float = 120.0  # an allocation that nobody asks for anything is given back
    environment: Mapping[str, str] = field(default_factory=dict)  # for Slurm's commands


class SlurmEngine:
    """Nodes of Slurm, and the agents of our jobs there. `folder` is on a disk that all share."""

    def __init__(
        self, folder: Path, settings: SlurmSettings | None = None, file: ClusterSpec | None = None
    ) -> None:
        self._folder = folder.absolute()
        self._settings = chosen = settings or SlurmSettings()
        self._root = self._folder / "slurm"
        self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._commands = Commands(self._settings.environment)
        self._watch = SlurmWatch(self._commands, look_seconds=self._settings.look_seconds)
        self._connections = NodeAgents()
        self._names = LaunchNames(self._root)
        self._allocations: dict[Key, Allocation] = {}
        self._agents: dict[str, tuple[Allocation, str]] = {}  # by the name of their connection
        self._parting: dict[int, float] = {}  # jobs that should end by themselves, until when
        self._inventory = Inventory(
            self._names.prefix, file, partitions=chosen.partitions, pins_nodes=chosen.pins_nodes
        )

    # --- from start to end ----------------------------------------------------------------------

    @property
    def trouble(self) -> str:
        """Why Slurm does not answer."""
        return self._watch.trouble

    def discover(self) -> ClusterSpec:
        """The nodes with GPUs in our partitions, whatever their state."""
        return self._inventory.describe(self._commands.nodes())

    def start(self, controller: int) -> None:
        """Look at Slurm, and find the jobs of controllers before this one."""
        self._connections.set_controller(controller)
        self._watch.start()
        by_name = {jobs[0].name: first for first, jobs in self._watch.view.jobs.items()}
        for folder in sorted(self._root.iterdir()):
            found = recover(folder) if folder.is_dir() else None
            if found is None:
                continue
            found.number = found.number or by_name.get(self._names.name(found.key), 0)
            self._allocations[found.key] = found

    def close(self) -> None:
        """Let go; what trains goes on until its lease runs out."""
        self._connections.close()
        self._watch.close(wait_seconds=30.0)

    def quit(self) -> None:
        """End every job of ours, and with them all agents."""
        for key in list(self._allocations):
            self.release(key, is_hurried=True)

    # --- looking --------------------------------------------------------------------------------

    def poll(self, offsets: Mapping[Key, int], renew: Iterable[Key], lease_seconds: float) -> Poll:
        """Ask every agent; say which nodes and GPUs are not ours to plan with."""
        now = time.monotonic()
        for allocation in self._allocations.values():
            self._meet(allocation)
        answers = self._connections.poll(offsets, renew, lease_seconds)
        found = [self._named(launch) for launch in answers.launches]
        for name, (allocation, node) in list(self._agents.items()):
            if name in answers.leaving:
                allocation.lost[node] = answers.leaving[name]
            elif node in allocation.lost and name not in answers.silent:
                del allocation.lost[node]  # its slurmd is back
            if name in answers.silent:
                self._note_silence(allocation, node, now)
        for allocation in self._allocations.values():
            found += self._absent(allocation, offsets)
        self._note_recalls(found, now)
        self._part(now)
        self._look_when_due(now)
        quiet = frozenset(
            node
            for name, (allocation, node) in self._agents.items()
            if name in answers.silent and node not in allocation.lost
        )
        cluster = self._inventory.renew(self._watch.view)
        held: dict[str, int] = {}
        lost: dict[str, str] = {}
        for allocation in self._allocations.values():
            for node, count in allocation.gpus.items():
                held[node] = held.get(node, 0) + count
            lost |= allocation.lost
        there = {node for _, node in self._agents.values()}
        return Poll(
            tuple(found),
            quiet,
            cluster,
            lost={**self._inventory.lost(self._watch.view, there), **lost},
            taken=self._inventory.taken(self._watch.view, held),
        )

    def _meet(self, allocation: Allocation) -> None:
        """Take up with the agents of an allocation, as soon as all of them are there."""
        self._note_end(allocation)
        if allocation.is_ready or allocation.is_over or not allocation.number:
            return
        kinds = {name: next(iter(node.gpus), "") for name, node in self._watch.view.nodes.items()}
        agents = find_agents(allocation, kinds)
        if agents is None:
            return
        for node, remote in agents.items():
            name = allocation.name_of(node)
            self._connections.connect(name, remote)
            self._agents[name] = (allocation, node)
            self._link(allocation, node)
        allocation.is_ready = True

    def _note_end(self, allocation: Allocation) -> None:
        """Whether Slurm has ended it, or never had it."""
        view = self._watch.view
        if allocation.is_over or not allocation.number or view.asked <= allocation.submitted:
            return
        jobs = view.jobs.get(allocation.number, ())
        allocation.is_over = all(job.is_over for job in jobs) or allocation.has_ended()

    def _note_silence(self, allocation: Allocation, node: str, now: float) -> None:
        """An agent that does not answer has left with its job, or its node is lost."""
        seconds = self._connections.silent_seconds(allocation.name_of(node))
        if allocation.is_over or allocation.has_ended():
            allocation.is_over = True
            self._drop(allocation, node)
        elif seconds > self._settings.silence_seconds:
            allocation.lost.setdefault(node, silence_reason(seconds))
            self._drop(allocation, node)
        else:
            self._watch.look_soon(now - self._settings.busy_seconds)

    def _note_recalls(self, found: Iterable[Seen], now: float) -> None:
        """GPUs that Slurm wants back are not ours from the moment that the controller hears it."""
        keys = {(launch.job_id, launch.epoch) for launch in found if launch.note == RECALLED}
        for key in keys & self._allocations.keys():
            allocation = self._allocations[key]
            if not allocation.is_recalled:
                actual = allocation.actual
                gpus = {actual.get(node, node): count for node, count in allocation.gpus.items()}
                self._inventory.recalled[allocation.number] = (gpus, now)
                allocation.is_recalled = True

    def _drop(self, allocation: Allocation, node: str) -> None:
        name = allocation.name_of(node)
        self._connections.disconnect(name)
        self._agents.pop(name, None)

    def _absent(self, allocation: Allocation, offsets: Mapping[Key, int]) -> list[Seen]:
        """Launches whose agents are gone, from their files."""
        if not allocation.is_over and not allocation.lost:
            return []
        found = []
        for node in allocation.gpus:
            if allocation.name_of(node) in self._agents or node in allocation.forgotten:
                continue
            note = allocation.lost.get(node, "Slurm has ended the job")
            seen = seen_from_files(allocation, node, offsets.get(allocation.key, 0), note)
            found += [seen] if seen is not None else []
        return found

    def _named(self, seen: Seen) -> Seen:
        return replace(seen, node=self._agents[seen.node][1])

    def _look_when_due(self, now: float) -> None:
        """Look more often while a job is to start or to end."""
        is_afoot = self._parting or any(
            not (allocation.is_ready or allocation.is_over)
            for allocation in self._allocations.values()
        )
        if is_afoot or self._inventory.suspects or self._inventory.recalled:
            self._watch.look_soon(now - self._settings.busy_seconds)

    def _part(self, now: float) -> None:
        """Jobs that were given back but do not end are cancelled."""
        view = self._watch.view
        for number, deadline in list(self._parting.items()):
            if view.asked > deadline or now > deadline + 60:
                if not all(job.is_over for job in view.jobs.get(number, ())):
                    self._watch.cancel(number)
                del self._parting[number]

    # --- orders ---------------------------------------------------------------------------------

    def ask(self, node: str, op: str, **values: Any) -> dict[str, Any]:
        """One request to the agent of a launch on a node; what is over is answered from files."""
        key = (str(values.get("job_id")), int(values.get("epoch", 0)))
        allocation = self._allocations.get(key)
        if allocation is None:
            raise AgentGone(f"there is no allocation for {key[0]} epoch {key[1]}")
        name = allocation.name_of(node)
        if name in self._agents:
            if op == "launch":
                values = self._launch_values(allocation, values)
            return self._connections.ask(name, op, **values)
        folder = allocation.launch_folder(node)
        if op == "forget":
            allocation.forgotten.add(node)
            with suppress(OSError):
                (folder / "launch.json").replace(folder / "forgotten.json")
            return {}
        if op == "read_end":
            return {"text": read_tail(folder / str(values["name"]), 4000)}
        raise AgentGone(f"the agent of {node} is gone")

    def _launch_values(self, allocation: Allocation, values: dict[str, Any]) -> dict[str, Any]:
        """As it was ordered, but where the ranks meet, and with the devices that Slurm gave."""
        environment = dict(values["environment"])
        meeting = self._meeting(allocation, environment["MASTER_ADDR"])
        environment |= {"MASTER_ADDR": meeting["host"], "MASTER_PORT": str(meeting["port"])}
        ranks = []
        for rank in values["ranks"]:
            own = dict(rank["environment"])
            if own.get("CUDA_VISIBLE_DEVICES"):  # Slurm has set it: the agent has it already
                del own["CUDA_VISIBLE_DEVICES"]
            ranks.append({**rank, "environment": own})
        return {**values, "environment": environment, "ranks": ranks}

    def _meeting(self, allocation: Allocation, node: str) -> dict[str, Any]:
        """An address and a port of the first rank's node, the same for all who ask."""
        path = allocation.folder / "meeting.json"
        known: dict[str, Any] | None = read_json(path)
        if known is None:
            actual = allocation.actual[node]
            host = (read_json(allocation.folder / actual / "address.json") or {})["host"]
            port = self._connections.ask(allocation.name_of(node), "port")["port"]
            known = {"host": host, "port": port}
            write_whole(path, known)
        return known

    def read(self, node: str, *, job_id: str, epoch: int, name: str, offset: int) -> dict[str, Any]:
        """From the shared disk."""
        return read_shared_file(
            self._folder / "agents", node, job_id=job_id, epoch=epoch, name=name, offset=offset
        )

    def rendezvous(self, node: str) -> Rendezvous:
        """Nobody of ours is on the node yet: where the ranks meet is settled at the launch."""
        return Rendezvous(address=node, port=0)

    # --- locks ----------------------------------------------------------------------------------

    def reserve(self, key: Key, gpus: Mapping[str, int]) -> bool:
        """Submit a Slurm job for these GPUs; whether it runs, and all its agents answer."""
        allocation = self._allocations.get(key)
        if allocation is None:
            allocation = self._create(key, gpus)
        if allocation.refusal:
            raise SlurmRefused(allocation.refusal)
        if allocation.number == 0 and allocation.submitted >= 0:
            self._submit(allocation)
        if allocation.is_over and not allocation.is_ready:
            if any(allocation.launch_folder(node).exists() for node in allocation.gpus):
                return True  # its agents came and went while no controller looked
            if allocation.has_ended():
                raise AgentGone(f"Slurm's job {allocation.number}: {allocation.complaint()}")
            allocation.begin_again()  # a node was lost before the script could begin
        return allocation.is_ready

    def held(self) -> frozenset[Key]:
        """All that were submitted and not given back."""
        return frozenset(self._allocations)

    def release(self, key: Key, *, is_hurried: bool = False) -> None:
        """Let the agents go, and the Slurm job end; it is cancelled if it does not."""
        allocation = self._allocations.pop(key, None)
        if allocation is None:
            return
        now = time.monotonic()
        (allocation.folder / "over").touch()
        for node in allocation.gpus:
            name = allocation.name_of(node)
            if name in self._agents:
                with suppress(AgentGone, AgentRefused):
                    self._connections.ask(name, "quit")
            elif allocation.number and not allocation.is_over and allocation.is_absent(node):
                allocation.lost.setdefault(node, "no agent came up there")
            self._drop(allocation, node)
        if not allocation.number:
            return  # should it be submitted all the same, its script sees that it is over
        for node in allocation.lost:
            self._inventory.suspects[allocation.actual.get(node, node)] = (allocation.number, now)
        if is_hurried or allocation.lost or not allocation.is_ready:
            self._watch.cancel(allocation.number)
        else:
            self._parting[allocation.number] = now + _PARTING_SECONDS

    def _create(self, key: Key, gpus: Mapping[str, int]) -> Allocation:
        view, settings = self._watch.view, self._settings
        if gone := [node for node in gpus if node not in view.nodes]:
            raise AgentGone(f"Slurm does not show {', '.join(gone)} any more")
        allocation = create(
            self._root,
            key,
            gpus,
            addresses={name: node.address for name, node in view.nodes.items()},
            settings={
                "grace_seconds": settings.grace_seconds,
                "slurmd_seconds": settings.slurmd_seconds,
                "idle_seconds": settings.idle_seconds,
            },
        )
        groups = make_groups(
            gpus, view.nodes, allowed=settings.partitions, pins_nodes=settings.pins_nodes
        )
        made = ScriptSettings(
            python=sys.executable,
            python_path=os.pathsep.join(
                filter(None, [str(Path(__file__).parents[4]), os.environ.get("PYTHONPATH", "")])
            ),
            pins_nodes=settings.pins_nodes,
            warning_seconds=settings.warning_seconds,
            options=settings.options,
        )
        text = write_script(allocation.folder, self._names.name(key), groups, made)
        (allocation.folder / "job.sh").write_text(text, encoding="utf-8")
        self._allocations[key] = allocation
        return allocation

    def _submit(self, allocation: Allocation) -> None:
        allocation.submitted = -1.0  # under way

        def done(number: int, refusal: str) -> None:
            if number:
                write_whole(allocation.folder / "number", number)
            allocation.submitted = time.monotonic()
            allocation.refusal, allocation.number = refusal, number
            if number and (allocation.folder / "over").exists():
                self._watch.cancel(number)  # it was given back meanwhile

        self._watch.submit(allocation.folder / "job.sh", done)

    def _link(self, allocation: Allocation, node: str) -> None:
        """People find logs where every engine has them: `agents/NODE/launches/JOB.EPOCH`."""
        target = allocation.launch_folder(node)
        link = self._folder / "agents" / node / "launches" / target.name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(os.path.relpath(target, link.parent))
