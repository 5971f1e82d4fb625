"""How much memory does each rank need, item by item, at the moment when it needs most?

Theory of operation. A run has five moments that can be the peak, and the estimate takes
the largest of them:

    loss       every micro-batch in flight is kept, and the logits are there
    backward   every micro-batch in flight is kept, and one layer is recomputed and differentiated
    last       the first layer's backward: all gradients are there, few activations are left
    step       the optimizer's temporaries, no activations
    load       some launchers put the whole model on every GPU before they shard it

Which one wins depends on the numbers: a small batch peaks in the step, a large vocabulary at the
loss. The items of the answer are those of the winning moment, so that they add up to it.

Everything that depends on the model and the recipe alone is worked out once (`_terms`, cached);
what depends on the layout is array arithmetic. One layout and a hundred thousand are the same code.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from drystone.describe.gpu import GpuSpec
from drystone.describe.layout import IntArray, Layouts, Sharding
from drystone.describe.model import Experts, Head, Mlp, ModelSpec
from drystone.describe.recipe import (
    Loss,
    Offload,
    Precision,
    Recipe,
    RecomputeKind,
    Tuning,
)
from drystone.estimate.activations import (
    BlockActivations,
    SavedBytes,
    activation_width,
    block_activations,
    norm_bytes,
)
from drystone.estimate.launchers import Launcher, find_launcher
from drystone.estimate.parameters import BlockParameters, count_block, count_model
from drystone.estimate.state import StateBytes, state_bytes
from drystone.units import MiB

FloatArray = npt.NDArray[np.float64]
MOMENTS = ("loss", "backward", "last", "step", "load")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimates:
    """Bytes on one rank of the asked-for stage, one entry per layout, at the peak moment."""

    weights: FloatArray
    gradients: FloatArray
    optimizer: FloatArray
    activations: FloatArray
    logits: FloatArray
    gathered: FloatArray  # gathered layers and communication buffers
    step: FloatArray  # temporaries of the optimizer step
    workspace: FloatArray  # what libraries allocate through torch
    cache: FloatArray  # reserved by the allocator, but not allocated
    context: FloatArray  # outside the allocator: CUDA context, NCCL
    moment: IntArray  # index into MOMENTS

    @property
    def allocated(self) -> FloatArray:
        """What torch calls max allocated."""
        return (
            self.weights + self.gradients + self.optimizer + self.activations + self.logits
            + self.gathered + self.step + self.workspace
        )  # fmt: skip

    @property
    def reserved(self) -> FloatArray:
        """What torch calls max reserved."""
        return self.allocated + self.cache

    @property
    def device(self) -> FloatArray:
        """What nvidia-smi shows."""
        return self.reserved + self.context


def estimate_memory(
    model: ModelSpec,
    recipe: Recipe,
    layouts: Layouts,
    *,
    stage: npt.ArrayLike | None = None,
    gpu: GpuSpec | None = None,
) -> MemoryEstimates:
    """Bytes on one rank of pipeline stage `stage`, or of the hungriest stage when it is None."""
    terms = _terms(model, recipe)
    if stage is not None:
        return _stage_memory(terms, layouts, np.asarray(stage, dtype=np.int64), gpu)
    first = _stage_memory(terms, layouts, np.zeros(1, dtype=np.int64), gpu)
    if int(layouts.pp.max(initial=1)) == 1:
        return first
    last = _stage_memory(terms, layouts, layouts.pp - 1, gpu)
    take_last = last.device > first.device
    return MemoryEstimates(
        **{
            one.name: np.where(take_last, getattr(last, one.name), getattr(first, one.name))
            for one in fields(MemoryEstimates)
        }
    )


# --- what depends on the model and the recipe alone ------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """One kind of layer: how many come before each position, parameters, activations."""

    parameters: BlockParameters
    activations: BlockActivations
    adapter: float  # trainable adapter parameters
    quantised: float  # parameters kept in few bits
    transient: float  # bytes per token while it runs backward, divided by tp


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Terms:
    """All that the array arithmetic needs."""

    recipe: Recipe
    launcher: Launcher
    state: StateBytes
    layers: tuple[_Layer, ...]
    counts: IntArray  # (num_layers + 1, kinds): how many of each kind before a position
    num_layers: int
    hidden_size: int
    embedding: float  # parameters on the first stage, divided by tp
    positions: float  # on the first stage, whole
    head: float  # on the last stage, divided by tp; without a tied matrix
    tied_head: float  # the shared matrix: a copy when first and last stage differ
    final_norms: float
    logits_per_token: float  # elements
    logits_bytes: float  # bytes per element at the peak
    head_bytes: float  # other bytes per token around the loss
    width: int
    boundary: float  # bytes per token that enter a layer
    frozen: bool


@lru_cache(maxsize=512)
def _terms(model: ModelSpec, recipe: Recipe) -> _Terms:
    launcher = find_launcher(recipe.launcher)
    counted = count_model(model)
    kinds = model.blocks
    order = np.array([kinds.index(block) for block in model.layers()])
    counts = np.zeros((len(order) + 1, len(kinds)), dtype=np.int64)
    counts[1:] = np.cumsum(order[:, None] == np.arange(len(kinds)), axis=0)
    width = activation_width(recipe.precision)
    has_vocabulary_loss = model.head in (Head.LANGUAGE, Head.MASKED)
    return _Terms(
        recipe=recipe,
        launcher=launcher,
        state=state_bytes(recipe, launcher),
        layers=tuple(_layer(block, model, recipe, launcher) for block in kinds),
        counts=counts,
        num_layers=len(order),
        hidden_size=model.hidden_size,
        embedding=float(counted.embedding),
        positions=float(counted.positions),
        head=float(counted.head),
        tied_head=float(counted.tied_head),
        final_norms=float(counted.final_norms + counted.other),
        logits_per_token=float(model.vocab_size if has_vocabulary_loss else model.num_classes),
        logits_bytes=_logits_bytes(recipe, launcher),
        head_bytes=norm_bytes(model.final_norm, model.hidden_size, recipe, launcher)
        + width * model.hidden_size,
        width=width,
        boundary=float(width * model.hidden_size),
        frozen=recipe.tuning is not Tuning.FULL,
    )


def _layer(block, model: ModelSpec, recipe: Recipe, launcher: Launcher) -> _Layer:  # type: ignore[no-untyped-def]
    hidden = model.hidden_size
    parameters = count_block(block, hidden)
    adapter = adapter_parameters(block, hidden, recipe) if recipe.tuning is not Tuning.FULL else 0
    quantised = 0.0
    if recipe.tuning is Tuning.QLORA:
        quantised = parameters.total - parameters.norms - parameters.router
    ffn = block.feed_forward
    ffn_size = ffn.ffn_size if isinstance(ffn, Mlp) else ffn.top_k * ffn.ffn_size + ffn.shared_ffn_size
    return _Layer(
        parameters=parameters,
        activations=block_activations(block, hidden, recipe, launcher),
        adapter=float(adapter),
        quantised=float(quantised),
        transient=float(2 * activation_width(recipe.precision) * ffn_size),
    )


def adapter_parameters(block, hidden_size: int, recipe: Recipe) -> int:  # type: ignore[no-untyped-def]
    """Parameters that LoRA adds to one layer: rank x (inputs + outputs) of each target."""
    attention, ffn = block.attention, block.feed_forward
    query, context = attention.num_heads * attention.head_dim, attention.num_heads * attention.v_dim
    key, value = attention.num_kv_heads * attention.head_dim, attention.num_kv_heads * attention.v_dim
    sizes = {
        "q": hidden_size + query,
        "k": hidden_size + key,
        "v": hidden_size + value,
        "o": context + hidden_size,
    }
    if isinstance(ffn, Mlp):
        sizes |= {"up": hidden_size + ffn.ffn_size, "down": ffn.ffn_size + hidden_size}
        if ffn.gated:
            sizes["gate"] = hidden_size + ffn.ffn_size
    return recipe.lora.rank * sum(sizes.get(target, 0) for target in recipe.lora.targets)


def _logits_bytes(recipe: Recipe, launcher: Launcher) -> float:
    if recipe.loss is Loss.CHUNKED:
        return 0.0
    if recipe.loss is Loss.FUSED:
        return launcher.fused_logits_bytes
    if recipe.compiled:
        return min(launcher.logits_bytes, 6.0)
    return launcher.logits_bytes


# --- what depends on the layout --------------------------------------------------------------


def _stage_memory(
    terms: _Terms, layouts: Layouts, stage: IntArray, gpu: GpuSpec | None
) -> MemoryEstimates:
    """One stage of every layout."""
    recipe, launcher, state = terms.recipe, terms.launcher, terms.state
    tp, pp, cp = layouts.tp, layouts.pp, layouts.cp
    is_first, is_last = stage == 0, stage == pp - 1
    start, end = _layer_range(terms.num_layers, pp, stage)
    counts = terms.counts[end] - terms.counts[start]

    # Parameters on this rank, dense and expert, trained and frozen.
    dense, expert, adapter, quantised = _layer_parameters(terms, counts, layouts)
    around_first = terms.embedding / tp + terms.positions
    around_last = (terms.head + np.where(is_first, 0.0, terms.tied_head)) / tp + terms.final_norms
    around = is_first * around_first + is_last * around_last
    spread = layouts.vocab_barriers > 0
    vocabulary = (terms.embedding + terms.head + terms.tied_head) / (tp * pp)
    around = np.where(spread, vocabulary + terms.positions * is_first, around)

    # Weights, gradients and optimizer state.
    zero3 = layouts.sharding >= Sharding.ZERO3
    zero2 = layouts.sharding >= Sharding.ZERO2
    zero1 = layouts.sharding >= Sharding.ZERO1
    ranks = layouts.shard_size
    expert_ranks = np.maximum(1, ranks // layouts.ep)
    sharded = (dense + around) / ranks + expert / expert_ranks
    whole = dense + around + expert
    if terms.frozen:
        trained = adapter + around * recipe.lora.train_embeddings
        frozen_bytes = 2.0 * (whole - quantised) + quantised * _bits(recipe) / 8
        per_weight = 4.0 if launcher.keeps_fp32_adapters else 2.0
        weights = np.where(zero3, frozen_bytes / ranks, frozen_bytes)
        weights = weights + adapter * per_weight
        gradients_full = trained * per_weight
        optimizer = np.where(zero1, trained / ranks, trained) * 2 * per_weight
        step_full = np.where(zero1, trained / ranks, trained) * per_weight * launcher.step_copies
    else:
        weights = np.where(zero3, sharded, whole) * state.weights
        weights = weights + np.where(zero3, 0.0, whole * state.compute_copy)
        gradients_full = np.where(zero2, sharded, whole) * state.gradients
        optimizer = np.where(zero1, sharded, whole) * (state.master + state.moments)
        step_full = np.where(zero1, sharded, whole) * state.step
    if recipe.offload in (Offload.OPTIMIZER, Offload.STATE):
        optimizer, step_full = optimizer * 0, step_full * 0
    if recipe.offload is Offload.STATE:
        weights, gradients_full = weights * 0, gradients_full * 0

    # Activations.
    tokens = layouts.micro_batch * (recipe.seq_len / cp)
    keys = recipe.seq_len / cp
    num_micro = np.maximum(1, recipe.global_batch // (layouts.dp * layouts.micro_batch))
    in_flight = _micro_batches_in_flight(layouts, stage, num_micro) + layouts.vocab_barriers
    sp = np.where(layouts.sequence_parallel > 0, tp, 1)
    kept_all, rebuilt_one, kept_one, transient = _layer_activations(terms, counts, layouts, keys, sp)
    buffers = (pp > 1) * launcher.pipeline_buffers * terms.boundary / sp
    kept = tokens * in_flight * (kept_all + buffers)
    if recipe.offload is Offload.ACTIVATIONS:
        kept = kept * 0
    rebuilt = tokens * (rebuilt_one + transient)
    # Sequence parallelism gathers the whole sequence in front of a matrix product.
    whole_input = np.where(sp > 1, terms.boundary, 0.0)
    rebuilt = rebuilt + tokens * 2 * whole_input
    has_logits = np.where(spread, 1 / pp, is_last)
    logits = has_logits * tokens * (
        terms.logits_per_token / tp * terms.logits_bytes + terms.head_bytes / sp + whole_input
    )  # fmt: skip

    # Layers gathered under ZeRO-3, and the gradient of one that waits for its reduction.
    largest = _largest_layer(terms, layouts)
    copy = 2.0 if recipe.precision not in (Precision.FP32, Precision.TF32) else 4.0
    gathered_layers = np.where(layouts.keep_gathered > 0, end - start, launcher.gathered_layers)
    layer_copy = _bits(recipe) / 8 if terms.frozen else copy
    root = around * copy * launcher.root_stays_gathered
    gathered = zero3 * (ranks > 1) * (gathered_layers * largest * layer_copy + root)
    gathered = gathered + (zero1 & (ranks > 1)) * copy * np.minimum(launcher.bucket_elements, whole)
    unreduced = zero2 * (ranks > 1) * copy * largest * (not terms.frozen)

    buckets = ~zero1 & (layouts.dp * cp > 1) & launcher.copies_buckets
    gathered = gathered + buckets * gradients_full
    loaded = (zero3 & (ranks > 1) & launcher.loads_whole) * whole * state.weights
    lingering = tokens * kept_one
    if terms.frozen and launcher.frozen_inputs_linger:
        lingering = np.where(zero3 & (ranks > 1), 2 * kept, lingering)

    # The five moments. The last has no optimizer state yet, so it is taken off again.
    always = launcher.gradients_persist | (num_micro > 1)
    early = np.where(always, gradients_full, 0.0)
    zero = np.zeros_like(kept)
    moments = (
        # gradients, activations, logits, gathered, step
        (early, kept, logits, gathered, zero),
        (early, kept + rebuilt, zero, gathered + unreduced, zero),
        (gradients_full + zero, lingering + rebuilt, zero, gathered + unreduced, zero),
        (gradients_full + zero, zero, zero, zero, step_full + zero),
        (zero, zero, zero, loaded - optimizer, zero),
    )
    totals = np.stack([sum(items) for items in moments])
    moment = totals.argmax(axis=0)
    picked = [
        np.take_along_axis(np.stack([items[i] for items in moments]), moment[None], axis=0)[0]
        for i in range(5)
    ]
    workspace = np.full_like(kept, _workspace_bytes(recipe, gpu))
    # The allocator keeps what one moment freed, and the next cannot use all of it.
    every_kind = (
        gradients_full + np.maximum(kept, lingering) + rebuilt + logits + gathered + unreduced
        + step_full
    )  # fmt: skip
    unused = every_kind - totals.max(axis=0)
    share = np.where(layouts.num_gpus > 1, 0.8, 0.3)
    cache = share * unused + 0.10 * totals.max(axis=0)
    groups = 0.0 + (layouts.dp * cp > 1) + (tp > 1) + (pp > 1) + (layouts.ep > 1)
    context = zero + 1100.0 * MiB + groups * 256 * MiB
    if gpu is not None:
        allocated = weights + optimizer + totals.max(axis=0) + workspace
        cache = np.minimum(cache, np.maximum(0.0, gpu.usable_bytes - context - allocated))
    return MemoryEstimates(
        weights=weights + zero,
        gradients=picked[0],
        optimizer=optimizer + zero,
        activations=picked[1],
        logits=picked[2],
        gathered=picked[3],
        step=picked[4],
        workspace=workspace,
        cache=cache + zero,
        context=context,
        moment=moment,
    )


def _layer_range(num_layers: int, pp: IntArray, stage: IntArray) -> tuple[IntArray, IntArray]:
    """First layer and one past the last of a stage; the first stages take what is left over."""
    each, more = num_layers // pp, num_layers % pp
    start = stage * each + np.minimum(stage, more)
    return start, start + each + (stage < more)


def _layer_parameters(
    terms: _Terms, counts: IntArray, layouts: Layouts
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Parameters of the stage's layers on one rank: dense, expert, adapters, quantised."""
    dense = expert = adapter = quantised = 0.0
    for kind, layer in enumerate(terms.layers):
        number, parameters = counts[:, kind], layer.parameters
        dense = dense + number * (parameters.tp_divided / layouts.tp + parameters.tp_replicated)
        expert = expert + number * parameters.expert / (layouts.ep * layouts.tp)
        adapter = adapter + number * layer.adapter
        quantised = quantised + number * layer.quantised / layouts.tp
    return dense, expert, adapter, quantised  # type: ignore[return-value]


