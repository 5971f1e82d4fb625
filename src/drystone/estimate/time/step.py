"""Arithmetic of one training step, itemised: many layouts, or ranks that work layer by layer.

The formulas behind `speed`, which has the theory; the planner of unlike GPUs uses them too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from drystone.describe.generations import Generation
from drystone.describe.layout import Layouts, Sharding
from drystone.describe.machine import Machine
from drystone.describe.model import ModelSpec
from drystone.describe.recipe import LOW_PRECISIONS, Offload, Recipe, Tuning
from drystone.estimate.imbalance import fullest_excess
from drystone.estimate.launchers import LauncherEfficiency
from drystone.estimate.time.compute import Device, make_device
from drystone.estimate.time.experts import (
    ExpertHabits,
    dispatch_seconds,
    expert_habits,
    routed_tokens,
)
from drystone.estimate.time.network import allreduce_seconds, make_group
from drystone.estimate.time.overlap import (
    RankParams,
    data_parallel_seconds,
    expert_copies,
    exposed_seconds,
    min_exposed_share,
    pipeline_seconds,
    rank_params,
    straggler_share,
)
from drystone.estimate.time.work import Pass, Work, make_work

if TYPE_CHECKING:
    from drystone.estimate.learned.profile import LayerCorrection

FloatArray = npt.NDArray[np.float64]

# Memory bandwidth of a host, as one of eight GPUs sees it in an optimizer step on the host.
_HOST_BYTES_PER_SECOND = 25e9
_BACKWARD_HOST_SHARE = 1.0  # host time of a layer's backward pass over its forward pass
_ADAPTER_HOST_SECONDS = 1.2e-3  # at most, to enqueue a layer with adapters; calibrated
_FP8_HOST_SHARE = 0.55  # host time that quantising adds to a layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What model, recipe and machine fix before any layout is known."""

    work: Work
    device: Device
    machine: Machine
    recipe: Recipe
    launcher: LauncherEfficiency
    experts: ExpertHabits
    host_slowness: float
    correction: LayerCorrection | None = None  # by what was measured of this model

    @property
    def step_host_seconds(self) -> float:
        """The host's own work once a step: data, clipping, logging."""
        return self.launcher.step_host_seconds * self.host_slowness


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """Seconds of each item of a step, one entry a layout."""

    matmul: FloatArray
    attention: FloatArray
    memory_bound: FloatArray
    recompute: FloatArray
    launch_bound: FloatArray
    tensor_parallel: FloatArray
    context_parallel: FloatArray
    expert_parallel: FloatArray
    data_parallel: FloatArray
    pipeline_send: FloatArray
    pipeline_bubble: FloatArray
    optimizer: FloatArray
    host: FloatArray
    straggler: FloatArray
    total: FloatArray
    tokens_per_step: FloatArray
    num_gpus: FloatArray


def prepare_step(
    model: ModelSpec,
    recipe: Recipe,
    machine: Machine,
    *,
    gpu: Generation,
    launcher: LauncherEfficiency,
) -> Prepared:
    """The part of an estimate that no layout changes."""
    device = make_device(machine.gpu, recipe.precision, gpu)
    return Prepared(
        work=make_work(model, recipe, device, launcher),
        device=device,
        machine=machine,
        recipe=recipe,
        launcher=launcher,
        experts=expert_habits(recipe, launcher),
        host_slowness=gpu.host_slowness,
    )


@dataclass(frozen=True, slots=True)
class StepSplit:
    """The layouts as floats, and what follows from them alone."""

    tp: FloatArray
    cp: FloatArray
    dp: FloatArray
    pp: FloatArray
    ep: FloatArray
    etp: FloatArray
    micro: FloatArray
    inverse_tp: FloatArray
    row_share: FloatArray  # of a hidden row that a rank holds outside of attention and mlp
    tokens: FloatArray  # of a micro-batch on one rank
    sequences: FloatArray  # the same as attention sees it: micro / cp
    num_micro: FloatArray
    layer_share: FloatArray  # of all layers, in the fullest stage
    routed_share: FloatArray  # of a micro-batch's tokens that one rank sends to experts
    fullest: FloatArray  # load of the fullest expert-parallel rank over the mean


