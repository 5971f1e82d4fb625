"""Cells with unlike stages: equal GPUs as a pipeline, each stage with its own layers, dp and tp.

Crius lets every stage of a Cell decide its layers, its GPUs and their dp x tp (arXiv:2403.16125).
Stages that follow each other and are split alike form a run. All of n GPUs are divided into up to
two runs (three on up to 8 GPUs, so on up to 5 into any stages there could be), and the search over
groups (`plan/groups`) finds the fastest: runs are groups of one type. Micro-batches are of one size
over the whole pipeline; stages pass them on however they divide them. Tensor-parallel ranks stay in
a node. Only what the runtime executes is searched.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np

from drystone.describe.model import ModelSpec
from drystone.describe.option import IntArray
from drystone.describe.pool import GpuGroup, Pool
from drystone.describe.recipe import Recipe
from drystone.plan.cells.search import RECOMPUTES
from drystone.plan.executable import executes_splits, has_plain_blocks
from drystone.plan.groups.bounds import BoolArray
from drystone.plan.groups.pipelines import (
    host_seconds,
    memory_fits,
    micro_batch_sizes,
    pipeline_plan,
)
from drystone.plan.groups.search import Pipeline, PipelineSearch
from drystone.plan.groups.splits import GroupSplits, Setting, full_splits
from drystone.plan.plan import Plan

_MAX_GPUS_OF_THREE_RUNS: Final = 8
_SIMPLER: Final = 0.999  # of two ways that take about the same time, the simpler one
_MAX_GPUS: Final = 128  # beyond, stages of unlike size are not looked for


@lru_cache(maxsize=1024)
def plan_unlike_stages(
    model: ModelSpec, recipe: Recipe, group: GpuGroup, *, below_seconds: float = float("inf")
) -> Plan | None:
    """The fastest pipeline over all GPUs of the group that really takes less than so long."""
    if not 2 <= group.count <= _MAX_GPUS or not has_plain_blocks(model):
        return None
    mine = _one_network(group)
    pool = Pool(groups=(mine,), between=mine.machine.inter)
    settings = _settings(model, recipe, pool)
    best: Pipeline | None = None
    for num_runs in range(1, 4 if group.count <= _MAX_GPUS_OF_THREE_RUNS else 3):
        question = PipelineSearch(
            settings=[_in_runs(setting, num_runs) for setting in settings],
            num_layers=model.num_layers,
            host_seconds=host_seconds(model, recipe, mine),
            orders=(tuple(range(num_runs)),),
            accepts=lambda found: memory_fits(model, recipe, pool, found),
            below_seconds=_SIMPLER * below_seconds if best is None else best.step_seconds,
            may_combine=_Runs(mine),
        )
        best = question.solve() or best
    return None if best is None else pipeline_plan(model, recipe, pool, best)


def _one_network(group: GpuGroup) -> GpuGroup:
    """What joins two runs: the links inside a node where all GPUs are in one."""
    machine = group.machine
    if group.count > machine.gpus_per_node:
        return group
    return replace(group, machine=replace(machine, inter=machine.intra))


def _settings(model: ModelSpec, recipe: Recipe, pool: Pool) -> list[Setting]:
    """All runs of a recomputation and a size of micro-batch, of any number of GPUs."""
    [group] = pool.groups
    sizes = micro_batch_sizes(recipe)
    counts = tuple(range(1, group.count + 1))
    settings = []
    for index, recompute in enumerate(RECOMPUTES):
        own = replace(recipe, recompute=recompute)
        splits = full_splits(model, own, group, pool.between, sizes, counts)
        kinds = np.full(len(splits.tp), index)
        holds = splits.held_layers[np.arange(len(kinds)), splits.num_stages] > 0
        is_open = holds & executes_splits(model, recipe, splits.tp, splits.dp, kinds)
        if group.count > group.machine.gpus_per_node:
            is_open &= group.machine.gpus_per_node % splits.tp == 0
        settings += [
            Setting(
                splits=splits,
                choices=(np.flatnonzero(is_open & (splits.micro_batch == size)),),
                num_micro=recipe.global_batch // size,
                recompute_index=index,
            )
            for size in sizes
        ]
    return settings


def _in_runs(setting: Setting, number: int) -> Setting:
    """So many runs; one alone has several stages, for a single stage is a plain Cell."""
    [rows] = setting.choices
    if number == 1:
        rows = rows[setting.splits.num_stages[rows] > 1]
    return replace(setting, choices=(rows,) * number)


@dataclass(frozen=True, slots=True)
class _Runs:
    """Which runs make up a pipeline: they take all GPUs, and no tensor is split across nodes."""

    group: GpuGroup

    def __call__(self, splits: GroupSplits, choices: tuple[IntArray, ...]) -> BoolArray:
        first = np.zeros((1,) * len(choices), dtype=np.int64)  # GPUs of earlier runs
        allowed = np.ones((1,) * len(choices), dtype=bool)
        for axis, rows in enumerate(choices):
            shape = [1] * len(choices)
            shape[axis] = -1
            if self.group.count > self.group.machine.gpus_per_node:
                allowed = allowed & (first % splits.tp[rows].reshape(shape) == 0)
            first = first + splits.num_gpus[rows].reshape(shape)
        complete: BoolArray = allowed & (first == self.group.count)
        return complete
