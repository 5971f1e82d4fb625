"""How one pipeline stage is split over ranks, and the bytes of the training state on each.

Every array broadcasts to (stages, layouts). Questions that most layouts answer with "no" (is the
vocabulary spread, are layers kept gathered, is the schedule interleaved) are asked once for the
whole array, since one estimate is a few dozen NumPy calls and each call counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from drystone.describe.layout import Layouts, Sharding
from drystone.describe.recipe import Offload, Tuning
from drystone.estimate.imbalance import fullest_excess
from drystone.estimate.memory.terms import LayerTerms, MemoryTerms, quantised_bytes

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# NumPy compares with plain numbers several times faster than with an enumeration.
_ZERO1, _ZERO2, _ZERO3 = int(Sharding.ZERO1), int(Sharding.ZERO2), int(Sharding.ZERO3)


class StageSplit(NamedTuple):
    """The layouts as floats, and what follows from them alone."""

    tp: FloatArray
    repeats_kv: bool  # whether some layout has more of them than there are key-value heads
    sp: FloatArray  # tp where sequence parallelism divides, else 1
    expert_parts: FloatArray  # into which tensor and expert parallelism cut the experts
    routed_share: FloatArray  # of a micro-batch's tokens that one rank sends to experts
    fullest_excess: FloatArray  # what the fullest rank has of them above the mean, in one layer
    expert_ranks: FloatArray  # that share one copy of the state of an expert
    pp: IntArray
    ranks: IntArray  # that share one copy of the state
    is_shared: BoolArray  # whether there are several of them
    zero1: BoolArray
    zero2: BoolArray
    zero3: BoolArray
    is_first: BoolArray
    is_last: BoolArray
    start: IntArray  # first layer of the stage
    end: IntArray  # one past its last layer
    tokens: FloatArray  # of one micro-batch on one rank
    num_micro: IntArray  # micro-batches in a step
    in_flight: FloatArray  # micro-batches kept at once
    keeps_gathered: BoolArray | None  # None: no layout does
    spreads_vocabulary: BoolArray | None  # None: no layout does
    num_groups: IntArray  # groups of ranks that communicate
    keeps_pieces: BoolArray | None  # by our own runtime; None: no layout does


def split_stage(
    terms: MemoryTerms,
    layouts: Layouts,
    stage: IntArray,
    layers: tuple[IntArray, IntArray] | None = None,
) -> StageSplit:
    """Work out the split of one stage of each layout: given layers, or as equal as can be."""
    recipe, pp = terms.recipe, layouts.pp
    tp = layouts.tp.astype(np.float64)
    start, end = equal_layers(terms.num_layers, pp, stage) if layers is None else layers
    num_micro = -(-recipe.global_batch // (layouts.dp * layouts.micro_batch))
    # Experts lie within dp x cp x tp ranks; those that are left hold the same ones.
    expert_parts = (layouts.ep * layouts.etp).astype(np.float64)
    return StageSplit(
        tp=tp,
        repeats_kv=_is_any(layouts.tp > terms.fewest_kv_heads),
        sp=np.where(layouts.sequence_parallel > 0, tp, 1.0),
        expert_parts=expert_parts,
        routed_share=layouts.etp / tp,
        fullest_excess=_fullest_excess(terms, layouts),
        expert_ranks=np.maximum(1.0, layouts.shard_size * tp / expert_parts),
        pp=pp,
        ranks=layouts.shard_size,
        is_shared=layouts.shard_size > 1,
        zero1=layouts.sharding >= _ZERO1,
        zero2=layouts.sharding >= _ZERO2,
        zero3=layouts.sharding >= _ZERO3,
        is_first=stage == 0,
        is_last=stage == pp - 1,
        start=start,
        end=end,
        tokens=layouts.micro_batch * (recipe.seq_len / layouts.cp),
        num_micro=num_micro,
        in_flight=_in_flight(layouts, stage, num_micro),
        keeps_gathered=_flags(layouts.keep_gathered),
        spreads_vocabulary=_flags(layouts.vocab_barriers),
        num_groups=_num_groups(layouts),
        keeps_pieces=_keeps_pieces(terms, layouts),
    )


def equal_layers(num_layers: int, pp: IntArray, stage: IntArray) -> tuple[IntArray, IntArray]:
    """First layer of a stage and one past its last; the first stages take what is left over."""
    each = num_layers // pp
    more = num_layers - each * pp
    start = stage * each + np.minimum(stage, more)
    return start, start + each + (stage < more)


def stage_of_layer(terms: MemoryTerms, pp: IntArray, layer: int) -> IntArray:
    """The stage that a layer is on; the first stages have one layer more where some are left."""
    each = np.maximum(1, terms.num_layers // pp)
    more = terms.num_layers % pp
    after_more = more + (layer - more * (each + 1)) // each
    return np.where(layer < more * (each + 1), layer // (each + 1), after_more)


def _keeps_pieces(terms: MemoryTerms, layouts: Layouts) -> BoolArray | None:
    """Where our own runtime splits matrices or layers (`piece_moments` in `kept.py`)."""
    if not terms.launcher.keeps_pieces:
        return None
    is_split = (layouts.tp > 1) | (layouts.pp > 1)
    return is_split if _is_any(is_split) else None


def _num_groups(layouts: Layouts) -> IntArray:
    num_groups = (layouts.dp * layouts.cp > 1).astype(np.int64)
    for degree in (layouts.tp, layouts.pp, layouts.ep):
        num_groups += degree > 1
    return num_groups


def _fullest_excess(terms: MemoryTerms, layouts: Layouts) -> FloatArray:
    if not terms.num_experts:
        return _NOTHING
    return fullest_excess(terms.recipe, terms.num_experts, layouts.ep.astype(np.float64))


def _flags(column: IntArray) -> BoolArray | None:
    return column > 0 if _is_any(column) else None


def _is_any(column: IntArray | BoolArray) -> bool:
    return bool(np.count_nonzero(column))  # faster than any() on few entries


def _in_flight(layouts: Layouts, stage: IntArray, num_micro: IntArray) -> FloatArray:
    """Micro-batches whose activations a stage keeps at once: Narayanan et al., arXiv:2104.04473."""
    pp, virtual = layouts.pp, layouts.virtual_stages
    in_flight = (pp - stage).astype(np.float64)
    if _is_any(virtual > 1):
        # Interleaved: twice the stages behind it, and one round of the other chunks, in chunks.
        chunks = 2 * (pp - stage - 1) + (virtual - 1) * pp + 1
        in_flight = np.where(virtual > 1, chunks / virtual, in_flight)
    if _is_any(layouts.gpipe):
        in_flight = np.where(layouts.gpipe > 0, num_micro, in_flight)
    return np.minimum(in_flight + layouts.vocab_barriers, num_micro)


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


def each_kind(terms: MemoryTerms, split: StageSplit) -> Iterator[tuple[IntArray, LayerTerms]]:
    """Each kind of layer, with how many of them the stage has."""
    if len(terms.layers) == 1:
        yield split.end - split.start, terms.layers[0]
        return
    counts = terms.counts[split.end] - terms.counts[split.start]
    for kind, layer in enumerate(terms.layers):
        yield counts[..., kind], layer


def held_parameters(terms: MemoryTerms, split: StageSplit) -> Held:
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


def stage_state(terms: MemoryTerms, split: StageSplit, held: Held) -> State:
    """Weights, gradients and optimizer state on one rank."""
    make = _frozen_state if terms.is_frozen else _full_state
    found = make(terms, split, held)
    match terms.recipe.offload:
        case Offload.OPTIMIZER:
            nothing = np.zeros_like(found.optimizer)
            return found._replace(optimizer=nothing, step=nothing)
        case Offload.STATE:
            return State(*(np.zeros_like(column) for column in found))
        case _:
            return found


def _around(terms: MemoryTerms, split: StageSplit) -> FloatArray:
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


def _full_state(terms: MemoryTerms, split: StageSplit, held: Held) -> State:
    state = terms.state
    whole = held.whole
    sharded = _sharded(terms, split, held)
    is_sharded = split.zero1
    kept_whole = whole * (state.weights + state.compute_copy)
    if terms.launcher.keeps_pieces:
        # A piece is the whole where nobody shares it and it is computed with as it is.
        has_copy = split.is_shared | (state.compute_copy > 0)
        pieces = sharded * state.weights + has_copy * whole * terms.copy_bytes
        has_pieces = is_sharded & split.is_shared
        if split.keeps_pieces is not None:
            is_sharded = is_sharded | split.keeps_pieces
            has_pieces = has_pieces | split.keeps_pieces
        kept_whole = np.where(has_pieces, pieces, kept_whole)
    optimizer_params = np.where(is_sharded, sharded, whole)
    return State(
        weights=np.where(split.zero3, sharded * state.weights, kept_whole),
        gradients=np.where(split.zero2, sharded, whole) * state.gradients,
        optimizer=optimizer_params * (state.master + state.moments),
        step=optimizer_params * state.step,
        loaded=_loaded(terms, split, whole * state.weights),
    )


def _sharded(terms: MemoryTerms, split: StageSplit, held: Held) -> FloatArray:
    """Parameters on one rank when data parallelism divides them."""
    sharded = held.dense / split.ranks
    return sharded + held.expert / split.expert_ranks if terms.num_experts else sharded


def _frozen_state(terms: MemoryTerms, split: StageSplit, held: Held) -> State:
    """Frozen weights, in few bits where they are quantised, and full state for the adapters."""
    state, lora = terms.state, terms.recipe.lora
    whole = held.whole
    frozen = terms.frozen_bytes * whole
    if terms.recipe.tuning is Tuning.QLORA:
        frozen = terms.frozen_bytes * (whole - held.quantised)
        frozen = frozen + held.quantised * quantised_bytes(terms.recipe)
    shard_of_frozen = frozen / split.ranks
    if terms.num_experts:
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


def _loaded(terms: MemoryTerms, split: StageSplit, whole_bytes: FloatArray) -> FloatArray:
    if not terms.launcher.loads_whole:
        return _NOTHING
    return (split.zero3 & split.is_shared) * whole_bytes
