"""How much memory does each rank need, item by item, at the moment when it needs most?

Theory of operation. A run has five moments that can be the peak; the estimate takes the largest:

    loss       every micro-batch in flight is kept, and the logits are there
    backward   every micro-batch in flight is kept, and one layer is recomputed and differentiated
    last       the first layer's backward: all gradients are there, few activations are left
    step       the optimizer's temporaries, no activations
    load       some launchers put the whole model on every GPU before they shard it

Which one wins depends on the numbers: a small batch peaks in the step, a large vocabulary at the
loss. The items of the answer are those of the winning moment, so that they add up to it.

Arrays have the shape (stages, layouts). What is asked for is either one stage, or the hungriest:
then the first and the last are worked out side by side, since the first has most micro-batches in
flight and the last has the logits, and those where the kind of layer changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from drystone.describe.gpu import GpuSpec
from drystone.describe.layout import Layouts
from drystone.describe.model import ModelSpec
from drystone.describe.recipe import Offload, Recipe
from drystone.estimate.learned.residuals import memory_range
from drystone.estimate.memory.kept import Moments
from drystone.estimate.memory.split import stage_of_layer
from drystone.estimate.memory.stage import StageMemory, stage_memory
from drystone.estimate.memory.terms import MemoryTerms, memory_terms

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

MOMENTS = ("loss", "backward", "last", "step", "load")

_MOST_CHANGES = 4  # of the kind of layer along the depth

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
        """`required`, from the low to the high end of what published runs make likely."""
        low, high = memory_range()
        return MemoryRange(self.required * low, self.required * high)

    def fits(self, gpu: GpuSpec) -> npt.NDArray[np.bool_]:
        """Whether the upper end of what it may take is on the GPU."""
        return self.required_range().high <= gpu.usable_bytes

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
            start, end = (np.atleast_1d(np.asarray(one, dtype=np.int64))[None] for one in layers)
            found = stage_memory(terms, layouts, stages, gpu, (start, end))
            return _hungriest(found, stages)
    elif np.count_nonzero(layouts.pp > 1) == 0:
        stages = np.zeros((1, 1), dtype=np.int64)
    else:
        stages = _candidates(terms, layouts.pp)
    return _hungriest(stage_memory(terms, layouts, stages, gpu), stages)


def _candidates(terms: MemoryTerms, pp: IntArray) -> IntArray:
    """Stages of which one is the hungriest, (candidates, layouts)."""
    stages = [np.zeros_like(pp), pp - 1]
    # Of the stages with equal layers the first keeps most. Where kinds alternate all along, stages
    # are alike.
    if len(terms.changes) <= _MOST_CHANGES:
        for layer in terms.changes:
            changing = stage_of_layer(terms, pp, layer)
            stages += [changing, np.minimum(changing + 1, pp - 1)]
    return np.stack(stages)


def _hungriest(found: StageMemory, stages: IntArray) -> MemoryEstimates:
    required = found.allocated
    pick = required.argmax(axis=0)
    columns = np.arange(len(pick))
    return MemoryEstimates(
        stage=np.broadcast_to(stages, required.shape)[pick, columns],
        moment=found.moment[pick, columns],
        weights=found.weights[pick, columns],
        optimizer=found.optimizer[pick, columns],
        workspace=np.full(len(pick), found.workspace),
        cache=found.cache[pick, columns],
        context=found.context.astype(np.float64),
        peak=found.peak[pick, columns],
        _moments=found.moments,
        _pick=pick,
    )


def needs_host_memory(recipe: Recipe) -> bool:
    """Whether part of the state lives in host memory, which is not estimated here."""
    return recipe.offload is not Offload.NONE
