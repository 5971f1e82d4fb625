"""Plans that use GPUs of different kinds at once, data parallel: Cephalo's way.

Every rank runs all layers, layer by layer over its micro-batches; its share of the batch follows
its speed, and its share of weights, gradients and optimizer state follows the memory that is left
(arXiv:2411.01075). The search is `assignment`; here it is fed with our estimates, and its answer
becomes a plan. A rank's gradients are weighted by its samples, so the update equals that of one
device with the whole batch.

What shows of collectives behind compute is as `estimate/time/overlap.py` has it for equal GPUs, so
that plans of all ways compare. It grows with the collectives' time, which the regime of shards
fixes, and a step grows with compute. So under each regime the assignment with the least compute is
the fastest, and a regime is only searched if the least compute of all regimes leaves it a chance.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from drystone.describe.layout import Sharding
from drystone.describe.model import ModelSpec, ModuleSpec
from drystone.describe.pool import GpuGroup, Pool
from drystone.describe.recipe import OPTIMIZERS, Recipe
from drystone.estimate.layer import (
    LayerSeconds,
    compute_memory_bytes,
    layer_seconds,
    rank_bytes,
    sharded_state_bytes,
)
from drystone.estimate.learned.residuals import memory_range
from drystone.estimate.memory.layer_major import layer_major_recipe
from drystone.estimate.time.network import Ring, make_ring
from drystone.estimate.time.speed import prepare
from drystone.estimate.time.step import Prepared, layered_step, optimizer_seconds
from drystone.plan.plan import GpuNeed, Plan, RankShare, StagePlan, Way
from drystone.plan.uneven.assignment import (
    Assignment,
    AssignmentShortfall,
    RankGroup,
    plan_assignment,
)
from drystone.plan.uneven.spec import (
    AssignmentSpec,
    RankKind,
    RingLink,
    ShardRegime,
    ring_regimes,
)
from drystone.plan.uneven.whole import whole_memory_bytes, whole_pass_seconds, whole_recipes

FloatArray = npt.NDArray[np.float64]

# Micro-batches beyond this gain nothing: the GPU is full, and memory only grows.
_MAX_MICRO_BATCH = 64


def plan_uneven(model: ModelSpec, recipe: Recipe, pool: Pool) -> Plan | AssignmentShortfall:
    """The fastest division of batch and state over all GPUs of the pool.

    With the state divided and layer by layer, or, where that fits and is faster, all of it on each.
    """
    if OPTIMIZERS[recipe.optimizer].needs_whole_matrices and pool.num_gpus > 1:
        return _plan_whole(model, recipe, pool)
    layered = _plan_layered(model, recipe, pool)
    whole = _plan_whole(model, recipe, pool) if len(pool.groups) > 1 else layered
    if not isinstance(whole, Plan):
        return layered
    if isinstance(layered, Plan) and layered.step_seconds <= whole.step_seconds:
        return layered
    return whole


def _plan_layered(model: ModelSpec, recipe: Recipe, pool: Pool) -> Plan | AssignmentShortfall:
    mine = layer_major_recipe(recipe)
    spec = assignment_spec(model, mine, pool)
    loosest = min(spec.regimes, key=lambda regime: (regime.least_share, -regime.largest_share))
    least = _least_compute(spec, loosest)
    if isinstance(least, AssignmentShortfall):
        return least
    best, best_items = least, _time_items(model, mine, pool, spec, least)
    for regime in spec.regimes:
        bound = _time_items(model, mine, pool, spec, replace(least, regime=regime))
        if _but_optimizer(bound) >= sum(best_items.values()):
            continue
        found = _least_compute(spec, regime)
        if isinstance(found, Assignment):
            items = _time_items(model, mine, pool, spec, found)
            if sum(items.values()) < sum(best_items.values()):
                best, best_items = found, items
    needs = _needs(model, mine, pool, spec, best)
    return make_plan(model, mine, pool, best, items=best_items, needs=needs)


def _plan_whole(model: ModelSpec, recipe: Recipe, pool: Pool) -> Plan | AssignmentShortfall:
    """The fastest with all state on every rank; or by how much the leanest of them does not fit."""
    plans: list[Plan] = []
    shortfall = AssignmentShortfall(
        reason="whole weights with offload cannot be executed", short_bytes=0.0
    )
    for mine in whole_recipes(recipe):
        spec = _whole_spec(model, mine, pool)
        found = _least_compute(spec, spec.regimes[0])
        if not isinstance(found, Assignment):
            shortfall = found
            continue
        found = replace(
            found, groups=tuple(replace(group, state_share=1.0) for group in found.groups)
        )
        items = _time_items(model, mine, pool, spec, found)
        needs = tuple(
            GpuNeed(
                gpu=group.gpu.name,
                count=group.count,
                required_bytes=high_bytes / memory_range()[1],
                high_bytes=high_bytes,
                usable_bytes=float(group.gpu.usable_bytes),
            )
            for group, _, high_bytes in hungriest_ranks(pool, spec, found)
        )
        plans.append(
            make_plan(model, mine, pool, found, items=items, needs=needs, sharding=Sharding.NONE)
        )
    return min(plans, key=lambda plan: plan.step_seconds) if plans else shortfall


def _whole_spec(model: ModelSpec, recipe: Recipe, pool: Pool) -> AssignmentSpec:
    """The question with no state to divide: what a rank needs is all in its micro-batch."""
    sizes = np.arange(1, min(recipe.global_batch, _MAX_MICRO_BATCH) + 1)
    kinds = []
    for group in pool.groups:
        forward, backward = whole_pass_seconds(model, recipe, group.machine, sizes)
        memory = whole_memory_bytes(model, recipe, group.machine, sizes, num_ranks=pool.num_gpus)
        kinds.append(
            RankKind(
                num_ranks=group.count,
                forward_seconds=np.concatenate([[0.0], forward]),
                # The search adds a forward pass to the backward one, for recomputation.
                backward_seconds=np.concatenate([[0.0], np.maximum(backward - forward, 0.0)]),
                compute_memory_bytes=np.concatenate([memory[:1], memory]),
                usable_bytes=float(group.gpu.usable_bytes),
            )
        )
    prepared = prepare(model, recipe, pool.groups[0].machine, None)
    work = prepared.work
    params = (work.layer_params + work.outer_params) / work.num_layers
    gradient_bytes = params * work.trained_share * work.reduce_bytes
    once = slowest_ring(pool).collective_seconds(
        gradient_bytes / _reached_share(prepared, pool), num_ranks=pool.num_gpus
    )
    return AssignmentSpec(
        kinds=tuple(kinds),
        batch=recipe.global_batch,
        state_bytes=0.0,
        regimes=(ShardRegime(name="replicated", reduce_scatter_seconds=2.0 * once),),
        may_idle=True,
    )


def _least_compute(spec: AssignmentSpec, regime: ShardRegime) -> Assignment | AssignmentShortfall:
    """The assignment with the least compute time whose shards are within the regime's bounds."""
    free = replace(regime, allgather_seconds=0.0, reduce_scatter_seconds=0.0)
    found = plan_assignment(replace(spec, regimes=(free,)))
    return replace(found, regime=regime) if isinstance(found, Assignment) else found


