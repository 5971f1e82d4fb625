"""What the controller needs of a cluster, whoever runs it: one machine, Ray, Slurm.

An engine says which nodes there are, starts and watches processes there through an agent on each,
and holds a lock on the GPUs of a launch where others share the cluster. It decides nothing and
remembers nothing that matters: the log is the only truth, and what runs is asked of the agents.
All methods but `read` are called by one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from drystone.describe.files.cluster import ClusterSpec

Key = tuple[str, int]  # a launch: job and epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One launch as the agent of one node sees it."""

    node: str
    job_id: str
    epoch: int
    devices: tuple[int, ...]
    exits: Mapping[int, int | None]  # by rank
    is_over: bool
    note: str
    reports: str
    offset: int


@dataclass(frozen=True, slots=True)
class Poll:
    """What the cluster says at one time."""

    launches: tuple[Seen, ...]
    silent: frozenset[str]  # nodes whose agents did not answer this time
    cluster: ClusterSpec | None = None  # the nodes of now, if they are not those of before
    left: Mapping[str, str] = field(default_factory=dict)  # why nodes are not in it any more
    lost: Mapping[str, str] = field(default_factory=dict)  # nodes of it that cannot be used now
    taken: Mapping[str, int] = field(default_factory=dict)  # GPUs of nodes that others use


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the ranks of a launch meet."""

    address: str
    port: int


class Engine(Protocol):
    """A cluster, and the agents on its nodes."""

    @property
    def trouble(self) -> str:
        """Why the cluster's own scheduler does not answer; empty where it does, or is none."""
        ...

    def discover(self) -> ClusterSpec:
        """The nodes there are now, with the types and numbers of their GPUs."""
        ...

    def start(self, controller: int) -> None:
        """Find or start the agents. Orders carry this epoch; agents refuse those of older ones."""
        ...

    def close(self) -> None:
        """Let go of everything; what trains goes on until its lease runs out."""
        ...

    def quit(self) -> None:
        """End all agents, and with them everything that runs."""
        ...

    def poll(self, offsets: Mapping[Key, int], renew: Iterable[Key], lease_seconds: float) -> Poll:
        """Ask every agent how its launches stand; those named in `renew` get longer leases.

        Nodes that joined or left since are told by `Poll.cluster`, once; a node that left is gone
        for good, and one that comes back has another name. The agent of a node that left answers no
        more orders.
        """
        ...

    def ask(self, node: str, op: str, **values: Any) -> dict[str, Any]:
        """One request to one agent; raises `AgentGone` or `AgentRefused`."""
        ...

    def read(self, node: str, *, job_id: str, epoch: int, name: str, offset: int) -> dict[str, Any]:
        """`text` of a file of a launch from an offset on, and the next `offset`. From any thread.

        It also works for launches that are over and, where it can be, for nodes that left.
        """
        ...

    def rendezvous(self, node: str) -> Rendezvous:
        """An address of a node that the others reach, and a port that is free there.

        Raises `AgentGone`. If somebody takes the port before the ranks do, the launch fails with a
        fault of the network and is tried again with another one.
        """
        ...

    def reserve(self, key: Key, gpus: Mapping[str, int]) -> bool:
        """Take the lock on so many GPUs of each node, all or none; whether it is held now.

        It is asked again at every tick until it is, and asking twice is once.
        """
        ...

    def held(self) -> frozenset[Key]:
        """The launches that have a lock, or wait for one, also of controllers before this one."""
        ...

    def release(self, key: Key) -> None:
        """Give a lock back; nothing of its launch runs any more."""
        ...
