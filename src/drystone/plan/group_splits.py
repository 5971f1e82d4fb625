"""Which ways are there to cut a group of equal GPUs into pipeline stages, and how do they combine?

Each way has the pace of a layer and the memory that a layer takes; the time of every combination of
ways over all groups is guessed in one array operation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from drystone.describe.layout import Layouts, Sharding
from drystone.describe.model import ModelSpec
from drystone.describe.pool import GpuGroup, Pool
from drystone.describe.recipe import Recipe
from drystone.estimate.activations import activation_width
from drystone.estimate.layer import layer_seconds
from drystone.estimate.memory import estimate_memory
from drystone.plan.space import tensor_degrees

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_STAGES_PER_GROUP = (1, 2, 3, 4, 6, 8, 12, 16)
_MOST_COMBINATIONS = 20_000  # of splits of all groups, the fastest splits first
_LINE_STAGES = 9  # pipeline depth at which the line of memory is drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSplit:
    """One way to cut a group into stages."""

    group: GpuGroup
    num_stages: int
    tp: int
    dp: int
    local_micro: int  # sequences of a micro-batch on one data-parallel rank
    layer_seconds: float
    head_seconds: float
    send_seconds: float
    room_bytes: float  # for layers: what is usable, less what a stage needs anyway
    state_bytes: float  # of one layer
    kept_bytes: float  # activations of one layer and one micro-batch in flight


def group_splits(
    model: ModelSpec, recipe: Recipe, pool: Pool, group: GpuGroup, micro_batch: int
) -> list[GroupSplit]:
    """The ways to cut one group into stages, for one size of micro-batch."""
    shapes = [
        (stages, tp, group.count // (stages * tp))
        for tp in tensor_degrees(model, group.machine.gpus_per_node, group.count)
        for stages in _STAGES_PER_GROUP
        if stages * tp <= group.count and stages <= model.num_layers
    ]
    shapes = [one for one in shapes if one[2] <= micro_batch]
    if not shapes:
        return []
    local = np.array([-(-micro_batch // dp) for _, _, dp in shapes])
    cost = layer_seconds(
        model, recipe, group.machine, tp=np.array([tp for _, tp, _ in shapes]), micro_batch=local
    )
    room, state, kept = _line(model, recipe, group, shapes, local)
    element = activation_width(recipe.precision)
    link = pool.between
    splits = [
        GroupSplit(
            group=group,
            num_stages=stages,
            tp=tp,
            dp=dp,
            local_micro=int(local[index]),
            layer_seconds=float(cost.both[index]),
            head_seconds=float(cost.head[index]),
            send_seconds=2.0 * (
                int(local[index]) * recipe.seq_len * model.hidden_size * element / tp
                / link.bandwidth_bytes_per_second + link.latency_seconds
            ),
            room_bytes=float(room[index]),
            state_bytes=float(state[index]),
            kept_bytes=float(kept[index]),
        )
        for index, (stages, tp, dp) in enumerate(shapes)
    ]  # fmt: skip
    splits = _undominated(splits)
    splits.sort(key=lambda one: one.layer_seconds / one.num_stages)
    return splits[: max(2, int(_MOST_COMBINATIONS ** (1 / len(pool.groups))))]


def _undominated(splits: list[GroupSplit]) -> list[GroupSplit]:
    """Of those with equally many stages, the ones that no other beats in pace and memory."""

    def beats(one: GroupSplit, other: GroupSplit) -> bool:
        mine = (one.layer_seconds, one.state_bytes, one.kept_bytes, -one.room_bytes)
        theirs = (other.layer_seconds, other.state_bytes, other.kept_bytes, -other.room_bytes)
        return all(a <= b for a, b in zip(mine, theirs, strict=True)) and mine != theirs

    return [
        split
        for split in splits
        if not any(beats(o, split) for o in splits if o.num_stages == split.num_stages)
    ]


def _line(
    model: ModelSpec,
    recipe: Recipe,
    group: GpuGroup,
    shapes: list[tuple[int, int, int]],
    local: IntArray,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Room for layers, bytes of a layer's state, and of what it keeps per micro-batch in flight.

    Memory is a line in the number of layers and in the micro-batches in flight; three points of a
    stage in the middle of a pipeline give it.
    """
    repeated = [shape for shape in shapes for _ in range(3)]
    stage = np.tile([1, 1, _LINE_STAGES - 2], len(shapes))
    number = np.tile([1, 2, 2], len(shapes))
    dp = np.array([one[2] for one in repeated])
    tp = np.array([one[1] for one in repeated])
    layouts = Layouts.build(
        dp=dp,
        tp=tp,
        pp=_LINE_STAGES,
        micro_batch=np.repeat(local, 3),
        sharding=np.where(dp > 1, int(Sharding.ZERO1), int(Sharding.NONE)),
        sequence_parallel=tp > 1,
    )
    memory = estimate_memory(model, recipe, layouts, stage=stage, layers=(number * 0, number))
    one, two, later = memory.required_range().high.reshape(-1, 3).T
    per_layer = two - one  # with _LINE_STAGES - 1 micro-batches in flight
    kept = np.maximum(0.0, (two - later) / 2 / (_LINE_STAGES - 3))
    state = np.maximum(1.0, per_layer - kept * (_LINE_STAGES - 1))
    return group.gpu.usable_bytes - (one - per_layer), state, kept


def guess_seconds(num_layers: int, options: list[list[GroupSplit]], num_micro: int) -> FloatArray:
    """Every combination at once: balanced stages as far as memory allows.

    Half a layer is lost on each stage to whole numbers, and a stage keeps half as many
    micro-batches as there are stages, as the middle ones do.
    """
    stages = _outer(options, lambda split: split.num_stages).sum(axis=0)
    number = _outer(options, lambda split: split.num_stages)
    pace = _outer(options, lambda split: split.layer_seconds)
    in_flight = np.minimum(num_micro, 0.5 * (stages + 1))
    most = _outer(options, lambda split: split.room_bytes) / (
        _outer(options, lambda split: split.state_bytes)
        + _outer(options, lambda split: split.kept_bytes) * in_flight
    )
    most = np.maximum(0.0, most)
    wanted = num_layers + 0.5 * stages
    slowest = wanted / (number / pace).sum(axis=0)
    for _ in range(3):  # what one group cannot hold, the others take
        is_full = slowest / pace > most
        held = (number * most * is_full).sum(axis=0)
        free_rate = (number / pace * ~is_full).sum(axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            slowest = np.where(free_rate > 0, (wanted - held) / free_rate, np.inf)
    holds = (number * most).sum(axis=0) >= num_layers
    possible = holds & (stages <= num_layers) & (most.min(axis=0) >= 1)
    guess: FloatArray = np.where(possible, (num_micro - 1 + stages) * slowest, np.inf)
    return guess


def _outer(options: list[list[GroupSplit]], value: Callable[[GroupSplit], float]) -> FloatArray:
    """One number of every group's split, for every combination: (groups, splits, splits, ...)."""
    axes = [np.array([value(split) for split in splits], dtype=np.float64) for splits in options]
    return np.stack(np.meshgrid(*axes, indexing="ij"))
