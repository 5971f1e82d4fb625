"""How fast could a pipeline over groups be at best? Lower bounds for many of them at once.

With M micro-batches and stages of t_i seconds a step takes M (1 + w) max t + (sum t - max t) and
what comes once a step; w is the wait for stragglers. Without whole numbers and memory this is a
linear programme whose dual says: if a layer is worth x seconds, where the sum over stages of
max(0, x / pace - 1) equals M (1 + w) - 1, then no pipeline takes less than x for each layer.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from drystone.estimate.time.overlap import straggler_share
from drystone.plan.groups.splits import DEEPEST, GroupSplits, Setting

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Number = TypeVar("Number", np.float64, np.int64)

_HALVINGS = 10  # of the interval in which the slowest stage's time lies


def bound_seconds(setting: Setting, choices: tuple[IntArray, ...]) -> FloatArray:
    """For every combination at once: in less time a layer no pipeline of it steps, in any order."""
    splits = setting.splits
    number = _axes(splits.num_stages.astype(np.float64), choices)
    gpus = _sum(_axes(splits.num_gpus.astype(np.float64), choices))
    return _layer_worth(_weight(setting, gpus), number, _axes(splits.layer_seconds, choices))


def held_layers(splits: GroupSplits, pipelines: IntArray) -> FloatArray:
    """At most so many layers have a place on each group of a pipeline, (rows, groups in order)."""
    number = splits.num_stages[pipelines]
    behind = number.sum(axis=1)[:, None] - np.cumsum(number, axis=1)  # stages of later groups
    front = np.minimum(behind + number, DEEPEST)
    held: FloatArray = (
        splits.held_layers[pipelines, front] - splits.held_layers[pipelines, front - number]
    )
    return held


def _axes(values: npt.NDArray[Number], choices: tuple[IntArray, ...]) -> list[npt.NDArray[Number]]:
    """A number of each group's splits along an axis of its own."""
    shapes = np.eye(len(choices), dtype=np.int64) * -2 + 1  # 1, and -1 for the own axis
    return [values[one].reshape(shape) for one, shape in zip(choices, shapes, strict=True)]


def _layer_worth(
    weight: FloatArray, number: list[FloatArray], pace: list[FloatArray]
) -> FloatArray:
    """Seconds that a layer is worth: the dual of the linear programme."""
    worth = (weight + _sum(number)) / _sum([n / p for n, p in zip(number, pace, strict=True)])
    for _ in range(len(pace) - 1):  # stages too slow for what a layer is worth take no part
        active = [p <= worth for p in pace]
        if all(bool(one.all()) for one in active):
            break
        taking = [a * n for a, n in zip(active, number, strict=True)]
        rate = _sum([n / p for n, p in zip(taking, pace, strict=True)])
        worth = (weight + _sum(taking)) / rate
    return worth


def _sum(arrays: list[FloatArray]) -> FloatArray:
    total, *others = arrays
    for one in others:
        total = total + one
    return total


def _weight(setting: Setting, num_gpus: FloatArray) -> FloatArray:
    """How often the slowest stage counts beyond its place in the sum of all."""
    return setting.num_micro * (1.0 + straggler_share(num_gpus)) - 1.0


def may_beat(
    setting: Setting,
    pipelines: IntArray,
    holds: FloatArray,
    num_layers: int,
    below_seconds: float,
) -> BoolArray:
    """Whether the slowest stage could be as fast as it must be: one look instead of a bound."""
    splits = setting.splits
    number, pace = splits.num_stages[pipelines], splits.layer_seconds[pipelines]
    send = _least_send(splits, pipelines.shape[1])[pipelines]
    one_each = (number * (pace + send)).sum(axis=1) + splits.head_seconds[pipelines[:, -1]]
    weight = _weight(setting, splits.num_gpus[pipelines].sum(axis=1).astype(np.float64))
    # One micro-batch on one GPU has no weight, so there is no limit.
    limit = np.maximum(0.0, below_seconds - one_each) / np.maximum(weight, 1e-12)
    most = np.maximum(0.0, np.floor((limit[:, None] * (1 + 1e-9) - send) / pace))
    enough: BoolArray = np.minimum(holds, number * most).sum(axis=1) >= num_layers
    return enough


def order_bound_seconds(
    setting: Setting, pipelines: IntArray, holds: FloatArray, num_layers: int
) -> FloatArray:
    """The same for groups in order, (rows, groups), with memory by place and whole layers."""
    splits = setting.splits
    number = splits.num_stages[pipelines]
    pace = splits.layer_seconds[pipelines]
    send = _least_send(splits, pipelines.shape[1])[pipelines]
    weight = _weight(setting, splits.num_gpus[pipelines].sum(axis=1).astype(np.float64))
    slowest = _least_slowest(num_layers, number, pace, send, holds)
    # Above the least, is a slower slowest stage paid back by layers moved to faster stages?
    pays = (number * (pace.max(axis=1)[:, None] / pace - 1.0)).sum(axis=1) > weight
    within = np.where(pays, np.inf, slowest)[:, None]
    most = np.minimum(holds, number * (within - send) / pace)
    total = _least_total(num_layers, number, pace, most)
    head = splits.head_seconds[pipelines[:, -1]]
    bound = weight * slowest + total + (number * send).sum(axis=1) + head
    return np.where(number.sum(axis=1) <= num_layers, bound, np.inf)


