"""One rank's part of a pipeline stage: its layers, held as the plan shards them, run in segments.

A segment is what is before the layers, one layer, or what is after them. Each runs with a graph of
its own, so that its weights need to be there only while it is computed, and it can be recomputed,
whatever the schedule of the pipeline is. What is sharded over data-parallel ranks are the same
units as everywhere (`run/train/uneven/shard.py`), here of this rank's tensor-parallel part:

    ZeRO-0, 1   weights and gradients whole during a step, then reduced to the owner of each piece
    ZeRO-2      gradients reduced after each micro-batch
    ZeRO-3      and weights gathered for each use

Optimizer state is always sharded: that of ZeRO-0 would be the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from drystone.describe.layout import Sharding
from drystone.run.train.cells.tensor import Leaf
from drystone.run.train.collectives import Pending
from drystone.run.train.uneven.shard import Layer, Owned, Unit

Timed = Callable[[str], AbstractContextManager[None]]
Paced = Callable[[str, torch.Tensor], AbstractContextManager[None]]


class StagePart:
    """The weights that are used together, sharded over the data-parallel ranks of the stage."""

    def __init__(
        self,
        units: Sequence[Unit],  # at most one of them is trained, and it is the first
        leaves: Sequence[Leaf],
        *,
        sharding: Sharding,
        tensor_group: dist.ProcessGroup | None,
        copied: frozenset[str],
    ) -> None:
        self._layer, self._sharding, self._tensor_group = Layer(units), sharding, tensor_group
        trained = [leaf for leaf in leaves if leaf.value.requires_grad]
        self._partial = [index for index, leaf in enumerate(trained) if leaf.is_partial]
        by_name = {leaf.name: leaf for leaf in leaves}
        is_first = tensor_group is None or dist.get_rank(tensor_group) == 0
        self.owned = [
            Owned(
                one.name,
                by_name[one.name].shape,
                one.start,
                one.end,
                one.value,
                by_name[one.name].part,
                is_counted=(is_first or by_name[one.name].is_split) and one.name not in copied,
                is_in_block=one.is_in_block,
            )
            for unit in units
            for one in unit.owned
        ]
        self._reduction: Pending | None = None
        self._has_gradients = False  # whole ones, to which micro-batches add

    def start_use(self) -> None:
        """It will be used next."""
        self._layer.start_gather()

    def use(self) -> None:
        """From here on the weights are there."""
        self._layer.gather()

    def leave(self) -> None:
        """They are not needed for now."""
        if self._sharding >= Sharding.ZERO3:
            self._layer.free()

    def begin_backward(self) -> None:
        """Before the backward pass of one micro-batch."""
        if not self._has_gradients:
            self.finish_reduction()
            self._layer.begin_gradients()
            self._has_gradients = True

    def end_backward(self, *, is_last: bool) -> None:
        """After it; after the last one of a step nothing more is added to the gradients."""
        if is_last or self._sharding >= Sharding.ZERO2:
            self._start_reduction()

    def end_step(self) -> None:
        """After the last micro-batch; `finish_reduction` comes later."""
        self._layer.free()

    def finish_reduction(self) -> None:
        """Until the owned pieces have their gradients; those of micro-batches add up."""
        if self._reduction is None:
            return
        before = [one.value.grad for one in self.owned]
        self._reduction.wait()
        self._reduction = None
        for one, gradient in zip(self.owned, before, strict=True):
            if gradient is not None and one.value.grad is not None:
                one.value.grad += gradient

    def _start_reduction(self) -> None:
        self._has_gradients = False
        self._sum_partial()
        self._reduction = self._layer.start_reduce()

    def _sum_partial(self) -> None:
        """Gradients of which each tensor-parallel rank has a part: one collective."""
        if not self._partial or self._tensor_group is None:
            return
        gradients = self._layer.units[0].gradients()
        some = [gradients[index] for index in self._partial]
        flat = torch.cat(some)
        dist.all_reduce(flat, group=self._tensor_group)
        for one, summed in zip(some, flat.split([one.numel() for one in some]), strict=True):
            one.copy_(summed)


@dataclass(frozen=True, slots=True)
class Segment:
    """A part and what it computes: from what enters, and from the batch, what leaves."""

    part: StagePart
    run: Callable[[torch.Tensor | None, torch.Tensor | None], torch.Tensor]
    kinds: tuple[str, str] = (
        "",
        "",
    )  # of section, forward and backward, where devices are emulated
    is_recomputed: bool = False
    needs_weights_backward: bool = True  # a mere look-up does not
    is_entry: bool = False  # before the layers: an embedding
    is_over_vocabulary: bool = False  # its loss is of logits that are split


@dataclass(slots=True)
class _Kept:
    """What a segment keeps of a micro-batch for its backward pass."""

    entered: torch.Tensor | None
    left: torch.Tensor | None  # None: compute it again


class ChunkRun:
    """Consecutive segments, and the micro-batches that are on their way through them."""

    def __init__(self, segments: Sequence[Segment], *, timed: Timed, paced: Paced) -> None:
        self._segments, self._timed, self._paced = list(segments), timed, paced
        self._kept: dict[int, list[_Kept]] = {}
        self._batches: dict[int, torch.Tensor | None] = {}

    def forward(
        self, micro: int, hidden: torch.Tensor | None, batch: torch.Tensor | None
    ) -> torch.Tensor | None:
        """What leaves the last segment; for the loss its sum. None where there are no samples."""
        kept = self._kept[micro] = []
        self._batches[micro] = batch
        is_empty = _is_empty(hidden, batch)
        for index, segment in enumerate(self._segments):
            self._use(index)
            self._start_use(index + 1)
            if not is_empty:
                with self._timed("forward"), self._section(segment.kinds[0], hidden):
                    hidden = self._run_forward(segment, hidden, batch, kept)
            segment.part.leave()
        return None if is_empty else hidden

    def forget(self, micro: int) -> None:
        """Nothing of this micro-batch goes backward."""
        del self._kept[micro], self._batches[micro]

    def backward(
        self, micro: int, gradient: torch.Tensor | None, *, is_last: bool
    ) -> torch.Tensor | None:
        """The gradient of what entered, from that of what left."""
        kept, batch = self._kept.pop(micro), self._batches.pop(micro)
        self._finish_reduction(0)  # of the micro-batch before: it had a forward pass for it
        for index in reversed(range(len(self._segments))):
            segment = self._segments[index]
            if segment.needs_weights_backward:
                self._use(index)
            self._start_use(index - 1, is_backward=True)
            if segment.is_entry:  # its gradient is larger than a layer's: alone with it
                self._finish_reduction(index + 1)
            with self._timed("reduce"):
                segment.part.begin_backward()
            if kept:
                with self._timed("backward"), self._section(segment.kinds[1], kept[-1].entered):
                    gradient = _run_backward(segment, kept.pop(), batch, gradient)
            is_used_again = any(one.part is segment.part for one in self._segments[:index])
            segment.part.end_backward(is_last=is_last and not is_used_again)
            # One reduction is on its way at a time: each holds gradients that are whole.
            self._finish_reduction(index + 1)
            if segment.is_entry:
                self._finish_reduction(index)
            segment.part.leave()
        return gradient

    def _finish_reduction(self, index: int) -> None:
        if index < len(self._segments):
            with self._timed("reduce"):
                self._segments[index].part.finish_reduction()

    def _section(self, kind: str, hidden: torch.Tensor | None) -> AbstractContextManager[None]:
        return self._paced(kind, hidden) if kind and hidden is not None else nullcontext()

    def _use(self, index: int) -> None:
        with self._timed("gather"):
            self._segments[index].part.use()

    def _start_use(self, index: int, *, is_backward: bool = False) -> None:
        """What comes next is gathered while this is computed."""
        if not 0 <= index < len(self._segments):
            return
        if self._segments[index].needs_weights_backward or not is_backward:
            self._segments[index].part.start_use()

    def _run_forward(
        self,
        segment: Segment,
        hidden: torch.Tensor | None,
        batch: torch.Tensor | None,
        kept: list[_Kept],
    ) -> torch.Tensor:
        entered = None if hidden is None else hidden.detach().requires_grad_()
        with torch.set_grad_enabled(not segment.is_recomputed), _over_vocabulary(segment):
            left = segment.run(entered, batch)
        kept.append(_Kept(entered, None if segment.is_recomputed else left))
        return left.detach()


def _run_backward(
    segment: Segment, kept: _Kept, batch: torch.Tensor | None, gradient: torch.Tensor | None
) -> torch.Tensor | None:
    with _over_vocabulary(segment):
        left = kept.left if kept.left is not None else segment.run(kept.entered, batch)
        if left.requires_grad:  # not so before the first trained layer
            left.backward(gradient)
    return None if kept.entered is None else kept.entered.grad


def _over_vocabulary(segment: Segment) -> AbstractContextManager[None]:
    """Cross-entropy of logits that are split by the vocabulary, in both directions."""
    return loss_parallel() if segment.is_over_vocabulary else nullcontext()


def local_scalar(loss: torch.Tensor) -> torch.Tensor:
    """A loss that every tensor-parallel rank knows, as a plain tensor."""
    return loss.to_local() if isinstance(loss, DTensor) else loss


def _is_empty(hidden: torch.Tensor | None, batch: torch.Tensor | None) -> bool:
    given = hidden if hidden is not None else batch
    return given is None or not len(given)
