"""Embedding and head share a weight, but stand on two stages: each adds the other's gradient.

Both stages hold a copy, cut in their own ways. After each has summed its gradient over its own
ranks, every rank gets from the other stage what belongs to the elements that it holds. The sum of
two numbers does not depend on their order, so both copies take the same update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from drystone.run.runtime.collectives import Wire
from drystone.run.runtime.exchange import Mail, Region
from drystone.run.runtime.shard import Owned
from drystone.run.runtime.slices import Box, part_boxes

_MOST_BOXES = 8  # that an interval of a matrix falls into: three, with room


class TiedGradient:
    """The weight of that name, on two stages. Every rank of the job must make one."""

    def __init__(
        self, owned: Sequence[Owned], name: str, *, wire: Wire, others: range | None, mail: Mail
    ) -> None:
        mine_too = [one for one in owned if one.name == name and one.value.requires_grad]
        self._pieces = mine_too if others is not None else []
        self._others, self._mail = others or range(0), mail
        mine = [_region(box) for one in self._pieces for box in _boxes(one)]
        table: list[Any] = [None] * wire.num_ranks
        dist.all_gather_object(table, mine, group=wire.group)
        self._regions: list[list[Region]] = table

    def add_other(self, *, first_tag: int) -> None:
        """Add to the gradients of the owned pieces those of the other stage."""
        views = [(_region(box), view) for one in self._pieces for box, view in _views(one)]
        received = [torch.zeros_like(view) for _, view in views]
        incoming = []
        for index, (mine, view) in enumerate(views):
            for rank in self._others:
                for number, other in enumerate(self._regions[rank]):
                    sent, awaited = (index, number), (number, index)
                    self._mail.send(
                        view, mine, {rank: other}, held=mine, tag=first_tag + _pair(*sent)
                    )
                    incoming.append(
                        self._mail.start_receive(
                            received[index], mine, {rank: other}, tag=first_tag + _pair(*awaited)
                        )
                    )
        for one in incoming:
            one.wait()
        self._mail.finish()
        for (_, view), other_gradient in zip(views, received, strict=True):
            view += other_gradient


def _pair(sender_box: int, receiver_box: int) -> int:
    return sender_box * _MOST_BOXES + receiver_box


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
