"""How much does a job learn in a second? Throughput times statistical efficiency.

Pollux (Qiao et al., OSDI 2021): goodput = throughput x efficiency, at the batch that maximises it.
A batch of M samples on n GPUs is n x m x (a + 1): m at a time on each GPU, after a accumulations.

throughput(M) = M / (a x (step - sync) + step), of measured steps
gain(M)       = (variance + norm) / (variance / r + norm),  r = M / M0
efficiency(M) = gain / r: what a sample of batch M is worth in samples of the smallest batch M0

Work is counted in samples of M0, so goodput is M0 x gain / seconds: how many of those a step does.
Step times lie between measured ones on straight lines: over the batch of a GPU and, where a
placement was not measured, over nodes and GPUs at the same GPUs a node.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from drystone.errors import InvalidSpec
from goodput.tables import NoiseRow, PlacedStep

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_NUM_BATCHES = 50  # tried between the least and the largest, in equal ratios, as Pollux does
_EPSILON = 1e-8


@dataclass(frozen=True, slots=True, eq=False)
class StepCurve:
    """Step and exchange time of one placement, over the batch of a GPU."""

    local_batch: FloatArray  # ascending
    step_seconds: FloatArray
    sync_seconds: FloatArray

    @property
    def least(self) -> float:
        """The smallest batch of a GPU that was measured."""
        return float(self.local_batch[0])

    @property
    def most(self) -> float:
        """The largest batch of a GPU that was measured: what its memory holds."""
        return float(self.local_batch[-1])

    def at(self, local_batch: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Seconds of a step and of the exchange in it."""
        return (
            np.interp(local_batch, self.local_batch, self.step_seconds),
            np.interp(local_batch, self.local_batch, self.sync_seconds),
        )


class StepTimes:
    """The measured steps of one model on one GPU type."""

    def __init__(self, steps: Sequence[PlacedStep]) -> None:
        if not steps:
            raise InvalidSpec("a throughput model needs at least one measured step")
        exact: dict[tuple[int, ...], list[PlacedStep]] = defaultdict(list)
        shapes: dict[tuple[int, int], list[PlacedStep]] = defaultdict(list)
        for step in steps:
            if step.placement:
                exact[tuple(sorted(step.placement))].append(step)
            shapes[step.num_nodes, step.num_gpus].append(step)
        self._exact = {key: _curve(rows) for key, rows in exact.items()}
        self._shapes = {key: _curve(rows) for key, rows in shapes.items()}

    def curve(self, placement: Sequence[int]) -> StepCurve | None:
        """Of these GPUs on each node; None where it lies outside what was measured."""
        key = tuple(sorted(placement))
        if key in self._exact:
            return self._exact[key]
        return self._between_nodes(len(key), sum(key))

    def _between_nodes(self, num_nodes: int, num_gpus: int) -> StepCurve | None:
        known = np.array(sorted({nodes for nodes, _ in self._shapes}))
        below, above = known[known <= num_nodes], known[known >= num_nodes]
        if not len(below) or not len(above):
            return None
        low, high = int(below[-1]), int(above[0])
        per_node = num_gpus / num_nodes
        first = self._between_gpus(low, per_node * low)
        second = self._between_gpus(high, per_node * high)
        if first is None or second is None:
            return None
        share = 0.0 if high == low else (num_nodes - low) / (high - low)
        return _blend(first, second, share)

    def _between_gpus(self, num_nodes: int, num_gpus: float) -> StepCurve | None:
        known = np.array(sorted(gpus for nodes, gpus in self._shapes if nodes == num_nodes))
        below = known[known <= num_gpus + _EPSILON]
        above = known[known >= num_gpus - _EPSILON]
        if not len(below) or not len(above):
            return None
        low, high = int(below[-1]), int(above[0])
        share = 0.0 if high == low else (num_gpus - low) / (high - low)
        return _blend(self._shapes[num_nodes, low], self._shapes[num_nodes, high], share)


