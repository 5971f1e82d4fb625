"""Exposed communication of data-parallel ranks, and the allowance for stragglers.

Theory of operation. Gradients are reduced once a step (plain, ZeRO-1) or once a micro-batch (ZeRO-2
and 3); ZeRO-3 also gathers the weights for the forward pass and, unless they are kept, again for
the backward pass. A launcher that prefetches hides such transfers behind compute, except the first
one. What hides is not free: it takes memory bandwidth and multiprocessors from the compute, in
proportion to its bytes, however slowly they travel. Copies of an expert lie on every `ep` x
`etp`-th rank only (Megatron's expert data parallelism, `ep_shard` of FSDP2 meshes): their weights
and gradients travel among those, and where there is one copy, nowhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from drystone.describe.layout import Layouts, Sharding
from drystone.estimate.time.network import (
    CommGroup,
    allreduce_seconds,
    gather_seconds,
    make_group,
    send_seconds,
)

if TYPE_CHECKING:
    from drystone.estimate.time.step import Prepared, StageCompute, StepSplit
    from drystone.estimate.time.work import Work

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


@dataclass(frozen=True, slots=True)
class RankParams:
    """Parameters of the fullest stage that one rank works on, before any sharding."""

    dense: FloatArray
    expert: FloatArray  # copies lie on every `ep` x `etp`-th rank only

    @property
    def total(self) -> FloatArray:
        """Both."""
        return self.dense + self.expert


def rank_params(work: Work, split: StepSplit) -> RankParams:
    """What the layouts leave of the model on one rank."""
    dense = (work.layer_params - work.expert_params) * split.layer_share * split.inverse_tp
    outer = work.outer_params * split.inverse_tp / np.minimum(split.pp, 2.0)
    experts = work.expert_params * split.layer_share / (split.ep * split.etp)
    return RankParams(dense + outer, experts)


def expert_copies(split: StepSplit, ranks: FloatArray) -> FloatArray:
    """Ranks that hold the same experts, where `ranks` share a copy of everything else."""
    return np.maximum(1.0, ranks * split.tp / (split.ep * split.etp))


class _Transfers:
    """Collectives over one group of data-parallel ranks, and over those with the same experts."""

    def __init__(
        self, prepared: Prepared, split: StepSplit, params: RankParams, ranks: FloatArray
    ) -> None:
        self.group = make_group(ranks, split.tp, prepared.machine)
        self._params = params
        self._experts: CommGroup | None = None
        if prepared.work.num_moe_layers:
            copies, stride = expert_copies(split, ranks), split.ep * split.etp
            self._experts = make_group(copies, stride, prepared.machine)
        self._launcher = prepared.launcher

    def gather(
        self, param_bytes: float, *, num_calls: FloatArray | float = 1.0, by_layer: bool = False
    ) -> FloatArray:
        """All-gathers or reduce-scatters; `by_layer`: by the hooks of ZeRO-3."""

        def seconds(params: FloatArray, group: CommGroup) -> FloatArray:
            num_bytes = params * param_bytes
            return gather_seconds(
                num_bytes / self._share(group) if by_layer else num_bytes,
                group,
                num_calls=num_calls,
            )

        return self._of_both(seconds)

    def allreduce(self, param_bytes: float, *, num_calls: FloatArray) -> FloatArray:
        """All-reduces of so many bytes a parameter."""
        return self._of_both(
            lambda params, group: allreduce_seconds(
                params * param_bytes, group, num_calls=num_calls
            )
        )

    def _of_both(self, seconds: Callable[[FloatArray, CommGroup], FloatArray]) -> FloatArray:
        dense = seconds(self._params.dense, self.group)
        if self._experts is None:
            return dense
        return dense + seconds(self._params.expert, self._experts)

    def _share(self, group: CommGroup) -> FloatArray:
        """Of the bandwidth that the gathers of the launcher reach."""
        launcher = self._launcher
        return np.where(group.crosses, launcher.network_gather_share, launcher.gather_share)


def data_parallel_seconds(
    prepared: Prepared,
    layouts: Layouts,
    split: StepSplit,
    stage: StageCompute,
    params: RankParams,
) -> tuple[FloatArray, FloatArray]:
    """Exposed seconds per micro-batch and per step."""
    nothing = np.zeros_like(split.tokens)
    ranks = split.dp * split.cp
    if (ranks == 1.0).all():
        return nothing, nothing
    everyone = _Transfers(prepared, split, params, ranks)
    shard = everyone
    if (layouts.shard_size != ranks).any():
        shard = _Transfers(prepared, split, params, layouts.shard_size.astype(np.float64))
    gathers = layouts.sharding == Sharding.ZERO3
    if gathers.all():
        return _gathered_seconds(prepared, layouts, split, stage, params, shard), nothing
    per_micro, per_step = _reduced_seconds(prepared, layouts, split, stage, everyone, shard)
    if not gathers.any():
        return per_micro, per_step
    gathered = _gathered_seconds(prepared, layouts, split, stage, params, shard)
    return np.where(gathers, gathered, per_micro), np.where(gathers, 0.0, per_step)


def _gathered_seconds(
    prepared: Prepared,
    layouts: Layouts,
    split: StepSplit,
    stage: StageCompute,
    params: RankParams,
    shard: _Transfers,
) -> FloatArray:
    """ZeRO-3: weights gathered for both passes, gradients scattered."""
    work, launcher = prepared.work, prepared.launcher
    layers = split.layer_share * work.num_layers
    gather = shard.gather(work.element_bytes, num_calls=layers, by_layer=True)
    gradient_bytes = work.trained_share * work.reduce_bytes
    scatter = shard.gather(gradient_bytes, num_calls=layers, by_layer=True)
    if (layouts.shard_size != split.dp * split.cp).any():
        reached = np.where(
            shard.group.crosses, launcher.network_gather_share, launcher.gather_share
        )
        whole = params.total * gradient_bytes / reached
        scatter = scatter + _replica_seconds(prepared, layouts, split, whole)
    again = np.where(layouts.keep_gathered, 0.0, gather)
    least = _min_share(prepared, split, shard.group)
    overlap = launcher.overlap_share
    return exposed_seconds(gather, overlap * stage.forward, least) + exposed_seconds(
        again + scatter, overlap * stage.backward, least
    )


def _replica_seconds(
    prepared: Prepared, layouts: Layouts, split: StepSplit, gradient_bytes: FloatArray
) -> FloatArray:
    """Hybrid sharding: each part of the gradients is also reduced among the copies."""
    copies = split.dp * split.cp / layouts.shard_size
    group = make_group(copies, split.tp * layouts.shard_size, prepared.machine)
    layers = split.layer_share * prepared.work.num_layers
    return allreduce_seconds(gradient_bytes / layouts.shard_size, group, num_calls=layers)


def _reduced_seconds(
    prepared: Prepared,
    layouts: Layouts,
    split: StepSplit,
    stage: StageCompute,
    everyone: _Transfers,
    shard: _Transfers,
) -> tuple[FloatArray, FloatArray]:
    """Plain data parallelism, ZeRO-1 and ZeRO-2: gradients reduced, new weights gathered."""
    work = prepared.work
    layers = split.layer_share * work.num_layers
    hiding = prepared.launcher.overlap_share * stage.backward
    least = _min_share(prepared, split, shard.group)
    gradient_bytes = work.trained_share * work.reduce_bytes
    whole = everyone.allreduce(gradient_bytes, num_calls=layers)
    reduce = exposed_seconds(whole, hiding, least)
    if not layouts.sharding.any():
        return np.zeros_like(reduce), reduce
    parts = shard.gather(gradient_bytes, num_calls=layers)
    scatter = exposed_seconds(parts, hiding, least)
    update = shard.gather(work.trained_share * work.element_bytes)
    every_micro = layouts.sharding == Sharding.ZERO2
    per_step = np.where(layouts.sharding == Sharding.NONE, reduce, scatter + update)
    return np.where(every_micro, scatter, 0.0), np.where(every_micro, update, per_step)


def _min_share(prepared: Prepared, split: StepSplit, group: CommGroup) -> FloatArray:
    pace = group.bandwidth_bytes_per_second / prepared.machine.intra.bandwidth_bytes_per_second
    layers = split.layer_share * prepared.work.num_layers
    return min_exposed_share(prepared.launcher.overlap_share, pace, num_layers=layers)


def pipeline_seconds(prepared: Prepared, layouts: Layouts, split: StepSplit) -> FloatArray:
    """Activations on to the next stage and gradients back, for one micro-batch, where they show."""
    work = prepared.work
    if (layouts.pp == 1).all():
        return np.zeros_like(split.tokens)
    row_bytes = split.tokens * split.row_share * (work.hidden_size * work.element_bytes)
    stride = split.tp * split.cp * split.dp
    once = send_seconds(row_bytes, split.pp, stride, prepared.machine)
    shown = 1.0 - prepared.launcher.send_hidden_share
    interleaved = 2.0 * (layouts.virtual_stages * shown * once)
    plain = np.where(split.pp > 1.0, exchange_seconds(prepared, once), 0.0)
    return np.where(layouts.virtual_stages > 1, interleaved, plain)


def exchange_seconds(prepared: Prepared, send: FloatArray) -> FloatArray:
    """Activations on and gradients back, with nothing interleaved; `send` is one message.

    Each ends with a wait of the host, so the GPU runs dry meanwhile.
    """
    return 2.0 * (send + prepared.launcher.send_host_seconds * prepared.host_slowness)
