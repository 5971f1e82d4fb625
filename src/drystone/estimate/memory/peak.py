"""Peak memory of each rank, item by item, at the moment when it needs most.

Theory of operation. A run has five moments that can be the peak; the estimate takes the largest:

    loss       every micro-batch in flight is kept, and the logits are there
    backward   every micro-batch in flight is kept, and one layer is recomputed and differentiated
    last       the first layer's backward: all gradients are there, few activations are left
    step       the optimizer's temporaries, no activations
    load       some launchers put the whole model on every GPU before they shard it

Which one wins depends on the numbers: a small batch peaks in the step, a large vocabulary at the
loss. The items of the answer are those of the winning moment, so that they add up to it.

Read on from `stage_memory`: how a stage is split and what state it holds is in `state.py`,
activations and gathered weights in `kept.py`, and the numbers that no layout changes in `terms.py`.

Arrays have the shape (stages, layouts). What is asked for is either one stage, or the hungriest:
then the first and the last are worked out side by side, since the first has most micro-batches in
flight and the last has the logits, and those where the kind of layer changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from drystone.describe.generations import generation_of
from drystone.describe.gpu import GpuSpec
from drystone.describe.layout import Layouts
from drystone.describe.model import ModelSpec
from drystone.describe.recipe import Recipe, Tuning
from drystone.estimate.launchers import Launcher
from drystone.estimate.learned.residuals import exceeds_share, likely_range, memory_range
from drystone.estimate.memory.kept import (
    NOTHING,
    Gathered,
    Kept,
    Moment,
    Moments,
    gathered_weights,
    kept_activations,
    piece_gathered,
    piece_moments,
)
from drystone.estimate.memory.state import (
    FloatArray,
    IntArray,
    StageSplit,
    State,
    held_parameters,
    split_stage,
    stage_of_layer,
    stage_state,
)
from drystone.estimate.memory.terms import MemoryTerms, memory_terms
from drystone.units import MiB

# PyTorch's cuBLAS workspace is 8 MiB per handle and stream before Hopper and 32 MiB from it on
# (torch.backends.cuda, CUBLAS_WORKSPACE_CONFIG); cuBLASLt and Transformer Engine hold as much again
# each. Three of them are alive in a training process.
_WORKSPACE_BYTES = 24 * MiB + 46 * MiB  # where no GPU is named; generations.csv has each
# One CUDA context with the kernels of torch, cuBLAS and NCCL loaded: 1,113 MiB by the calibration
# in the BigScience logs. Each communicator adds its channels' buffers (`launchers.py`).
_CONTEXT_BYTES = 1113 * MiB
MOMENTS = ("loss", "backward", "last", "step", "load")

_MAX_CHANGES = 4  # of the kind of layer along the depth

ITEM_SOURCES = {
    "weights": "parameters (estimate/parameters.py) x bytes by precision and launcher; "
    "ZeRO, arXiv:1910.02054 section 5",
    "gradients": "parameters x bytes by precision and launcher; "
    "ZeRO-2, arXiv:1910.02054 section 5.2",
    "optimizer": "moments and fp32 master; ZeRO-1, arXiv:1910.02054 section 5.1",
    "activations": "tensors kept by autograd, arXiv:2205.05198 section 4, extended; "
    "micro-batches in flight, arXiv:2104.04473 section 2.2",
    "logits": "copies of the logits around the loss, counted per launcher (docs/launchers.md)",
    "gathered": "layers gathered under ZeRO-3, arXiv:1910.02054 section 5.3; reduction buckets",
    "step": "temporaries of the optimizer step (docs/launchers.md)",
    "workspace": "cuBLAS workspaces, PyTorch notes on CUDA semantics",
    "cache": "blocks that the caching allocator holds and cannot use again (docs/launchers.md)",
    "context": "CUDA context and NCCL buffers: readings of nvidia-smi minus reserved memory",
}


class MemoryRange(NamedTuple):
    """What a run is likely to take on its GPU, from the residuals of published runs."""

    low: FloatArray
    high: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryEstimates:
    """Bytes on one rank, one entry per layout, at the peak moment of the asked-for stage."""

    recipe: Recipe
    stage: IntArray  # which stage it is
    moment: IntArray  # index into MOMENTS
    weights: FloatArray
    optimizer: FloatArray
    workspace: FloatArray  # what libraries allocate through torch
    cache: FloatArray  # reserved by the allocator, but not allocated
    context: FloatArray  # outside the allocator: CUDA context, NCCL
    peak: FloatArray  # all that comes and goes, at the peak moment
    _moments: Moments
    _pick: IntArray

    @property
    def allocated(self) -> FloatArray:
        """What torch calls max allocated."""
        return self.weights + self.optimizer + self.peak + self.workspace

    @property
    def reserved(self) -> FloatArray:
        """What torch calls max reserved."""
        return self.allocated + self.cache

    @property
    def device(self) -> FloatArray:
        """What nvidia-smi shows."""
        return self.reserved + self.context

    @property
    def required(self) -> FloatArray:
        """The least a GPU must have: the allocator gives its cache back before it gives up."""
        return self.allocated + self.context

    def required_range(self) -> MemoryRange:
        """`required` with the margin that the planner leaves."""
        low, high = memory_range()
        return MemoryRange(self.required * low, self.required * high)

    def likely_range(self) -> MemoryRange:
        """`required`, from the low to the high end between which four of five runs lie."""
        low, high = likely_range(
            self.recipe.launcher, is_full=self.recipe.tuning is Tuning.FULL, reading="allocated"
        )
        return MemoryRange(self.required * low, self.required * high)

    def fits(self, gpu: GpuSpec) -> npt.NDArray[np.bool_]:
        """Whether a run is not refused: what is not more than the GPU has may well run."""
        return self.required <= gpu.usable_bytes

    def risk(self, gpu: GpuSpec) -> FloatArray:
        """The share of such runs that would run out of memory, by the published ones."""
        is_full = self.recipe.tuning is Tuning.FULL
        shares = [
            exceeds_share(self.recipe.launcher, is_full=is_full, reading="allocated", room=room)
            for room in gpu.usable_bytes / self.required
        ]
        return np.array(shares)

    def items(self) -> dict[str, FloatArray]:
        """Every item by name; they add up to `device`."""
        picked = self._moments.at(self.moment, self._pick)
        return {
            "weights": self.weights,
            "gradients": picked.gradients,
            "optimizer": self.optimizer,
            "activations": picked.activations,
            "logits": picked.logits,
            "gathered": picked.gathered,
            "step": picked.step,
            "workspace": self.workspace,
            "cache": self.cache,
            "context": self.context,
        }


def estimate_memory(
    model: ModelSpec,
    recipe: Recipe,
    layouts: Layouts,
    *,
    stage: npt.ArrayLike | None = None,
    layers: tuple[npt.ArrayLike, npt.ArrayLike] | None = None,
    gpu: GpuSpec | None = None,
) -> MemoryEstimates:
    """Bytes on one rank of pipeline stage `stage` (one per layout), or of the hungriest stage.

    With a stage, `layers` may say which ones it has (from, and one past the last), where they are
    not divided equally.
    """
    terms = memory_terms(model, recipe)
    if stage is not None:
        stages = np.atleast_1d(np.asarray(stage, dtype=np.int64))[None]
        if layers is not None:
            start, end = (np.atleast_1d(np.asarray(edge, dtype=np.int64))[None] for edge in layers)
            found = stage_memory(terms, layouts, stages, gpu, (start, end))
            return _hungriest(recipe, found, stages)
    elif np.count_nonzero(layouts.pp > 1) == 0:
        stages = np.zeros((1, 1), dtype=np.int64)
    else:
        stages = _candidates(terms, layouts.pp)
    return _hungriest(recipe, stage_memory(terms, layouts, stages, gpu), stages)


def _candidates(terms: MemoryTerms, pp: IntArray) -> IntArray:
    """Stages of which one is the hungriest, (candidates, layouts)."""
    stages = [np.zeros_like(pp), pp - 1]
    # Of the stages with equal layers the first keeps most. Where kinds alternate all along, stages
    # are alike.
    if len(terms.changes) <= _MAX_CHANGES:
        for layer in terms.changes:
            changing = stage_of_layer(terms, pp, layer)
            stages += [changing, np.minimum(changing + 1, pp - 1)]
    return np.stack(stages)


def _hungriest(recipe: Recipe, found: StageMemory, stages: IntArray) -> MemoryEstimates:
    required = found.allocated
    pick = required.argmax(axis=0)
    columns = np.arange(len(pick))
    return MemoryEstimates(
        recipe=recipe,
        stage=np.broadcast_to(stages, required.shape)[pick, columns],
        moment=found.moment[pick, columns],
        weights=found.weights[pick, columns],
        optimizer=found.optimizer[pick, columns],
        workspace=np.full(len(pick), found.workspace),
        cache=found.cache[pick, columns],
        context=found.context,
        peak=found.peak[pick, columns],
        _moments=found.moments,
        _pick=pick,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageMemory:
    """Bytes on one rank, (stages, layouts)."""

    weights: FloatArray
    optimizer: FloatArray
    peak: FloatArray
    workspace: float
    cache: FloatArray
    context: FloatArray  # (layouts,)
    moment: IntArray
    moments: Moments

    @property
    def allocated(self) -> FloatArray:
        """What torch calls max allocated."""
        return self.weights + self.optimizer + self.peak + self.workspace


def stage_memory(
    terms: MemoryTerms,
    layouts: Layouts,
    stage: IntArray,
    gpu: GpuSpec | None,
    layers: tuple[IntArray, IntArray] | None = None,
) -> StageMemory:
    """Bytes on one rank of the given stage of each layout."""
    split = split_stage(terms, layouts, stage, layers)
    held = held_parameters(terms, split)
    state = stage_state(terms, split, held)
    kept = kept_activations(terms, split)
    gathered = piece_gathered(terms, split, held, gathered_weights(terms, split, held, state))
    moments = _moments(terms, split, state, kept, gathered)
    moments = piece_moments(terms, split, held, kept, moments)
    totals = np.empty((len(moments), *state.weights.shape))
    for index, moment in enumerate(moments):
        totals[index] = moment.total
    peak = totals.max(axis=0)
    workspace = workspace_bytes(gpu)
    context = context_bytes(split.num_groups, terms.launcher)
    cache = _cache_bytes(terms.launcher, split, state, kept, gathered, peak)
    if gpu is not None:
        # The allocator gives blocks back rather than fail.
        allocated = state.weights + state.optimizer + peak + workspace
        cache = np.minimum(cache, np.maximum(0.0, gpu.usable_bytes - context - allocated))
    return StageMemory(
        weights=state.weights,
        optimizer=state.optimizer,
        peak=peak,
        workspace=workspace,
        cache=cache,
        context=context,
        moment=totals.argmax(axis=0),
        moments=moments,
    )


def _moments(
    terms: MemoryTerms, split: StageSplit, state: State, kept: Kept, gathered: Gathered
) -> Moments:
    gradients, zero = state.gradients, NOTHING
    early = gradients
    if not terms.launcher.gradients_persist:
        early = (split.num_micro > 1) * gradients
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
    launcher: Launcher,
    split: StageSplit,
    state: State,
    kept: Kept,
    gathered: Gathered,
    peak: FloatArray,
) -> FloatArray:
    """What the allocator holds without using it."""
    every_kind = (
        state.gradients
        + np.maximum(kept.kept, kept.lingering)
        + kept.rebuilt
        + kept.logits
        + gathered.layers
        + gathered.unreduced
        + state.step
    )
    is_alone = split.num_groups == 0
    share = np.where(is_alone, launcher.cache_share_alone, launcher.cache_share_sharded)
    return share * np.maximum(0.0, every_kind - peak) + launcher.cache_share_of_peak * peak


def context_bytes(num_groups: int | IntArray, launcher: Launcher) -> FloatArray:
    """What lies outside the allocator, for so many groups of ranks that communicate."""
    return _CONTEXT_BYTES + launcher.communicator_bytes * np.asarray(num_groups, dtype=np.float64)


def workspace_bytes(gpu: GpuSpec | None) -> float:
    """What cuBLAS and the like allocate through torch."""
    return float(_WORKSPACE_BYTES) if gpu is None else generation_of(gpu).workspace_bytes
