"""What does one rank of one pipeline stage hold, and when does it hold most?

The array arithmetic behind `peak.py`. Every array broadcasts to (stages, layouts). How the stage
is split is in `split.py`, parameters and their state in `state.py`, activations and
gathered weights in `kept.py`, what our own runtime does otherwise in `pieces.py`;
here are the five moments and the allocator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from drystone.describe.generations import generation_of
from drystone.describe.gpu import GpuSpec
from drystone.describe.layout import Layouts
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
from drystone.estimate.memory.split import FloatArray, IntArray, Split, split_stage
from drystone.estimate.memory.state import State, held_parameters, stage_state
from drystone.estimate.memory.terms import MemoryTerms
from drystone.units import MiB

Count = TypeVar("Count", int, IntArray)

# PyTorch's cuBLAS workspace is 8 MiB per handle and stream before Hopper and 32 MiB from it on
# (torch.backends.cuda, CUBLAS_WORKSPACE_CONFIG); cuBLASLt and Transformer Engine hold as much again
# each. Three of them are alive in a training process.
_WORKSPACE_BYTES = 24 * MiB + 46 * MiB  # where no GPU is named; generations.csv has each
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageMemory:
    """Bytes on one rank, (stages, layouts)."""

    weights: FloatArray
    optimizer: FloatArray
    peak: FloatArray
    workspace: float
    cache: FloatArray
    context: IntArray  # (layouts,)
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
    for index, one in enumerate(moments):
        totals[index] = one.total
    peak = totals.max(axis=0)
    workspace = workspace_bytes(gpu)
    context = context_bytes(split.num_groups)
    cache = _cache_bytes(split, state, kept, gathered, peak)
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
    terms: MemoryTerms, split: Split, state: State, kept: Kept, gathered: Gathered
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
    split: Split, state: State, kept: Kept, gathered: Gathered, peak: FloatArray
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
    share = np.where(split.num_groups == 0, _CACHE_SHARE_ALONE, _CACHE_SHARE_SHARDED)
    return share * np.maximum(0.0, every_kind - peak) + _CACHE_SHARE_OF_PEAK * peak


def context_bytes(num_groups: Count) -> Count:
    """What lies outside the allocator, for so many groups of ranks that communicate."""
    return _CONTEXT_BYTES + _COMMUNICATOR_BYTES * num_groups


def workspace_bytes(gpu: GpuSpec | None) -> float:
    """What cuBLAS and the like allocate through torch."""
    return float(_WORKSPACE_BYTES) if gpu is None else generation_of(gpu).workspace_bytes
