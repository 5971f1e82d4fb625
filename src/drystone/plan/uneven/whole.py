"""Plans that use unlike GPUs at once with all weights on each: nothing is gathered in a step.

Where memory allows, each rank keeps the whole training state, and as much of the activations as the
plan's recomputation says; only gradients are exchanged (`run/train/uneven/whole.py`). Batches
follow the ranks' speeds by the same search as for divided state, of which there is none here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from drystone.describe.layout import Layouts, Sharding
from drystone.describe.machine import Machine
from drystone.describe.model import ModelSpec
from drystone.describe.recipe import Offload, Recipe, Recompute, RecomputeKind, Tuning
from drystone.estimate.layer import layer_seconds
from drystone.estimate.learned.residuals import memory_range
from drystone.estimate.memory.peak import estimate_memory

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def whole_recipes(recipe: Recipe) -> Iterator[Recipe]:
    """The recipe with each recomputation that the runtime does with whole weights, if it does."""
    if recipe.offload is not Offload.NONE:
        return
    for kind in RecomputeKind:
        if kind is not RecomputeKind.SELECTIVE or recipe.tuning is Tuning.FULL:
            yield replace(recipe, recompute=Recompute(kind=kind))


def whole_pass_seconds(
    model: ModelSpec, recipe: Recipe, machine: Machine, sizes: IntArray
) -> tuple[FloatArray, FloatArray]:
    """Forward and backward of a layer with what is recomputed, for micro-batches of these sizes.

    Not faster than the host can enqueue; backward has a layer's part of embedding and head.
    """
    cost = layer_seconds(model, recipe, machine, micro_batch=sizes)
    slow = np.maximum(1.0, cost.host / cost.busy)
    outer = (cost.head + cost.embedding) / model.num_layers
    return cost.forward * slow, (cost.backward + cost.recompute) * slow + outer


def whole_memory_bytes(
    model: ModelSpec, recipe: Recipe, machine: Machine, sizes: IntArray, *, num_ranks: int
) -> FloatArray:
    """All that a rank needs, state included, for micro-batches of these sizes; the upper end.

    With several micro-batches, for gradients then stay from one to the next.
    """
    several = replace(recipe, global_batch=2 * num_ranks * int(sizes.max()))
    layouts = Layouts.build(dp=num_ranks, micro_batch=sizes, sharding=int(Sharding.NONE))
    found = estimate_memory(model, several, layouts, gpu=machine.gpu)
    return found.required * memory_range()[1]
