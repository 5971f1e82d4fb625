"""How does one job use GPUs of different kinds at once, data parallel? Cephalo's way.

Every rank runs all layers, layer by layer over its micro-batches; its share of the batch follows
its speed, and its share of weights, gradients and optimizer state follows the memory that is left
(arXiv:2411.01075). The search is `assignment`; here it is fed with our estimates, and its answer
becomes a plan. A rank's gradients are weighted by its samples, so the update equals that of one
device with the whole batch.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from drystone.describe.layout import Sharding
from drystone.describe.model import ModelSpec
from drystone.describe.pool import GpuGroup, Pool
from drystone.describe.recipe import Offload, Recipe, Recompute, RecomputeKind
from drystone.estimate.launchers import find_launcher
from drystone.estimate.layer import LayerSeconds, compute_memory_bytes, layer_seconds
from drystone.estimate.parameters import count_model
from drystone.estimate.speed import prepare
from drystone.estimate.state import state_bytes
from drystone.plan.assignment import Assignment, AssignmentShortfall, plan_assignment
from drystone.plan.assignment_spec import (
    AssignmentSpec,
    RankKind,
    RingLink,
    ShardRegime,
    ring_regimes,
)
from drystone.plan.plan import GpuNeed, Plan, RankShare, StagePlan, Way

# Micro-batches beyond this gain nothing: the GPU is full, and memory only grows.
_MOST_MICRO_BATCH = 64
# The head's forward pass, of its forward and backward passes together.
_HEAD_FORWARD_SHARE = 1 / 3


def plan_uneven(model: ModelSpec, recipe: Recipe, pool: Pool) -> Plan | AssignmentShortfall:
    """The fastest division of batch and state over all GPUs of the pool."""
    mine = replace(
        recipe, recompute=Recompute(kind=RecomputeKind.FULL), offload=Offload.ACTIVATIONS
    )
    spec = assignment_spec(model, mine, pool)
    found = plan_assignment(spec)
    if isinstance(found, AssignmentShortfall):
        return found
    return _make_plan(model, mine, pool, spec, found)


def assignment_spec(model: ModelSpec, recipe: Recipe, pool: Pool) -> AssignmentSpec:
    """The question for the search: times, memory and collectives from our estimates."""
    most = min(recipe.global_batch, _MOST_MICRO_BATCH)
    kinds = tuple(_rank_kind(model, recipe, group, pool.num_gpus, most) for group in pool.groups)
    params = count_model(model)
    state = state_bytes(recipe, find_launcher(recipe.launcher))
    per_param = state.weights + state.gradients + state.master + state.moments + state.step
    return AssignmentSpec(
        kinds=kinds,
        batch=recipe.global_batch,
        state_bytes=float(params.total * per_param),
        regimes=_regimes(model, recipe, pool, params.blocks / model.num_layers),
        may_idle=True,
    )


def slowest_ring(pool: Pool) -> RingLink:
    """The slowest part of a ring through all GPUs: between nodes all cards of a node work."""
    rates, hops = [], []
    crosses = len(pool.groups) > 1
    for group in pool.groups:
        machine = group.machine
        inside = min(group.count, machine.gpus_per_node)
        if inside > 1:
            rates.append(machine.intra.bandwidth_bytes_per_second)
            hops.append(machine.intra.latency_seconds)
        if crosses or group.count > machine.gpus_per_node:
            link = pool.between if crosses else machine.inter
            rate = min(link.bandwidth_bytes_per_second, machine.inter.bandwidth_bytes_per_second)
            rates.append(rate * inside)
            hops.append(link.latency_seconds)
    if not rates:
        return RingLink(bandwidth_bytes_per_second=1e12)
    return RingLink(bandwidth_bytes_per_second=min(rates), latency_seconds=max(hops))


def _regimes(
    model: ModelSpec, recipe: Recipe, pool: Pool, layer_params: float
) -> tuple[ShardRegime, ...]:
    work = prepare(model, recipe, pool.groups[0].machine, None).work
    return ring_regimes(
        slowest_ring(pool),
        num_ranks=pool.num_gpus,
        allgather_bytes=layer_params * work.element_bytes,
        reduce_scatter_bytes=layer_params * work.reduce_bytes,
    )


def _rank_kind(
    model: ModelSpec, recipe: Recipe, group: GpuGroup, num_ranks: int, most: int
) -> RankKind:
    machine = group.machine
    cost = layer_seconds(model, recipe, machine, micro_batch=np.arange(1, most + 1))
    forward, backward = _with_head(cost, model.num_layers)
    memory = compute_memory_bytes(
        model, recipe, machine, num_ranks=num_ranks, most_micro_batch=most
    )
    return RankKind(
        num_ranks=group.count,
        forward_seconds=np.concatenate([[0.0], forward]),
        backward_seconds=np.concatenate([[0.0], backward]),
        compute_memory_bytes=memory,
        usable_bytes=float(machine.gpu.usable_bytes),
    )


def _with_head(cost: LayerSeconds, num_layers: int) -> tuple[np.ndarray, np.ndarray]:
    """A layer with its part of the head, not faster than the host can enqueue it."""
    slow = np.maximum(1.0, cost.host / (cost.forward + cost.backward + cost.recompute))
    head = cost.head / num_layers
    forward = cost.forward * slow + head * _HEAD_FORWARD_SHARE
    return forward, cost.backward * slow + head * (1 - _HEAD_FORWARD_SHARE)


def _make_plan(
    model: ModelSpec, recipe: Recipe, pool: Pool, spec: AssignmentSpec, found: Assignment
) -> Plan:
    names = [group.gpu.name for group in pool.groups]
    shares = tuple(
        RankShare(
            gpu=names[group.kind_index],
            count=group.num_ranks,
            batch=group.batch,
            micro_batch=group.micro_batch,
            num_micro_batches=group.num_micro_batches,
            state_share=group.state_share,
        )
        for group in found.groups
    )
    items = _time_items(model, recipe, pool, found)
    return Plan(
        way=Way.UNEVEN,
        model=model,
        recipe=recipe,
        stages=(StagePlan(first_layer=0, end_layer=model.num_layers, ranks=shares),),
        needs=_needs(pool, spec, found),
        step_seconds=sum(items.values()),
        time_items=items,
        sharding=Sharding.ZERO3,
    )


def _time_items(
    model: ModelSpec, recipe: Recipe, pool: Pool, found: Assignment
) -> dict[str, float]:
    """Layers at the pace of the slowest rank, then the optimizer on the fullest rank."""
    prepared = [prepare(model, recipe, group.machine, None) for group in pool.groups]
    params = count_model(model).total
    optimizer = max(
        group.state_share * params * prepared[group.kind_index].work.optimizer_bytes
        / prepared[group.kind_index].device.bandwidth_bytes_per_second
        for group in found.groups
    )  # fmt: skip
    host = max(one.launcher.step_host_seconds * one.host_slowness for one in prepared)
    return {
        "layers": model.num_layers * found.synchronised_layer_seconds,
        "optimizer": optimizer,
        "host": host,
    }


def _needs(pool: Pool, spec: AssignmentSpec, found: Assignment) -> tuple[GpuNeed, ...]:
    needs = []
    for index, group in enumerate(pool.groups):
        mine = [one for one in found.groups if one.kind_index == index]
        held = max(one.compute_memory_bytes + one.state_share * spec.state_bytes for one in mine)
        needs.append(
            GpuNeed(
                gpu=group.gpu.name,
                count=group.count,
                required_bytes=held,
                high_bytes=held,
                usable_bytes=float(group.gpu.usable_bytes),
            )
        )
    return tuple(needs)