@dataclass(frozen=True, eq=False)
class GradientNoise:
    """How the gradients of one model looked, epoch by epoch, at several batch sizes."""

    batch: FloatArray  # (batches), ascending; the first is M0
    squared_norm: FloatArray  # (batches, epochs)
    variance: FloatArray  # (batches, epochs)
    end_steps: FloatArray  # (epochs): progress when an epoch ends, in steps of M0

    @property
    def least_batch(self) -> float:
        """M0, whose samples work is counted in."""
        return float(self.batch[0])

    @property
    def most_batch(self) -> float:
        """The largest batch at which learning was looked at."""
        return float(self.batch[-1])

    @cached_property
    def end_samples(self) -> FloatArray:
        """Work done when each epoch ends."""
        ends: FloatArray = self.end_steps * self.least_batch
        return ends

    def gain(self, batch: FloatArray) -> FloatArray:
        """What a step of this batch is worth in steps of M0, (batches, epochs)."""
        at = np.searchsorted(self.batch, batch, side="right") - 1
        low = np.clip(at, 0, len(self.batch) - 2)
        width = self.batch[low + 1] - self.batch[low]
        share = np.clip((batch - self.batch[low]) / width, 0.0, 1.0)[:, None]
        norm = (1 - share) * self.squared_norm[low] + share * self.squared_norm[low + 1]
        variance = (1 - share) * self.variance[low] + share * self.variance[low + 1]
        scale = (batch / self.least_batch)[:, None]
        gain: FloatArray = (variance + norm) / (variance / scale + norm)
        return gain


def gradient_noise(rows: Sequence[NoiseRow]) -> GradientNoise:
    """Of one model. Epochs that not every batch size reached are left out.

    An epoch ends when the fastest of the batch sizes had ended it.
    """
    by_batch: dict[int, dict[int, NoiseRow]] = defaultdict(dict)
    for row in rows:
        by_batch[row.batch][row.epoch] = row
    sizes = sorted(by_batch)
    if len(sizes) < 2:
        raise InvalidSpec("gradient noise is needed at two batch sizes at least")
    epochs = sorted(set.intersection(*(set(one) for one in by_batch.values())))
    table = [[by_batch[size][epoch] for epoch in epochs] for size in sizes]
    return GradientNoise(
        batch=np.array(sizes, dtype=np.float64),
        squared_norm=np.array([[one.squared_norm for one in line] for line in table]),
        variance=np.array([[one.variance for one in line] for line in table]),
        end_steps=np.array([[one.progress_steps for one in line] for line in table]).min(axis=0),
    )


def best_goodput(
    curve: StepCurve, noise: GradientNoise, num_gpus: int, *, most_local: float
) -> FloatArray | None:
    """Work a second in each epoch at the best batch for these GPUs; None where none is allowed."""
    least = max(noise.least_batch, curve.least * num_gpus)
    if least > noise.most_batch:
        return None
    batches = np.geomspace(least, noise.most_batch, _NUM_BATCHES)
    goodput = _goodput(curve, noise, num_gpus, batches, min(most_local, curve.most))
    result: FloatArray = goodput.max(axis=0)
    return result


def fixed_goodput(
    curve: StepCurve, noise: GradientNoise, num_gpus: int, *, batch: float, most_local: float
) -> FloatArray:
    """The same at one batch size, which the owner of the job has set."""
    limit = min(most_local, curve.most)
    result: FloatArray = _goodput(curve, noise, num_gpus, np.array([batch]), limit)[0]
    return result


