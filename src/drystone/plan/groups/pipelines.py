"""Plans that use GPUs of different kinds at once: a pipeline over groups of equal ones.

For clusters whose groups are joined by slow links: only activations cross them, once a micro-batch.
Each group has its own number of stages, its own tensor and data parallelism and its own layers (as
HexiScale, Metis and Zorse do). The space: 1, 2, 3, 4, 6, 8, 12 or 16 stages a group, any tensor
parallelism that stays in a node, the rest (or as much as is of use) data parallel with ZeRO-1,
micro-batches that divide the batch, any recomputation, the groups in any order. For more than three
groups it is smaller: 1, 2, 4 or 8 stages each, no GPU idle that could be one more data-parallel
rank, those with most memory first. `search` finds the optimum of this space.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from drystone.describe.layout import Layouts, Sharding
from drystone.describe.model import ModelSpec
from drystone.describe.pool import GpuGroup, Pool, make_pool
from drystone.describe.recipe import Recipe
from drystone.estimate.memory.peak import MemoryEstimates, estimate_memory, workspace_bytes
from drystone.estimate.time.speed import prepare
from drystone.plan.cells.search import RECOMPUTES
from drystone.plan.cells.space import divisors
from drystone.plan.groups.search import (
    ALL_ORDERS,
    Pipeline,
    PipelineSearch,
    group_orders,
)
from drystone.plan.groups.splits import (
    STAGES_OF_MANY,
    Setting,
    group_sharding,
    group_splits,
    join_splits,
)
from drystone.plan.plan import GpuNeed, Plan, RankShare, StagePlan, Way

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_MAX_MICRO_BATCH = 64


def plan_groups(model: ModelSpec, recipe: Recipe, pool: Pool) -> Plan | None:
    """The fastest pipeline over all groups of the pool, or None if none fits."""
    if len(pool.groups) > model.num_layers:
        return None
    # By name, so that the order in which groups are given decides no tie.
    ordered = sorted(pool.groups, key=lambda group: group.gpu.name)
    mine = make_pool(ordered, between=pool.between)
    question = pipeline_search(model, recipe, mine)
    best = question.solve()
    return None if best is None else pipeline_plan(model, recipe, mine, best)


def pipeline_search(model: ModelSpec, recipe: Recipe, pool: Pool) -> PipelineSearch:
    """The question for the search, from our estimates."""
    sizes = micro_batch_sizes(recipe)
    counts = np.array([group.count for group in pool.groups])
    settings = []
    for index, recompute in enumerate(RECOMPUTES):
        own = replace(recipe, recompute=recompute)
        splits = join_splits(
            [group_splits(model, own, group, pool.between, sizes) for group in pool.groups]
        )
        # Not even at the end of the pipeline would each stage hold a layer: no need to try.
        holds = splits.held_layers[np.arange(len(splits.tp)), splits.num_stages]
        is_open = holds > 0
        if len(pool.groups) > ALL_ORDERS:
            available = counts[splits.group_index] // (splits.num_stages * splits.tp)
            is_open &= splits.dp == np.minimum(available, splits.micro_batch)
            is_open &= np.isin(splits.num_stages, STAGES_OF_MANY)
        settings += [
            Setting(
                splits=splits,
                choices=tuple(
                    np.flatnonzero(
                        is_open & (splits.micro_batch == size) & (splits.group_index == group)
                    )
                    for group in range(len(pool.groups))
                ),
                num_micro=recipe.global_batch // size,
                recompute_index=index,
            )
            for size in sizes
        ]

    return PipelineSearch(
        settings=settings,
        num_layers=model.num_layers,
        host_seconds=max(host_seconds(model, recipe, group) for group in pool.groups),
        orders=group_orders(tuple(group.gpu.usable_bytes for group in pool.groups)),
        accepts=lambda found: memory_fits(model, recipe, pool, found),
    )


def micro_batch_sizes(recipe: Recipe) -> tuple[int, ...]:
    """Micro-batches of a whole pipeline that are tried."""
    return tuple(size for size in divisors(recipe.global_batch) if size <= _MAX_MICRO_BATCH)


def host_seconds(model: ModelSpec, recipe: Recipe, group: GpuGroup) -> float:
    """Seconds of the host, once a step."""
    return prepare(model, recipe, group.machine, None).step_host_seconds


def memory_fits(model: ModelSpec, recipe: Recipe, pool: Pool, found: Pipeline) -> bool:
    """Whether each stage fits with the layers that it really has."""
    high = _stage_memory(model, recipe, pool, found).required_range().high
    groups = found.setting.splits.group_index[found.rows]
    usable = [pool.groups[index].gpu.usable_bytes for index in groups]
    return bool((high <= np.array(usable)).all())


def _stage_memory(model: ModelSpec, recipe: Recipe, pool: Pool, found: Pipeline) -> MemoryEstimates:
    """What a rank of each stage needs with the layers that it really has."""
    splits, rows, layers = found.setting.splits, found.rows, found.layers
    layouts = Layouts.build(
        dp=splits.dp[rows],
        tp=splits.tp[rows],
        pp=len(rows),
        micro_batch=splits.local_micro[rows],
        sharding=group_sharding(splits.dp[rows]),
        sequence_parallel=splits.tp[rows] > 1,
    )
    ends = np.cumsum(layers)
    # Architectures differ only in library workspaces; the largest stands for all.
    gpu = max((group.gpu for group in pool.groups), key=workspace_bytes)
    own = replace(recipe, recompute=RECOMPUTES[found.setting.recompute_index])
    return estimate_memory(
        model, own, layouts, stage=np.arange(len(rows)), layers=(ends - layers, ends), gpu=gpu
    )


def pipeline_plan(model: ModelSpec, recipe: Recipe, pool: Pool, best: Pipeline) -> Plan:
    """A pipeline that was worked out, as a plan on a pool with just its groups."""
    splits, num_micro = best.setting.splits, best.setting.num_micro
    stages = tuple(
        StagePlan(
            first_layer=int(end - number),
            end_layer=int(end),
            tp=int(splits.tp[row]),
            ranks=(
                RankShare(
                    gpu=pool.groups[splits.group_index[row]].gpu.name,
                    count=int(splits.tp[row] * splits.dp[row]),
                    batch=int(splits.local_micro[row]) * num_micro,
                    micro_batch=int(splits.local_micro[row]),
                    num_micro_batches=num_micro,
                    state_share=1 / int(splits.tp[row] * splits.dp[row]),
                ),
            ),
        )
        for row, number, end in zip(best.rows, best.layers, np.cumsum(best.layers), strict=True)
    )
    slowest = float(best.stage_seconds.max())
    items = {
        "stages": num_micro * slowest,
        "pipeline_bubble": float(best.stage_seconds.sum()) - slowest,
        "straggler": num_micro * slowest * best.straggler_share,
        "data_parallel_and_optimizer": best.tail_seconds,
        "host": max(host_seconds(model, recipe, group) for group in pool.groups),
    }
    return Plan(
        way=Way.GROUPS,
        model=model,
        recipe=replace(recipe, recompute=RECOMPUTES[best.setting.recompute_index]),
        stages=stages,
        needs=_needs(model, recipe, pool, best),
        step_seconds=sum(items.values()),
        time_items=items,
        sharding=Sharding.ZERO1,
        sequence_parallel=bool((splits.tp[best.rows] > 1).any()),
    )


def _needs(model: ModelSpec, recipe: Recipe, pool: Pool, best: Pipeline) -> tuple[GpuNeed, ...]:
    splits = best.setting.splits
    memory = _stage_memory(model, recipe, pool, best)
    high, items = memory.required_range().high, memory.items()
    needs = []
    for index, group in enumerate(pool.groups):
        mine = np.flatnonzero(splits.group_index[best.rows] == index)
        worst = int(mine[high[mine].argmax()])
        rows = best.rows[mine]
        needs.append(
            GpuNeed(
                gpu=group.gpu.name,
                count=int((splits.tp[rows] * splits.dp[rows]).sum()),
                required_bytes=float(memory.required[worst]),
                high_bytes=float(high[worst]),
                usable_bytes=float(group.gpu.usable_bytes),
                stage=worst,
                items={name: float(array[worst]) for name, array in items.items()},
            )
        )
    return tuple(needs)
