"""How does a layout split one pipeline stage? Layers, tokens and micro-batches on one rank.

Every array broadcasts to (stages, layouts). Questions that most layouts answer with "no" (is the
vocabulary spread, are layers kept gathered, is the schedule interleaved) are asked once for the
whole array, since one estimate is a few dozen NumPy calls and each call counts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from drystone.describe.layout import Layouts, Sharding
from drystone.estimate.memory.terms import MemoryTerms

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# NumPy compares with plain numbers several times faster than with an enumeration.
_ZERO1, _ZERO2, _ZERO3 = int(Sharding.ZERO1), int(Sharding.ZERO2), int(Sharding.ZERO3)


class Split(NamedTuple):
    """The layouts as floats, and what follows from them alone."""

    tp: FloatArray
    repeats_kv: bool  # whether some layout has more of them than there are key-value heads
    sp: FloatArray  # tp where sequence parallelism divides, else 1
    expert_parts: FloatArray  # into which tensor and expert parallelism cut the experts
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
) -> Split:
    """Work out the split of one stage of each layout: given layers, or as equal as can be."""
    recipe, pp = terms.recipe, layouts.pp
    tp = layouts.tp.astype(np.float64)
    start, end = equal_layers(terms.num_layers, pp, stage) if layers is None else layers
    num_micro = -(-recipe.global_batch // (layouts.dp * layouts.micro_batch))
    copies = layouts.dp * layouts.cp
    # Experts lie within dp x cp x tp ranks: past dp x cp they take the place of tensor parallelism.
    ep = np.minimum(layouts.ep, copies)
    return Split(
        tp=tp,
        repeats_kv=_is_any(layouts.tp > terms.fewest_kv_heads),
        sp=np.where(layouts.sequence_parallel > 0, tp, 1.0),
        expert_parts=ep * tp,
        expert_ranks=np.maximum(1.0, layouts.shard_size / ep),
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
    """Where our own runtime splits matrices or layers (`pieces.py`)."""
    if not terms.launcher.keeps_pieces:
        return None
    is_split = (layouts.tp > 1) | (layouts.pp > 1)
    return is_split if _is_any(is_split) else None


def _num_groups(layouts: Layouts) -> IntArray:
    num_groups = (layouts.dp * layouts.cp > 1).astype(np.int64)
    for degree in (layouts.tp, layouts.pp, layouts.ep):
        num_groups += degree > 1
    return num_groups


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
