"""The nodes of a Slurm cluster from look to look: which there are, are lost, and what is taken."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from drystone.describe.files.cluster import ClusterSpec
from drystone.errors import DrystoneError
from drystone.run.engines.slurm.dialect import SlurmNode
from drystone.run.engines.slurm.discover import make_cluster, usable_nodes
from drystone.run.engines.slurm.free import by_type, drained_rest, lost_nodes, taken_by_others
from drystone.run.engines.slurm.watch import Look

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
        self._seen = 0.0  # when the last look was begun that was taken in
        self._taken: tuple[dict[str, int], dict[str, int]] = ({}, {})  # of the last two looks
        # Nodes where a job of ours does not end: its number, and when it was given back.
        self.suspects: dict[str, tuple[int, float]] = {}
        # GPUs that Slurm took back from a job of ours, by its number, and when that left them.
        self.recalled: dict[int, tuple[Mapping[str, int], float]] = {}

    @property
    def names(self) -> list[str]:
        """Of the nodes that were described."""
        return [one.id for one in self._cluster.nodes] if self._cluster is not None else []

    def describe(self, nodes: Iterable[SlurmNode]) -> ClusterSpec:
        """The nodes with GPUs in our partitions, whatever their state."""
        self._cluster = make_cluster(usable_nodes(nodes, self._partitions), self._file)
        return self._cluster

    def renew(self, look: Look) -> ClusterSpec | None:
        """Take in a look; the cluster, if it has other nodes than before."""
        if look.asked == self._seen:
            return None
        self._seen, before = look.asked, self._cluster
        self._taken = (self._taken[1], taken_by_others(look, self.names, self._prefix))
        with suppress(DrystoneError):  # Slurm shows no nodes at all: then they are merely lost
            after = self.describe(look.nodes.values())
            return after if after != before else None
        return None

    def lost(self, look: Look, there: Container[str]) -> dict[str, str]:
        """Nodes on which nothing can be started, and why; on those `there` agents of ours answer.

        A node that was lost with a job of ours on it stays so until Slurm has got rid of the job:
        before that, nobody can tell whether its slurmd is alive.
        """
        lost = lost_nodes(look, there, self.names)
        for node, (number, since) in list(self.suspects.items()):
            stays = any(
                node in job.gpus and (job.is_running or job.is_completing)
                for job in look.jobs.get(number, ())
            )
            if look.asked > since and not stays:
                del self.suspects[node]
            else:
                lost.setdefault(node, f"Slurm's job {number} does not end there")
        return lost

    def taken(self, look: Look, held: Mapping[str, int]) -> dict[str, int]:
        """GPUs of each node that others have; `held` are ours, as they were planned.

        Only what two looks agree on: nodes and jobs are asked for one after the other.
        """
        before, now = self._taken
        taken = {node: min(count, before.get(node, 0)) for node, count in now.items()}
        taken = {node: count for node, count in taken.items() if count}
        for node, count in self._recalled_now(look).items():
            taken[node] = max(taken.get(node, 0), count)
        if not self._pins_nodes:
            there = [one for one in self.names if one in look.nodes]
            taken = by_type(taken, held, look.nodes, there)
        return taken | drained_rest(look, held, self.names)

    def _recalled_now(self, look: Look) -> dict[str, int]:
        """GPUs that are somebody else's though nobody has them yet: a job would only queue there.

        That ends when a look has shown all of them in use, when nobody came for them, or when a
        look says that no one was to come: a job whose time was over was not preempted.
        """
        before, _ = self._taken
        found: dict[str, int] = {}
        for number, (gpus, since) in list(self.recalled.items()):
            jobs = look.jobs.get(number, ())
            # While it completes, older versions do not say what ended it.
            is_free = all(
                job.is_over and not job.states & {"COMPLETING", "PREEMPTED"} for job in jobs
            )
            is_taken = all(before.get(node, 0) >= count for node, count in gpus.items())
            if look.asked > since and (is_free or is_taken or look.asked > since + _RECALL_SECONDS):
                del self.recalled[number]
                continue
            for node, count in gpus.items():
                found[node] = found.get(node, 0) + count
        return found
