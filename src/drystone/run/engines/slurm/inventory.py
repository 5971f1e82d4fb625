"""The nodes of a Slurm cluster from look to look: which there are, are lost, and what is taken."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from drystone.describe.catalogue import find_gpu
from drystone.describe.cluster import NodeSpec
from drystone.describe.files.cluster import ClusterSpec, parse_cluster
from drystone.errors import DrystoneError, InvalidSpec, UnknownName
from drystone.run.engines.agents_on_nodes import TakenGpus
from drystone.run.engines.slurm.dialect import SlurmJob, SlurmNode
from drystone.run.engines.slurm.watch import SlurmView


def is_ours(job: SlurmJob, prefix: str) -> bool:
    """Whether a job was submitted by this system: its name says so."""
    return job.name.startswith(prefix)


def taken_by_others(view: SlurmView, names: Iterable[str], prefix: str) -> dict[str, int]:
    """GPUs in use on each node that are not ours; nodes on which there are none are left out.

    It is the difference of two answers, so that jobs which we may not see count as well.
    """
    own: dict[str, int] = {}
    for jobs in view.jobs.values():
        for job in jobs:
            if is_ours(job, prefix) and (job.is_running or job.is_completing):
                for node, count in job.gpus.items():
                    own[node] = own.get(node, 0) + count
    taken = {}
    for name in names:
        there = view.nodes.get(name)
        others = there.num_gpus_in_use - own.get(name, 0) if there is not None else 0
        if others > 0:
            taken[name] = others
    return taken


def drained_rest(view: SlurmView, held: Mapping[str, int], names: Iterable[str]) -> dict[str, int]:
    """On nodes that are drained nothing new may start: all that we do not hold there is taken."""
    rest = {}
    for name in names:
        node = view.nodes.get(name)
        if node is not None and node.is_drained and held.get(name, 0):
            rest[name] = node.num_gpus - held[name]
    return rest


def by_type(
    taken: Mapping[str, int],
    held: Mapping[str, int],
    nodes: Mapping[str, SlurmNode],
    names: Iterable[str],
) -> dict[str, int]:
    """Where Slurm chooses the nodes only counts by type mean anything.

    What others have of a type is put on the nodes of that type where we have planned least.
    """
    names = list(names)
    left: dict[str, int] = {}
    for name, count in taken.items():
        left[_kind(nodes[name])] = left.get(_kind(nodes[name]), 0) + count
    moved = {}
    for name in sorted(names, key=lambda name: (held.get(name, 0), name)):
        room = nodes[name].num_gpus - held.get(name, 0)
        count = min(room, left.get(_kind(nodes[name]), 0))
        if count > 0:
            moved[name] = count
            left[_kind(nodes[name])] -= count
    return moved


def lost_nodes(view: SlurmView, there: Container[str], names: Iterable[str]) -> dict[str, str]:
    """Nodes where nothing can run, and why; our agents, where they are, know more than pings."""
    lost = {}
    for name in names:
        node = view.nodes.get(name)
        if node is None:
            lost[name] = "Slurm does not show it any more"
        elif node.is_lost and not (name in there and "DOWN" not in node.states):
            lost[name] = _told(node, "is down")
        elif node.is_drained and name not in there:
            lost[name] = _told(node, "is drained")
    return lost


def _told(node: SlurmNode, what: str) -> str:
    states = "+".join(sorted(node.states)).lower()
    return f"it {what} in Slurm ({states}{': ' + node.reason if node.reason else ''})"


def _kind(node: SlurmNode) -> str:
    return next(iter(node.gpus), "")


_log = logging.getLogger("drystone.slurm")


def usable_nodes(nodes: Iterable[SlurmNode], partitions: Sequence[str] = ()) -> list[SlurmNode]:
    """Those with GPUs in the partitions that we use; none named: in any."""
    return [
        node
        for node in nodes
        if node.num_gpus and (not partitions or set(partitions) & set(node.partitions))
    ]


def make_cluster(nodes: Sequence[SlurmNode], file: ClusterSpec | None = None) -> ClusterSpec:
    """The nodes as Drystone describes them, by name."""
    named = {node.id: node.gpu for node in file.nodes} if file is not None else {}
    specs = []
    for node in sorted(nodes, key=lambda node: node.name):
        gpu = named.get(node.name) or _gpu_of(node)
        if gpu is None:
            _log.warning(
                "node %s is left out: no catalogue type is called %s, nor any of its features; "
                "name it in a cluster file",
                node.name,
                " or ".join(node.gpus) or "''",
            )
            continue
        specs.append(NodeSpec(id=node.name, gpu=gpu, num_gpus=node.num_gpus))
    if not specs:
        raise InvalidSpec(
            "Slurm shows no node with GPUs of a known type",
            hint="`sinfo -N -o '%N %G %P'` shows what it has; --partition chooses among them",
        )
    return _described(specs, file)


def _described(specs: Sequence[NodeSpec], file: ClusterSpec | None) -> ClusterSpec:
    """With prices and emulations, and with the memory that follows from them."""
    types = dict.fromkeys(spec.gpu for spec in specs)
    plain = parse_cluster(f"nodes: [{', '.join(f'{{gpu: {gpu}}}' for gpu in types)}]")
    emulations = {} if file is None else {g: e for g, e in file.emulations.items() if g in types}
    prices = dict(plain.dollars_per_gpu_hour)
    if file is not None:
        prices |= {g: d for g, d in file.dollars_per_gpu_hour.items() if g in types}
    made = ClusterSpec(nodes=tuple(specs), emulations=emulations, dollars_per_gpu_hour=prices)
    sized = tuple(
        replace(spec, memory_bytes=float(made.gpu(spec.gpu).usable_bytes)) for spec in specs
    )
    return replace(made, nodes=sized)


def _gpu_of(node: SlurmNode) -> str | None:
    kinds = [kind for kind in node.gpus if kind]
    if len(node.gpus) > 1:
        _log.warning("node %s has several types of GPUs; all count as the first", node.name)
    for name in (*kinds, *node.features):
        try:
            return find_gpu(name.replace("_", " ")).name
        except UnknownName:
            continue
    return None


# Who preempts a job gets its GPUs when a scheduler of Slurm's looks next: 30 s, unless a site says
# otherwise.
_RECALL_SECONDS: Final = 30.0


class Inventory:
    """What was described last, and what two looks agree on."""

    def __init__(
        self,
        prefix: str,
        file: ClusterSpec | None,
        *,
        partitions: Sequence[str] = (),
        pins_nodes: bool = True,
    ) -> None:
        self._prefix, self._file = prefix, file
        self._partitions, self._pins_nodes = partitions, pins_nodes
        self._cluster: ClusterSpec | None = None
        self._taken = TakenGpus()
        # Nodes where a job of ours does not end: its number, and when it was given back.
        self.suspects: dict[str, tuple[int, float]] = {}
        # GPUs that Slurm took back from a job of ours, by its number, and when that left them.
        self.recalled: dict[int, tuple[Mapping[str, int], float]] = {}

    @property
    def names(self) -> list[str]:
        """Of the nodes that were described."""
        return [node.id for node in self._cluster.nodes] if self._cluster is not None else []

    def describe(self, nodes: Iterable[SlurmNode]) -> ClusterSpec:
        """The nodes with GPUs in our partitions, whatever their state."""
        self._cluster = make_cluster(usable_nodes(nodes, self._partitions), self._file)
        return self._cluster

    def renew(self, view: SlurmView) -> ClusterSpec | None:
        """Take in a look; the cluster, if it has other nodes than before."""
        if not self._taken.is_new(view.asked):
            return None
        before = self._cluster
        self._taken.note(view.asked, taken_by_others(view, self.names, self._prefix))
        with suppress(DrystoneError):  # Slurm shows no nodes at all: then they are merely lost
            after = self.describe(view.nodes.values())
            return after if after != before else None
        return None

    def lost(self, view: SlurmView, there: Container[str]) -> dict[str, str]:
        """Nodes on which nothing can be started, and why; on those `there` agents of ours answer.

        A node that was lost with a job of ours on it stays so until Slurm has got rid of the job:
        before that, nobody can tell whether its slurmd is alive.
        """
        lost = lost_nodes(view, there, self.names)
        for node, (number, since) in list(self.suspects.items()):
            stays = any(
                node in job.gpus and (job.is_running or job.is_completing)
                for job in view.jobs.get(number, ())
            )
            if view.asked > since and not stays:
                del self.suspects[node]
            else:
                lost.setdefault(node, f"Slurm's job {number} does not end there")
        return lost

    def taken(self, view: SlurmView, held: Mapping[str, int]) -> dict[str, int]:
        """GPUs of each node that others have; `held` are ours, as they were planned."""
        taken = self._taken.agreed()
        for node, count in self._recalled_now(view).items():
            taken[node] = max(taken.get(node, 0), count)
        if not self._pins_nodes:
            there = [name for name in self.names if name in view.nodes]
            taken = by_type(taken, held, view.nodes, there)
        return taken | drained_rest(view, held, self.names)

    def _recalled_now(self, view: SlurmView) -> dict[str, int]:
        """GPUs that are somebody else's though nobody has them yet: a job would only queue there.

        That ends when a look has shown all of them in use, when nobody came for them, or when a
        look says that no one was to come: a job whose time was over was not preempted.
        """
        before = self._taken.before
        found: dict[str, int] = {}
        for number, (gpus, since) in list(self.recalled.items()):
            jobs = view.jobs.get(number, ())
            # While it completes, older versions do not say what ended it.
            is_free = all(
                job.is_over and not job.states & {"COMPLETING", "PREEMPTED"} for job in jobs
            )
            is_taken = all(before.get(node, 0) >= count for node, count in gpus.items())
            if view.asked > since and (is_free or is_taken or view.asked > since + _RECALL_SECONDS):
                del self.recalled[number]
                continue
            for node, count in gpus.items():
                found[node] = found.get(node, 0) + count
        return found
