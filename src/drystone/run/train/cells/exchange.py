"""Pass a tensor from ranks that hold it one way to ranks that want it another way.

A tensor that several ranks hold in pieces is described by regions: for each rank a box of indices.
Where what one rank gives overlaps what another wants, a message goes from one to the other. Stages
of unlike degrees pass activations that way, and two stages that share a weight its gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from drystone.run.train.cells.layout import Stage
from drystone.run.train.checkpoint.slices import Box, part_boxes
from drystone.run.train.collectives import Wire
from drystone.run.train.uneven.shard import Owned

Region = tuple[range, ...]  # one range of indices for each dimension


def overlap(one: Region, other: Region) -> Region | None:
    """The box that both contain, if any."""
    both = tuple(
        range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True)
    )
    return both if all(len(side) for side in both) else None


def inside(outer: Region, inner: Region) -> tuple[slice, ...]:
    """Where a box lies within the tensor of a larger box."""
    return tuple(
        slice(b.start - a.start, b.stop - a.start) for a, b in zip(outer, inner, strict=True)
    )


@lru_cache(maxsize=256)
def hidden_regions(
    stage: Stage, num_samples: int, seq_len: int, *, splits_sequence: bool
) -> Mapping[int, Region]:
    """Samples and positions of one micro-batch that each rank of a stage holds, or gives away.

    Tensor-parallel ranks hold all positions unless they split the sequence; but each gives away
    its part only, so nothing is sent twice.
    """
    found: dict[int, Region] = {}
    each = -(-seq_len // stage.tp)
    for dp_index, samples in enumerate(stage.runs(num_samples)):
        for tp_index in range(stage.tp):
            at = range(min(tp_index * each, seq_len), min((tp_index + 1) * each, seq_len))
            positions = at if splits_sequence else range(seq_len)
            found[stage.rank(dp_index, tp_index)] = (samples, positions)
    return found


class Mail:
    """Messages between ranks. Sends are started and not waited for until the step ends.

    Messages have no names: those of two ranks must be sent in the order in which they are received.
    On NCCL both directions of a pair share a stream, and the first message blocks until the other
    rank is there, so all ranks must start their sends and receives in one common order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group  # of all ranks
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []

    def send(
        self, tensor: torch.Tensor, mine: Region, wanted: Mapping[int, Region], *, held: Region
    ) -> None:
        """Give away the part `mine` of a tensor, which covers `held`, to whoever wants of it."""
        self._sent = [(work, part) for work, part in self._sent if not work.is_completed()]
        for rank, want in wanted.items():
            both = overlap(mine, want)
            if both is not None:
                part = tensor.detach()[inside(held, both)].contiguous()
                work = dist.isend(part, group=self._group, group_dst=rank)
                assert work is not None
                self._sent.append((work, part))

    def start_receive(
        self, tensor: torch.Tensor, mine: Region, given: Mapping[int, Region]
    ) -> Incoming:
        """Begin to fill a tensor, which covers `mine`, from what others give away."""
        parts = []
        for rank, give in given.items():
            both = overlap(mine, give)
            if both is not None:
                target = tensor[inside(mine, both)]
                part = target if target.is_contiguous() else torch.empty_like(target).contiguous()
                work = dist.irecv(part, group=self._group, group_src=rank)
                assert work is not None
                parts.append((work, part, target))
        return Incoming(tensor, parts)

    def finish(self) -> None:
        """Until all that was sent has left."""
        for work, _ in self._sent:
            work.wait()
        self._sent = []


class Incoming:
    """A tensor that is on its way, in parts."""

    def __init__(
        self,
        tensor: torch.Tensor,
        parts: Sequence[tuple[dist.Work, torch.Tensor, torch.Tensor]],
    ) -> None:
        self._tensor, self._parts = tensor, list(parts)

    def wait(self) -> torch.Tensor:
        """The tensor, whole."""
        for work, part, target in self._parts:
            work.wait()
            if part is not target:
                target.copy_(part)
        self._parts = []
        return self._tensor


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