def _largest_layer(terms: _Terms, layouts: Layouts) -> FloatArray:
    sizes = [
        layer.parameters.tp_divided / layouts.tp
        + layer.parameters.tp_replicated
        + layer.parameters.expert / (layouts.ep * layouts.tp)
        for layer in terms.layers
    ]
    return np.maximum.reduce(sizes)


def _layer_activations(
    terms: _Terms, counts: IntArray, layouts: Layouts, keys: FloatArray, sp: IntArray
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Bytes per token: kept by all layers, rebuilt by one, kept by one, transient in one."""
    all_kept = one_rebuilt = one_kept = transient = 0.0
    for kind, layer in enumerate(terms.layers):
        kept = _split(layer.activations.kept, layouts, keys, sp)
        all_kept = all_kept + counts[:, kind] * kept
        one_kept = np.maximum(one_kept, kept)
        one_rebuilt = np.maximum(one_rebuilt, _split(layer.activations.rebuilt, layouts, keys, sp))
        transient = np.maximum(transient, layer.transient / layouts.tp)
    return all_kept, one_rebuilt, one_kept, transient  # type: ignore[return-value]


def _split(saved: SavedBytes, layouts: Layouts, keys: FloatArray, sp: IntArray) -> FloatArray:
    return (
        saved.whole / sp + saved.gathered + (saved.divided + saved.scores * keys) / layouts.tp
        + saved.expert / layouts.tp
    )  # fmt: skip


def _micro_batches_in_flight(layouts: Layouts, stage: IntArray, num_micro: IntArray) -> FloatArray:
    """Micro-batches whose activations a stage keeps at once: Narayanan et al., arXiv:2104.04473."""
    pp, virtual = layouts.pp, layouts.virtual_stages
    after = pp - stage - 1
    plain = after + 1
    interleaved = (2 * after + (virtual - 1) * pp + 1) / virtual
    ours = np.where(virtual > 1, interleaved, plain)
    return np.where(layouts.gpipe > 0, num_micro, np.minimum(ours, num_micro)).astype(np.float64)


def _bits(recipe: Recipe) -> float:
    return recipe.weight_bits or (4.5 if recipe.tuning is Tuning.QLORA else 16.0)


def _workspace_bytes(recipe: Recipe, gpu: GpuSpec | None) -> float:
    return 100.0 * MiB


def _context_bytes(gpu: GpuSpec | None) -> float:
    return 600.0 * MiB
