"""Which parameters does one rank of a stage hold, and how many bytes of state stand for them?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from drystone.describe.recipe import Offload, Tuning
from drystone.estimate.memory.split import FloatArray, IntArray, Split
from drystone.estimate.memory.terms import LayerTerms, MemoryTerms, quantised_bytes


class Held(NamedTuple):
    """Parameters on one rank, before data-parallel sharding."""

    dense: FloatArray  # layers and what stands around them
    expert: FloatArray
    around: FloatArray  # embedding, head, last norm: the part of `dense` that is in no layer
    adapter: FloatArray
    quantised: FloatArray
    largest_layer: FloatArray

    @property
    def whole(self) -> FloatArray:
        """All of it."""
        return self.dense + self.expert


class State(NamedTuple):
    """Bytes on one rank."""

    weights: FloatArray
    gradients: FloatArray
    optimizer: FloatArray
    step: FloatArray
    loaded: FloatArray  # at the moment of loading, beyond the weights


_NOTHING: FloatArray = np.zeros((1, 1))


def each_kind(terms: MemoryTerms, split: Split) -> Iterator[tuple[IntArray, LayerTerms]]:
    """Each kind of layer, with how many of them the stage has."""
    if len(terms.layers) == 1:
        yield split.end - split.start, terms.layers[0]
        return
    counts = terms.counts[split.end] - terms.counts[split.start]
    for kind, layer in enumerate(terms.layers):
        yield counts[..., kind], layer


def held_parameters(terms: MemoryTerms, split: Split) -> Held:
    """What one rank would hold if data parallelism divided nothing."""
    around = _around(terms, split)
    dense, expert, adapter, quantised, largest = around, _NOTHING, _NOTHING, _NOTHING, _NOTHING
    for number, layer in each_kind(terms, split):
        parameters = layer.parameters
        one = parameters.tp_divided / split.tp + parameters.tp_replicated
        if split.repeats_kv:
            repeats = np.maximum(1.0, split.tp / layer.num_kv_heads) - 1
            one = one + repeats * layer.kv / split.tp
        dense = dense + number * one
        if parameters.expert:
            experts = parameters.expert / split.expert_parts
            expert = expert + number * experts
            one = one + experts
        if terms.is_frozen:
            # Of an adapter's two factors, one is divided by tensor parallelism.
            adapter = adapter + number * layer.adapter * (0.5 + 0.5 / split.tp)
            quantised = quantised + number * (one - layer.unquantised)
        largest = np.maximum(largest, one)
    return Held(dense, expert, around, adapter, quantised, largest)


def stage_state(terms: MemoryTerms, split: Split, held: Held) -> State:
    """Weights, gradients and optimizer state on one rank."""
    make = _frozen_state if terms.is_frozen else _full_state
    found = make(terms, split, held)
    match terms.recipe.offload:
        case Offload.OPTIMIZER:
            nothing = np.zeros_like(found.optimizer)
            return found._replace(optimizer=nothing, step=nothing)
        case Offload.STATE:
            return State(*(np.zeros_like(one) for one in found))
        case _:
            return found


def _around(terms: MemoryTerms, split: Split) -> FloatArray:
    """Embedding, head and last norm on this stage."""
    copy_of_tied = np.where(split.is_first, 0.0, terms.tied_head)
    around = split.is_first * (terms.embedding / split.tp + terms.positions)
    around = around + split.is_last * ((terms.head + copy_of_tied) / split.tp + terms.final_norms)
    if split.spreads_vocabulary is None:
        return around
    # A part of the input's and of the output's matrix are on the same rank, so ties hold.
    spread = (terms.embedding + terms.head) / (split.tp * split.pp)
    spread = spread + terms.positions * split.is_first + terms.final_norms * split.is_last
    return np.where(split.spreads_vocabulary, spread, around)


def _full_state(terms: MemoryTerms, split: Split, held: Held) -> State:
    state = terms.state
    whole = held.whole
    sharded = _sharded(terms, split, held)
    is_sharded = split.zero1
    kept_whole = whole * (state.weights + state.compute_copy)
    if split.keeps_pieces is not None:
        is_sharded = is_sharded | split.keeps_pieces
        # A piece is the whole where nobody shares it and it is computed with as it is.
        has_copy = split.is_shared | (state.compute_copy > 0)
        pieces = sharded * state.weights + has_copy * whole * terms.copy_bytes
        kept_whole = np.where(split.keeps_pieces, pieces, kept_whole)
    optimizer_params = np.where(is_sharded, sharded, whole)
    return State(
        weights=np.where(split.zero3, sharded * state.weights, kept_whole),
        gradients=np.where(split.zero2, sharded, whole) * state.gradients,
        optimizer=optimizer_params * (state.master + state.moments),
        step=optimizer_params * state.step,
        loaded=_loaded(terms, split, whole * state.weights),
    )


def _sharded(terms: MemoryTerms, split: Split, held: Held) -> FloatArray:
    """Parameters on one rank when data parallelism divides them."""
    sharded = held.dense / split.ranks
    return sharded + held.expert / split.expert_ranks if terms.has_experts else sharded


def _frozen_state(terms: MemoryTerms, split: Split, held: Held) -> State:
    """Frozen weights, in few bits where they are quantised, and full state for the adapters."""
    state, lora = terms.state, terms.recipe.lora
    whole = held.whole
    frozen = terms.frozen_bytes * whole
    if terms.recipe.tuning is Tuning.QLORA:
        frozen = terms.frozen_bytes * (whole - held.quantised)
        frozen = frozen + held.quantised * quantised_bytes(terms.recipe)
    shard_of_frozen = frozen / split.ranks
    if terms.has_experts:
        shard_of_frozen = frozen * (_sharded(terms, split, held) / whole)
    # PEFT trains a copy of the embeddings and keeps the original.
    trained = held.adapter + held.around if lora.train_embeddings else held.adapter
    shard = trained / split.ranks
    optimizer_params = np.where(split.zero1, shard, trained)
    trained_whole = trained * (state.weights + state.compute_copy)
    return State(
        weights=np.where(
            split.zero3, shard_of_frozen + shard * state.weights, frozen + trained_whole
        ),
        gradients=np.where(split.zero2, shard, trained) * state.gradients,
        optimizer=optimizer_params * (state.master + state.moments),
        step=optimizer_params * state.step,
        loaded=_loaded(terms, split, frozen),
    )


def _loaded(terms: MemoryTerms, split: Split, whole_bytes: FloatArray) -> FloatArray:
    if not terms.launcher.loads_whole:
        return _NOTHING
    return (split.zero3 & split.is_shared) * whole_bytes
