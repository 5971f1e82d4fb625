"""Lower bounds on the step of a pipeline over groups, for many pipelines at once.

With M micro-batches and stages of t_i seconds a step takes M (1 + w) max t + (sum t - max t) and
what comes once a step; w is the wait for stragglers. Without whole numbers and memory this is a
linear programme whose dual says: if a layer is worth x seconds, where the sum over stages of
max(0, x / pace - 1) equals M (1 + w) - 1, then no pipeline takes less than x for each layer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from drystone.estimate.time.overlap import straggler_share
from drystone.plan.groups.splits import DEEPEST, GroupSplits, Setting

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_HALVINGS = 10  # of the interval in which the slowest stage's time lies


# 1. A loose bound: every combination of splits, in any order of the groups.


def layer_bound_seconds(setting: Setting, choices: tuple[IntArray, ...]) -> FloatArray:
    """Seconds for each layer below which no pipeline of a combination steps; an axis a group."""
    splits = setting.splits
    stages = _axes(splits.num_stages.astype(np.float64), choices)
    gpus = _sum(_axes(splits.num_gpus.astype(np.float64), choices))
    return _layer_worth(_weight(setting, gpus), stages, _axes(splits.seconds.layer, choices))


def splits_worth_trying(
    setting: Setting, num_layers: int, below_seconds: float
) -> tuple[IntArray, ...]:
    """For each group, the splits that are in any combination that could be that fast."""
    choices = setting.choices
    if not np.isfinite(below_seconds) or not all(len(rows) for rows in choices):
        return choices
    worth = below_seconds / num_layers
    splits = setting.splits
    gains = [
        splits.num_stages[rows] * np.maximum(0.0, worth / splits.seconds.layer[rows] - 1.0)
        for rows in choices
    ]
    best = sum(float(gain.max()) for gain in gains)
    needed = setting.num_micro - 1.0
    return tuple(
        rows[best - gain.max() + gain > needed] for rows, gain in zip(choices, gains, strict=True)
    )


def _axes(values: FloatArray, choices: tuple[IntArray, ...]) -> list[FloatArray]:
    """A number of each group's splits along an axis of its own."""
    shapes = np.eye(len(choices), dtype=np.int64) * -2 + 1  # 1, and -1 for the own axis
    return [values[rows].reshape(shape) for rows, shape in zip(choices, shapes, strict=True)]


def _layer_worth(
    weight: FloatArray, stages: list[FloatArray], pace: list[FloatArray]
) -> FloatArray:
    """Seconds that a layer is worth: the dual of the linear programme."""
    worth = (weight + _sum(stages)) / _sum([n / p for n, p in zip(stages, pace, strict=True)])
    for _ in range(len(pace) - 1):  # stages too slow for what a layer is worth take no part
        active = [p <= worth for p in pace]
        if all(bool(each.all()) for each in active):
            break
        taking = [a * n for a, n in zip(active, stages, strict=True)]
        rate = _sum([n / p for n, p in zip(taking, pace, strict=True)])
        worth = (weight + _sum(taking)) / rate
    return worth


def _sum(arrays: list[FloatArray]) -> FloatArray:
    total, *others = arrays
    for array in others:
        total = total + array
    return total


def _weight(setting: Setting, num_gpus: FloatArray) -> FloatArray:
    """How often the slowest stage counts beyond its place in the sum of all."""
    return setting.num_micro * (1.0 + straggler_share(num_gpus)) - 1.0


# 2. Tighter bounds: groups in order, with memory by place and whole layers.


class Candidates(NamedTuple):
    """Pipelines with what their bounds need: (pipelines, groups in order), or (pipelines,)."""

    pipelines: IntArray  # rows of `splits`
    stages: IntArray
    pace: FloatArray  # seconds of a layer
    send: FloatArray  # seconds that a stage sends at least
    max_layers: FloatArray  # that have a place on the group
    head: FloatArray  # seconds, on the last stage
    weight: FloatArray  # how often the slowest stage counts beyond its place in the sum of all

    def take(self, keep: BoolArray | IntArray) -> Candidates:
        """Some of them."""
        return Candidates._make(column[keep] for column in self)


