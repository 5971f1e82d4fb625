"""Samples as numbers: tokens, which of them are predicted, and where one document ends.

A sample is a row of 64-bit numbers, one longer than what the model reads. The low 32 bits are the
token; the next bit says that it is not predicted (a prompt, or padding); the bits above number the
documents of a row, which do not look at each other. A plain row of tokens is such a row: all of it
is predicted, and it is one document.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

TOKEN_BITS = 32
_TOKEN_MASK = (1 << TOKEN_BITS) - 1
SKIPPED = 1 << TOKEN_BITS  # this token is not predicted
DOCUMENT = 1 << (TOKEN_BITS + 1)  # times the number of the document in its row
IGNORED = -100  # what torch's cross-entropy passes over


def inputs_of(batch: torch.Tensor) -> torch.Tensor:
    """The tokens that the model reads."""
    return batch[:, :-1] & _TOKEN_MASK


def targets_of(batch: torch.Tensor) -> torch.Tensor:
    """The tokens that it is to predict; -100 where none is."""
    following = batch[:, 1:]
    return (following & _TOKEN_MASK).masked_fill((following & SKIPPED) != 0, IGNORED)


def num_predicted(batch: torch.Tensor) -> torch.Tensor:
    """How many tokens of a batch are predicted; on its device, for the host not to wait."""
    return ((batch[:, 1:] & SKIPPED) == 0).sum()


def documents_of(batch: torch.Tensor) -> torch.Tensor:
    """The number of the document that each token read belongs to."""
    return batch[:, :-1] >> (TOKEN_BITS + 1)


class Places(NamedTuple):
    """Where the tokens of a batch are: what blocks are given besides the hidden state."""

    rotary: Mapping[float, Any]  # tables (`models/rotary.py`); empty where positions are learned
    documents: torch.Tensor | None = None  # of each token; None: a row is one document


def document_starts(documents: torch.Tensor) -> torch.Tensor:
    """Where the document of each token begins in its row."""
    at = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return torch.where(begins, at, 0).cummax(dim=1).values


def same_document(documents: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Which tokens see which: those before, of the same document, within the mask if any."""
    if mask is None:
        length = documents.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    return (documents[:, None, :, None] == documents[:, None, None, :]) & mask
