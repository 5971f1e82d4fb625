"""What comes and goes where our own runtime splits matrices or layers?

A rank holds pieces of fp32 weights, of gradients and of optimizer state, shared out over the
data-parallel ranks of its stage. What is whole for a moment (`run/train/cells/stage.py`): under
ZeRO-3 the weights of the layer that runs and of the one that comes next, and the piece that is cast
for it; from ZeRO-2 on the fp32 gradient of a layer, that of the layer before it while it is
reduced, and the piece that comes of it beside the one it is added to. Embedding and head are
gathered only while they run. An embedding is alone with its gradient, once more in the compute
dtype; so is the head, but for the layer that comes next. `benchmarks/runtime_cells_memory.py`
compares.
"""

from __future__ import annotations

import numpy as np

from drystone.estimate.memory.kept import Gathered, Kept
from drystone.estimate.memory.moments import Moment, Moments
from drystone.estimate.memory.split import FloatArray, Split
from drystone.estimate.memory.state import Held
from drystone.estimate.memory.terms import MemoryTerms

_GRADIENT_BYTES = 4.0


def piece_gathered(terms: MemoryTerms, split: Split, held: Held, generic: Gathered) -> Gathered:
    """Whole weights and gradients of layers."""
    if split.keeps_pieces is None:
        return generic
    layer = held.largest_layer
    weights = (split.zero3 & split.is_shared) * layer * (2 * terms.copy_bytes + _sent(terms, split))
    trained = layer if not terms.is_frozen else 0.0 * layer
    gradients = trained * _GRADIENT_BYTES * (2 + 1 / split.ranks)
    return Gathered(
        np.where(split.keeps_pieces, weights, generic.layers),
        np.where(
            split.keeps_pieces, (split.zero2 & split.is_shared) * gradients, generic.unreduced
        ),
    )


def piece_moments(
    terms: MemoryTerms, split: Split, held: Held, kept: Kept, generic: Moments
) -> Moments:
    """The same moments, but for the loss and for the backward pass of the embedding."""
    if split.keeps_pieces is None or terms.is_frozen:
        return generic
    return generic._replace(
        loss=_where(split, _loss(terms, split, held, generic.loss), generic.loss),
        backward=_where(split, _backward(terms, split, kept, generic.backward), generic.backward),
    )


def _loss(terms: MemoryTerms, split: Split, held: Held, generic: Moment) -> Moment:
    """The head and the last layer are there, and the head's gradient."""
    head = split.is_last * ((terms.head + _copy_of_tied(terms, split)) / split.tp)
    layer = held.largest_layer * (terms.copy_bytes + _sent(terms, split))
    weights = (split.zero3 & split.is_shared) * (layer + terms.copy_bytes * head)
    gradient = (split.zero2 & split.is_shared) * _GRADIENT_BYTES * head
    # torch's loss over a split vocabulary makes four copies in fp32, not three.
    logits = split.is_last * split.tokens * terms.logits_bytes_per_token / split.tp
    return generic._replace(
        logits=generic.logits + np.where(split.tp > 1, logits / 3, 0.0),
        gathered=weights + gradient,
    )


def _backward(terms: MemoryTerms, split: Split, kept: Kept, generic: Moment) -> Moment:
    """A layer's or the embedding's, whichever takes more."""
    front = split.is_first * (terms.embedding / split.tp + terms.positions)
    is_reduced = split.zero2 & split.is_shared
    # First the gradient as it is computed, then the piece that comes of its reduction.
    beside = np.maximum(terms.copy_bytes, is_reduced * _GRADIENT_BYTES / split.ranks)
    embedding = generic._replace(
        # Nothing is left of the micro-batch but the gradient of what entered the first layer.
        activations=kept.kept * (1 - 1 / split.in_flight) + 2 * split.tokens * terms.boundary,
        gathered=front * (is_reduced * _GRADIENT_BYTES + beside),
    )
    is_larger = embedding.total > generic.total
    return Moment(
        *(np.where(is_larger, one, other) for one, other in zip(embedding, generic, strict=True))
    )


def _copy_of_tied(terms: MemoryTerms, split: Split) -> FloatArray:
    """The shared matrix is the head's too; on a stage of its own it is a copy."""
    return np.where(split.is_last, terms.tied_head, 0.0)


def _sent(terms: MemoryTerms, split: Split) -> FloatArray:
    """Bytes of a parameter's piece that is cast for the gather of the layer that comes next."""
    is_cast = terms.copy_bytes < terms.state.weights and not terms.is_frozen
    return is_cast * terms.copy_bytes / split.ranks


def _where(split: Split, own: Moment, generic: Moment) -> Moment:
    assert split.keeps_pieces is not None
    return Moment(
        *(np.where(split.keeps_pieces, one, other) for one, other in zip(own, generic, strict=True))
    )