def _but_optimizer(items: dict[str, float]) -> float:
    return sum(seconds for name, seconds in items.items() if name != "optimizer")


def assignment_spec(model: ModelSpec, recipe: Recipe, pool: Pool) -> AssignmentSpec:
    """The question for the search: times, memory and collectives from our estimates."""
    most = min(recipe.global_batch, _MAX_MICRO_BATCH)
    return AssignmentSpec(
        kinds=tuple(_rank_kind(model, recipe, group, pool.num_gpus, most) for group in pool.groups),
        batch=recipe.global_batch,
        state_bytes=sharded_state_bytes(model, recipe, pool.groups[0].machine),
        regimes=_regimes(model, recipe, pool),
        may_idle=True,
    )


def pool_ring(pool: Pool) -> Ring:
    """The ring through all GPUs of the pool."""
    between = pool.between if len(pool.groups) > 1 else None
    machines = [group.machine for group in pool.groups]
    return make_ring(machines, [group.count for group in pool.groups], between)


def slowest_ring(pool: Pool) -> RingLink:
    """The same as one slowest link between neighbours."""
    ring = pool_ring(pool)
    if np.isinf(ring.bandwidth_bytes_per_second):
        return RingLink(bandwidth_bytes_per_second=1e12)
    return RingLink(
        bandwidth_bytes_per_second=float(ring.bandwidth_bytes_per_second),
        latency_seconds=float(ring.hops_seconds) / max(1, pool.num_gpus - 1),
    )


def _regimes(model: ModelSpec, recipe: Recipe, pool: Pool) -> tuple[ShardRegime, ...]:
    """A layer's collectives, each with its part of embedding and head."""
    prepared = prepare(model, recipe, pool.groups[0].machine, None)
    work = prepared.work
    params = (work.layer_params + work.outer_params) / work.num_layers
    reached = _reached_share(prepared, pool)
    return ring_regimes(
        slowest_ring(pool),
        num_ranks=pool.num_gpus,
        allgather_bytes=params * work.element_bytes / reached,
        reduce_scatter_bytes=params * work.trained_share * work.reduce_bytes / reached,
    )


def _reached_share(prepared: Prepared, pool: Pool) -> float:
    """Of a link's bandwidth, what the launcher's gathers reach."""
    alone = len(pool.groups) == 1
    inside = alone and pool.groups[0].count <= pool.groups[0].machine.gpus_per_node
    launcher = prepared.launcher
    return launcher.gather_share if inside else launcher.network_gather_share


