"""What does one rank of one pipeline stage hold? The array arithmetic behind `memory.py`.

Every array broadcasts to (stages, layouts). The functions follow the life of memory: parameters, the
state kept for them, activations, what is gathered, then the five moments and the allocator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from drystone.describe.gpu import GpuSpec
from drystone.describe.layout import Layouts, Sharding
from drystone.describe.recipe import Offload
from drystone.estimate.activations import SavedBytes
from drystone.estimate.memory_terms import MemoryTerms, weight_bits
from drystone.units import MiB

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# PyTorch's cuBLAS workspace is 8 MiB per handle and stream before Hopper and 32 MiB from it on
# (torch.backends.cuda, CUBLAS_WORKSPACE_CONFIG); cuBLASLt and Transformer Engine hold as much again
# each. Three of them are alive in a training process.
_WORKSPACE_BYTES = 24 * MiB + 46 * MiB
_WORKSPACE_HOPPER_BYTES = 96 * MiB + 46 * MiB
_LARGE_WORKSPACE = ("Hopper", "Blackwell", "Blackwell Ultra")
# One CUDA context with the kernels of torch, cuBLAS and NCCL loaded: 1,113 MiB by the calibration
# in the BigScience logs. Each communicator adds its channels' buffers.
_CONTEXT_BYTES = 1113 * MiB
_COMMUNICATOR_BYTES = 256 * MiB
# The share of memory freed by one moment that the next cannot use again, on one stream and on
# several (collectives allocate on their own), and what rounding and splitting of blocks costs.
# From runs read both by torch and by nvidia-smi.
_CACHE_SHARE_ALONE = 0.3
_CACHE_SHARE_SHARDED = 0.8
_CACHE_SHARE_OF_PEAK = 0.10


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
        return self.gradients + self.activations + self.logits + self.gathered + self.step


class Moments(NamedTuple):
    """The five moments, in the order of `memory.MOMENTS`."""

    loss: Moment
    backward: Moment
    last: Moment
    step: Moment
    load: Moment

    def at(self, moment: IntArray, stage_index: IntArray) -> Moment:
        """For each layout, the items of its moment on the stage of that index."""
        shape = np.broadcast_shapes(*(item.shape for one in self for item in one))
        columns = np.arange(shape[1])
        picked = []
        for item in zip(*self, strict=True):
            stacked = np.stack([np.broadcast_to(one, shape) for one in item])
            picked.append(stacked[moment, stage_index, columns])
        return Moment(*picked)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageMemory:
    """Bytes on one rank, (stages, layouts)."""

    weights: FloatArray
    optimizer: FloatArray
    peak: FloatArray
    workspace: FloatArray
    cache: FloatArray
    context: FloatArray
    moment: IntArray
    moments: Moments

    @property
    def allocated(self) -> FloatArray:
        """What torch calls max allocated."""
        return self.weights + self.optimizer + self.peak + self.workspace


def stage_memory(
    terms: MemoryTerms, layouts: Layouts, stage: IntArray, gpu: GpuSpec | None
) -> StageMemory:
    """Bytes on one rank of the given stage of each layout."""
    split = _Split.of(terms, layouts, stage)
    held = _parameters(terms, split)
    state = _state(terms, split, held)
    kept = _activations(terms, split)
    gathered = _gathered(terms, split, held, state)
    moments = _moments(terms, split, state, kept, gathered)
    totals = np.stack(np.broadcast_arrays(*(one.total for one in moments)))
    moment = totals.argmax(axis=0)
    peak = totals.max(axis=0)
    workspace = np.full_like(peak, _workspace_bytes(gpu))
    context = _CONTEXT_BYTES + _COMMUNICATOR_BYTES * split.num_communicators
    allocated = state.weights + state.optimizer + peak + workspace
    cache = _cache_bytes(split, state, kept, gathered, peak)
    if gpu is not None:
        # The allocator gives blocks back rather than fail.
        cache = np.minimum(cache, np.maximum(0.0, gpu.usable_bytes - context - allocated))
    return StageMemory(
        weights=state.weights,
        optimizer=state.optimizer,
        peak=peak,
        workspace=workspace,
        cache=cache,
        context=context,
        moment=moment,
        moments=moments,
    )


# --- how the job is split --------------------------------------------------------------------


class _Split(NamedTuple):
    """The layouts as floats, and what follows from them alone."""

    tp: FloatArray
    sp: FloatArray  # tp where sequence parallelism divides, else 1
    ep: FloatArray
    pp: FloatArray
    ranks: FloatArray  # that share one copy of the state
    zero1: BoolArray
    zero2: BoolArray
    zero3: BoolArray
    is_first: BoolArray
    is_last: BoolArray
    start: IntArray  # first layer of the stage
    end: IntArray  # one past its last layer
    tokens: FloatArray  # of one micro-batch on one rank
    keys: FloatArray  # that one token attends to
    num_micro: FloatArray  # micro-batches in a step
    in_flight: FloatArray  # micro-batches kept at once
    keeps_gathered: BoolArray
    spreads_vocabulary: BoolArray
    num_communicators: FloatArray
    is_alone: BoolArray

    @classmethod
    def of(cls, terms: MemoryTerms, layouts: Layouts, stage: IntArray) -> _Split:
        """Work out the split of one stage."""
        recipe, pp = terms.recipe, layouts.pp
        copies = layouts.dp * layouts.cp
        tp = layouts.tp.astype(np.float64)
        sharded = copies > 1
        each, more = np.divmod(terms.num_layers, pp)
        start = stage * each + np.minimum(stage, more)
        num_micro = np.maximum(1, recipe.global_batch // (layouts.dp * layouts.micro_batch))
        keys = recipe.seq_len / layouts.cp
        groups = sharded + 0.0 + (layouts.tp > 1) + (pp > 1) + (layouts.ep > 1)
        return cls(
            tp=tp,
            sp=np.where(layouts.sequence_parallel > 0, tp, 1.0),
            ep=layouts.ep.astype(np.float64),
            pp=pp.astype(np.float64),
            ranks=layouts.shard_size.astype(np.float64),
            zero1=layouts.sharding >= Sharding.ZERO1,
            zero2=layouts.sharding >= Sharding.ZERO2,
            zero3=layouts.sharding >= Sharding.ZERO3,
            is_first=stage == 0,
            is_last=stage == pp - 1,
            start=start,
            end=start + each + (stage < more),
            tokens=layouts.micro_batch * keys,
            keys=keys,
            num_micro=num_micro.astype(np.float64),
            in_flight=_in_flight(layouts, stage, num_micro),
            keeps_gathered=layouts.keep_gathered > 0,
            spreads_vocabulary=layouts.vocab_barriers > 0,
            num_communicators=groups,
            is_alone=groups == 0,
        )


def _in_flight(layouts: Layouts, stage: IntArray, num_micro: IntArray) -> FloatArray:
    """Micro-batches whose activations a stage keeps at once: Narayanan et al., arXiv:2104.04473."""
    virtual = layouts.virtual_stages
    after = layouts.pp - stage - 1
    # Interleaved: twice the stages behind it, and one round of the other chunks, in chunks.
    ours = np.where(virtual > 1, (2 * after + (virtual - 1) * layouts.pp + 1) / virtual, after + 1)
    ours = np.where(layouts.gpipe > 0, num_micro, np.minimum(ours, num_micro))
    return ours + layouts.vocab_barriers


# --- parameters and their state --------------------------------------------------------------


class _Held(NamedTuple):
    """Parameters on this rank, before data-parallel sharding."""

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


def _parameters(terms: MemoryTerms, split: _Split) -> _Held:
    around = _around(terms, split)
    dense, expert, adapter, quantised, largest = around, 0.0, 0.0, 0.0, 0.0
    for number, layer in _layers(terms, split):
        parameters = layer.parameters
        one = parameters.tp_divided / split.tp + parameters.tp_replicated
        experts = parameters.expert / (split.ep * split.tp) if parameters.expert else 0.0
        dense = dense + number * one
        expert = expert + number * experts
        if terms.is_frozen:
            # Of an adapter's two factors, one is divided by tensor parallelism.
            adapter = adapter + number * layer.adapter * (0.5 + 0.5 / split.tp)
            quantised = quantised + number * layer.quantised / split.tp
        largest = np.maximum(largest, one + experts)
    return _Held(dense, expert, around, adapter, quantised, largest)  # type: ignore[arg-type]


def _layers(terms: MemoryTerms, split: _Split):  # type: ignore[no-untyped-def]
    """Each kind of layer, with how many of them the stage has."""
    if len(terms.layers) == 1:
        yield split.end - split.start, terms.layers[0]
        return
    counts = terms.counts[split.end] - terms.counts[split.start]
    for kind, layer in enumerate(terms.layers):
        yield counts[..., kind], layer


def _around(terms: MemoryTerms, split: _Split) -> FloatArray:
    """Embedding, head and last norm on this stage."""
    copy_of_tied = np.where(split.is_first, 0.0, terms.tied_head)
    around = split.is_first * (terms.embedding / split.tp + terms.positions)
    around = around + split.is_last * (
        (terms.head + copy_of_tied) / split.tp + terms.final_norms
    )  # fmt: skip
    if not split.spreads_vocabulary.any():
        return around
    vocabulary = (terms.embedding + terms.head + terms.tied_head) / (split.tp * split.pp)
    return np.where(
        split.spreads_vocabulary, vocabulary + terms.positions * split.is_first, around
    )


class _State(NamedTuple):
    weights: FloatArray
    gradients: FloatArray
    optimizer: FloatArray
    step: FloatArray
    loaded: FloatArray  # at the moment of loading, beyond the weights


def _state(terms: MemoryTerms, split: _Split, held: _Held) -> _State:
    found = _frozen_state(terms, split, held) if terms.is_frozen else _full_state(terms, split, held)
    offload = terms.recipe.offload
    if offload is Offload.NONE or offload is Offload.ACTIVATIONS:
        return found
    nothing = np.zeros_like(found.optimizer)
    if offload is Offload.OPTIMIZER:
        return found._replace(optimizer=nothing, step=nothing)
    return _State(*(np.zeros_like(one) for one in found))


def _full_state(terms: MemoryTerms, split: _Split, held: _Held) -> _State:
    state = terms.state
    expert_ranks = np.maximum(1.0, split.ranks / split.ep)
    whole = held.whole
    sharded = held.dense / split.ranks + held.expert / expert_ranks
    optimizer_params = np.where(split.zero1, sharded, whole)
    weights = np.where(split.zero3, sharded * state.weights,
                       whole * (state.weights + state.compute_copy))  # fmt: skip
    return _State(
        weights=weights,
        gradients=np.where(split.zero2, sharded, whole) * state.gradients,
        optimizer=optimizer_params * (state.master + state.moments),
        step=optimizer_params * state.step,
        loaded=_loaded(terms, split, whole * state.weights),
    )


def _frozen_state(terms: MemoryTerms, split: _Split, held: _Held) -> _State:
    """Frozen weights in 16 bit or fewer, and full state for the adapters alone."""
    recipe, launcher = terms.recipe, terms.launcher
    whole = held.whole
    frozen = 2.0 * (whole - held.quantised) + held.quantised * weight_bits(recipe) / 8
    adapter_bytes = 4.0 if launcher.keeps_fp32_adapters else 2.0
    trained = held.adapter
    if recipe.lora.train_embeddings:
        trained = trained + held.around  # PEFT trains a copy and keeps the original
    shard = np.where(split.zero1, trained / split.ranks, trained)
    return _State(
        weights=np.where(split.zero3, frozen / split.ranks, frozen) + trained * adapter_bytes,
        gradients=trained * adapter_bytes,
        optimizer=shard * 2 * adapter_bytes,
        step=shard * adapter_bytes * launcher.step_copies,
        loaded=_loaded(terms, split, frozen),
    )


def _loaded(terms: MemoryTerms, split: _Split, whole_bytes: FloatArray) -> FloatArray:
    if not terms.launcher.loads_whole:
        return np.zeros(1)
    return (split.zero3 & (split.ranks > 1)) * whole_bytes


# --- activations -----------------------------------------------------------------------------


class _Kept(NamedTuple):
    kept: FloatArray  # by all layers of the stage, for every micro-batch in flight
    lingering: FloatArray  # when the first layer's backward runs
    rebuilt: FloatArray  # by the layer that runs backward
    logits: FloatArray


def _activations(terms: MemoryTerms, split: _Split) -> _Kept:
    kept, rebuilt, one, transient = 0.0, 0.0, 0.0, 0.0
    for number, layer in _layers(terms, split):
        share = layer.token_share
        of_layer = share * _divided(layer.activations.kept, split)
        kept = kept + number * of_layer
        one = np.maximum(one, of_layer)
        rebuilt = np.maximum(rebuilt, share * _divided(layer.activations.rebuilt, split))
        transient = np.maximum(transient, share * layer.transient / split.tp)
    if terms.launcher.pipeline_buffers:
        kept = kept + (split.pp > 1) * terms.launcher.pipeline_buffers * terms.boundary / split.sp
    # Sequence parallelism gathers the whole sequence in front of a matrix product.
    whole_input = np.where(split.sp > 1, terms.boundary, 0.0)
    kept_bytes = split.tokens * split.in_flight * kept
    if terms.recipe.offload is Offload.ACTIVATIONS:
        kept_bytes = kept_bytes * 0.0
    lingering = split.tokens * one
    if terms.is_frozen and terms.launcher.frozen_inputs_linger:
        lingering = np.where(split.zero3 & (split.ranks > 1), 2 * kept_bytes, lingering)
    has_logits = np.where(split.spreads_vocabulary, 1 / split.pp, split.is_last)
    per_token = (
        terms.logits_bytes_per_token / split.tp + terms.head_bytes_per_token / split.sp + whole_input
    )
    return _Kept(
        kept=kept_bytes,
        lingering=lingering,
        rebuilt=split.tokens * (rebuilt + transient + 2 * whole_input),
        logits=has_logits * split.tokens * per_token,
    )


def _divided(saved: SavedBytes, split: _Split) -> FloatArray:
    """Bytes per token on one tensor-parallel rank."""
    divided = (saved.divided + saved.expert + saved.scores * split.keys) / split.tp
    return saved.whole / split.sp + saved.gathered + divided


# --- what is gathered, the moments, the allocator --------------------------------------------


class _Gathered(NamedTuple):
    layers: FloatArray  # weights gathered under ZeRO-3, and buckets
    unreduced: FloatArray  # a layer's gradient that waits for its reduction


def _gathered(terms: MemoryTerms, split: _Split, held: _Held, state: _State) -> _Gathered:
    launcher = terms.launcher
    sharded = split.ranks > 1
    num_layers = np.where(split.keeps_gathered, split.end - split.start, launcher.gathered_layers)
    layers = num_layers * held.largest_layer * terms.layer_copy_bytes
    if launcher.root_stays_gathered:
        layers = layers + held.around * terms.copy_bytes
    layers = (split.zero3 & sharded) * layers
    if launcher.bucket_elements:
        bucket = terms.copy_bytes * np.minimum(launcher.bucket_elements, held.whole)
        layers = layers + (split.zero1 & sharded) * bucket
    if launcher.copies_buckets:
        layers = layers + (~split.zero1 & sharded) * state.gradients
    unreduced = 0.0 if terms.is_frozen else terms.copy_bytes * held.largest_layer
    return _Gathered(layers, (split.zero2 & sharded) * unreduced)


def _moments(
    terms: MemoryTerms, split: _Split, state: _State, kept: _Kept, gathered: _Gathered
) -> Moments:
    gradients = state.gradients
    early = gradients
    if not terms.launcher.gradients_persist:
        early = np.where(split.num_micro > 1, gradients, 0.0)
    zero = np.zeros((1, 1))
    backward = gathered.layers + gathered.unreduced
    return Moments(
        loss=Moment(early, kept.kept, kept.logits, gathered.layers, zero),
        backward=Moment(early, kept.kept + kept.rebuilt, zero, backward, zero),
        last=Moment(gradients, kept.lingering + kept.rebuilt, zero, backward, zero),
        step=Moment(gradients, zero, zero, zero, state.step),
        # There is no optimizer state yet when the model is loaded.
        load=Moment(zero, zero, zero, np.maximum(0.0, state.loaded - state.optimizer), zero),
    )


def _cache_bytes(
    split: _Split, state: _State, kept: _Kept, gathered: _Gathered, peak: FloatArray
) -> FloatArray:
    """What the allocator holds without using it."""
    every_kind = (
        state.gradients + np.maximum(kept.kept, kept.lingering) + kept.rebuilt + kept.logits
        + gathered.layers + gathered.unreduced + state.step
    )  # fmt: skip
    share = np.where(split.is_alone, _CACHE_SHARE_ALONE, _CACHE_SHARE_SHARDED)
    return share * np.maximum(0.0, every_kind - peak) + _CACHE_SHARE_OF_PEAK * peak


def _workspace_bytes(gpu: GpuSpec | None) -> float:
    if gpu is not None and gpu.architecture in _LARGE_WORKSPACE:
        return float(_WORKSPACE_HOPPER_BYTES)
    return float(_WORKSPACE_BYTES)
