"""Splits of a group of equal GPUs into pipeline stages: all of them, as arrays, with their costs.

A split has a number of stages, a tensor-parallel degree and as many data-parallel ranks as the GPUs
and the micro-batch allow. What a stage costs is a line in its number of layers: its time, the
reduction of its gradients, and at each moment its memory, which also grows with the micro-batches
in flight. Where layers differ in kind, a stage counts as if all its layers were of the hungriest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from drystone.describe.layout import Layouts, Sharding
from drystone.describe.machine import Link
from drystone.describe.model import ModelSpec
from drystone.describe.pool import GpuGroup
from drystone.describe.recipe import Recipe
from drystone.estimate.layer import LayerSeconds, layer_seconds
from drystone.estimate.learned.residuals import memory_range
from drystone.estimate.memory.peak import stage_memory
from drystone.estimate.memory.terms import memory_terms
from drystone.estimate.time.network import START_SECONDS, gather_seconds, make_group, send_seconds
from drystone.estimate.time.overlap import exchange_seconds, exposed_seconds, min_exposed_share
from drystone.estimate.time.speed import prepare
from drystone.estimate.time.step import optimizer_seconds
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


class StageSeconds(NamedTuple):
    """Seconds of one micro-batch in a stage: layers x `layer`, and the rest by its place."""

    layer: FloatArray
    head: FloatArray
    embedding: FloatArray
    inner_send: FloatArray  # to the next stage of the same group
    outer_send: FloatArray  # to a stage of another group


class OnceSeconds(NamedTuple):
    """Seconds once a step: gradients reduced as far as it shows, weights updated and gathered."""

    reduce_layer: FloatArray
    min_reduce: FloatArray
    update_layer: FloatArray
    update_fixed: FloatArray
    outer_layers: FloatArray  # half of embedding and head, in layers

    def seconds(self, rows: IntArray, layers: FloatArray) -> FloatArray:
        """Of stages with so many layers."""
        reduce = np.maximum(layers * self.reduce_layer[rows], self.min_reduce[rows])
        return reduce + (layers * self.update_layer[rows] + self.update_fixed[rows])


class StageBytes(NamedTuple):
    """Memory of a stage, (rows, roles, moments), as lines in its layers.

    fixed + layers x layer + in flight x (flight_fixed + layers x flight_layer)
    """

    room: FloatArray  # (rows,)
    fixed: FloatArray
    layer: FloatArray
    flight_fixed: FloatArray
    flight_layer: FloatArray

    def max_layers(self, rows: IntArray, roles: IntArray, in_flight: IntArray) -> IntArray:
        """How many layers a stage of each row holds in its role."""
        flight = in_flight[:, None]
        fixed = self.fixed[rows, roles] + flight * self.flight_fixed[rows, roles]
        each = self.layer[rows, roles] + flight * self.flight_layer[rows, roles]
        most = ((self.room[rows, None] - fixed) / np.maximum(each, 1.0)).min(axis=1)
        whole: IntArray = np.floor(most + 1e-9).astype(np.int64)
        return whole

    def held_layers(self, num_micro: IntArray) -> FloatArray:
        """What the last n stages of a pipeline hold at most, (rows, n from 0 to DEEPEST).

        The n-th last keeps n micro-batches. Far below zero where it does not hold one layer.
        """
        flight = np.minimum(np.arange(1, DEEPEST + 1), num_micro[:, None])
        least = np.full(flight.shape, np.inf)
        for moment in range(self.fixed.shape[2]):
            fixed = self.fixed[:, MIDDLE, moment, None]
            each = self.layer[:, MIDDLE, moment, None]
            if self.flight_layer[:, MIDDLE, moment].any():
                fixed = fixed + flight * self.flight_fixed[:, MIDDLE, moment, None]
                each = each + flight * self.flight_layer[:, MIDDLE, moment, None]
            least = np.minimum(least, (self.room[:, None] - fixed) / np.maximum(each, 1.0))
        most = np.floor(least + 1e-9)
        held = np.cumsum(np.where(most >= 1, most, _NO_ROOM), axis=1)
        return np.concatenate([np.zeros((len(held), 1)), held], axis=1)


class GroupSplits(NamedTuple):
    """Ways to cut groups into stages, one row each."""

    group_index: IntArray
    micro_batch: IntArray  # of the whole pipeline
    num_stages: IntArray
    tp: IntArray
    dp: IntArray
    local_micro: IntArray  # sequences of a micro-batch on one data-parallel rank
    held_layers: FloatArray  # see `StageBytes.held_layers`
    seconds: StageSeconds
    once: OnceSeconds
    memory: StageBytes

    @property
    def num_gpus(self) -> IntArray:
        """GPUs that are used; the others of the group idle."""
        return self.num_stages * self.tp * self.dp


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Setting:
    """One recomputation and one size of micro-batch: the ways of all groups that go together."""

    splits: GroupSplits
    choices: tuple[IntArray, ...]  # rows of `splits` for each group
    num_micro: int
    recompute_index: int


def join_splits(parts: list[GroupSplits], *, renumbers: bool = True) -> GroupSplits:
    """The ways of several groups, numbered by their place in the list."""
    joined: GroupSplits = _join(parts)
    if not renumbers:
        return joined
    numbers = np.repeat(np.arange(len(parts)), [len(part.tp) for part in parts])
    return joined._replace(group_index=numbers)


def _join(parts: Sequence[Any]) -> Any:
    """Rows of one after rows of the other, in tables and in the tables they are made of."""
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    return type(parts[0])(*(_join(columns) for columns in zip(*parts, strict=True)))


@lru_cache(maxsize=256)
def group_splits(
    model: ModelSpec,
    recipe: Recipe,
    group: GpuGroup,
    between: Link,
    sizes: tuple[int, ...],
) -> GroupSplits:
    """The ways to cut one group, for each size of micro-batch."""
    return _split_costs(model, recipe, group, between, _shapes(model, group, sizes))


@lru_cache(maxsize=256)
def full_splits(
    model: ModelSpec,
    recipe: Recipe,
    group: GpuGroup,
    between: Link,
    sizes: tuple[int, ...],
    counts: tuple[int, ...],
) -> GroupSplits:
    """The ways to cut just so many GPUs of a group, none idle, for each of several counts."""
    shapes = [
        (size, number, tp, count // (number * tp))
        for count in counts
        for tp in tensor_degrees(model, group.machine.gpus_per_node, count)
        for number in STAGES_OF_FEW
        if count % (number * tp) == 0 and number <= model.num_layers
        for size in sizes
        if count // (number * tp) <= size
    ]
    return _split_costs(model, recipe, group, between, shapes)


def _split_costs(
    model: ModelSpec,
    recipe: Recipe,
    group: GpuGroup,
    between: Link,
    shapes: list[tuple[int, int, int, int]],
) -> GroupSplits:
    """Splits by (micro-batch, stages, tp, dp), with what a stage of each costs."""
    size, number, tp, dp = np.array(shapes, dtype=np.int64).reshape(-1, 4).T
    local = -(-size // dp)
    cost = layer_seconds(model, recipe, group.machine, tp=tp, micro_batch=local)
    inner, outer = _send_seconds(model, recipe, group, between, (number, tp, dp, local))
    memory = _stage_bytes(model, recipe, group, tp, dp, local)
    return GroupSplits(
        group_index=np.zeros_like(tp),
        micro_batch=size,
        num_stages=number,
        tp=tp,
        dp=dp,
        local_micro=local,
        held_layers=memory.held_layers(recipe.global_batch // size),
        seconds=StageSeconds(
            layer=cost.both,
            head=cost.head,
            embedding=cost.embedding,
            inner_send=inner,
            outer_send=outer,
        ),
        once=_once_seconds(model, recipe, group, tp, dp, cost),
        memory=memory,
    )


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


def _data_parallel(size: int, available: int, inside: int) -> list[int]:
    """Data-parallel ranks of a stage: all that there are, or fewer where that may be as good.

    Not more than a micro-batch has sequences; as few as have no more to do; and as many as are in a
    node, whose reductions do not cross the network.
    """
    most = min(size, available)
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


def _once_seconds(
    model: ModelSpec,
    recipe: Recipe,
    group: GpuGroup,
    tp: IntArray,
    dp: IntArray,
    cost: LayerSeconds,
) -> OnceSeconds:
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
    return OnceSeconds(
        reduce_layer=exposed_seconds(reduce, cost.hiding, min_share),
        min_reduce=reduce,
        update_layer=gather + update,
        update_fixed=fixed,
        outer_layers=np.full(len(tp), outer),
    )


def _stage_bytes(
    model: ModelSpec, recipe: Recipe, group: GpuGroup, tp: IntArray, dp: IntArray, local: IntArray
) -> StageBytes:
    """Lines of memory in the number of layers, from stages of one layer and of two."""
    if len(memory_terms(model, recipe).layers) == 1:
        kinds = [model]
    else:
        kinds = [replace(model, stack=((block, model.num_layers),)) for block in model.blocks]
    found = [_kind_bytes(kind, recipe, group, tp, dp, local) for kind in kinds]
    lines = zip(*(each[1:] for each in found), strict=True)
    joined = [np.concatenate(columns, axis=2) for columns in lines]
    return StageBytes(found[0].room, *joined)


def _kind_bytes(
    model: ModelSpec, recipe: Recipe, group: GpuGroup, tp: IntArray, dp: IntArray, local: IntArray
) -> StageBytes:
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
    base = np.stack([each.reshape(shape) for each in bases], axis=-1)
    flights = np.stack([kept * flight.reshape(shape) for kept in kept_at], axis=-1)
    _, high = memory_range()
    layer, flight_layer = base[:, :, 1] - base[:, :, 0], flights[:, :, 1] - flights[:, :, 0]
    return StageBytes(
        np.full(num_rows, group.gpu.usable_bytes / high - found.workspace),
        base[:, :, 0] - layer,
        layer,
        flights[:, :, 0] - flight_layer,
        flight_layer,
    )


def group_sharding(dp: IntArray) -> IntArray:
    """Optimizer state is divided wherever there is somebody to divide it with."""
    return np.where(dp > 1, int(Sharding.ZERO1), int(Sharding.NONE))
