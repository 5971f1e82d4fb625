"""What the runtime executes of a plan space: gaps in words, Cells without them, the faster way.

A plan that is listed here is executed as it is estimated; what is not is marked with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from drystone.describe.layout import Sharding
from drystone.describe.machine import Machine
from drystone.describe.model import ModelSpec, QkNorm, Side
from drystone.describe.option import FloatArray, IntArray
from drystone.describe.recipe import (
    LOW_PRECISIONS,
    OPTIMIZERS,
    TRAINED_WEIGHT_BITS,
    Offload,
    Optimizer,
    Precision,
    Recipe,
    Recompute,
    RecomputeKind,
    Tuning,
)
from drystone.describe.trainable import check_trainable
from drystone.plan.cells.search import RECOMPUTES, Cells, search_cells
from drystone.plan.plan import Plan, Way
from drystone.plan.uneven.pairs import equal_speeds

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EqualWays:
    """The faster of both ways on each count of equal GPUs that is enough."""

    counts: IntArray
    step_seconds: FloatArray
    high_bytes: FloatArray
    cell: IntArray  # row of `cells`; -1: data parallel, layer by layer
    cells: Cells  # the best one of each count that is executed as it is


@lru_cache(maxsize=256)
def equal_ways(
    model: ModelSpec,
    recipe: Recipe,
    machine: Machine,
    counts: tuple[int, ...],
    most_micro_batch: int = 0,
) -> EqualWays:
    """What the runtime would do on each of `counts` GPUs of one type."""
    shared = equal_speeds(model, recipe, machine, counts)
    cells = executable_cells(model, recipe, machine, counts, most_micro_batch)
    row_of = {int(count): row for row, count in enumerate(cells.layouts.num_gpus)}
    cell = np.array([row_of.get(count, -1) for count in counts], dtype=np.int64)
    seconds, high_bytes = np.append(cells.step_seconds, np.inf), np.append(cells.high_bytes, 0.0)
    is_cell = seconds[cell] < shared.step_seconds
    best = np.where(is_cell, seconds[cell], shared.step_seconds)
    fits = np.flatnonzero(np.isfinite(best))
    return EqualWays(
        counts=np.array(counts, dtype=np.int64)[fits],
        step_seconds=best[fits],
        high_bytes=np.where(is_cell, high_bytes[cell], shared.high_bytes)[fits],
        cell=np.where(is_cell, cell, -1)[fits],
        cells=cells,
    )


def executable_cells(
    model: ModelSpec,
    recipe: Recipe,
    machine: Machine,
    counts: tuple[int, ...],
    most_micro_batch: int = 0,
) -> Cells:
    """For each count the best Cell that the runtime executes as it is estimated.

    One that splits layers or matrices, or that holds all weights on every GPU. Where weights must
    be divided by data parallelism alone, layer by layer over all micro-batches is the better way.
    """
    return executed_layouts(model, recipe, machine, counts, most_micro_batch).best()


def executed_layouts(
    model: ModelSpec,
    recipe: Recipe,
    machine: Machine,
    counts: tuple[int, ...],
    most_micro_batch: int = 0,
) -> Cells:
    """Cells of all layouts on so many GPUs that the runtime executes as they are estimated."""
    cells = search_cells(model, recipe, machine, counts, most_micro_batch=most_micro_batch)
    layouts = cells.layouts
    gaps = _gaps(
        model,
        recipe,
        tp=layouts.tp,
        divides_state=_divides_state(layouts.dp, layouts.pp, layouts.sharding),
        cp=layouts.cp,
        ep=layouts.ep,
        vocab_barriers=layouts.vocab_barriers,
        is_selective=cells.recompute == RECOMPUTES.index(Recompute.parse("selective")),
        is_layered=np.zeros(len(cells), dtype=bool),
    )
    is_wanted = (layouts.tp * layouts.pp > 1) | (layouts.sharding <= int(Sharding.ZERO1))
    is_wanted &= has_plain_blocks(model)
    return cells.take(np.flatnonzero(is_wanted & ~np.any(list(gaps.values()), axis=0)))


def executes_splits(
    model: ModelSpec, recipe: Recipe, tp: IntArray, dp: IntArray, recompute: IntArray
) -> BoolArray:
    """Whether the runtime executes such stages of a pipeline over groups."""
    none = np.zeros(len(tp), dtype=bool)
    one = np.ones(len(tp), dtype=np.int64)
    gaps = _gaps(
        model,
        recipe,
        tp=tp,
        divides_state=dp > 1,
        cp=one,
        ep=one,
        vocab_barriers=0 * one,
        is_selective=recompute == RECOMPUTES.index(Recompute.parse("selective")),
        is_layered=none,
    )
    found: BoolArray = ~np.any(list(gaps.values()), axis=0)
    return found


def marked(plan: Plan) -> Plan:
    """The plan with what the runtime cannot execute of it, if anything (docs/runtime.md)."""
    assert isinstance(plan.model, ModelSpec)  # modules have a search of their own
    layout = plan.layout
    found = _gaps(
        plan.model,
        plan.recipe,
        tp=np.array([max(stage.tp for stage in plan.stages)]),
        divides_state=_divides_state(
            np.array([max(stage.dp for stage in plan.stages)]),
            np.array([len(plan.stages)]),
            np.array([int(plan.sharding)]),
        ),
        cp=np.array([layout.cp if layout else 1]),
        ep=np.array([layout.ep if layout else 1]),
        vocab_barriers=np.array([layout.vocab_barriers if layout else 0]),
        is_selective=np.array([plan.recipe.recompute.kind is RecomputeKind.SELECTIVE]),
        is_layered=np.array([plan.way is Way.UNEVEN and plan.sharding is Sharding.ZERO3]),
    )
    gaps = [words for words, applies in found.items() if applies[0]]
    reasons = [f"the runtime does not execute {', '.join(gaps)} yet"] if gaps else []
    if problems := check_trainable(plan.model):
        reasons.append(f"the runtime does not train this model: {'; '.join(problems)}")
    return replace(plan, not_executable="; ".join(reasons)) if reasons else plan


def _divides_state(dp: IntArray, pp: IntArray, sharding: IntArray) -> BoolArray:
    """Whether data-parallel ranks update pieces; those of split layers always do."""
    found: BoolArray = (dp > 1) & ((sharding > 0) | (pp > 1))
    return found


def has_plain_blocks(model: ModelSpec) -> bool:
    """Whether Cells can split its layers; a script may train what `check_trainable` refuses."""
    return not any(
        block.attention.is_latent or block.side is Side.ENCODER for block in model.blocks
    )


def _gaps(
    model: ModelSpec,
    recipe: Recipe,
    *,
    tp: IntArray,
    divides_state: BoolArray,
    cp: IntArray,
    ep: IntArray,
    vocab_barriers: IntArray,
    is_selective: BoolArray,
    is_layered: BoolArray,  # layer by layer over all micro-batches
) -> dict[str, BoolArray]:
    """What the runtime does not execute, in words, and for which of these layouts that matters."""
    of_layout = {
        "context parallelism": cp > 1,
        "expert parallelism": ep > 1,
        "a vocabulary spread over stages": vocab_barriers > 0,
        "offloaded activations but layer by layer": ~is_layered
        & (recipe.offload is Offload.ACTIVATIONS),
        "selective recomputation beside adapters": is_selective
        & (recipe.tuning is not Tuning.FULL),
        f"{recipe.optimizer.value} with divided matrices": ((tp > 1) | divides_state)
        & OPTIMIZERS[recipe.optimizer].needs_whole_matrices,
        "torch.compile with split matrices": (tp > 1) & recipe.compiled,
        "experts with split matrices": (tp > 1) & model.is_moe,
        "adapters on split matrices": (tp > 1) & (recipe.tuning is not Tuning.FULL),
        "keys normalised over heads that are not split": np.logical_or.reduce(
            [
                (block.attention.qk_norm is QkNorm.FULL) & (block.attention.num_kv_heads % tp > 0)
                for block in model.blocks
            ]
        ),
    }
    of_all = {
        "pure fp16": recipe.precision is Precision.FP16,
        "multiplications in 8 or 4 bit": recipe.precision in LOW_PRECISIONS,
        f"optimizer {Optimizer.LAMB.value}": recipe.optimizer is Optimizer.LAMB,
        "quantised weights of other than 4 bits": recipe.tuning is Tuning.QLORA
        and recipe.weight_bits not in TRAINED_WEIGHT_BITS,
        "offloaded state": recipe.offload in (Offload.OPTIMIZER, Offload.STATE),
        "recomputation of single modules": bool(recipe.recompute.modules),
    }
    return of_layout | {words: np.full(len(tp), applies) for words, applies in of_all.items()}