@dataclass(frozen=True, slots=True)
class StageCompute:
    """Seconds of one micro-batch in one pipeline stage."""

    matmul: FloatArray
    attention: FloatArray
    memory: FloatArray
    recompute: FloatArray
    forward: FloatArray  # of the above, what data-parallel gathers can hide behind
    backward: FloatArray


def split_layouts(layouts: Layouts, recipe: Recipe, work: Work) -> StepSplit:
    """What the formulas need of the layouts, computed once."""
    tp, pp = layouts.tp.astype(np.float64), layouts.pp.astype(np.float64)
    dp, cp = layouts.dp.astype(np.float64), layouts.cp.astype(np.float64)
    micro = layouts.micro_batch.astype(np.float64)
    ep, etp = layouts.ep.astype(np.float64), layouts.etp.astype(np.float64)
    inverse_tp = 1.0 / tp
    sequences = micro / cp
    return StepSplit(
        tp=tp,
        cp=cp,
        dp=dp,
        pp=pp,
        ep=ep,
        etp=etp,
        micro=micro,
        inverse_tp=inverse_tp,
        row_share=np.where(layouts.sequence_parallel, inverse_tp, 1.0),
        tokens=sequences * work.tokens_per_sequence,
        sequences=sequences,
        num_micro=np.maximum(1.0, np.ceil(recipe.global_batch / (dp * micro))),
        layer_share=np.ceil(work.num_layers / pp) / work.num_layers,
        routed_share=etp * inverse_tp,
        fullest=1.0 + fullest_excess(recipe, work.num_experts, ep),
    )


