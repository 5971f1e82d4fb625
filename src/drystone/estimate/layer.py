"""How long does one layer take for one micro-batch on one GPU, and what does a rank need to run it?

Whoever divides layers or batches unevenly (mixed GPUs) needs the cost of one layer instead of the
cost of a step. The numbers are those of `speed` and `memory`, taken apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from drystone.describe.layout import Layouts, Sharding
from drystone.describe.machine import Machine
from drystone.describe.model import ModelSpec
from drystone.describe.recipe import Recipe
from drystone.estimate.learned.residuals import memory_range
from drystone.estimate.memory.layer_major import layer_major_memory, layer_major_recipe
from drystone.estimate.memory.peak import StageMemory, stage_memory
from drystone.estimate.memory.terms import memory_terms
from drystone.estimate.time.speed import prepare
from drystone.estimate.time.step import (
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
    backward: FloatArray  # the same, without recomputation, and adding up the gradients
    recompute: FloatArray  # what recomputation adds to the backward pass
    head: FloatArray  # the head and the loss, forward and backward, and its gradients
    embedding: FloatArray  # adding up the embedding's gradients
    host: FloatArray  # the host needs at least this to enqueue the layer, both directions
    hiding: FloatArray  # of backward and recomputation, what can hide a reduction of gradients

    @property
    def busy(self) -> FloatArray:
        """Forward and backward with recomputation."""
        return self.forward + self.backward + self.recompute

    @property
    def both(self) -> FloatArray:
        """Forward and backward with recomputation, not faster than the host can enqueue."""
        return np.maximum(self.busy, self.host)


def layer_seconds(
    model: ModelSpec,
    recipe: Recipe,
    machine: Machine,
    *,
    tp: npt.ArrayLike = 1,
    micro_batch: npt.ArrayLike = 1,
    sharding: Sharding = Sharding.NONE,
) -> LayerSeconds:
    """The cost of one layer for arrays of tensor-parallel degrees and micro-batches.

    A layer is the mean of all layers of the model. The sharding matters to the host only.
    """
    layouts = Layouts.build(
        tp=tp,
        micro_batch=micro_batch,
        sequence_parallel=np.asarray(tp) > 1,
        sharding=int(sharding),
    )
    prepared = prepare(model, recipe, machine, None)
    work = prepared.work
    split = split_layouts(layouts, recipe, work)
    stage = stage_seconds(prepared, split)
    tensor, context, expert = layer_communication(prepared, split)
    passes = 2.0 + work.recompute_share
    each = (tensor + context + expert) / passes
    bandwidth = prepared.device.bandwidth_bytes_per_second
    accumulate = split.inverse_tp * (work.trained_share * work.accumulate_bytes / bandwidth)
    head = work.head.seconds(split.tokens, split.inverse_tp) + split.tokens * split.inverse_tp * (
        work.head_bytes / bandwidth
    )
    num = work.num_layers
    backward = stage.backward - stage.recompute + each + work.layer_params * accumulate
    return LayerSeconds(
        forward=(stage.forward + each) / num,
        backward=backward / num,
        recompute=(stage.recompute + each * work.recompute_share) / num,
        head=head + 0.5 * work.outer_params * accumulate,
        embedding=0.5 * work.outer_params * accumulate,
        host=host_seconds(prepared, split, layouts) / num,
        hiding=prepared.launcher.overlap_share * stage.backward / num,
    )


def compute_memory_bytes(
    model: ModelSpec, recipe: Recipe, machine: Machine, *, num_ranks: int, most_micro_batch: int
) -> FloatArray:
    """What a rank needs beside its share of the state, for micro-batches 0 to `most_micro_batch`.

    Layer by layer over all micro-batches with recomputation and boundary activations in host memory
    (Cephalo's way), so the number of micro-batches does not matter. The upper end of the range. A
    rank with a micro-batch of 0 computes nothing, but takes part in gathering layers. What comes
    and goes is counted at its own largest moment, whatever state lies beside it: with uneven shares
    a rank may have hardly any. Never less than what the engine takes (`memory/layer_major.py`).
    """
    found = _layer_major(model, recipe, machine, num_ranks, most_micro_batch)
    fixed = found.context + found.workspace
    comes_and_goes = np.zeros(most_micro_batch)
    gathered = np.zeros(1)
    for moment in found.moments:
        there = moment.activations + moment.logits + moment.gathered
        comes_and_goes = np.maximum(comes_and_goes, there.max(axis=0))
        gathered = np.maximum(gathered, moment.gathered.max(axis=0))
    there = np.concatenate([gathered[:1], comes_and_goes])
    if num_ranks > 1:
        memory = layer_major_memory(
            model, recipe, num_ranks=num_ranks, most_micro_batch=most_micro_batch
        )
        there = np.maximum(there, memory.apart_bytes())
    _, high = memory_range()
    return (np.concatenate([fixed[:1], fixed]) + there) * high


def rank_bytes(
    model: ModelSpec,
    recipe: Recipe,
    machine: Machine,
    *,
    num_ranks: int,
    micro_batch: int,
    state_share: float,
) -> float:
    """What one rank takes at its peak, expected: tensors, workspaces and context."""
    memory = layer_major_memory(
        model, recipe, num_ranks=num_ranks, most_micro_batch=max(micro_batch, 1)
    )
    found = _layer_major(model, recipe, machine, num_ranks, 1)
    fixed = float(found.context[0]) + found.workspace
    return fixed + float(memory.peak_bytes(state_share)[micro_batch])


def sharded_state_bytes(model: ModelSpec, recipe: Recipe, machine: Machine) -> float:
    """Weights, gradients and optimizer state of the whole model, as ZeRO-3 divides them.

    With the temporaries of the optimizer's step; the upper end of the range.
    """
    found = _layer_major(model, recipe, machine, 2, 1)
    step = found.moments.step
    on_each = found.weights + found.optimizer + step.gradients + step.step
    _, high = memory_range()
    return float(on_each[0, 0]) * 2 * high


def _layer_major(
    model: ModelSpec, recipe: Recipe, machine: Machine, num_ranks: int, most_micro_batch: int
) -> StageMemory:
    layouts = Layouts.build(
        dp=num_ranks,
        micro_batch=np.arange(1, most_micro_batch + 1),
        sharding=int(Sharding.ZERO3),
    )
    first = np.zeros((1, 1), dtype=np.int64)
    return stage_memory(
        memory_terms(model, layer_major_recipe(recipe)), layouts, first, machine.gpu
    )
