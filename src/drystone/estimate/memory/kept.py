"""What comes and goes on one rank of a stage: activations, logits, and what ZeRO-3 gathers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from drystone.describe.recipe import Offload
from drystone.estimate.memory.activations import SavedBytes
from drystone.estimate.memory.state import FloatArray, Held, IntArray, StageSplit, State, each_kind
from drystone.estimate.memory.terms import MemoryTerms


class Kept(NamedTuple):
    """Activations in bytes."""

    kept: FloatArray  # by all layers of the stage, for every micro-batch in flight
    lingering: FloatArray  # when the first layer's backward runs
    rebuilt: FloatArray  # by the layer that runs backward
    logits: FloatArray


class Gathered(NamedTuple):
    """Weights and gradients that are whole for a moment, in bytes."""

    layers: FloatArray  # weights gathered under ZeRO-3, and buckets
    unreduced: FloatArray  # a layer's gradient that waits for its reduction


_NOTHING: FloatArray = np.zeros((1, 1))


def kept_activations(terms: MemoryTerms, split: StageSplit) -> Kept:
    """What the backward pass needs, and what the loss takes."""
    kept, rebuilt, one, transient = _NOTHING, _NOTHING, _NOTHING, _NOTHING
    num_keys = terms.recipe.seq_len  # context parallelism divides the tokens, not their keys
    for number, layer in each_kind(terms, split):
        share = layer.token_share
        of_layer = share * _on_rank(layer.activations.kept, split, num_keys, number)
        kept = kept + number * of_layer
        one = np.maximum(one, of_layer)
        if layer.activations.rebuilt != SavedBytes():
            rebuilt = np.maximum(
                rebuilt, share * _on_rank(layer.activations.rebuilt, split, num_keys, 1)
            )
        transient = np.maximum(transient, share * layer.transient / split.tp)
    if terms.launcher.pipeline_buffers:
        kept = kept + (split.pp > 1) * terms.launcher.pipeline_buffers * terms.boundary / split.sp
    # Sequence parallelism gathers the whole sequence in front of a matrix product.
    whole_input = np.where(split.sp > 1, terms.boundary, 0.0)
    kept_bytes = split.tokens * split.in_flight * kept
    lingering = split.tokens * one
    if terms.recipe.offload is Offload.ACTIVATIONS:
        kept_bytes = np.minimum(kept_bytes, lingering)  # one layer is on its way, or at work
    if terms.is_frozen and terms.launcher.frozen_inputs_linger:
        lingering = np.where(split.zero3 & split.is_shared, 2 * kept_bytes, lingering)
    return Kept(
        kept=kept_bytes,
        lingering=lingering,
        rebuilt=split.tokens * (rebuilt + transient + 2 * whole_input),
        logits=_logits(terms, split, whole_input),
    )


def gathered_weights(terms: MemoryTerms, split: StageSplit, held: Held, state: State) -> Gathered:
    """Layers gathered under ZeRO-3, buckets, and the gradient of a layer before its reduction."""
    launcher = terms.launcher
    num_layers: FloatArray | float = launcher.gathered_layers
    if split.keeps_gathered is not None:
        num_layers = np.where(split.keeps_gathered, split.end - split.start, num_layers)
    num_layers = np.minimum(num_layers, split.end - split.start)
    layers = num_layers * held.largest_layer * terms.layer_copy_bytes
    if launcher.root_stays_gathered:
        layers = layers + held.around * terms.copy_bytes
    # State in host memory comes layer by layer as well, also to a single GPU.
    is_streamed = terms.recipe.offload is Offload.STATE
    layers = (split.zero3 & split.is_shared | is_streamed) * layers
    if launcher.bucket_elements:
        bucket = terms.copy_bytes * np.minimum(launcher.bucket_elements, held.whole)
        layers = layers + (split.zero1 & split.is_shared) * bucket
    if launcher.copies_buckets:
        layers = layers + (~split.zero1 & split.is_shared) * state.gradients
    if terms.is_frozen:
        return Gathered(layers, _NOTHING)
    unreduced = terms.copy_bytes * held.largest_layer
    return Gathered(layers, (split.zero2 & split.is_shared | is_streamed) * unreduced)


def _on_rank(
    saved: SavedBytes, split: StageSplit, num_keys: int, num_layers: IntArray | int
) -> FloatArray:
    """Bytes per token and layer on the fullest rank, where so many layers are kept."""
    divided = saved.divided + saved.scores * num_keys
    found: FloatArray = saved.whole / split.sp + saved.gathered + divided / split.tp
    if not saved.routed and not saved.inner:
        return found
    routed = saved.routed * split.routed_share + saved.inner / split.tp
    load = 1.0 + split.fullest_excess / np.sqrt(np.maximum(num_layers, 1))
    return found + routed * load


def _logits(terms: MemoryTerms, split: StageSplit, whole_input: FloatArray) -> FloatArray:
    per_token = (
        terms.logits_bytes_per_token / split.tp
        + terms.head_bytes_per_token / split.sp
        + whole_input
    )
    if split.spreads_vocabulary is None:
        return split.is_last * split.tokens * per_token
    share = np.where(split.spreads_vocabulary, 1 / split.pp, split.is_last)
    return share * split.tokens * per_token


NOTHING: FloatArray = np.zeros((1, 1))


class Moment(NamedTuple):
    """What comes and goes, at one moment."""

    gradients: FloatArray
    activations: FloatArray
    logits: FloatArray
    gathered: FloatArray
    step: FloatArray

    @property
    def total(self) -> FloatArray:
        """All of it."""
        total, *others = (part for part in self if part is not NOTHING)
        for part in others:
            total = total + part
        return total


class Moments(NamedTuple):
    """The five moments, in the order of `memory.MOMENTS`."""

    loss: Moment
    backward: Moment
    last: Moment
    step: Moment
    load: Moment

    def at(self, moment: IntArray, stage_index: IntArray) -> Moment:
        """For each layout, the items of its moment on the stage of that index."""
        shape = np.broadcast_shapes(*(item.shape for moment in self for item in moment))
        columns = np.arange(shape[1])
        picked = []
        for item in zip(*self, strict=True):
            stacked = np.stack([np.broadcast_to(array, shape) for array in item])
            picked.append(stacked[moment, stage_index, columns])
        return Moment(*picked)


_GRADIENT_BYTES = 4.0


def piece_gathered(
    terms: MemoryTerms, split: StageSplit, held: Held, generic: Gathered
) -> Gathered:
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
    terms: MemoryTerms, split: StageSplit, held: Held, kept: Kept, generic: Moments
) -> Moments:
    """The same moments, but for the loss and for the backward pass of the embedding."""
    if split.keeps_pieces is None or terms.is_frozen:
        return generic
    return generic._replace(
        loss=_where(split, _loss(terms, split, held, generic.loss), generic.loss),
        backward=_where(split, _backward(terms, split, kept, generic.backward), generic.backward),
    )


def _loss(terms: MemoryTerms, split: StageSplit, held: Held, generic: Moment) -> Moment:
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


def _backward(terms: MemoryTerms, split: StageSplit, kept: Kept, generic: Moment) -> Moment:
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


def _copy_of_tied(terms: MemoryTerms, split: StageSplit) -> FloatArray:
    """The shared matrix is the head's too; on a stage of its own it is a copy."""
    return np.where(split.is_last, terms.tied_head, 0.0)


def _sent(terms: MemoryTerms, split: StageSplit) -> FloatArray:
    """Bytes of a parameter's piece that is cast for the gather of the layer that comes next."""
    is_cast = terms.copy_bytes < terms.state.weights and not terms.is_frozen
    return is_cast * terms.copy_bytes / split.ranks


def _where(split: StageSplit, own: Moment, generic: Moment) -> Moment:
    assert split.keeps_pieces is not None
    return Moment(
        *(np.where(split.keeps_pieces, one, other) for one, other in zip(own, generic, strict=True))
    )
