"""Which pipeline over groups of unlike GPUs is the fastest? An exact search with bounds.

A pipeline is one way to cut each group (`group_splits`), an order of the groups, and layers divided
by `layer_shares`. Every combination has a lower bound (`group_bounds`), and combinations are worked
out exactly, many at once, the lowest bound first, until the next bound is above the best found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from drystone.estimate.time.overlap import straggler_share
from drystone.plan.groups.bounds import (
    bound_seconds,
    held_layers,
    may_beat,
    order_bound_seconds,
    share_layers,
)
from drystone.plan.groups.splits import FIRST, LAST, MIDDLE, ONLY, GroupSplits, Setting

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Number = TypeVar("Number", np.float64, np.int64)

_BLOCK = 4096  # pipelines bounded at once
_CHUNK = 64  # pipelines worked out at once
_SEED_SPLITS = 5  # of each group, to find a first pipeline
ALL_ORDERS = 3  # groups up to which every order is tried


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
        possible = may_beat(
            setting, pipelines, holds, self.num_layers, _seconds(best) - self.host_seconds
        )
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
    waits = straggler_share(splits.num_gpus[combinations].sum(axis=1).astype(np.float64))
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