def _rank_kind(
    model: ModelSpec, recipe: Recipe, group: GpuGroup, num_ranks: int, most: int
) -> RankKind:
    machine = group.machine
    cost = layer_seconds(
        model,
        recipe,
        machine,
        micro_batch=np.arange(1, most + 1),
        sharding=Sharding.ZERO3 if num_ranks > 1 else Sharding.NONE,
    )
    forward, backward = pass_seconds_of(cost, model.num_layers)
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


def pass_seconds_of(cost: LayerSeconds, num_layers: int) -> tuple[FloatArray, FloatArray]:
    """Forward, and backward without recomputation, not faster than the host can enqueue.

    Backward has a layer's part of embedding and head, which are not computed again.
    """
    slow = np.maximum(1.0, cost.host / cost.busy)
    outer = (cost.head + cost.embedding) / num_layers
    return cost.forward * slow, cost.backward * slow + outer


def make_plan(
    model: ModelSpec | ModuleSpec,
    recipe: Recipe,
    pool: Pool,
    found: Assignment,
    *,
    items: dict[str, float],
    needs: tuple[GpuNeed, ...],
    sharding: Sharding = Sharding.ZERO3,
    reason: str = "",
) -> Plan:
    """An assignment of batch and state as a plan: one stage with every layer on every rank."""
    shares = tuple(
        RankShare(
            gpu=pool.groups[group.kind_index].gpu.name,
            count=group.num_ranks,
            batch=group.batch,
            micro_batch=group.micro_batch,
            num_micro_batches=group.num_micro_batches,
            state_share=group.state_share,
        )
        for group in found.groups
    )
    return Plan(
        way=Way.UNEVEN,
        model=model,
        recipe=recipe,
        stages=(StagePlan(first_layer=0, end_layer=model.num_layers, ranks=shares),),
        needs=needs,
        step_seconds=sum(items.values()),
        time_items=items,
        sharding=sharding,
        reason=reason,
    )


def hungriest_ranks(
    pool: Pool, spec: AssignmentSpec, found: Assignment
) -> list[tuple[GpuGroup, RankGroup, float]]:
    """For each GPU type the ranks that need most, and the bytes that the search counted."""
    worst = []
    for index, group in enumerate(pool.groups):
        high_bytes = {
            rank: rank.compute_memory_bytes + rank.state_share * spec.state_bytes
            for rank in found.groups
            if rank.kind_index == index
        }
        rank = max(high_bytes, key=lambda rank: high_bytes[rank])
        worst.append((group, rank, high_bytes[rank]))
    return worst


def _time_items(
    model: ModelSpec, recipe: Recipe, pool: Pool, spec: AssignmentSpec, found: Assignment
) -> dict[str, float]:
    """Layers at the pace of the slowest rank, then the optimizer on the fullest rank."""
    prepared = [prepare(model, recipe, group.machine, None) for group in pool.groups]
    forward, backward = 0.0, 0.0
    for group in found.groups:
        kind, number = spec.kinds[group.kind_index], group.num_micro_batches
        there = number * float(kind.forward_seconds[group.micro_batch])
        forward = max(forward, there)
        backward = max(backward, there + number * float(kind.backward_seconds[group.micro_batch]))
    step = layered_step(
        prepared,
        num_ranks=pool.num_gpus,
        forward=forward,
        backward=backward,
        gather=found.regime.allgather_seconds,
        scatter=found.regime.reduce_scatter_seconds,
        pace=pool_ring(pool).pace,
    )
    return {
        "layers": float(step.layers),
        "data_parallel": float(step.exposed),
        "straggler": float(step.straggler_share * step.busy),
        "optimizer": max(
            group.state_share * full_update_seconds(prepared[group.kind_index])
            for group in found.groups
        ),
        "host": step.host,
    }


def full_update_seconds(prepared: Prepared) -> float:
    """One GPU's update of all trained parameters."""
    return float(optimizer_seconds(prepared, prepared.work.trained_params))


def _needs(
    model: ModelSpec, recipe: Recipe, pool: Pool, spec: AssignmentSpec, found: Assignment
) -> tuple[GpuNeed, ...]:
    """Of the hungriest rank of each type; the search counted with no less."""
    _, high = memory_range()
    needs = []
    for group, worst, _ in hungriest_ranks(pool, spec, found):
        state = worst.state_share * spec.state_bytes / high
        required = rank_bytes(
            model,
            recipe,
            group.machine,
            num_ranks=pool.num_gpus,
            micro_batch=worst.micro_batch,
            state_share=worst.state_share,
        )
        needs.append(
            GpuNeed(
                gpu=group.gpu.name,
                count=group.count,
                required_bytes=required,
                high_bytes=required * high,
                usable_bytes=float(group.gpu.usable_bytes),
                items={"compute": required - state, "state": state},
            )
        )
    return tuple(needs)
