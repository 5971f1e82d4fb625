"""Rows of documents: one in each, padded, or packed several to a row without seeing each other.

A text that is longer than a row goes on in the next one; its pieces overlap by a token, which one
predicts and the other begins with. A conversation that is longer is cut.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from drystone.run.train.data.store import Store
from drystone.run.train.data.token_file import epoch_orders
from drystone.run.train.samples import DOCUMENT, SKIPPED, TOKEN_BITS


class DocumentRows:
    """Samples by number; every epoch in an order of its own."""

    def __init__(
        self,
        store: Store,
        *,
        seq_len: int,
        seed: int = 0,
        is_packed: bool = False,
        is_shuffled: bool = True,
        needs_whole: bool = False,  # rows that are not full are left out
    ) -> None:
        self.store, self._width = store, seq_len + 1
        starts, ends = cut_pieces(store.ends, seq_len, cuts_off=not store.facts.is_text)
        lengths = np.diff(store.ends)
        self.num_cut = 0 if store.facts.is_text else int((lengths > self._width).sum())
        if needs_whole:
            is_whole = ends - starts == self._width
            starts, ends = starts[is_whole], ends[is_whole]
        if is_packed:
            order, self._rows = pack_rows(ends - starts, self._width)
            starts, ends = starts[order], ends[order]
        else:
            self._rows = np.arange(len(starts) + 1)
        self._starts, self._ends = starts, ends
        self.num_samples = len(self._rows) - 1
        self._order = epoch_orders(self.num_samples, seed, is_shuffled=is_shuffled)

    def read(self, samples: Sequence[int]) -> torch.Tensor:
        """Copied out of the store."""
        rows = np.zeros((len(samples), self._width), dtype=np.int64)
        for row, sample in zip(rows, samples, strict=True):
            epoch, index = divmod(sample, self.num_samples)
            self._fill(row, int(self._order(epoch)[index]))
        return torch.from_numpy(rows)

    def _fill(self, row: np.ndarray, number: int) -> None:
        at = 0
        pieces = range(int(self._rows[number]), int(self._rows[number + 1]))
        for document, piece in enumerate(pieces):
            start, end = int(self._starts[piece]), int(self._ends[piece])
            words = self.store.tokens[start:end].astype(np.int64)
            words |= self.store.marks[start:end].astype(np.int64) << TOKEN_BITS
            if document:
                words[0] |= SKIPPED  # nothing of its own comes before it
            row[at : at + len(words)] = words + document * DOCUMENT
            at += len(words)
        row[at:] = SKIPPED + (len(pieces) - 1) * DOCUMENT


def cut_pieces(
    ends: np.ndarray, seq_len: int, *, cuts_off: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Where the pieces of documents begin and end, each of at most `seq_len` + 1 tokens."""
    starts, lengths = ends[:-1], np.diff(ends)
    if cuts_off:
        return starts, starts + np.minimum(lengths, seq_len + 1)
    counts = -(-(lengths - 1) // seq_len)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    begins = np.repeat(starts, counts) + (np.arange(counts.sum()) - first) * seq_len
    return begins, np.minimum(begins + seq_len + 1, np.repeat(ends[1:], counts))


def pack_rows(lengths: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Which pieces share a row: their order, and where each row begins in it.

    The longest come first, each into the row that it fits best. The open rows are kept by the room
    that they have left; a number whose bits say where there are any finds the tightest.
    """
    order = np.argsort(-lengths, kind="stable")
    row_of = np.empty(len(lengths), dtype=np.int64)
    by_room: list[list[int]] = [[] for _ in range(width + 1)]
    has_room, num_rows = 0, 0
    for piece in order.tolist():
        length = int(lengths[piece])
        fitting = has_room >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                has_room ^= 1 << room
        else:
            room, row, num_rows = width, num_rows, num_rows + 1
        row_of[piece] = row
        left = room - length
        if left >= 2:  # a single token predicts nothing
            by_room[left].append(row)
            has_room |= 1 << left
    by_row = np.argsort(row_of, kind="stable")
    counts = np.bincount(row_of, minlength=num_rows)
    return by_row, np.concatenate(([0], np.cumsum(counts)))
