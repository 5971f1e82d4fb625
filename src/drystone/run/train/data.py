"""Training data: the tokens of each sample, and which rank computes which samples.

A source is addressed by global sample numbers, counted on through all epochs, so the position of a
job is one number and a job that is resized goes on where it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from drystone.errors import InvalidSpec, UnreadableFile
from drystone.plan.plan import Plan, Way

_DTYPES = {".bin": np.uint16, ".u16": np.uint16, ".u32": np.uint32, ".txt": np.uint8}
_MOST_STRIDE = 4
_LINES_BYTES = 1 << 20  # of text that is tokenised at a time


class TokenSource(Protocol):
    """Samples by number."""

    def read(self, samples: Sequence[int]) -> torch.Tensor:
        """Tokens of shape (samples, seq_len + 1), 64-bit."""


def open_tokens(
    name: str, *, seq_len: int, vocab_size: int, seed: int = 0, tokenizer: Path | None = None
) -> TokenSource:
    """`synthetic`, a file of 16-bit (.bin, .u16) or 32-bit (.u32) tokens, or a text (.txt).

    A text is taken as bytes, or as what a tokenizer (`tokenizer.json`, or the folder that has it)
    makes of it.
    """
    if name == "synthetic":
        return SyntheticTokens(seq_len=seq_len, vocab_size=vocab_size, seed=seed)
    path = Path(name)
    if tokenizer is not None and path.suffix != ".txt":
        raise InvalidSpec("holds tokens already", where=name, hint="Leave out the tokenizer")
    tokens = None if tokenizer is None else tokenise(path, tokenizer)
    return TokenFile(path, seq_len=seq_len, vocab_size=vocab_size, seed=seed, tokens=tokens)


def tokenise(path: Path, tokenizer: Path) -> np.ndarray:
    """The tokens of a text, line by line, without those that stand for beginning and end.

    Every rank does it when it starts; a large text is better made a file of tokens once.
    """
    from tokenizers import Tokenizer  # comes with `transformers`; slow to import

    file = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    try:
        encoder = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # its own errors are plain exceptions
        raise UnreadableFile(f"is no readable tokenizer: {error}", where=str(file)) from None
    found = [np.empty(0, dtype=np.uint32)]
    try:
        with path.open(encoding="utf-8") as text:
            while lines := text.readlines(_LINES_BYTES):
                for one in encoder.encode_batch(lines, add_special_tokens=False):
                    found.append(np.array(one.ids, dtype=np.uint32))
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableFile(f"cannot be read: {error}", where=str(path)) from None
    return np.concatenate(found)


class SyntheticTokens:
    """Made-up tokens with something to learn: each sample counts up by a stride of its own."""

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
    """A memory-mapped file of tokens, or of text as bytes; every epoch in an order of its own.

    `tokens` stand in the place of what the file holds.
    """

    def __init__(
        self,
        path: Path,
        *,
        seq_len: int,
        vocab_size: int,
        seed: int = 0,
        tokens: np.ndarray | None = None,
    ) -> None:
        dtype = _DTYPES.get(path.suffix)
        if dtype is None:
            raise InvalidSpec(
                "is no known kind of token file",
                where=str(path),
                hint="Known: " + ", ".join(_DTYPES),
            )
        try:
            self._tokens = np.memmap(path, dtype=dtype, mode="r") if tokens is None else tokens
        except (OSError, ValueError) as error:
            raise UnreadableFile(f"cannot be read: {error}", where=str(path)) from None
        # Neighbours share one token: the last of one is only predicted, the next begins with it.
        self._num_samples = (len(self._tokens) - 1) // seq_len
        if self._num_samples < 1:
            raise InvalidSpec(
                f"holds {len(self._tokens)} tokens, one sample needs {seq_len + 1}", where=str(path)
            )
        self._where, self._seq_len, self._vocab_size, self._seed = (
            str(path),
            seq_len,
            vocab_size,
            seed,
        )
        self._order = lru_cache(maxsize=2)(self._make_order)

    def read(self, samples: Sequence[int]) -> torch.Tensor:
        """Copied out of the file."""
        rows = np.empty((len(samples), self._seq_len + 1), dtype=np.int64)
        for row, sample in zip(rows, samples, strict=True):
            epoch, index = divmod(sample, self._num_samples)
            start = int(self._order(epoch)[index]) * self._seq_len
            row[:] = self._tokens[start : start + self._seq_len + 1]
        if rows.size and rows.max() >= self._vocab_size:
            raise InvalidSpec(
                f"holds token {rows.max()}, the model knows {self._vocab_size}", where=self._where
            )
        return torch.from_numpy(rows)

    def _make_order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self._seed, epoch)).permutation(self._num_samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """What one rank computes in a step, and what it holds; either may be nothing."""

    batch: int
    micro_batch: int
    state_share: float = 1.0  # relative to those of the other ranks

    def __post_init__(self) -> None:
        if self.batch < 0 or self.state_share < 0:
            raise InvalidSpec(f"a rank with batch {self.batch} and share {self.state_share}")
        if self.batch and self.micro_batch < 1:
            raise InvalidSpec(f"a rank with batch {self.batch} and micro_batch {self.micro_batch}")


def rank_works(plan: Plan) -> tuple[RankWork, ...]:
    """Every rank of a plan without tensor or pipeline parallelism, in the order of the plan."""
    if len(plan.stages) != 1 or plan.stages[0].tp * plan.stages[0].cp != 1:
        raise InvalidSpec(
            f"a plan of kind {plan.way.value} with tensor, context or pipeline parallelism",
            hint="Those that can be executed have a layout of their own: `cells.cell_layout`",
        )
    if plan.not_executable:
        raise InvalidSpec(f"the plan cannot be executed: {plan.not_executable}")
    works = [
        RankWork(
            batch=share.batch,
            micro_batch=share.micro_batch,
            state_share=share.state_share if plan.way is Way.UNEVEN else 1.0,
        )
        for share in plan.stages[0].ranks
        for _ in range(share.count)
    ]
    if plan.way is Way.CELL:
        works = _without_excess(works, plan.recipe.global_batch)
    total = sum(work.batch for work in works)
    if total != plan.recipe.global_batch:
        raise InvalidSpec(
            f"the ranks' batches sum to {total}, the global batch is {plan.recipe.global_batch}"
        )
    return tuple(works)


def _without_excess(works: Sequence[RankWork], global_batch: int) -> list[RankWork]:
    """Equal ranks are planned with the batch of the largest; the last ones have less to do."""
    ends = [min(end, global_batch) for end in (0, *accumulate(work.batch for work in works))]
    return [
        replace(work, batch=end - start)
        for work, (start, end) in zip(works, pairwise(ends), strict=True)
    ]


def micro_batches(works: Sequence[RankWork], rank: int, position: int) -> list[range]:
    """The global sample numbers of each micro-batch of one rank in the step at `position`."""
    ends = list(accumulate(work.batch for work in works))
    work = works[rank]
    start = position + ends[rank] - work.batch
    end = start + work.batch
    return [
        range(first, min(first + work.micro_batch, end))
        for first in range(start, end, max(work.micro_batch, 1))
    ]
