"""The fastest pipeline over groups of unlike GPUs: an exact search by branch and bound.

A pipeline is a split of each group (`splits`), an order of the groups, and layers for each stage.
Every combination has a lower bound (`bounds`), and combinations are worked out exactly, many at
once, the lowest bound first, until the next bound is above the best found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import permutations
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from drystone.estimate.time.overlap import straggler_share
from drystone.plan.groups.bounds import (
    layer_bound_seconds,
    make_candidates,
    may_beat,
    order_bound_seconds,
    splits_worth_trying,
)
from drystone.plan.groups.splits import FIRST, LAST, MIDDLE, ONLY, GroupSplits, Setting

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Number = TypeVar("Number", np.float64, np.int64)

ALL_ORDERS = 3  # groups up to which every order is tried
_BLOCK = 4096  # pipelines bounded at once
_CHUNK = 64  # pipelines worked out at once
_SEED_SPLITS = 5  # of each group, to find a first pipeline
# Halvings of the interval in which the slowest stage's time lies: a part in 10^9 of it is left.
_HALVINGS = 30
_HAIR = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pipeline:
    """One pipeline worked out: arrays by stage."""

    setting: Setting
    rows: IntArray  # of `setting.splits`
    layers: IntArray
    stage_seconds: FloatArray
    tail_seconds: float
    straggler_share: float
    step_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pipelines:
    """Pipelines worked out, one row each; arrays of (pipelines, stages), or (pipelines,)."""

    setting: Setting
    rows: IntArray
    exists: BoolArray  # pipelines differ in their number of stages
    layers: IntArray
    stage_seconds: FloatArray
    tail_seconds: FloatArray
    straggler_share: FloatArray
    step_seconds: FloatArray  # infinite where layers find no place

    def take(self, indices: IntArray) -> Pipelines:
        """Some of them."""
        return replace(
            self,
            rows=self.rows[indices],
            exists=self.exists[indices],
            layers=self.layers[indices],
            stage_seconds=self.stage_seconds[indices],
            tail_seconds=self.tail_seconds[indices],
            straggler_share=self.straggler_share[indices],
            step_seconds=self.step_seconds[indices],
        )

    def pick(self, index: int) -> Pipeline:
        """One of them."""
        here = self.exists[index]
        return Pipeline(
            setting=self.setting,
            rows=self.rows[index][here],
            layers=self.layers[index][here],
            stage_seconds=self.stage_seconds[index][here],
            tail_seconds=float(self.tail_seconds[index]),
            straggler_share=float(self.straggler_share[index]),
            step_seconds=float(self.step_seconds[index]),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineSearch:
    """The question: which pipeline over these groups is the fastest?"""

    settings: list[Setting]
    num_layers: int
    host_seconds: float  # once a step
    orders: tuple[tuple[int, ...], ...]  # of the groups
    accepts: Callable[[Pipeline], bool]  # the last word, on its memory
    below_seconds: float = float("inf")  # slower ones are of no interest
    may_combine: Callable[[GroupSplits, tuple[IntArray, ...]], BoolArray] | None = None

    def solve(self) -> Pipeline | None:
        """The optimum; None if nothing fits."""
        best: Pipeline | None = None
        for setting in self.settings:  # a good one soon, so that bounds cut off much
            few = tuple(_fastest(setting.splits, rows, _SEED_SPLITS) for rows in setting.choices)
            best = self._search(setting, few, best)
        for setting in self.settings:
            below_seconds = self._limit(best) - self.host_seconds
            choices = splits_worth_trying(setting, self.num_layers, below_seconds)
            best = self._search(setting, choices, best)
        return best

    def _limit(self, best: Pipeline | None) -> float:
        return self.below_seconds if best is None else best.step_seconds

    def _search(
        self, setting: Setting, choices: tuple[IntArray, ...], best: Pipeline | None
    ) -> Pipeline | None:
        """The best of one setting, if it is better: combinations by their loose bound."""
        if not all(len(rows) for rows in choices):
            return best
        bounds = layer_bound_seconds(setting, choices) * self.num_layers + self.host_seconds
        if self.may_combine is not None:
            bounds = np.where(self.may_combine(setting.splits, choices), bounds, np.inf)
        shape, bounds = bounds.shape, bounds.ravel()
        for block in _ascending(bounds, max(1, _BLOCK // len(self.orders)), self._limit(best)):
            block = block[bounds[block] < self._limit(best)]
            if not len(block):
                break
            places = np.unravel_index(block, shape)
            combinations = np.stack(
                [rows[place] for rows, place in zip(choices, places, strict=True)], axis=1
            )
            pipelines = np.concatenate([combinations[:, order] for order in self.orders])
            best = self._search_block(setting, pipelines, best)
        return best

    def _search_block(
        self, setting: Setting, pipelines: IntArray, best: Pipeline | None
    ) -> Pipeline | None:
        """The best of some pipelines, if it is better: by their tighter bound."""
        found = make_candidates(setting, pipelines, self.num_layers)
        found = found.take(may_beat(found, self.num_layers, self._limit(best) - self.host_seconds))
        bounds = order_bound_seconds(found, self.num_layers) + self.host_seconds
        for chunk in _ascending(bounds, _CHUNK, self._limit(best)):
            chunk = chunk[bounds[chunk] < self._limit(best)]
            if not len(chunk):
                break
            best = self._improve(setting, found.pipelines[chunk], best)
        return best

    def _improve(
        self, setting: Setting, pipelines: IntArray, best: Pipeline | None
    ) -> Pipeline | None:
        """The best of these worked out exactly, if it is better."""
        found = work_out(
            setting, pipelines, num_layers=self.num_layers, host_seconds=self.host_seconds
        )
        for index in np.argsort(found.step_seconds, kind="stable"):
            if not found.step_seconds[index] < self._limit(best):
                break
            picked = found.pick(int(index))
            if self.accepts(picked):
                return picked
        return best


def group_orders(usable_bytes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Every order of few groups; of many, most memory first: the first stages keep most."""
    everyone = range(len(usable_bytes))
    if len(usable_bytes) <= ALL_ORDERS:
        return tuple(permutations(everyone))
    return (tuple(sorted(everyone, key=lambda index: -usable_bytes[index])),)


