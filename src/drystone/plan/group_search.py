"""Which pipeline over groups of unlike GPUs is the fastest? An exact search with bounds.

Theory of operation. A pipeline is one way to cut each group (`group_splits`), an order of the
groups, and layers divided by `layer_shares`. With M micro-batches and stages of t_i seconds a step
takes M (1 + w) max t + (sum t - max t) and what comes once a step; w is the wait for stragglers.
Without whole numbers and memory this is a linear programme whose dual says: if a layer is worth x
seconds, where the sum over stages of max(0, x / pace - 1) equals M (1 + w) - 1, then no pipeline
takes less than x for each layer. So every combination has a lower bound, all of them worked out in
a few array operations. Combinations are worked out exactly, many at once, the lowest bound first,
until the next bound is above the best found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from drystone.estimate.step import STRAGGLER_SHARE
from drystone.plan.group_splits import DEEPEST, FIRST, LAST, MIDDLE, ONLY, GroupSplits
from drystone.plan.layer_shares import share_layers

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Number = TypeVar("Number", np.float64, np.int64)

_BLOCK = 4096  # pipelines bounded at once
_CHUNK = 64  # pipelines worked out at once
_SEED_SPLITS = 5  # of each group, to find a first pipeline
_HALVINGS = 10  # of the interval in which the slowest stage's time lies, for a bound
ALL_ORDERS = 3  # groups up to which every order is tried


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Setting:
    """One recomputation and one size of micro-batch: the ways of all groups that go together."""

    splits: GroupSplits
    choices: tuple[IntArray, ...]  # rows of `splits` for each group
    num_micro: int
    recompute_index: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pipelines:
    """Pipelines worked out, one row each; arrays of (rows, stages)."""

    rows: IntArray  # of `splits`, by stage
    exists: BoolArray
    layers: IntArray
    stage_seconds: FloatArray
    tail_seconds: FloatArray  # (rows,)
    straggler_share: FloatArray  # (rows,)
    step_seconds: FloatArray  # (rows,); infinite where layers find no place


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BestPipeline:
    """The fastest one, by stage."""

    setting: Setting
    rows: IntArray
    layers: IntArray
    stage_seconds: FloatArray
    tail_seconds: float
    straggler_share: float
    step_seconds: float


Accepts = Callable[[Setting, IntArray, IntArray], bool]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineSearch:
    """The question: which pipeline over these groups is the fastest?"""

    settings: list[Setting]
    num_layers: int
    host_seconds: float  # once a step
    orders: tuple[tuple[int, ...], ...]  # of the groups
    accepts: Accepts  # the last word on a pipeline: setting, rows by stage, layers by stage

    def solve(self) -> BestPipeline | None:
        """The optimum; None if nothing fits."""
        best: BestPipeline | None = None
        for setting in self.settings:  # a good one soon, so that bounds cut off much
            few = tuple(_fastest(setting.splits, one, _SEED_SPLITS) for one in setting.choices)
            best = self._search(setting, few, best)
        for setting in self.settings:
            best = self._search(setting, self._worth_trying(setting, _seconds(best)), best)
        return best

    def _search(
        self, setting: Setting, choices: tuple[IntArray, ...], best: BestPipeline | None
    ) -> BestPipeline | None:
        """The best of one setting, if it is better."""
        if not all(len(one) for one in choices):
            return best
        loose = bound_seconds(setting, choices) * self.num_layers + self.host_seconds
        shape, loose = loose.shape, loose.ravel()
        flat = np.flatnonzero(loose < _seconds(best))
        flat = flat[np.argsort(loose[flat], kind="stable")]
        size = max(1, _BLOCK // len(self.orders))
        for start in range(0, len(flat), size):
            block = flat[start : start + size]
            block = block[loose[block] < _seconds(best)]
            if not len(block):
                break
            indices = np.unravel_index(block, shape)
            columns = [one[index] for one, index in zip(choices, indices, strict=True)]
            combinations = np.stack(columns, axis=1)
            pipelines = np.concatenate([combinations[:, order] for order in self.orders])
            best = self._search_block(setting, pipelines, best)
        return best

    def _search_block(
        self, setting: Setting, pipelines: IntArray, best: BestPipeline | None
    ) -> BestPipeline | None:
        """The best of some pipelines, if it is better: those with the lowest bound first."""
        holds = held_layers(setting.splits, pipelines)
        possible = holds.sum(axis=1) >= self.num_layers
        pipelines, holds = pipelines[possible], holds[possible]
        bounds = order_bound_seconds(setting, pipelines, holds, self.num_layers)
        bounds = bounds + self.host_seconds
        order = np.flatnonzero(bounds < _seconds(best))
        order = order[np.argsort(bounds[order], kind="stable")]
        for start in range(0, len(order), _CHUNK):
            rows = order[start : start + _CHUNK]
            rows = rows[bounds[rows] < _seconds(best)]
            if not len(rows):
                break
            best = self._improve(setting, pipelines[rows], best)
        return best

    def _improve(
        self, setting: Setting, pipelines: IntArray, best: BestPipeline | None
    ) -> BestPipeline | None:
        """The best of these, if it is better."""
        found = work_out(
            setting, pipelines, num_layers=self.num_layers, host_seconds=self.host_seconds
        )
        for row in np.argsort(found.step_seconds, kind="stable"):
            if not found.step_seconds[row] < _seconds(best):
                break
            picked = _pick(setting, found, int(row))
            if self.accepts(setting, picked.rows, picked.layers):
                return picked
        return best

    def _worth_trying(self, setting: Setting, below_seconds: float) -> tuple[IntArray, ...]:
        """For each group, the splits that are in any combination that could be that fast."""
        choices = setting.choices
        if np.isfinite(below_seconds) and all(len(one) for one in choices):
            worth = (below_seconds - self.host_seconds) / self.num_layers
            splits = setting.splits
            gains = [
                splits.num_stages[one] * np.maximum(0.0, worth / splits.layer_seconds[one] - 1.0)
                for one in choices
            ]
            most = sum(float(one.max()) for one in gains)
            least = setting.num_micro - 1.0
            choices = tuple(
                one[most - gain.max() + gain > least]
                for one, gain in zip(choices, gains, strict=True)
            )
        return choices


def _seconds(best: BestPipeline | None) -> float:
    return float("inf") if best is None else best.step_seconds


def group_orders(usable_bytes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Every order of few groups; of many, most memory first: the first stages keep most."""
    everyone = range(len(usable_bytes))
    if len(usable_bytes) <= ALL_ORDERS:
        return tuple(permutations(everyone))
    return (tuple(sorted(everyone, key=lambda index: -usable_bytes[index])),)


