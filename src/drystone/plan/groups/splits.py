"""Which ways are there to cut a group of equal GPUs into pipeline stages? All of them, as arrays.

A way has a number of stages, a tensor-parallel degree and as many data-parallel ranks as the GPUs
and the micro-batch allow. What a stage costs is a line in its number of layers: its time, the
reduction of its gradients, and at each moment its memory, which also grows with the micro-batches
in flight. Where layers differ in kind, a stage counts as if all its layers were of the hungriest.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from drystone.describe.layout import Layouts, Sharding
from drystone.describe.machine import Link
from drystone.describe.model import ModelSpec
from drystone.describe.pool import GpuGroup
from drystone.describe.recipe import Recipe
from drystone.estimate.layer import LayerSeconds, layer_seconds
from drystone.estimate.learned.residuals import memory_range
from drystone.estimate.memory.stage import stage_memory
from drystone.estimate.memory.terms import memory_terms
from drystone.estimate.time.network import START_SECONDS, gather_seconds, make_group, send_seconds
from drystone.estimate.time.overlap import exposed_seconds, min_exposed_share
from drystone.estimate.time.speed import prepare
from drystone.estimate.time.step import exchange_seconds, optimizer_seconds
from drystone.plan.cells.space import tensor_degrees

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

STAGES_OF_FEW = (1, 2, 3, 4, 6, 8, 12, 16)  # that a group may have, among up to three groups
STAGES_OF_MANY = (1, 2, 4, 8)
# Where a stage is in the pipeline: this decides about embedding, head and logits.
MIDDLE, FIRST, LAST, ONLY = range(4)
_NO_ROOM = -1e9
DEEPEST = 48  # stages of a pipeline for which memory is looked up; deeper ones count as this deep
_ROLE_STAGES = np.array([1, 0, 2, 0])  # a stage of that role in a pipeline of ...
_ROLE_DEPTHS = np.array([3, 3, 3, 1])  # ... so many


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupSplits:
    """Ways to cut groups into stages, one row each. Seconds are of one micro-batch."""

    group_index: IntArray
    micro_batch: IntArray  # of the whole pipeline
    num_stages: IntArray
    tp: IntArray
    dp: IntArray
    local_micro: IntArray  # sequences of a micro-batch on one data-parallel rank
    layer_seconds: FloatArray
    head_seconds: FloatArray
    embedding_seconds: FloatArray
    inner_send_seconds: FloatArray  # to the next stage of the same group
    outer_send_seconds: FloatArray  # to a stage of another group
    # Once a step, by layers: max(layers x reduce, least reduce) + layers x update + fixed.
    reduce_layer_seconds: FloatArray
    reduce_least_seconds: FloatArray
    update_layer_seconds: FloatArray
    update_fixed_seconds: FloatArray
    outer_layers: FloatArray  # half of embedding and head, in layers
    # Memory, (rows, roles, moments): fixed + layers x layer + in flight x (fixed + layers x layer).
    room_bytes: FloatArray  # (rows,)
    fixed_bytes: FloatArray
    layer_bytes: FloatArray
    flight_fixed_bytes: FloatArray
    flight_layer_bytes: FloatArray
    # What the last n stages of a pipeline hold at most, (rows, 0 to DEEPEST): the n-th last keeps n
    # micro-batches. Far below zero where it does not hold one layer.
    held_layers: FloatArray

    def __len__(self) -> int:
        return len(self.tp)

    @property
    def num_gpus(self) -> IntArray:
        """GPUs that are used; the others of the group idle."""
        return self.num_stages * self.tp * self.dp

    def most_layers(self, rows: IntArray, roles: IntArray, in_flight: IntArray) -> IntArray:
        """How many layers a stage of each row holds in its role."""
        flight = in_flight[:, None]
        fixed = self.fixed_bytes[rows, roles] + flight * self.flight_fixed_bytes[rows, roles]
        each = self.layer_bytes[rows, roles] + flight * self.flight_layer_bytes[rows, roles]
        most = ((self.room_bytes[rows, None] - fixed) / np.maximum(each, 1.0)).min(axis=1)
        whole: IntArray = np.floor(most + 1e-9).astype(np.int64)
        return whole


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Setting:
    """One recomputation and one size of micro-batch: the ways of all groups that go together."""

    splits: GroupSplits
    choices: tuple[IntArray, ...]  # rows of `splits` for each group
    num_micro: int
    recompute_index: int


def join_splits(parts: list[GroupSplits]) -> GroupSplits:
    """The ways of several groups, numbered by their place in the list."""
    columns = {
        one.name: np.concatenate([getattr(part, one.name) for part in parts])
        for one in fields(GroupSplits)
    }
    columns["group_index"] = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    return GroupSplits(**columns)


@lru_cache(maxsize=256)
def group_splits(
    model: ModelSpec,
    recipe: Recipe,
    group: GpuGroup,
    between: Link,
    sizes: tuple[int, ...],
) -> GroupSplits:
    """The ways to cut one group, for each size of micro-batch."""
    shapes = _shapes(model, group, sizes)
    size, number, tp, dp = np.array(shapes, dtype=np.int64).reshape(-1, 4).T
    local = -(-size // dp)
    cost = layer_seconds(model, recipe, group.machine, tp=tp, micro_batch=local)
    inner, outer = _send_seconds(model, recipe, group, between, (number, tp, dp, local))
    tail = _tail(model, recipe, group, tp, dp, cost)
    memory = _memory(model, recipe, group, tp, dp, local)
    found = GroupSplits(
        group_index=np.zeros_like(tp),
        micro_batch=size,
        num_stages=number,
        tp=tp,
        dp=dp,
        local_micro=local,
        layer_seconds=cost.both,
        head_seconds=cost.head,
        embedding_seconds=cost.embedding,
        inner_send_seconds=inner,
        outer_send_seconds=outer,
        reduce_layer_seconds=tail.reduce_layer,
        reduce_least_seconds=tail.reduce_least,
        update_layer_seconds=tail.update_layer,
        update_fixed_seconds=tail.update_fixed,
        outer_layers=tail.outer_layers,
        room_bytes=memory.room,
        fixed_bytes=memory.fixed,
        layer_bytes=memory.layer,
        flight_fixed_bytes=memory.flight_fixed,
        flight_layer_bytes=memory.flight_layer,
        held_layers=np.zeros((len(tp), 0)),
    )
    return replace(found, held_layers=_held_layers(found, recipe.global_batch // size))


def _held_layers(splits: GroupSplits, num_micro: IntArray) -> FloatArray:
    flight = np.minimum(np.arange(1, DEEPEST + 1), num_micro[:, None])
    room = splits.room_bytes[:, None]
    least = np.full(flight.shape, np.inf)
    for moment in range(splits.fixed_bytes.shape[2]):
        fixed = splits.fixed_bytes[:, MIDDLE, moment, None]
        each = splits.layer_bytes[:, MIDDLE, moment, None]
        if splits.flight_layer_bytes[:, MIDDLE, moment].any():
            fixed = fixed + flight * splits.flight_fixed_bytes[:, MIDDLE, moment, None]
            each = each + flight * splits.flight_layer_bytes[:, MIDDLE, moment, None]
        least = np.minimum(least, (room - fixed) / np.maximum(each, 1.0))
    most = np.floor(least + 1e-9)
    held = np.cumsum(np.where(most >= 1, most, _NO_ROOM), axis=1)
    return np.concatenate([np.zeros((len(splits), 1)), held], axis=1)


def _shapes(
    model: ModelSpec, group: GpuGroup, sizes: tuple[int, ...]
) -> list[tuple[int, int, int, int]]:
    """(micro-batch, stages, tp, dp), some of which leave GPUs idle."""
    count = group.count
    return [
        (size, number, tp, dp)
        for size in sizes
        for tp in tensor_degrees(model, group.machine.gpus_per_node, count)
        for number in STAGES_OF_FEW
        if number * tp <= count and number <= model.num_layers
        for dp in _data_parallel(size, count // (number * tp), group.machine.gpus_per_node // tp)
    ]


def _data_parallel(size: int, most: int, inside: int) -> list[int]:
    """Data-parallel ranks of a stage: all that there are, or fewer where that may be as good.

    Not more than a micro-batch has sequences; as few as have no more to do; and as many as are in a
    node, whose reductions do not cross the network.
    """
    most = min(size, most)
    enough = -(-size // -(-size // most))
    in_node = min(most, max(1, inside))
    return sorted({most, enough, -(-size // -(-size // in_node))})


def _send_seconds(
    model: ModelSpec,
    recipe: Recipe,
    group: GpuGroup,
    between: Link,
    shape: tuple[IntArray, IntArray, IntArray, IntArray],
) -> tuple[FloatArray, FloatArray]:
    """Activations on and gradients back, inside the group and out of it."""
    stages, tp, dp, local = shape
    prepared = prepare(model, recipe, group.machine, None)
    work = prepared.work
    row_bytes = local * work.tokens_per_sequence * (work.hidden_size * work.element_bytes) / tp
    inner = send_seconds(row_bytes, stages.astype(float), (tp * dp).astype(float), group.machine)
    rate = min(between.bandwidth_bytes_per_second, group.machine.inter.bandwidth_bytes_per_second)
    outer = row_bytes / rate + between.latency_seconds + START_SECONDS
    inside = np.where(stages > 1, exchange_seconds(prepared, inner), 0.0)
    return inside, exchange_seconds(prepared, outer)


class _Tail(NamedTuple):
    reduce_layer: FloatArray
    reduce_least: FloatArray
    update_layer: FloatArray
    update_fixed: FloatArray
    outer_layers: FloatArray


def _tail(
    model: ModelSpec,
    recipe: Recipe,
    group: GpuGroup,
    tp: IntArray,
    dp: IntArray,
    cost: LayerSeconds,
) -> _Tail:
    """Gradients reduced behind the backward pass, weights gathered and updated, as under ZeRO-1."""
    prepared = prepare(model, recipe, group.machine, None)
    work = prepared.work
    ranks = make_group(dp.astype(np.float64), tp.astype(np.float64), group.machine)
    trained = work.layer_params / work.num_layers * work.trained_share / tp
    reduce = gather_seconds(trained * work.reduce_bytes, ranks)
    pace = ranks.bandwidth_bytes_per_second / group.machine.intra.bandwidth_bytes_per_second
    min_share = min_exposed_share(prepared.launcher.overlap_share, pace)
    fixed = np.where(dp > 1, ranks.ring_seconds + START_SECONDS, 0.0)
    gather = gather_seconds(trained * work.element_bytes, ranks) - fixed
    update = optimizer_seconds(prepared, trained / dp)
    outer = 0.5 * work.outer_params / (work.layer_params / work.num_layers)
    return _Tail(
        reduce_layer=exposed_seconds(reduce, cost.hiding, min_share),
        reduce_least=reduce,
        update_layer=gather + update,
        update_fixed=fixed,
        outer_layers=np.full(len(tp), outer),
    )


class _Memory(NamedTuple):
    room: FloatArray
    fixed: FloatArray
    layer: FloatArray
    flight_fixed: FloatArray
    flight_layer: FloatArray


def _memory(
    model: ModelSpec, recipe: Recipe, group: GpuGroup, tp: IntArray, dp: IntArray, local: IntArray
) -> _Memory:
    """Lines of memory in the number of layers, from stages of one layer and of two."""
    if len(memory_terms(model, recipe).layers) == 1:
        kinds = [model]
    else:
        kinds = [replace(model, stack=((one, model.num_layers),)) for one in model.blocks]
    found = [_kind_memory(one, recipe, group, tp, dp, local) for one in kinds]
    joined = [
        np.concatenate(columns, axis=2) for columns in zip(*(one[1:] for one in found), strict=True)
    ]
    return _Memory(found[0].room, *joined)


def _kind_memory(
    model: ModelSpec, recipe: Recipe, group: GpuGroup, tp: IntArray, dp: IntArray, local: IntArray
) -> _Memory:
    """Arrays of (rows, roles, moments) for a model whose layers are all alike."""
    num_rows, roles, numbers = len(tp), len(_ROLE_STAGES), 2
    layouts = Layouts.build(
        dp=np.repeat(dp, roles * numbers),
        tp=np.repeat(tp, roles * numbers),
        pp=np.tile(np.repeat(_ROLE_DEPTHS, numbers), num_rows),
        micro_batch=np.repeat(local, roles * numbers),
        sharding=np.repeat(group_sharding(dp), roles * numbers),
        sequence_parallel=np.repeat(tp > 1, roles * numbers),
    )
    stage = np.tile(np.repeat(_ROLE_STAGES, numbers), num_rows)
    end = np.tile([1, min(2, model.num_layers)], num_rows * roles)
    found = stage_memory(
        memory_terms(model, recipe), layouts, stage[None], group.gpu, ((0 * end)[None], end[None])
    )
    shape = (num_rows, roles, numbers)
    in_flight = np.minimum(
        layouts.pp - stage, -(-recipe.global_batch // (layouts.dp * layouts.micro_batch))
    )
    flight = np.broadcast_to(found.moments.loss.activations[0] / in_flight, len(stage))
    lasting = (found.weights + found.optimizer)[0] + found.context
    # Only at the loss and in the backward pass is every micro-batch in flight still kept.
    kept_at = (1.0, 1.0, 0.0, 0.0, 0.0)
    bases = [
        lasting + np.broadcast_to(moment.total[0], len(stage)) - kept * flight * in_flight
        for moment, kept in zip(found.moments, kept_at, strict=True)
    ]
    base = np.stack([one.reshape(shape) for one in bases], axis=-1)
    flights = np.stack([kept * flight.reshape(shape) for kept in kept_at], axis=-1)
    _, high = memory_range()
    layer, flight_layer = base[:, :, 1] - base[:, :, 0], flights[:, :, 1] - flights[:, :, 0]
    return _Memory(
        np.full(num_rows, group.gpu.usable_bytes / high - found.workspace),
        base[:, :, 0] - layer,
        layer,
        flights[:, :, 0] - flight_layer,
        flight_layer,
    )


def group_sharding(dp: IntArray) -> IntArray:
    """Optimizer state is divided wherever there is somebody to divide it with."""
    return np.where(dp > 1, int(Sharding.ZERO1), int(Sharding.NONE))