def _ascending(bounds: FloatArray, size: int, below: float) -> list[IntArray]:
    """Indices of the bounds below a value, the lowest first, so many at a time."""
    order = np.flatnonzero(bounds < below)
    order = order[np.argsort(bounds[order], kind="stable")]
    return [order[start : start + size] for start in range(0, len(order), size)]


def _fastest(splits: GroupSplits, rows: IntArray, number: int) -> IntArray:
    if len(rows) <= number:
        return rows
    rate = splits.num_stages[rows] / splits.seconds.layer[rows]
    return rows[np.sort(np.argsort(-rate, kind="stable")[:number])]


def work_out(
    setting: Setting,
    pipelines: IntArray,
    *,
    num_layers: int,
    host_seconds: float | FloatArray,
    num_micro: IntArray | None = None,  # by pipeline, where it is not the setting's
) -> Pipelines:
    """Each pipeline exactly: memory by place, whole layers, time. (pipelines, groups in order)."""
    splits = setting.splits
    num_micro = np.broadcast_to(
        setting.num_micro if num_micro is None else num_micro, len(pipelines)
    )
    number = splits.num_stages[pipelines]
    total = number.sum(axis=1)
    # One entry a stage, then laid out as (pipelines, stages).
    flat = np.repeat(pipelines.ravel(), number.ravel())
    row = np.repeat(np.arange(len(total)), total)
    place = np.arange(len(flat)) - np.repeat(np.cumsum(total) - total, total)
    in_group = np.arange(len(flat)) - np.repeat(
        np.cumsum(number.ravel()) - number.ravel(), number.ravel()
    )
    first, last = place == 0, place == total[row] - 1
    roles = np.where(first, np.where(last, ONLY, FIRST), np.where(last, LAST, MIDDLE))
    flight = np.minimum(total[row] - place, num_micro[row])
    edge = ((in_group == 0) & ~first) | ((in_group == splits.num_stages[flat] - 1) & ~last)
    seconds = splits.seconds
    send = np.maximum(seconds.inner_send[flat], np.where(edge, seconds.outer_send[flat], 0.0))
    other = send + last * seconds.head[flat] + first * seconds.embedding[flat]

    shape = (len(total), int(total.max(initial=1)))
    exists = np.arange(shape[1]) < total[:, None]

    def laid_out(values: npt.NDArray[Number]) -> npt.NDArray[Number]:
        out = np.zeros(shape, dtype=values.dtype)
        out[row, place] = values
        return out

    pace = laid_out(seconds.layer[flat])
    max_layers = laid_out(splits.memory.max_layers(flat, roles, flight))
    layers, fits = share_layers(num_layers, pace, laid_out(other), max_layers, exists)
    stage_seconds = pace * layers + laid_out(other)
    outer = splits.once.outer_layers[flat] * (first.astype(np.float64) + last)
    tail = laid_out(splits.once.seconds(flat, layers[row, place] + outer)).max(axis=1)
    waits = straggler_share(splits.num_gpus[pipelines].sum(axis=1).astype(np.float64))
    slowest = stage_seconds.max(axis=1)
    step = num_micro * (1.0 + waits) * slowest + stage_seconds.sum(axis=1) - slowest
    return Pipelines(
        setting=setting,
        rows=laid_out(flat),
        exists=exists,
        layers=layers,
        stage_seconds=stage_seconds,
        tail_seconds=tail,
        straggler_share=waits,
        step_seconds=np.where(fits, step + tail + host_seconds, np.inf),
    )


def share_layers(
    num_layers: int,
    layer_seconds: FloatArray,
    other_seconds: FloatArray,
    max_layers: IntArray,
    exists: BoolArray,
) -> tuple[IntArray, BoolArray]:
    """Layers of each stage of each pipeline, (rows, stages), and which rows hold all layers.

    The slowest stage takes one of the values `other + n * layer`; halving an interval around the
    least for which all layers have a place leaves only that one.
    """
    most = np.where(exists, np.minimum(max_layers, num_layers), 0)
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
        room = _min_room(num_layers, pace, other, most[rows], exists[rows])
        layers[rows] = _fill(num_layers, pace, room, exists[rows])
    return layers, fits


def _min_room(
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
    for _ in range(_HALVINGS):
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
