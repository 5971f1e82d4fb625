"""Samples of token files and of made-up tokens, by number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
import torch

from drystone.errors import InvalidSpec, UnreadableFile

TOKEN_DTYPES: Final = {
    ".bin": np.uint16,
    ".u16": np.uint16,
    ".u32": np.uint32,
    ".txt": np.uint8,
}
_MOST_STRIDE = 4


class SyntheticTokens:
    """Made-up tokens with something to learn: each sample counts up by a stride of its own."""

    num_samples = 1 << 40  # it never repeats itself

    def __init__(self, *, seq_len: int, vocab_size: int, seed: int = 0) -> None:
        self._seq_len, self._vocab_size, self._seed = seq_len, vocab_size, seed

    def read(self, samples: Sequence[int]) -> torch.Tensor:
        """Computed, not stored."""
        at = np.arange(self._seq_len + 1)
        rows = []
        for sample in samples:
            chance = np.random.default_rng((self._seed, sample))
            start, stride = chance.integers(self._vocab_size), chance.integers(1, _MOST_STRIDE + 1)
            rows.append((start + stride * at) % self._vocab_size)
        return torch.from_numpy(np.array(rows, dtype=np.int64).reshape(-1, self._seq_len + 1))


class TokenFile:
    """Memory-mapped files of tokens, or of text as bytes; every epoch in an order of its own."""

    def __init__(
        self,
        path: Path,
        *more: Path,
        seq_len: int,
        vocab_size: int,
        seed: int = 0,
        is_shuffled: bool = True,
    ) -> None:
        self._files = [_map_tokens(file) for file in (path, *more)]
        # Neighbours share one token: the last of one is only predicted, the next begins with it.
        sizes = [max(len(tokens) - 1, 0) // seq_len for tokens in self._files]
        self._ends = np.cumsum(sizes)
        self.num_samples = int(self._ends[-1])
        if self.num_samples < 1:
            num_tokens = max(len(tokens) for tokens in self._files)
            raise InvalidSpec(
                f"holds {num_tokens} tokens, one sample needs {seq_len + 1}", where=str(path)
            )
        self._where, self._seq_len, self._vocab_size, self._seed = (
            str(path),
            seq_len,
            vocab_size,
            seed,
        )
        self._order = epoch_orders(self.num_samples, seed, is_shuffled=is_shuffled)

    def read(self, samples: Sequence[int]) -> torch.Tensor:
        """Copied out of the file."""
        rows = np.empty((len(samples), self._seq_len + 1), dtype=np.int64)
        for row, sample in zip(rows, samples, strict=True):
            epoch, index = divmod(sample, self.num_samples)
            at = int(self._order(epoch)[index])
            file = int(np.searchsorted(self._ends, at, side="right"))
            start = (at - int(self._ends[file - 1] if file else 0)) * self._seq_len
            row[:] = self._files[file][start : start + self._seq_len + 1]
        if rows.size and rows.max() >= self._vocab_size:
            raise InvalidSpec(
                f"holds token {rows.max()}, the model knows {self._vocab_size}", where=self._where
            )
        return torch.from_numpy(rows)


def _map_tokens(path: Path) -> np.ndarray:
    dtype = TOKEN_DTYPES.get(path.suffix)
    if dtype is None:
        raise InvalidSpec(
            "is no known kind of token file",
            where=str(path),
            hint="Known: " + ", ".join(TOKEN_DTYPES),
        )
    try:
        return np.memmap(path, dtype=dtype, mode="r")
    except (OSError, ValueError) as error:
        raise UnreadableFile(f"cannot be read: {error}", where=str(path)) from None


def epoch_orders(
    num_samples: int, seed: int, *, is_shuffled: bool = True
) -> Callable[[int], np.ndarray]:
    """The order of the samples in each epoch: a function of seed and epoch alone."""

    def make(epoch: int) -> np.ndarray:
        if not is_shuffled:
            return np.arange(num_samples)
        return np.random.default_rng((seed, epoch)).permutation(num_samples)

    return lru_cache(maxsize=2)(make)
