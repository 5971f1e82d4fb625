"""A part of a tensor, as torch's distributed checkpoints want it: as boxes with offsets.

A rank holds the elements `[start, end)` of a parameter in row-major order. That is a rectangle only
where the cut falls between rows; in general it is a few of them: the rest of a row, whole rows, the
beginning of a row. Saved that way under the parameter's own name and shape, a checkpoint can be
loaded into any other split, by this runtime or by another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of a tensor, and where its elements begin in the row-major order."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """Elements."""
        return prod(self.lengths)


def interval_boxes(shape: Sequence[int], start: int, end: int) -> list[Box]:
    """The rectangles, in order, that the elements `[start, end)` of a tensor consist of."""
    if start >= end:
        return []
    if len(shape) <= 1:
        return [Box((start,) * len(shape), (end - start,) * len(shape), start)]
    row = prod(shape[1:])
    first_whole, end_whole = -(-start // row), end // row
    if first_whole > end_whole:  # within one row
        return _boxes_of_row(shape, end_whole, start, end)
    boxes = _boxes_of_row(shape, first_whole - 1, start, first_whole * row)
    if end_whole > first_whole:
        zeros = (0,) * (len(shape) - 1)
        lengths = (end_whole - first_whole, *shape[1:])
        boxes.append(Box((first_whole, *zeros), lengths, first_whole * row))
    return boxes + _boxes_of_row(shape, end_whole, end_whole * row, end)


def part_boxes(shape: Sequence[int], start: int, end: int, part: Box | None) -> list[Box]:
    """The same, where the elements are counted within a box of the tensor."""
    if part is None:
        return interval_boxes(shape, start, end)
    return [
        Box(
            tuple(a + b for a, b in zip(part.offsets, box.offsets, strict=True)),
            box.lengths,
            box.start,
        )
        for box in interval_boxes(part.lengths, start, end)
    ]


def _boxes_of_row(shape: Sequence[int], index: int, start: int, end: int) -> list[Box]:
    base = index * prod(shape[1:])
    return [
        Box((index, *box.offsets), (1, *box.lengths), base + box.start)
        for box in interval_boxes(shape[1:], start - base, end - base)
    ]


class Slice(torch.Tensor):
    """The elements `[start, end)` of a tensor of `shape`, held in the 1-D tensor `local`."""

    local: torch.Tensor
    boxes: list[Box]
    begin: int

    @staticmethod
    def __new__(
        cls: type[Slice],
        local: torch.Tensor,
        shape: Sequence[int],
        start: int,
        part: Box | None = None,
    ) -> Slice:
        """A tensor without storage of its own; with `part`, `start` counts within that box."""
        whole = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=local.dtype, device=local.device
        )
        whole.local = local
        whole.boxes = part_boxes(shape, start, start + local.numel(), part)
        whole.begin = start
        return whole

    def with_values(self, local: torch.Tensor) -> Slice:
        """The same elements, of other values."""
        other = Slice(local, self.shape, self.begin)
        other.boxes = self.boxes
        return other

    def __repr__(self) -> str:
        return f"Slice({tuple(self.shape)}, {self.boxes})"

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.lengths))
            for box in self.boxes
        ]

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        box = next(box for box in self.boxes if box.offsets == tuple(index.offset))
        at = box.start - self.begin
        return self.local[at : at + box.size].view(box.lengths)

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Checkpointing detaches what it is given; nothing else is asked of a slice."""
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{function} on a slice of a tensor")
