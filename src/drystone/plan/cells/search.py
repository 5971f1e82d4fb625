"""What is the best way to run one job on n equal GPUs? Crius's Cells, searched as arrays.

A Cell fixes the GPU type, the count and the number of pipeline stages; what is left open is how
each stage splits its work: data, tensor, context and expert parallelism, micro-batch, recomputation
and sharding (arXiv:2403.16125). Here every layout of every count is estimated in one array call per
kind of recomputation, memory first; speed only for those that fit. So the answer is the optimum of
the estimate over the whole space, and no heuristic can miss it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from drystone.describe.layout import Layout, Layouts, Schedule, Sharding
from drystone.describe.machine import Machine
from drystone.describe.model import ModelSpec
from drystone.describe.pool import GpuGroup
from drystone.describe.recipe import Recipe, Recompute, RecomputeKind
from drystone.estimate.learned.residuals import memory_range
from drystone.estimate.memory.peak import estimate_memory, workspace_bytes
from drystone.estimate.time.speed import estimate_speed
from drystone.plan.cells.space import enumerate_layouts
from drystone.plan.plan import GpuNeed, Plan, RankShare, StagePlan, Way

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

RECOMPUTES = (
    Recompute(kind=RecomputeKind.NONE),
    Recompute(kind=RecomputeKind.SELECTIVE),
    Recompute(kind=RecomputeKind.FULL),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cells:
    """The layouts of one job on one GPU type that fit, each with its time and memory."""

    recipe: Recipe
    layouts: Layouts
    recompute: IntArray  # index into RECOMPUTES
    step_seconds: FloatArray
    high_bytes: FloatArray  # the upper end of what each GPU needs
    nearest: NearestMiss | None  # what came closest, where a count has no layout that fits

    def __len__(self) -> int:
        return len(self.step_seconds)

    def counts(self) -> IntArray:
        """The numbers of GPUs for which something fits, ascending."""
        return np.array(sorted(set(self.layouts.num_gpus.tolist())), dtype=np.int64)

    def best(self) -> Cells:
        """For each count the fastest layout; ties go to less memory, then to the simpler split."""
        counts = self.layouts.num_gpus
        fastest = np.full(int(counts.max(initial=0)) + 1, np.inf)
        np.minimum.at(fastest, counts, self.step_seconds)
        tied = self.take(np.flatnonzero(self.step_seconds == fastest[counts]))
        layouts = tied.layouts
        order = np.lexsort(
            (
                layouts.virtual_stages,
                layouts.sharding,
                layouts.pp,
                layouts.tp,
                tied.high_bytes,
                layouts.num_gpus,
            )
        )
        is_first = np.diff(layouts.num_gpus[order], prepend=0) > 0
        return tied.take(order[is_first])

    def take(self, indices: IntArray) -> Cells:
        """Some of them."""
        return replace(
            self,
            layouts=take_layouts(self.layouts, indices),
            recompute=self.recompute[indices],
            step_seconds=self.step_seconds[indices],
            high_bytes=self.high_bytes[indices],
        )

    def layout(self, index: int) -> Layout:
        """One of them as a plain layout."""
        return layout_at(self.layouts, index)

    def recipe_of(self, index: int) -> Recipe:
        """The recipe with the recomputation that this one needs."""
        return replace(self.recipe, recompute=RECOMPUTES[int(self.recompute[index])])


@dataclass(frozen=True, slots=True, kw_only=True)
class NearestMiss:
    """The layout that lacked least."""

    layout: Layout
    recompute: Recompute
    missing_bytes: float
    stage: int


def search_cells(
    model: ModelSpec,
    recipe: Recipe,
    machine: Machine,
    counts: tuple[int, ...],
    *,
    recomputes: tuple[Recompute, ...] = RECOMPUTES,
    most_micro_batch: int = 0,
) -> Cells:
    """All layouts that fit, on any of `counts` GPUs of one machine type."""
    found: list[Cells] = []
    for recompute in recomputes:
        mine = replace(recipe, recompute=recompute)
        space = _measure_space(model, mine, machine.gpus_per_node, counts, most_micro_batch)
        found.append(_estimate(model, mine, machine, space, RECOMPUTES.index(recompute)))
    return _join(recipe, found)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Space:
    """Every layout for nodes of one size, and the memory that each takes on any GPU."""

    layouts: Layouts
    required_bytes: FloatArray  # without library workspaces, which differ by architecture
    stage: IntArray  # the hungriest


@lru_cache(maxsize=64)
def _measure_space(
    model: ModelSpec,
    recipe: Recipe,
    gpus_per_node: int,
    counts: tuple[int, ...],
    most_micro_batch: int,
) -> _Space:
    layouts = enumerate_layouts(
        model,
        seq_len=recipe.seq_len,
        global_batch=recipe.global_batch,
        gpus_per_node=gpus_per_node,
        counts=counts,
        most_micro_batch=most_micro_batch,
    )
    if not len(layouts):
        return _Space(
            layouts=layouts, required_bytes=np.zeros(0), stage=np.zeros(0, dtype=np.int64)
        )
    memory = estimate_memory(model, recipe, layouts)
    return _Space(
        layouts=layouts, required_bytes=memory.required - memory.workspace, stage=memory.stage
    )


def _estimate(
    model: ModelSpec, recipe: Recipe, machine: Machine, space: _Space, recompute: int
) -> Cells:
    """Memory for all, speed for those that fit."""
    layouts, gpu = space.layouts, machine.gpu
    if not len(layouts):
        empty = np.zeros(0)
        return Cells(
            recipe=recipe,
            layouts=layouts,
            recompute=np.zeros(0, dtype=np.int64),
            step_seconds=empty,
            high_bytes=empty,
            nearest=None,
        )
    high = (space.required_bytes + workspace_bytes(gpu)) * memory_range()[1]
    fitting = np.flatnonzero(high <= gpu.usable_bytes)
    closest = int(high.argmin())
    nearest = NearestMiss(
        layout=layout_at(layouts, closest),
        recompute=RECOMPUTES[recompute],
        missing_bytes=float(high[closest] - gpu.usable_bytes),
        stage=int(space.stage[closest]),
    )
    chosen = take_layouts(layouts, fitting)
    seconds = (
        estimate_speed(model, recipe, chosen, machine).step_seconds if len(chosen) else np.zeros(0)
    )
    return Cells(
        recipe=recipe,
        layouts=chosen,
        recompute=np.full(len(chosen), recompute, dtype=np.int64),
        step_seconds=seconds,
        high_bytes=high[fitting],
        nearest=nearest,
    )


def _join(recipe: Recipe, parts: list[Cells]) -> Cells:
    names = [field.name for field in fields(Layouts)]
    joined = {name: np.concatenate([getattr(p.layouts, name) for p in parts]) for name in names}
    misses = [part.nearest for part in parts if part.nearest is not None]
    return Cells(
        recipe=recipe,
        layouts=Layouts(**joined),
        recompute=np.concatenate([part.recompute for part in parts]),
        step_seconds=np.concatenate([part.step_seconds for part in parts]),
        high_bytes=np.concatenate([part.high_bytes for part in parts]),
        nearest=min(misses, key=lambda miss: miss.missing_bytes, default=None),
    )


def take_layouts(layouts: Layouts, indices: IntArray) -> Layouts:
    """Some of the layouts."""
    return Layouts(
        **{field.name: getattr(layouts, field.name)[indices] for field in fields(Layouts)}
    )


def layout_at(layouts: Layouts, index: int) -> Layout:
    """One of many as a plain layout."""
    virtual = int(layouts.virtual_stages[index])
    ranks = int(layouts.dp[index] * layouts.cp[index])
    shard = int(layouts.shard_size[index])
    usual_etp = int(layouts.tp[index]) if layouts.ep[index] == 1 else 1
    if layouts.gpipe[index]:
        schedule = Schedule.GPIPE
    else:
        schedule = Schedule.INTERLEAVED if virtual > 1 else Schedule.ONE_F_ONE_B
    return Layout(
        dp=int(layouts.dp[index]),
        tp=int(layouts.tp[index]),
        pp=int(layouts.pp[index]),
        cp=int(layouts.cp[index]),
        ep=int(layouts.ep[index]),
        etp=0 if int(layouts.etp[index]) == usual_etp else int(layouts.etp[index]),
        micro_batch=int(layouts.micro_batch[index]),
        sharding=Sharding(int(layouts.sharding[index])),
        shard_size=0 if shard == ranks else shard,
        sequence_parallel=bool(layouts.sequence_parallel[index]),
        schedule=schedule,
        virtual_stages=virtual,
        keep_gathered=bool(layouts.keep_gathered[index]),
        vocab_barriers=int(layouts.vocab_barriers[index]),
    )


def cell_plan(model: ModelSpec, cells: Cells, index: int, group: GpuGroup) -> Plan:
    """One Cell as a plan."""
    layout, recipe = cells.layout(index), cells.recipe_of(index)
    layouts = Layouts.of([layout])
    memory = estimate_memory(model, recipe, layouts, gpu=group.gpu)
    speed = estimate_speed(model, recipe, layouts, group.machine).row(0)
    rank_batch = -(-recipe.global_batch // layout.dp)
    per_stage = layout.num_gpus // layout.pp
    shards = per_stage if layout.sharding is Sharding.ZERO3 else layout.tp
    share = RankShare(
        gpu=group.gpu.name,
        count=per_stage,
        batch=rank_batch,
        micro_batch=layout.micro_batch,
        num_micro_batches=rank_batch // layout.micro_batch,
        state_share=1 / shards,
    )
    return Plan(
        way=Way.CELL,
        model=model,
        recipe=recipe,
        layout=layout,
        stages=_equal_stages(model, layout.pp, share, tp=layout.tp, cp=layout.cp, ep=layout.ep),
        needs=(
            GpuNeed(
                gpu=group.gpu.name,
                count=layout.num_gpus,
                required_bytes=float(memory.required[0]),
                high_bytes=float(memory.required_range().high[0]),
                usable_bytes=float(group.gpu.usable_bytes),
                stage=int(memory.stage[0]),
                items={name: float(array[0]) for name, array in memory.items().items()},
            ),
        ),
        step_seconds=speed.step_seconds,
        time_items=speed.items,
        sharding=layout.sharding,
        sequence_parallel=layout.sequence_parallel,
        schedule=layout.schedule,
        virtual_stages=layout.virtual_stages,
    )


def _equal_stages(
    model: ModelSpec, pp: int, share: RankShare, *, tp: int, cp: int, ep: int
) -> tuple[StagePlan, ...]:
    each, more = divmod(model.num_layers, pp)
    stages, start = [], 0
    for stage in range(pp):
        end = start + each + (stage < more)
        stages.append(
            StagePlan(first_layer=start, end_layer=end, ranks=(share,), tp=tp, cp=cp, ep=ep)
        )
        start = end
    return tuple(stages)
