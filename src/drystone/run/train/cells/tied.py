"""Embedding and head share a weight, but stand on two stages: each adds the other's gradient.

Both stages hold a copy, cut in their own ways. After each has summed its gradient over its own
ranks, every rank gets from the other stage what belongs to the elements that it holds. The sum of
two numbers does not depend on their order, so both copies take the same update.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from drystone.run.train.cells.exchange import Mail, Region
from drystone.run.train.checkpoint.slices import Box, part_boxes
from drystone.run.train.collectives import Wire
from drystone.run.train.uneven.shard import Owned


class TiedGradient:
    """The weight of that name, on two stages. Every rank of the job must make one."""

    def __init__(
        self,
        owned: Sequence[Owned],
        name: str,
        *,
        wire: Wire,
        stages: tuple[range, range],  # the ranks of the first and of the last
        mails: tuple[Mail, Mail],  # from the first to the last, and back
    ) -> None:
        first, last = stages
        self._is_first = wire.rank in first
        self._others = last if self._is_first else first if wire.rank in last else range(0)
        self._mails = mails
        self._pieces = [one for one in owned if one.name == name and one.value.requires_grad]
        mine = [_region(box) for piece in self._pieces for box in _boxes(piece)]
        table: list[Any] = [None] * wire.num_ranks
        dist.all_gather_object(table, mine, group=wire.group)
        self._regions: list[list[Region]] = table

    def add_other(self) -> None:
        """Add to the gradients of the owned pieces those of the other stage."""
        views = [(_region(box), view) for piece in self._pieces for box, view in _views(piece)]
        received = [torch.zeros_like(view) for _, view in views]
        forward, backward = self._mails
        incoming = []
        for rank in self._others:
            theirs = self._regions[rank]
            pairs = list(product(range(len(views)), range(len(theirs))))
            if not self._is_first:  # both sides go through them in one order, that of the first
                pairs.sort(key=lambda pair: pair[::-1])
            for index, number in pairs:
                (mine, view), other = views[index], {rank: theirs[number]}
                if self._is_first:
                    forward.send(view, mine, other, held=mine)
                    incoming.append(backward.start_receive(received[index], mine, other))
                else:
                    incoming.append(forward.start_receive(received[index], mine, other))
                    backward.send(view, mine, other, held=mine)
        for parts in incoming:
            parts.wait()
        for mail in self._mails:
            mail.finish()
        for (_, view), other_gradient in zip(views, received, strict=True):
            view += other_gradient


def _boxes(one: Owned) -> list[Box]:
    return part_boxes(one.shape, one.start, one.end, one.part)


def _region(box: Box) -> Region:
    return tuple(
        range(start, start + length) for start, length in zip(box.offsets, box.lengths, strict=True)
    )


def _views(one: Owned) -> list[tuple[Box, torch.Tensor]]:
    """The gradient of a piece, box by box."""
    gradient = one.value.grad
    assert gradient is not None
    return [
        (box, gradient[box.start - one.start :][: box.size].view(box.lengths))
        for box in _boxes(one)
    ]