def step_seconds(prepared: Prepared, layouts: Layouts) -> StepSeconds:
    """One step of every layout."""
    work = prepared.work
    split = split_layouts(layouts, prepared.recipe, work)
    stage = stage_seconds(prepared, split)
    bandwidth = prepared.device.bandwidth_bytes_per_second
    spreads_vocabulary = layouts.vocab_barriers > 0  # arXiv:2411.05288: each stage has a part of it
    head_share = np.where(spreads_vocabulary, 1.0 / split.pp, 1.0)
    head_matmul = work.head.seconds(split.tokens, split.inverse_tp) * head_share
    head_memory = split.tokens * split.inverse_tp * (work.head_bytes / bandwidth) * head_share
    tensor, context, expert = layer_communication(prepared, split)
    local_params = rank_params(work, split)
    per_micro, per_step = data_parallel_seconds(prepared, layouts, split, stage, local_params)
    send = pipeline_seconds(prepared, layouts, split)
    accumulate = local_params.total * (work.trained_share * work.accumulate_bytes / bandwidth)
    layers = stage.matmul + stage.attention + stage.memory + stage.recompute
    body = layers + tensor + context + expert + per_micro + send
    busy = body + head_matmul + head_memory + accumulate
    launch = np.maximum(0.0, host_seconds(prepared, split, layouts) - busy)
    m = split.num_micro
    others = np.where(spreads_vocabulary, busy, body) + launch
    bubble = (split.pp - 1.0) * others / layouts.virtual_stages
    num_gpus = split.tp * split.cp * split.dp * split.pp
    straggler = m * busy * straggler_share(num_gpus)
    optimizer = _layout_optimizer_seconds(prepared, layouts, split, local_params)
    host = np.full(len(m), prepared.step_host_seconds)
    return StepSeconds(
        matmul=m * (stage.matmul + head_matmul),
        attention=m * stage.attention,
        memory_bound=m * (stage.memory + head_memory + accumulate),
        recompute=m * stage.recompute,
        launch_bound=m * launch,
        tensor_parallel=m * tensor,
        context_parallel=m * context,
        expert_parallel=m * expert,
        data_parallel=m * per_micro + per_step,
        pipeline_send=m * send,
        pipeline_bubble=bubble,
        optimizer=optimizer,
        host=host,
        straggler=straggler,
        total=m * (busy + launch) + straggler + bubble + per_step + optimizer + host,
        tokens_per_step=m * split.dp * split.micro * work.counted_tokens_per_sequence,
        num_gpus=num_gpus,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayeredStep:
    """A step of ranks that run each layer for all their micro-batches, in seconds."""

    layers: FloatArray  # compute
    exposed: FloatArray  # gathers and scatters beyond what compute hides
    busy: FloatArray  # both
    straggler_share: FloatArray  # of `busy`
    host: float


def layered_step(
    prepared: Sequence[Prepared],  # of each GPU type
    *,
    num_ranks: FloatArray | int,
    forward: FloatArray | float,  # of one layer, on the slowest rank
    backward: FloatArray | float,  # with recomputation
    gather: FloatArray | float,  # a layer's weights, before each pass
    scatter: FloatArray | float,  # its gradients
    pace: FloatArray | float,  # bandwidth between all ranks over that inside a node
) -> LayeredStep:
    """Every layer at the pace of the slowest rank; the optimizer is not in it."""
    launcher, num = prepared[0].launcher, prepared[0].work.num_layers
    overlap = launcher.overlap_share
    least = min_exposed_share(overlap, np.minimum(1.0, pace), num_layers=num)
    exposed = exposed_seconds(gather, overlap * forward, least) + exposed_seconds(
        gather + scatter, overlap * backward, least
    )
    return LayeredStep(
        layers=np.asarray(num * (forward + backward)),
        exposed=num * exposed,
        busy=num * (forward + backward + exposed),
        straggler_share=straggler_share(num_ranks),
        host=max(each.step_host_seconds for each in prepared),
    )


def _pass_seconds(
    prepared: Prepared, split: StepSplit, direction: Pass
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Multiplications, attention and memory-bound work of all layers in one direction."""
    matmul = direction.matmul.seconds(split.tokens, split.inverse_tp)
    if prepared.work.num_moe_layers:
        rows = routed_tokens(prepared, split)
        matmul = matmul + direction.experts.seconds(rows, 1.0 / split.etp)
    attention = split.sequences * split.inverse_tp * direction.attention_seconds
    per_second = 1.0 / prepared.device.bandwidth_bytes_per_second
    memory = split.tokens * (
        split.row_share * (direction.hidden_bytes * per_second)
        + split.inverse_tp * (direction.split_bytes * per_second)
    )
    if direction.routed_bytes:
        moved = split.tokens * split.inverse_tp * split.fullest
        memory = memory + moved * (direction.routed_bytes * per_second)
    if direction.weight_bytes:
        memory = memory + split.inverse_tp * (direction.weight_bytes * per_second)
    return matmul, attention, memory


def stage_seconds(prepared: Prepared, split: StepSplit) -> StageCompute:
    """What the layers of the fullest stage compute for one micro-batch, without the head."""
    work, share = prepared.work, split.layer_share
    matmul, attention, memory = _pass_seconds(prepared, split, work.forward)
    matmul_back, attention_back, memory_back = _pass_seconds(prepared, split, work.backward)
    if prepared.correction is not None:
        there, back = prepared.correction.at(split.micro)
        matmul, attention, memory = there * matmul, there * attention, there * memory
        matmul_back, attention_back = back * matmul_back, back * attention_back
        memory_back = back * memory_back
    forward = matmul + attention + memory
    recompute = (
        matmul * work.recompute_share
        + attention * work.recompute_attention_share
        + memory * work.recompute_memory_share
    )
    backward = matmul_back + attention_back + memory_back
    return StageCompute(
        matmul=share * (matmul + matmul_back),
        attention=share * (attention + attention_back),
        memory=share * (memory + memory_back),
        recompute=share * recompute,
        forward=share * forward,
        backward=share * (backward + recompute),
    )


def layer_communication(
    prepared: Prepared, split: StepSplit
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Tensor-, context- and expert-parallel time of one micro-batch in one stage."""
    work, machine = prepared.work, prepared.machine
    zero = np.zeros_like(split.tokens)
    layers = split.layer_share * work.num_layers
    passes = 2.0 + work.recompute_share
    row_bytes = split.tokens * (work.hidden_size * work.element_bytes)
    tensor = context = zero
    if (split.tp > 1.0).any():
        group = make_group(split.tp, 1.0, machine)
        shown = 1.0 - prepared.launcher.tensor_hidden_share
        tensor = layers * (2.0 * passes * shown) * allreduce_seconds(row_bytes, group)
    if (split.cp > 1.0).any():
        ring = make_group(split.cp, split.tp, machine)
        keys = split.tokens * split.inverse_tp * work.kv_bytes_per_token * (split.cp - 1.0)
        moved = keys / ring.bandwidth_bytes_per_second + (split.cp - 1.0) * 15e-6
        once = split.sequences * split.inverse_tp * split.layer_share
        there = np.maximum(
            layers * moved - once * work.forward.attention_seconds, 0.2 * layers * moved
        )
        context = np.where(split.cp > 1.0, 3.0 * there, 0.0)
    return tensor, context, dispatch_seconds(prepared, split)


def optimizer_seconds(prepared: Prepared, num_params: FloatArray | float) -> FloatArray:
    """One GPU's update of so many trained parameters."""
    per_param = prepared.work.optimizer_bytes / prepared.device.bandwidth_bytes_per_second
    return np.asarray(num_params * per_param)


def _layout_optimizer_seconds(
    prepared: Prepared, layouts: Layouts, split: StepSplit, params: RankParams
) -> FloatArray:
    work, recipe = prepared.work, prepared.recipe
    ranks = layouts.shard_size.astype(np.float64)
    shared: FloatArray = params.dense / ranks
    if work.num_moe_layers:
        shared = shared + params.expert / expert_copies(split, ranks)
    mine = np.where(layouts.sharding > 0, shared, params.total) * work.trained_share
    seconds = optimizer_seconds(prepared, mine)
    if recipe.offload in (Offload.OPTIMIZER, Offload.STATE) and recipe.tuning is Tuning.FULL:
        # Gradients to the host, new weights back, and the host's own pass over its states.
        bus = prepared.machine.gpu.bus_bytes_per_second
        seconds = mine * (work.reduce_bytes + work.element_bytes) / bus + mine * (
            28.0 / _HOST_BYTES_PER_SECOND
        )
    return seconds


def host_seconds(prepared: Prepared, split: StepSplit, layouts: Layouts) -> FloatArray:
    """What the host needs to enqueue one micro-batch of the fullest stage."""
    work = prepared.work
    passes = 1.0 + _BACKWARD_HOST_SHARE + work.recompute_memory_share
    launcher = prepared.launcher
    sharded = layouts.sharding == Sharding.ZERO3
    extra = (
        1.0
        + launcher.tensor_host_share * (split.tp > 1.0)
        + launcher.context_host_share * (split.cp > 1.0)
        + launcher.shard_host_share * sharded
        + _FP8_HOST_SHARE * (prepared.recipe.precision in LOW_PRECISIONS)
    )
    layers = split.layer_share * work.num_layers * extra + 1.0  # one for what is around them
    sends = 2.0 * layouts.virtual_stages * launcher.send_host_seconds * (split.pp > 1.0)
    layer_seconds = launcher.layer_host_seconds
    if prepared.recipe.tuning is not Tuning.FULL:  # no hooks on gradients that are never made
        layer_seconds = min(layer_seconds, _ADAPTER_HOST_SECONDS)
    experts = prepared.experts
    per_layer = layer_seconds * passes * experts.layer_host_share
    moe_layers = split.layer_share * work.num_moe_layers
    routing = moe_layers * passes * experts.host_seconds
    seconds: FloatArray = (layers * per_layer + routing + sends) * prepared.host_slowness
    return seconds