def _least_slowest(
    num_layers: int, number: IntArray, pace: FloatArray, send: FloatArray, holds: FloatArray
) -> FloatArray:
    """The slowest stage takes at least this, with whole layers on every stage."""
    low = (num_layers + (number * send / pace).sum(axis=1)) / (number / pace).sum(axis=1)
    low = np.maximum(low, (pace + send).max(axis=1))
    high = low + num_layers * pace.max(axis=1)
    tried = low  # it may be the answer itself
    for _ in range(_HALVINGS):
        room = np.minimum(holds, number * np.floor((tried[:, None] * (1 + 1e-9) - send) / pace))
        enough = room.sum(axis=1) >= num_layers
        high, low = np.where(enough, tried, high), np.where(enough, low, tried)
        tried = 0.75 * low + 0.25 * high  # it is near the lower end
    least: FloatArray = low
    return least


def _least_total(
    num_layers: int, number: IntArray, pace: FloatArray, most: FloatArray
) -> FloatArray:
    """All layers where they take least: one on each stage, the others on the fastest first."""
    order = np.argsort(pace, axis=1, kind="stable")
    pace_sorted = np.take_along_axis(pace, order, axis=1)
    number_sorted = np.take_along_axis(number, order, axis=1)
    more = np.maximum(0.0, np.take_along_axis(most, order, axis=1) - number_sorted)
    before = np.cumsum(more, axis=1) - more
    left = (num_layers - number.sum(axis=1))[:, None]
    given = np.clip(left - before, 0.0, more)
    total: FloatArray = (pace_sorted * (number_sorted + given)).sum(axis=1)
    return total


def _least_send(splits: GroupSplits, num_groups: int) -> FloatArray:
    if num_groups == 1:
        return splits.inner_send_seconds
    alone = splits.num_stages == 1
    return np.where(
        alone,
        splits.outer_send_seconds,
        np.minimum(splits.inner_send_seconds, splits.outer_send_seconds),
    )


# Halvings of the interval in which the slowest stage's time lies: a part in 10^9 of it is left.
_LAYER_SHARES_HALVINGS = 30
_HAIR = 1e-12


def share_layers(
    num_layers: int,
    layer_seconds: FloatArray,
    other_seconds: FloatArray,
    most_layers: IntArray,
    exists: BoolArray,
) -> tuple[IntArray, BoolArray]:
    """Layers of each stage of each pipeline, (rows, stages), and which rows hold all layers.

    The slowest stage takes one of the values `other + n * layer`; halving an interval around the
    least for which all layers have a place leaves only that one.
    """
    most = np.where(exists, np.minimum(most_layers, num_layers), 0)
    number = exists.sum(axis=1)
    fits = (
        ((most >= 1) | ~exists).all(axis=1)
        & (most.sum(axis=1) >= num_layers)
        & (number <= num_layers)
    )
    layers = np.zeros(most.shape, dtype=np.int64)
    rows = np.flatnonzero(fits)
    if len(rows):
        pace = np.where(exists[rows], layer_seconds[rows], 1.0)
        other = np.where(exists[rows], other_seconds[rows], 0.0)
        room = _least_room(num_layers, pace, other, most[rows], exists[rows])
        layers[rows] = _fill(num_layers, pace, room, exists[rows])
    return layers, fits


def _least_room(
    num_layers: int, pace: FloatArray, other: FloatArray, most: IntArray, exists: BoolArray
) -> IntArray:
    """Layers that each stage finishes within the least time in which all of them have a place."""
    one_each = np.where(exists, pace + other, 0.0).max(axis=1)
    low = one_each
    high = np.where(exists, other + most * pace, 0.0).max(axis=1)
    # Without whole numbers and memory all would end together; with whole numbers a layer later.
    together = (num_layers + (exists * other / pace).sum(axis=1)) / (exists / pace).sum(axis=1)
    later = together + np.where(exists, pace, 0.0).max(axis=1)
    for value in (later, together, one_each):  # the interval is open at its lower end
        tried = np.maximum(value, one_each)
        enough = _room(tried, pace, other, most).sum(axis=1) >= num_layers
        high = np.where(enough, np.minimum(high, tried), high)
        low = np.where(enough, low, np.maximum(low, tried))
    for _ in range(_LAYER_SHARES_HALVINGS):
        middle = 0.5 * (low + high)
        enough = _room(middle, pace, other, most).sum(axis=1) >= num_layers
        high = np.where(enough, middle, high)
        low = np.where(enough, low, middle)
    return _room(high, pace, other, most)


def _room(threshold: FloatArray, pace: FloatArray, other: FloatArray, most: IntArray) -> IntArray:
    # A hair above, so that the value the threshold was made from counts.
    within = np.floor((threshold[:, None] * (1 + _HAIR) - other) / pace)
    return np.minimum(most, within.astype(np.int64))


def _fill(num_layers: int, pace: FloatArray, room: IntArray, exists: BoolArray) -> IntArray:
    """One layer each, and the others where a layer takes least."""
    more = room - exists
    order = np.argsort(pace, axis=1, kind="stable")
    sorted_more = np.take_along_axis(more, order, axis=1)
    before = np.cumsum(sorted_more, axis=1) - sorted_more
    left = (num_layers - exists.sum(axis=1))[:, None]
    given = np.clip(left - before, 0, sorted_more)
    layers = np.empty_like(room)
    np.put_along_axis(layers, order, given, axis=1)
    return layers + exists
