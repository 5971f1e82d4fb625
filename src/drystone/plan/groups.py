"""How does one job use GPUs of different kinds at once, as a pipeline over groups of equal ones?

For clusters whose groups are joined by slow links: only activations cross them, once a micro-batch.
Each group has its own number of stages, its own tensor and data parallelism and its own layers (as
HexiScale, Metis and Zorse do). The search guesses the time of every combination of group splits in
one array operation, then works out the most promising ones exactly: memory, whole layers, order of
the groups. Layers are divided by `layer_shares`; a stage's memory is that of `estimate.memory`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np
import numpy.typing as npt

from drystone.describe.layout import Layouts, Sharding
from drystone.describe.model import ModelSpec
from drystone.describe.pool import Pool
from drystone.describe.recipe import Recipe
from drystone.estimate.memory import estimate_memory
from drystone.estimate.speed import prepare
from drystone.plan.cells import RECOMPUTES
from drystone.plan.group_splits import GroupSplit, group_splits, guess_seconds
from drystone.plan.layer_shares import share_layers
from drystone.plan.plan import GpuNeed, Plan, RankShare, StagePlan, Way
from drystone.plan.space import divisors

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_MOST_MICRO_BATCH = 64
# Combinations worked out exactly, the most promising first, and when to stop before.
_MOST_EXACT = 48
_HOPELESS = 1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    splits: tuple[GroupSplit, ...]  # in pipeline order
    layers: IntArray  # per stage
    recipe: Recipe
    micro_batch: int
    step_seconds: float
    items: dict[str, float]


def plan_groups(model: ModelSpec, recipe: Recipe, pool: Pool) -> Plan | None:
    """The fastest pipeline found over all groups of the pool, or None if none fits."""
    if len(pool.groups) > model.num_layers:
        return None
    best: _Found | None = None
    for candidate in _candidates(model, recipe, pool):
        if best is not None and candidate.guess_seconds > _HOPELESS * best.step_seconds:
            break
        found = _work_out(model, candidate.recipe, candidate.splits, candidate.micro_batch)
        best = _better(best, found)
    return None if best is None else _make_plan(model, pool, best)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    guess_seconds: float
    splits: tuple[GroupSplit, ...]
    recipe: Recipe
    micro_batch: int


def _candidates(model: ModelSpec, recipe: Recipe, pool: Pool) -> list[_Candidate]:
    """The most promising combinations of group splits, micro-batch and recomputation."""
    candidates: list[_Candidate] = []
    sizes = [one for one in divisors(recipe.global_batch) if one <= _MOST_MICRO_BATCH]
    for recompute in RECOMPUTES:
        mine = replace(recipe, recompute=recompute)
        for micro_batch in sizes:
            options = [group_splits(model, mine, pool, group, micro_batch) for group in pool.groups]
            if not all(options):
                continue
            guesses = guess_seconds(
                model.num_layers, options, -(-recipe.global_batch // micro_batch)
            )
            nearest = np.argpartition(guesses, min(_MOST_EXACT, guesses.size - 1), axis=None)
            for flat in nearest[:_MOST_EXACT]:
                if not np.isfinite(guesses.flat[flat]):
                    continue
                indices = np.unravel_index(int(flat), guesses.shape)
                chosen = tuple(one[int(i)] for one, i in zip(options, indices, strict=True))
                candidates.append(
                    _Candidate(
                        guess_seconds=float(guesses.flat[flat]),
                        splits=chosen,
                        recipe=mine,
                        micro_batch=micro_batch,
                    )
                )
    candidates.sort(key=lambda one: one.guess_seconds)
    return candidates[:_MOST_EXACT]


def _better(one: _Found | None, other: _Found | None) -> _Found | None:
    if one is None or other is None:
        return one or other
    return other if other.step_seconds < one.step_seconds else one


def _work_out(
    model: ModelSpec, recipe: Recipe, chosen: tuple[GroupSplit, ...], micro_batch: int
) -> _Found | None:
    """The best order of the groups, with layers divided as memory allows."""
    if sum(split.num_stages for split in chosen) > model.num_layers:
        return None
    if len(chosen) <= 3:
        orders = list(permutations(chosen))
    else:  # most memory first, since the first stages keep most micro-batches
        orders = [tuple(sorted(chosen, key=lambda one: -one.group.gpu.usable_bytes))]
    found: _Found | None = None
    for order in orders:
        found = _better(found, _divide(model, recipe, order, micro_batch))
    return found


def _divide(
    model: ModelSpec, recipe: Recipe, order: tuple[GroupSplit, ...], micro_batch: int
) -> _Found | None:
    stages = [split for split in order for _ in range(split.num_stages)]
    per_layer = np.array([split.layer_seconds for split in stages])
    other = np.array([split.send_seconds for split in stages])
    other[-1] += stages[-1].head_seconds
    most = _most_layers(model, recipe, stages)
    layers = share_layers(model.num_layers, per_layer, other, most)
    if layers is None or not _fits(model, recipe, stages, layers):
        return None
    seconds = per_layer * layers + other
    num_micro = -(-recipe.global_batch // micro_batch)
    items = {
        "stages": float(num_micro * seconds.max()),
        "pipeline_bubble": float(seconds.sum() - seconds.max()),
        "data_parallel": _reduce_seconds(model, recipe, stages, layers),
        "host": max(_host_seconds(model, recipe, split) for split in order),
    }
    return _Found(
        splits=order,
        layers=layers,
        recipe=recipe,
        micro_batch=micro_batch,
        step_seconds=sum(items.values()),
        items=items,
    )


def _stage_layouts(stages: list[GroupSplit], repeat: int = 1) -> Layouts:
    dp = np.repeat([split.dp for split in stages], repeat)
    tp = np.repeat([split.tp for split in stages], repeat)
    micro = np.repeat([split.local_micro for split in stages], repeat)
    return Layouts.build(
        dp=dp,
        tp=tp,
        pp=len(stages),
        micro_batch=micro,
        sharding=np.where(dp > 1, int(Sharding.ZERO1), int(Sharding.NONE)),
        sequence_parallel=tp > 1,
    )


def _stage_high_bytes(
    model: ModelSpec, recipe: Recipe, stages: list[GroupSplit], layers: IntArray
) -> FloatArray:
    """The upper end of what a rank of each stage needs; shape as `layers`, (stages, ...)."""
    repeat = layers.size // len(stages)
    index = np.repeat(np.arange(len(stages)), repeat)
    flat = layers.reshape(-1)
    memory = estimate_memory(
        model, recipe, _stage_layouts(stages, repeat), stage=index, layers=(flat * 0, flat)
    )
    return memory.required_range().high.reshape(layers.shape)


def _most_layers(model: ModelSpec, recipe: Recipe, stages: list[GroupSplit]) -> IntArray:
    """How many layers each stage holds: memory grows with a stage's layers along a line."""
    few, many = 1, max(2, model.num_layers // len(stages))
    tried = np.broadcast_to(np.array([few, many]), (len(stages), 2))
    high = _stage_high_bytes(model, recipe, stages, np.ascontiguousarray(tried))
    usable = np.array([split.group.gpu.usable_bytes for split in stages], dtype=np.float64)
    slope = np.maximum((high[:, 1] - high[:, 0]) / (many - few), 1.0)
    return np.floor(few + (usable - high[:, 0]) / slope).astype(np.int64)


def _fits(model: ModelSpec, recipe: Recipe, stages: list[GroupSplit], layers: IntArray) -> bool:
    high = _stage_high_bytes(model, recipe, stages, layers)
    usable = np.array([split.group.gpu.usable_bytes for split in stages])
    return bool((high <= usable).all())


def _reduce_seconds(
    model: ModelSpec, recipe: Recipe, stages: list[GroupSplit], layers: IntArray
) -> float:
    """Gradients of the slowest stage to reduce and weights to gather, once a step."""
    slowest = 0.0
    for split, number in zip(stages, layers, strict=True):
        if split.dp == 1:
            continue
        work = prepare(model, recipe, split.group.machine, None).work
        machine = split.group.machine
        params = work.layer_params / work.num_layers * int(number) / split.tp
        crosses = split.tp * split.dp > machine.gpus_per_node
        rate = machine.intra.bandwidth_bytes_per_second
        if crosses:
            cards = max(1, machine.gpus_per_node // split.tp)
            rate = min(rate, machine.inter.bandwidth_bytes_per_second * cards)
        moved = params * (work.reduce_bytes + work.element_bytes) * (split.dp - 1) / split.dp
        slowest = max(slowest, moved / rate)
    return slowest


def _host_seconds(model: ModelSpec, recipe: Recipe, split: GroupSplit) -> float:
    prepared = prepare(model, recipe, split.group.machine, None)
    return prepared.launcher.step_host_seconds * prepared.host_slowness


def _make_plan(model: ModelSpec, pool: Pool, found: _Found) -> Plan:
    recipe: Recipe = found.recipe
    stages = [split for split in found.splits for _ in range(split.num_stages)]
    ends = np.cumsum(found.layers)
    num_micro = -(-recipe.global_batch // found.micro_batch)
    plans = tuple(
        StagePlan(
            first_layer=int(end - number),
            end_layer=int(end),
            tp=split.tp,
            ranks=(
                RankShare(
                    gpu=split.group.gpu.name,
                    count=split.tp * split.dp,
                    batch=split.local_micro * num_micro,
                    micro_batch=split.local_micro,
                    num_micro_batches=num_micro,
                    state_share=1 / (split.tp * split.dp),
                ),
            ),
        )
        for split, number, end in zip(stages, found.layers, ends, strict=True)
    )
    return Plan(
        way=Way.GROUPS,
        model=model,
        recipe=recipe,
        stages=plans,
        needs=_needs(model, recipe, pool, stages, found.layers),
        step_seconds=found.step_seconds,
        time_items=found.items,
        sharding=Sharding.ZERO1,
        sequence_parallel=any(split.tp > 1 for split in stages),
    )


def _needs(
    model: ModelSpec, recipe: Recipe, pool: Pool, stages: list[GroupSplit], layers: IntArray
) -> tuple[GpuNeed, ...]:
    high = _stage_high_bytes(model, recipe, stages, layers)
    needs = []
    for group in pool.groups:
        mine = [index for index, split in enumerate(stages) if split.group == group]
        worst = max(mine, key=lambda index: high[index])
        needs.append(
            GpuNeed(
                gpu=group.gpu.name,
                count=sum(stages[index].tp * stages[index].dp for index in mine),
                required_bytes=float(high[worst]),
                high_bytes=float(high[worst]),
                usable_bytes=float(group.gpu.usable_bytes),
                stage=worst,
            )
        )
    return tuple(needs)