def _fastest(splits: GroupSplits, rows: IntArray, number: int) -> IntArray:
    if len(rows) <= number:
        return rows
    rate = splits.num_stages[rows] / splits.layer_seconds[rows]
    return rows[np.sort(np.argsort(-rate, kind="stable")[:number])]


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
    return setting.num_micro * (1.0 + straggler_shares(num_gpus)) - 1.0


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


def straggler_shares(num_gpus: FloatArray) -> FloatArray:
    """What waiting for the slowest of equal GPUs adds."""
    shares: FloatArray = STRAGGLER_SHARE * np.sqrt(2.0 * np.log(num_gpus))
    return shares


def _least_send(splits: GroupSplits, num_groups: int) -> FloatArray:
    if num_groups == 1:
        return splits.inner_send_seconds
    alone = splits.num_stages == 1
    return np.where(
        alone,
        splits.outer_send_seconds,
        np.minimum(splits.inner_send_seconds, splits.outer_send_seconds),
    )


def work_out(
    setting: Setting, combinations: IntArray, *, num_layers: int, host_seconds: float
) -> Pipelines:
    """Each pipeline exactly: memory by place, whole layers, time. (rows, groups in order)."""
    splits = setting.splits
    number = splits.num_stages[combinations]
    total = number.sum(axis=1)
    # One entry a stage, then laid out as (rows, stages).
    flat = np.repeat(combinations.ravel(), number.ravel())
    row = np.repeat(np.arange(len(total)), total)
    place = np.arange(len(flat)) - np.repeat(np.cumsum(total) - total, total)
    in_group = np.arange(len(flat)) - np.repeat(
        np.cumsum(number.ravel()) - number.ravel(), number.ravel()
    )
    first, last = place == 0, place == total[row] - 1
    roles = np.where(first, np.where(last, ONLY, FIRST), np.where(last, LAST, MIDDLE))
    flight = np.minimum(total[row] - place, setting.num_micro)
    edge = ((in_group == 0) & ~first) | ((in_group == splits.num_stages[flat] - 1) & ~last)
    send = np.maximum(
        splits.inner_send_seconds[flat], np.where(edge, splits.outer_send_seconds[flat], 0.0)
    )
    other = send + last * splits.head_seconds[flat] + first * splits.embedding_seconds[flat]

    shape = (len(total), int(total.max(initial=1)))
    exists = np.arange(shape[1]) < total[:, None]

    def laid_out(values: npt.NDArray[Number]) -> npt.NDArray[Number]:
        out = np.zeros(shape, dtype=values.dtype)
        out[row, place] = values
        return out

    pace = laid_out(splits.layer_seconds[flat])
    most = laid_out(splits.most_layers(flat, roles, flight))
    layers, fits = share_layers(num_layers, pace, laid_out(other), most, exists)
    seconds = pace * layers + laid_out(other)
    outer = splits.outer_layers[flat] * (first.astype(np.float64) + last)
    tail = laid_out(tail_seconds(splits, flat, layers[row, place] + outer)).max(axis=1)
    waits = straggler_shares(splits.num_gpus[combinations].sum(axis=1).astype(np.float64))
    slowest = seconds.max(axis=1)
    step = setting.num_micro * (1.0 + waits) * slowest + seconds.sum(axis=1) - slowest
    return Pipelines(
        rows=laid_out(flat),
        exists=exists,
        layers=layers,
        stage_seconds=seconds,
        tail_seconds=tail,
        straggler_share=waits,
        step_seconds=np.where(fits, step + tail + host_seconds, np.inf),
    )


def tail_seconds(splits: GroupSplits, rows: IntArray, layers: FloatArray) -> FloatArray:
    """Once a step: gradients reduced as far as it shows, weights updated and gathered."""
    reduce = np.maximum(
        layers * splits.reduce_layer_seconds[rows], splits.reduce_least_seconds[rows]
    )
    update = layers * splits.update_layer_seconds[rows] + splits.update_fixed_seconds[rows]
    return reduce + update


def _pick(setting: Setting, found: Pipelines, row: int) -> BestPipeline:
    here = found.exists[row]
    return BestPipeline(
        setting=setting,
        rows=found.rows[row][here],
        layers=found.layers[row][here],
        stage_seconds=found.stage_seconds[row][here],
        tail_seconds=float(found.tail_seconds[row]),
        straggler_share=float(found.straggler_share[row]),
        step_seconds=float(found.step_seconds[row]),
    )