def _goodput(
    curve: StepCurve, noise: GradientNoise, num_gpus: int, batches: FloatArray, most_local: float
) -> FloatArray:
    """Work a second, (batches, epochs)."""
    local = batches / num_gpus
    accumulations = np.ceil(local / most_local - _EPSILON) - 1
    if num_gpus == 1:
        # Of a single batch the noise cannot be told, so one GPU goes in two parts beyond M0.
        beyond = batches > noise.least_batch + _EPSILON
        accumulations = np.where(beyond, np.maximum(accumulations, 1), accumulations)
    parts = accumulations + 1
    atomic = np.ceil(local / parts - _EPSILON)
    atomic = np.minimum(atomic, np.floor(noise.most_batch / (num_gpus * parts) + _EPSILON))
    step, sync = curve.at(atomic)
    seconds = step + accumulations * (step - sync)
    gain = noise.gain(num_gpus * atomic * parts)
    goodput: FloatArray = noise.least_batch * gain / seconds[:, None]
    return goodput


def _curve(rows: Sequence[PlacedStep]) -> StepCurve:
    """Of rows of one shape: placements that differ only in how they lie are averaged."""
    by_batch: dict[int, list[PlacedStep]] = defaultdict(list)
    for row in rows:
        by_batch[row.local_batch].append(row)
    sizes = sorted(by_batch)
    return StepCurve(
        np.array(sizes, dtype=np.float64),
        np.array([np.mean([row.step_seconds for row in by_batch[size]]) for size in sizes]),
        np.array([np.mean([row.sync_seconds for row in by_batch[size]]) for size in sizes]),
    )


def _blend(first: StepCurve, second: StepCurve, share: float) -> StepCurve:
    """So far from the first to the second, at the batches that both know."""
    if share == 0.0:
        return first
    least, most = max(first.least, second.least), min(first.most, second.most)
    both = np.union1d(first.local_batch, second.local_batch)
    both = both[(both >= least) & (both <= most)]
    one, other = first.at(both), second.at(both)
    return StepCurve(
        both,
        (1 - share) * one[0] + share * other[0],
        (1 - share) * one[1] + share * other[1],
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GoodputModel:
    """What is known of one model: its steps on each GPU type, and its gradients."""

    steps: Mapping[str, StepTimes]  # by GPU type
    noise: GradientNoise
    slowdown: float = 1.0  # how much slower it runs in earnest than it was measured
    most_local: float = math.inf  # samples that a GPU takes at a time, beside what was measured
    most_gpus: int = 1_000_000
    fixed_batch: float = 0.0  # 0: whatever is best

    @property
    def total_samples(self) -> float:
        """The work of all epochs."""
        return float(self.noise.end_samples[-1])

    def goodput(self, gpu: str, placement: Sequence[int], *, batch: float = 0.0) -> FloatArray:
        """Work a second in each epoch; zeros where it cannot run so. `batch` 0: the best one."""
        nothing = np.zeros(len(self.noise.end_steps))
        curve = self.steps[gpu].curve(placement) if gpu in self.steps else None
        num_gpus = sum(placement)
        if curve is None or num_gpus > self.most_gpus:
            return nothing
        batch = batch or self.fixed_batch
        limit = self.most_local
        if batch:
            fixed = fixed_goodput(curve, self.noise, num_gpus, batch=batch, most_local=limit)
            return fixed / self.slowdown
        best = best_goodput(curve, self.noise, num_gpus, most_local=limit)
        return nothing if best is None else best / self.slowdown


def build_steps(steps: Sequence[PlacedStep]) -> dict[str, dict[str, StepTimes]]:
    """Measured steps by model and GPU type."""
    grouped: dict[tuple[str, str], list[PlacedStep]] = defaultdict(list)
    for step in steps:
        grouped[step.model, step.gpu].append(step)
    found: dict[str, dict[str, StepTimes]] = defaultdict(dict)
    for (model, gpu), rows in grouped.items():
        found[model][gpu] = StepTimes(rows)
    return dict(found)


def build_noise(rows: Sequence[NoiseRow]) -> dict[str, GradientNoise]:
    """Gradient noise by model."""
    grouped: dict[str, list[NoiseRow]] = defaultdict(list)
    for row in rows:
        grouped[row.model].append(row)
    return {model: gradient_noise(some) for model, some in grouped.items()}
