"""Samples of the user's own: a data set in the module's file, read by number, in any order.

    def training_data(): ...   # anything with len() and [number]: one sample, without its batch

A sample is what `forward` takes for it: a tensor, a tuple or a table of tensors and numbers. The
order of an epoch depends on the seed alone, so a resize does not disturb it.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch.utils.data import default_collate

from drystone.errors import InvalidSpec
from drystone.run.train.data.token_file import epoch_orders

_FUNCTION = "training_data"


class OwnSamples:
    """The samples of a data set, shuffled anew in every epoch."""

    def __init__(self, dataset: Any, *, seed: int = 0) -> None:
        self._dataset, self.num_samples = dataset, len(dataset)
        self._order = epoch_orders(self.num_samples, seed)

    def read(self, samples: Sequence[int]) -> Any:
        """One batch, as the module takes it."""
        found = []
        for sample in samples:
            epoch, index = divmod(sample, self.num_samples)
            found.append(self._dataset[int(self._order(epoch)[index])])
        return default_collate(found)

    def instead_of(self, tokens: torch.Tensor) -> Any:
        """As many samples as there are rows of tokens: to look at a module before training."""
        return self.read(range(len(tokens)))


def find_own_samples(source: ModuleType, path: str, *, seed: int = 0) -> OwnSamples | None:
    """What the file reads by itself; None where it takes tokens."""
    function = getattr(source, _FUNCTION, None)
    if not callable(function):
        return None
    dataset = function()
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and len(dataset)):
        raise InvalidSpec(
            f"{_FUNCTION}() returned {type(dataset).__name__}, which has no samples by number",
            where=path,
            hint="Return something with len() and [number], as torch.utils.data.Dataset; streams "
            "cannot go on where another number of GPUs left off",
        )
    return OwnSamples(dataset, seed=seed)
