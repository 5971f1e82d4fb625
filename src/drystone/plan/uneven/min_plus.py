"""The least sum over every way to add up to a number, and which numbers can be added up to at all.

(min,+) convolution of short dense vectors that remembers how each sum came about, so that any entry
can be traced back to what each rank takes; and sums of sets of whole numbers, kept as bits.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


@dataclass(slots=True, eq=False)
class Node:
    """The least reduced cost of every sum of offsets, over one rank or over two nodes together."""

    reduced: FloatArray
    kind: int = -1
    parts: tuple[Node, Node] | None = None
    solved: dict[int, Counter[tuple[int, int]]] = field(default_factory=dict)


def repeated(node: Node, num_ranks: int, *, goal: int, slack: float) -> Node:
    """The sum over `num_ranks` equal ranks, by doubling."""
    total: Node | None = None
    while True:
        if num_ranks & 1:
            total = node if total is None else join(total, node, goal=goal, slack=slack)
        num_ranks >>= 1
        if not num_ranks:
            assert total is not None
            return total
        node = join(node, node, goal=goal, slack=slack)


def joined(nodes: list[Node], *, goal: int, slack: float) -> Node:
    """All nodes together, the short ones first; of the last join only the goal is computed."""
    nodes = sorted(nodes, key=lambda node: node.reduced.size)
    total = nodes[0]
    for node in nodes[1:-1]:
        total = join(total, node, goal=goal, slack=slack)
    if len(nodes) == 1:
        return total
    last = nodes[-1]
    start = max(goal + 1 - last.reduced.size, 0)
    ours = total.reduced[start : goal + 1]
    theirs = last.reduced[goal - start - np.arange(ours.size)] if ours.size else ours
    reduced = np.full(goal + 1, np.inf)
    least = (ours + theirs).min(initial=np.inf)
    reduced[goal] = least if least <= slack else np.inf
    return Node(reduced, parts=(total, last))


def join(one: Node, other: Node, *, goal: int, slack: float) -> Node:
    """The (min,+) convolution of two nodes, without what exceeds the goal or the slack."""
    few, many = sorted(
        (one.reduced, other.reduced), key=lambda array: int(np.isfinite(array).sum())
    )
    reduced = np.full(min(few.size + many.size - 1, goal + 1), np.inf)
    for index in np.flatnonzero(np.isfinite(few)).tolist():
        part = reduced[index : index + many.size]
        np.minimum(part, many[: part.size] + few[index], out=part)
    reduced[reduced > slack] = np.inf
    return Node(reduced, parts=(one, other))


def trace(node: Node, offset: int) -> Counter[tuple[int, int]]:
    """How many ranks of which kind take which offset, in a cheapest sum to `offset`."""
    if node.parts is None:
        return Counter({(node.kind, offset): 1})
    if offset not in node.solved:
        one, other = node.parts
        start = max(offset + 1 - other.reduced.size, 0)
        ours = one.reduced[start : offset + 1]
        sums = ours + other.reduced[offset - start - np.arange(ours.size)]
        ties = np.flatnonzero(sums == sums.min()) + start
        # Of equal sums the most even one: then both halves are likely to be the same.
        taken = int(ties[np.argmin(np.abs(2 * ties - offset))])
        node.solved[offset] = trace(one, taken) + trace(other, offset - taken)
    return node.solved[offset]


def sumset(one: int, other: int, within: int) -> int:
    """Every sum of a member of one set and a member of the other; sets as bits."""
    few, many = sorted((one, other), key=int.bit_count)
    sums = 0
    while few:
        lowest = few & -few
        sums |= many << (lowest.bit_length() - 1)
        few ^= lowest
    return sums & within
