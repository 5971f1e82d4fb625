"""Seconds of collectives and messages among GPUs: groups inside a machine, rings through many.

Theory of operation. Ranks are numbered as Megatron numbers them: tensor-parallel ranks are
neighbours, then context, data and pipeline ranks. A group is `size` ranks that lie `stride` apart.
As long as it fits into a node, its bytes travel over the link inside; otherwise every node holds
some members of it, and each member brings its own network card: a ring that crosses nodes runs at
(members in a node) x (bandwidth of one card), never faster than the link inside. Bandwidths are
those that collectives reach (`busbw`), so a ring over n ranks moves (n-1)/n of the bytes once for a
gather or a scatter, and twice for an all-reduce. Small messages take logarithmically many hops
(NCCL's trees), large ones linearly many; the time is a fixed start plus both parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from drystone.describe.machine import Link, Machine

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

# Starting a collective: enqueueing the kernel and meeting the other ranks. nccl-tests shows 10 to
# 20 us for the smallest all-reduce inside a node (github issues NVIDIA/nccl-tests#68, #149).
START_SECONDS = 12e-6


@dataclass(frozen=True, slots=True)
class CommGroup:
    """Ranks that talk to each other, for many layouts at once."""

    size: FloatArray
    bandwidth_bytes_per_second: FloatArray  # of the slowest part of a ring through all of them
    ring_seconds: FloatArray  # all the hops of a ring through all of them
    tree_seconds: FloatArray  # all the hops from a leaf to the root of a tree
    crosses: BoolArray  # whether it spans nodes
    num_nodes: FloatArray  # that it spans


def make_group(size: FloatArray, stride: FloatArray | float, machine: Machine) -> CommGroup:
    """The group of `size` ranks that lie `stride` apart."""
    inside = np.clip(np.floor(machine.gpus_per_node / np.asarray(stride)), 1.0, size)
    nodes = np.ceil(size / inside)
    crosses = nodes > 1.0
    intra, inter = machine.intra, machine.inter
    card = np.minimum(inside * inter.bandwidth_bytes_per_second, intra.bandwidth_bytes_per_second)
    return CommGroup(
        size=size,
        bandwidth_bytes_per_second=np.where(crosses, card, intra.bandwidth_bytes_per_second),
        ring_seconds=(size - nodes) * intra.latency_seconds
        + np.where(crosses, nodes, 0.0) * inter.latency_seconds,
        tree_seconds=np.log2(inside) * intra.latency_seconds
        + np.log2(nodes) * inter.latency_seconds,
        crosses=crosses,
        num_nodes=nodes,
    )


def gather_seconds(
    num_bytes: FloatArray, group: CommGroup, *, num_calls: float | FloatArray = 1.0
) -> FloatArray:
    """All-gathers to, or reduce-scatters of, `num_bytes` in total; 0 for a group of one.

    NCCL knows only rings for them, so each call passes every rank.
    """
    moved = num_bytes * (1.0 - 1.0 / group.size) / group.bandwidth_bytes_per_second
    seconds = moved + num_calls * (group.ring_seconds + START_SECONDS)
    return np.where(group.size > 1, seconds, 0.0)


def allreduce_seconds(
    num_bytes: FloatArray, group: CommGroup, *, num_calls: float | FloatArray = 1.0
) -> FloatArray:
    """All-reduces of `num_bytes` in total, each by ring or tree, whichever has fewer hops."""
    moved = 2.0 * num_bytes * (1.0 - 1.0 / group.size) / group.bandwidth_bytes_per_second
    hops = 2.0 * np.minimum(group.ring_seconds, group.tree_seconds)
    return np.where(group.size > 1, moved + num_calls * (hops + START_SECONDS), 0.0)


def alltoall_seconds(
    row_bytes: FloatArray,
    group: CommGroup,
    machine: Machine,
    *,
    num_copies: float = 1.0,
    fused: bool = False,
    share_of_nodes: float = 1.0,
) -> FloatArray:
    """Every rank sends `num_copies` of each of its rows, `row_bytes` in all, to ranks at random.

    Unlike a ring, what leaves a node does so over each rank's own card, while what stays inside
    travels over the link there. `fused`: a row goes to each node, and there to each rank, once;
    `share_of_nodes`: the part of the nodes that the copies of one row may go to.
    """
    inside, nodes = group.size / group.num_nodes, group.num_nodes
    if fused:
        allowed = np.maximum(1.0, nodes * share_of_nodes)
        beyond = allowed * _share_hit(allowed, num_copies) * (1.0 - 1.0 / nodes)
        within = group.size * _share_hit(group.size, num_copies) * (1.0 - 1.0 / inside)
    else:
        beyond = num_copies * (1.0 - 1.0 / nodes)
        within = num_copies * (inside - 1.0) / group.size
    moved = np.maximum(
        beyond / machine.inter.bandwidth_bytes_per_second,
        within / machine.intra.bandwidth_bytes_per_second,
    )
    seconds = row_bytes * moved + group.tree_seconds + START_SECONDS
    return np.where(group.size > 1, seconds, 0.0)


def _share_hit(num_places: FloatArray, num_copies: float) -> FloatArray:
    """Share of the places that at least one of so many copies goes to."""
    share: FloatArray = 1.0 - (1.0 - 1.0 / num_places) ** num_copies
    return share


def send_seconds(
    num_bytes: FloatArray, size: FloatArray, stride: FloatArray, machine: Machine
) -> FloatArray:
    """One message from each of `size` ranks to the next, `stride` further on; the slowest one."""
    crosses = size * stride > machine.gpus_per_node
    bandwidth = np.where(
        crosses, machine.inter.bandwidth_bytes_per_second, machine.intra.bandwidth_bytes_per_second
    )
    latency = np.where(crosses, machine.inter.latency_seconds, machine.intra.latency_seconds)
    return np.where(size > 1, num_bytes / bandwidth + latency + START_SECONDS, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """A ring through all GPUs of several types, for many numbers of them at once."""

    bandwidth_bytes_per_second: FloatArray  # of its slowest part; infinite: nothing is sent
    hops_seconds: FloatArray
    inside_bytes_per_second: float  # of the slowest link inside a node

    @property
    def pace(self) -> FloatArray:
        """Its bandwidth over that inside a node."""
        return self.bandwidth_bytes_per_second / self.inside_bytes_per_second


def make_ring(
    machines: Sequence[Machine], counts: Sequence[FloatArray | int], between: Link | None = None
) -> Ring:
    """The ring through `counts` GPUs of each type. Between nodes all cards of a node work.

    `between` joins the types; one type alone uses its own link between nodes.
    """
    slowest: FloatArray = np.asarray(np.inf)
    hops: FloatArray = np.asarray(START_SECONDS)
    for machine, count in zip(machines, counts, strict=True):
        inside = np.minimum(count, machine.gpus_per_node)
        nodes = np.ceil(count / np.asarray(machine.gpus_per_node))
        link = machine.inter if between is None else between
        card = min(link.bandwidth_bytes_per_second, machine.inter.bandwidth_bytes_per_second)
        leaves = (nodes > 1) | (between is not None)
        intra = np.where(inside > 1, machine.intra.bandwidth_bytes_per_second, np.inf)
        inter = np.where(leaves, card * inside, np.inf)
        slowest = np.minimum(slowest, np.minimum(intra, inter))
        hops = hops + (count - nodes) * machine.intra.latency_seconds
        hops = hops + leaves * nodes * link.latency_seconds
    return Ring(
        bandwidth_bytes_per_second=slowest,
        hops_seconds=np.where(np.isinf(slowest), 0.0, hops),
        inside_bytes_per_second=min(
            machine.intra.bandwidth_bytes_per_second for machine in machines
        ),
    )
