"""Trained weights read from safetensors, a piece at a time: no rank reads more than it keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from drystone.describe.families.names import Stored
from drystone.describe.model import ModelSpec
from drystone.describe.weights import Tensor, find_second_head, find_weights
from drystone.errors import InvalidSpec, UnreadableFile
from drystone.run.train.checkpoint.slices import Box

_SHARED = "tokens.weight"  # with a head that is the embedding


class PretrainedWeights:
    """The files of a model's folder, checked against its config, under our names."""

    def __init__(self, spec: ModelSpec) -> None:
        folder = Path(spec.weights)
        if not folder.is_dir():
            raise UnreadableFile(
                "the folder with the weights is not here",
                where=spec.weights,
                hint="Every node that takes part must see it by the same path",
            )
        self._places = find_weights(folder, spec)
        self._second_head = find_second_head(folder, spec)
        self._files: dict[Path, Any] = {}

    def has(self, name: str) -> bool:
        """Whether it is there; adapters are not."""
        return name in self._places

    def read(self, name: str, part: Box, first: int, last: int) -> torch.Tensor:
        """The elements `[first, last)`, row by row, of a part of one weight, as one line, fp32."""
        stored, tensor = self._places[name]
        found = self._read(stored, tensor, stored.find(name), part, first, last)
        if not torch.isfinite(found).all():
            raise UnreadableFile(
                f"{tensor.name} has values that are no numbers", where=str(tensor.file)
            )
        if name == _SHARED and self._second_head is not None:
            other = self._read(stored, self._second_head, 0, part, first, last)
            if not torch.equal(found, other):
                raise InvalidSpec(
                    "its head and its embedding differ, but its config.json says that they are one",
                    where=str(tensor.file),
                    hint="Set tie_word_embeddings to false in a copy of the folder",
                )
        return found

    def close(self) -> None:
        """Let go of the files."""
        self._files.clear()

    def _read(
        self, stored: Stored, tensor: Tensor, start: int, part: Box, first: int, last: int
    ) -> torch.Tensor:
        begin = start + part.offsets[0]
        if len(part.lengths) == 1:
            return self._slice(tensor, (slice(begin + first, begin + last),))
        width, column = part.lengths[1], part.offsets[1]
        top, bottom = first // width, -(-last // width)
        rows, columns = slice(begin + top, begin + bottom), slice(column, column + width)
        if stored.is_transposed:
            found = self._slice(tensor, (columns, rows)).t()
        else:
            found = self._slice(tensor, (rows, columns))
        return found.reshape(-1)[first - top * width : last - top * width]

    def _slice(self, tensor: Tensor, at: tuple[slice, ...]) -> torch.Tensor:
        try:
            if tensor.file not in self._files:
                self._files[tensor.file] = safe_open(str(tensor.file), framework="pt")
            found: torch.Tensor = self._files[tensor.file].get_slice(tensor.name)[at]
        except (OSError, SafetensorError) as error:
            raise UnreadableFile(f"cannot be read: {error}", where=str(tensor.file)) from None
        return found.float()
