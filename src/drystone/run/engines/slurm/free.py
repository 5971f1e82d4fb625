"""Which GPUs of a Slurm cluster are ours to plan with? Not other people's, nor those of sick nodes.

All of it is computed from one look at Slurm and from what we hold, so that it can be tested.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from drystone.run.engines.slurm.dialect import SlurmJob, SlurmNode
from drystone.run.engines.slurm.watch import Look


def is_ours(job: SlurmJob, prefix: str) -> bool:
    """Whether a job was submitted by this system: its name says so."""
    return job.name.startswith(prefix)


def taken_by_others(look: Look, names: Iterable[str], prefix: str) -> dict[str, int]:
    """GPUs in use on each node that are not ours; nodes on which there are none are left out.

    It is the difference of two answers, so that jobs which we may not see count as well.
    """
    own: dict[str, int] = {}
    for jobs in look.jobs.values():
        for job in jobs:
            if is_ours(job, prefix) and (job.is_running or job.is_completing):
                for node, count in job.gpus.items():
                    own[node] = own.get(node, 0) + count
    taken = {}
    for name in names:
        there = look.nodes.get(name)
        others = there.num_gpus_in_use - own.get(name, 0) if there is not None else 0
        if others > 0:
            taken[name] = others
    return taken


def drained_rest(look: Look, held: Mapping[str, int], names: Iterable[str]) -> dict[str, int]:
    """On nodes that are drained nothing new may start: all that we do not hold there is taken."""
    rest = {}
    for name in names:
        node = look.nodes.get(name)
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
    for name in sorted(names, key=lambda one: (held.get(one, 0), one)):
        room = nodes[name].num_gpus - held.get(name, 0)
        count = min(room, left.get(_kind(nodes[name]), 0))
        if count > 0:
            moved[name] = count
            left[_kind(nodes[name])] -= count
    return moved


def lost_nodes(look: Look, there: Container[str], names: Iterable[str]) -> dict[str, str]:
    """Nodes where nothing can run, and why; our agents, where they are, know more than pings."""
    lost = {}
    for name in names:
        node = look.nodes.get(name)
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
