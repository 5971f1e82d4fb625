"""What comes and goes on one rank of a stage: activations, logits, and what ZeRO-3 gathers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from drystone.describe.recipe import Offload
from drystone.estimate.memory.activations import SavedBytes
from drystone.estimate.memory.split import FloatArray, Split
from drystone.estimate.memory.state import Held, State, each_kind
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


def kept_activations(terms: MemoryTerms, split: Split) -> Kept:
    """What the backward pass needs, and what the loss takes."""
    kept, rebuilt, one, transient = _NOTHING, _NOTHING, _NOTHING, _NOTHING
    num_keys = terms.recipe.seq_len  # context parallelism divides the tokens, not their keys
    for number, layer in each_kind(terms, split):
        share = layer.token_share
        of_layer = share * _on_rank(layer.activations.kept, split, num_keys)
        kept = kept + number * of_layer
        one = np.maximum(one, of_layer)
        if layer.activations.rebuilt != SavedBytes():
            rebuilt = np.maximum(
                rebuilt, share * _on_rank(layer.activations.rebuilt, split, num_keys)
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


def gathered_weights(terms: MemoryTerms, split: Split, held: Held, state: State) -> Gathered:
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


def _on_rank(saved: SavedBytes, split: Split, num_keys: int) -> FloatArray:
    """Bytes per token on one tensor-parallel rank."""
    divided = saved.divided + saved.scores * num_keys
    return saved.whole / split.sp + saved.gathered + divided / split.tp


def _logits(terms: MemoryTerms, split: Split, whole_input: FloatArray) -> FloatArray:
    per_token = (
        terms.logits_bytes_per_token / split.tp
        + terms.head_bytes_per_token / split.sp
        + whole_input
    )
    if split.spreads_vocabulary is None:
        return split.is_last * split.tokens * per_token
    share = np.where(split.spreads_vocabulary, 1 / split.pp, split.is_last)
    return share * split.tokens * per_token
