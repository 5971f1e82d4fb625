"""How long does one layer take for one micro-batch on one GPU, and what does a rank need to run it?

Whoever divides layers or batches unevenly (mixed GPUs) needs the cost of one layer instead of the
cost of a step. The numbers are those of `speed` and `memory`, taken apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from drystone.describe.cluster import Machine
from drystone.describe.layout import Layouts, Sharding
from drystone.describe.model import ModelSpec
from drystone.describe.recipe import Offload, Recipe, Recompute, RecomputeKind
from drystone.estimate.memory import estimate_memory
from drystone.estimate.residuals import memory_range
from drystone.estimate.speed import prepare
from drystone.estimate.step import (
    host_seconds,
    layer_communication,
    split_layouts,
    stage_seconds,
)

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSeconds:
    """Seconds of one layer and one micro-batch, one entry per asked-for (tp, micro-batch)."""

    forward: FloatArray  # compute and tensor-parallel communication
    backward: FloatArray  # the same, without recomputation
    recompute: FloatArray  # what recomputation adds to the backward pass
    head: FloatArray  # the head and the loss, forward and backward
    host: FloatArray  # the host needs at least this to enqueue the layer, both directions

    @property
    def both(self) -> FloatArray:
        """Forward and backward with recomputation, not faster than the host can enqueue."""
        return np.maximum(self.forward + self.backward + self.recompute, self.host)


def layer_seconds(
    model: ModelSpec,
    recipe: Recipe,
    machine: Machine,
    *,
    tp: npt.ArrayLike = 1,
    micro_batch: npt.ArrayLike = 1,
) -> LayerSeconds:
    """The cost of one layer for arrays of tensor-parallel degrees and micro-batches."""
    layouts = Layouts.build(tp=tp, micro_batch=micro_batch, sequence_parallel=np.asarray(tp) > 1)
    prepared = prepare(model, recipe, machine, None)
    work = prepared.work
    split = split_layouts(layouts, recipe, work)
    stage = stage_seconds(prepared, split)
    tensor, context, expert = layer_communication(prepared, split)
    passes = 2.0 + work.recompute_share
    each = (tensor + context + expert) / passes
    head = work.head.seconds(split.tokens, split.inverse_tp) + split.tokens * split.inverse_tp * (
        work.head_bytes / prepared.device.bandwidth_bytes_per_second
    )
    num = work.num_layers
    return LayerSeconds(
        forward=(stage.forward + each) / num,
        backward=(stage.backward - stage.recompute + each) / num,
        recompute=(stage.recompute + each * work.recompute_share) / num,
        head=head,
        host=host_seconds(prepared, split, layouts) / num,
    )


def compute_memory_bytes(
    model: ModelSpec, recipe: Recipe, machine: Machine, *, num_ranks: int, most_micro_batch: int
) -> FloatArray:
    """What a rank needs beside its share of the state, for micro-batches 0 to `most_micro_batch`.

    Layer by layer over all micro-batches with recomputation and boundary activations in host memory
    (Cephalo's way), so the number of micro-batches does not matter. The upper end of the range.
    """
    mine = replace(
        recipe, recompute=Recompute(kind=RecomputeKind.FULL), offload=Offload.ACTIVATIONS
    )
    layouts = Layouts.build(
        dp=num_ranks,
        micro_batch=np.arange(1, most_micro_batch + 1),
        sharding=int(Sharding.ZERO3),
    )
    memory = estimate_memory(model, mine, layouts, gpu=machine.gpu)
    items = memory.items()
    state = items["weights"] + items["gradients"] + items["optimizer"] + items["step"]
    _, high = memory_range()
    needed = (memory.required - state) * high
    idle = items["context"][:1] + items["workspace"][:1] + items["gathered"][:1]
    return np.concatenate([idle * high, needed])
