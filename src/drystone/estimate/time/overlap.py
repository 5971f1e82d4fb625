"""Exposed communication of data-parallel ranks, and the allowance for stragglers.

Theory of operation. Gradients are reduced once a step (plain, ZeRO-1) or once a micro-batch (ZeRO-2
and 3); ZeRO-3 also gathers the weights for the forward pass and, unless they are kept, again for
the backward pass. A launcher that prefetches hides such transfers behind compute, except the first
one. What hides is not free: it takes memory bandwidth and multiprocessors from the compute, in
proportion to its bytes, however slowly they travel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from drystone.describe.layout import Layouts, Sharding
from drystone.estimate.time.network import Group, allreduce_seconds, gather_seconds, make_group

if TYPE_CHECKING:
    from drystone.estimate.time.step import Prepared, Split, Stage

FloatArray = npt.NDArray[np.float64]

# Of the time that a hidden transfer would take inside a node, what compute loses to it. Calibrated;
# arXiv:2304.11277 section 5 reports the effect.
_CONTENTION_SHARE = 0.63
# Spread of the pace of equal GPUs; a step waits for the slowest of n, about sqrt(2 ln n) away.
_STRAGGLER_SHARE = 0.02


def straggler_share(num_gpus: FloatArray | float) -> FloatArray:
    """Share of a step's busy time that waiting for the slowest of equal GPUs adds."""
    share: FloatArray = _STRAGGLER_SHARE * np.sqrt(2.0 * np.log(num_gpus))
    return share


def exposed_seconds(
    transfer: FloatArray | float, hiding: FloatArray | float, min_share: FloatArray | float
) -> FloatArray:
    """Seconds of a transfer that compute does not hide: at least `min_share` of it."""
    return np.maximum(transfer - hiding, transfer * min_share)


def min_exposed_share(
    overlap_share: float, pace: FloatArray | float, *, num_layers: FloatArray | float = np.inf
) -> FloatArray:
    """Share of a transfer that is exposed even behind endless compute.

    `pace` is the transfer's bandwidth over that inside a node. The first of `num_layers` transfers
    has no compute to hide behind; infinitely many where that is counted elsewhere.
    """
    contention = overlap_share * _CONTENTION_SHARE
    return np.maximum(1.0 / num_layers, 1.0 - overlap_share + contention * pace)


def data_parallel_seconds(
    prepared: Prepared, layouts: Layouts, split: Split, stage: Stage, params: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Exposed seconds per micro-batch and per step; `params`: of one rank, before sharding."""
    nothing = np.zeros_like(split.tokens)
    ranks = split.dp * split.cp
    if (ranks == 1.0).all():
        return nothing, nothing
    everyone = make_group(ranks, split.tp, prepared.machine)
    shard = everyone
    if (layouts.shard_size != ranks).any():
        shard = make_group(layouts.shard_size.astype(np.float64), split.tp, prepared.machine)
    gathers = layouts.sharding == Sharding.ZERO3
    if gathers.all():
        return _gathered_seconds(prepared, layouts, split, stage, params, shard), nothing
    per_micro, per_step = _reduced_seconds(prepared, layouts, split, stage, params, everyone, shard)
    if not gathers.any():
        return per_micro, per_step
    gathered = _gathered_seconds(prepared, layouts, split, stage, params, shard)
    return np.where(gathers, gathered, per_micro), np.where(gathers, 0.0, per_step)


def _gathered_seconds(
    prepared: Prepared,
    layouts: Layouts,
    split: Split,
    stage: Stage,
    params: FloatArray,
    shard: Group,
) -> FloatArray:
    """ZeRO-3: weights gathered for both passes, gradients scattered."""
    work, launcher = prepared.work, prepared.launcher
    reached = np.where(shard.crosses, launcher.network_gather_share, launcher.gather_share)
    layers = split.layer_share * work.num_layers
    gather = gather_seconds(params * work.element_bytes / reached, shard, num_calls=layers)
    gradient_bytes = params * (work.trained_share * work.reduce_bytes) / reached
    scatter = gather_seconds(gradient_bytes, shard, num_calls=layers)
    if (layouts.shard_size != split.dp * split.cp).any():
        scatter = scatter + _replica_seconds(prepared, layouts, split, gradient_bytes)
    again = np.where(layouts.keep_gathered, 0.0, gather)
    least = _min_share(prepared, split, shard)
    overlap = launcher.overlap_share
    return exposed_seconds(gather, overlap * stage.forward, least) + exposed_seconds(
        again + scatter, overlap * stage.backward, least
    )


def _replica_seconds(
    prepared: Prepared, layouts: Layouts, split: Split, gradient_bytes: FloatArray
) -> FloatArray:
    """Hybrid sharding: each part of the gradients is also reduced among the copies."""
    copies = split.dp * split.cp / layouts.shard_size
    group = make_group(copies, split.tp * layouts.shard_size, prepared.machine)
    layers = split.layer_share * prepared.work.num_layers
    return allreduce_seconds(gradient_bytes / layouts.shard_size, group, num_calls=layers)


def _reduced_seconds(
    prepared: Prepared,
    layouts: Layouts,
    split: Split,
    stage: Stage,
    params: FloatArray,
    everyone: Group,
    shard: Group,
) -> tuple[FloatArray, FloatArray]:
    """Plain data parallelism, ZeRO-1 and ZeRO-2: gradients reduced, new weights gathered."""
    work = prepared.work
    layers = split.layer_share * work.num_layers
    trained = params * work.trained_share
    hiding = prepared.launcher.overlap_share * stage.backward
    least = _min_share(prepared, split, shard)
    gradient_bytes = trained * work.reduce_bytes
    whole = allreduce_seconds(gradient_bytes, everyone, num_calls=layers)
    reduce = exposed_seconds(whole, hiding, least)
    if not layouts.sharding.any():
        return np.zeros_like(reduce), reduce
    parts = gather_seconds(gradient_bytes, shard, num_calls=layers)
    scatter = exposed_seconds(parts, hiding, least)
    update = gather_seconds(trained * work.element_bytes, shard)
    every_micro = layouts.sharding == Sharding.ZERO2
    per_step = np.where(layouts.sharding == Sharding.NONE, reduce, scatter + update)
    return np.where(every_micro, scatter, 0.0), np.where(every_micro, update, per_step)


def _min_share(prepared: Prepared, split: Split, group: Group) -> FloatArray:
    pace = group.bandwidth_bytes_per_second / prepared.machine.intra.bandwidth_bytes_per_second
    layers = split.layer_share * prepared.work.num_layers
    return min_exposed_share(prepared.launcher.overlap_share, pace, num_layers=layers)