def make_candidates(setting: Setting, pipelines: IntArray, num_layers: int) -> Candidates:
    """Those of the pipelines whose memory holds all layers."""
    splits = setting.splits
    max_layers = _max_layers(splits, pipelines)
    holds_all = max_layers.sum(axis=1) >= num_layers
    pipelines, max_layers = pipelines[holds_all], max_layers[holds_all]
    num_gpus = splits.num_gpus[pipelines].sum(axis=1).astype(np.float64)
    return Candidates(
        pipelines=pipelines,
        stages=splits.num_stages[pipelines],
        pace=splits.seconds.layer[pipelines],
        send=_min_send(splits, pipelines.shape[1])[pipelines],
        max_layers=max_layers,
        head=splits.seconds.head[pipelines[:, -1]],
        weight=_weight(setting, num_gpus),
    )


def may_beat(found: Candidates, num_layers: int, below_seconds: float) -> BoolArray:
    """Whether the slowest stage could be as fast as it must be: one look instead of a bound."""
    one_each = (found.stages * (found.pace + found.send)).sum(axis=1) + found.head
    # One micro-batch on one GPU has no weight, so there is no limit.
    limit = np.maximum(0.0, below_seconds - one_each) / np.maximum(found.weight, 1e-12)
    within = np.floor((limit[:, None] * (1 + 1e-9) - found.send) / found.pace)
    room = np.minimum(found.max_layers, found.stages * np.maximum(0.0, within))
    enough: BoolArray = room.sum(axis=1) >= num_layers
    return enough


def order_bound_seconds(found: Candidates, num_layers: int) -> FloatArray:
    """Seconds below which none of these steps."""
    stages, pace, send = found.stages, found.pace, found.send
    slowest = _min_slowest(found, num_layers)
    # Above the least, is a slower slowest stage paid back by layers moved to faster stages?
    pays = (stages * (pace.max(axis=1)[:, None] / pace - 1.0)).sum(axis=1) > found.weight
    within = np.where(pays, np.inf, slowest)[:, None]
    room = np.minimum(found.max_layers, stages * (within - send) / pace)
    total = _min_total(num_layers, stages, pace, room)
    bound = found.weight * slowest + total + (stages * send).sum(axis=1) + found.head
    return np.where(stages.sum(axis=1) <= num_layers, bound, np.inf)


def _max_layers(splits: GroupSplits, pipelines: IntArray) -> FloatArray:
    """At most so many layers have a place on each group of a pipeline, (rows, groups in order)."""
    stages = splits.num_stages[pipelines]
    behind = stages.sum(axis=1)[:, None] - np.cumsum(stages, axis=1)  # stages of later groups
    front = np.minimum(behind + stages, DEEPEST)
    held: FloatArray = (
        splits.held_layers[pipelines, front] - splits.held_layers[pipelines, front - stages]
    )
    return held


def _min_slowest(found: Candidates, num_layers: int) -> FloatArray:
    """The slowest stage takes at least this, with whole layers on every stage."""
    stages, pace, send = found.stages, found.pace, found.send
    low = (num_layers + (stages * send / pace).sum(axis=1)) / (stages / pace).sum(axis=1)
    low = np.maximum(low, (pace + send).max(axis=1))
    high = low + num_layers * pace.max(axis=1)
    tried = low  # it may be the answer itself
    for _ in range(_HALVINGS):
        within = stages * np.floor((tried[:, None] * (1 + 1e-9) - send) / pace)
        enough = np.minimum(found.max_layers, within).sum(axis=1) >= num_layers
        high, low = np.where(enough, tried, high), np.where(enough, low, tried)
        tried = 0.75 * low + 0.25 * high  # it is near the lower end
    slowest: FloatArray = low
    return slowest


def _min_total(num_layers: int, stages: IntArray, pace: FloatArray, room: FloatArray) -> FloatArray:
    """All layers where they take least: one on each stage, the others on the fastest first."""
    order = np.argsort(pace, axis=1, kind="stable")
    pace_sorted = np.take_along_axis(pace, order, axis=1)
    stages_sorted = np.take_along_axis(stages, order, axis=1)
    more = np.maximum(0.0, np.take_along_axis(room, order, axis=1) - stages_sorted)
    before = np.cumsum(more, axis=1) - more
    left = (num_layers - stages.sum(axis=1))[:, None]
    given = np.clip(left - before, 0.0, more)
    total: FloatArray = (pace_sorted * (stages_sorted + given)).sum(axis=1)
    return total


def _min_send(splits: GroupSplits, num_groups: int) -> FloatArray:
    """A stage sends inside its group, to another group, or both; the slower counts."""
    inner, outer = splits.seconds.inner_send, splits.seconds.outer_send
    if num_groups == 1:
        return inner
    return np.where(splits.num_stages == 1, outer, np.minimum(inner, outer))
