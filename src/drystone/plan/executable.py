"""What does our own runtime execute, and what is the best of it on equal GPUs?

Data parallelism runs fully sharded and layer by layer, every layer computed again, whatever a Cell
of data parallelism alone would say; Cells that split layers or matrices run as they are
(docs/runtime.md). So on n GPUs of one type the runtime has two ways, and the faster one counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from drystone.describe.machine import Machine
from drystone.describe.model import ModelSpec, QkNorm, Side
from drystone.describe.recipe import Offload, Precision, Recipe, Tuning
from drystone.describe.trainable import check_trainable
from drystone.plan.cells.search import Cells, search_cells
from drystone.plan.plan import Plan
from drystone.plan.uneven.pairs import equal_speeds

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EqualWays:
    """The faster of both ways on each count of equal GPUs that is enough."""

    counts: IntArray
    step_seconds: FloatArray
    high_bytes: FloatArray
    cell: IntArray  # row of `cells`; -1: data parallel, layer by layer
    cells: Cells  # the best one of each count that splits layers or matrices


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
    cells = split_cells(model, recipe, machine, counts, most_micro_batch)
    row_of = {int(count): row for row, count in enumerate(cells.layouts.num_gpus)}
    cell = np.array([row_of.get(count, -1) for count in counts], dtype=np.int64)
    seconds, high_bytes = np.append(cells.step_seconds, np.inf), np.append(cells.high_bytes, 0.0)
    is_split = seconds[cell] < shared.step_seconds
    best = np.where(is_split, seconds[cell], shared.step_seconds)
    fits = np.flatnonzero(np.isfinite(best))
    return EqualWays(
        counts=np.array(counts, dtype=np.int64)[fits],
        step_seconds=best[fits],
        high_bytes=np.where(is_split, high_bytes[cell], shared.high_bytes)[fits],
        cell=np.where(is_split, cell, -1)[fits],
        cells=cells,
    )


def split_cells(
    model: ModelSpec,
    recipe: Recipe,
    machine: Machine,
    counts: tuple[int, ...],
    most_micro_batch: int = 0,
) -> Cells:
    """For each count the best Cell that splits layers or matrices and can be executed."""
    cells = search_cells(model, recipe, machine, counts, most_micro_batch=most_micro_batch)
    layouts = cells.layouts
    gaps = _gaps(
        model, recipe, tp=layouts.tp, pp=layouts.pp, cp=layouts.cp, ep=layouts.ep,
        vocab_barriers=layouts.vocab_barriers,
    )  # fmt: skip
    is_split = (layouts.tp * layouts.pp > 1) & _has_plain_blocks(model)
    return cells.take(np.flatnonzero(is_split & ~np.any(list(gaps.values()), axis=0))).best()


def marked(plan: Plan) -> Plan:
    """The plan with what the runtime cannot execute of it, if anything (docs/runtime.md)."""
    assert isinstance(plan.model, ModelSpec)  # modules have a search of their own
    layout = plan.layout
    found = _gaps(
        plan.model,
        plan.recipe,
        tp=np.array([max(stage.tp for stage in plan.stages)]),
        pp=np.array([len(plan.stages)]),
        cp=np.array([layout.cp if layout else 1]),
        ep=np.array([layout.ep if layout else 1]),
        vocab_barriers=np.array([layout.vocab_barriers if layout else 0]),
    )
    gaps = [words for words, applies in found.items() if applies[0]]
    reasons = [f"the runtime does not execute {', '.join(gaps)} yet"] if gaps else []
    if problems := check_trainable(plan.model):
        reasons.append(f"the runtime does not train this model: {'; '.join(problems)}")
    return replace(plan, not_executable="; ".join(reasons)) if reasons else plan


def _has_plain_blocks(model: ModelSpec) -> bool:
    """Whether Cells can split its layers; a script may train what `check_trainable` refuses."""
    return not model.is_moe and not any(
        block.attention.is_latent or block.side is Side.ENCODER for block in model.blocks
    )


def _gaps(
    model: ModelSpec,
    recipe: Recipe,
    *,
    tp: IntArray,
    pp: IntArray,
    cp: IntArray,
    ep: IntArray,
    vocab_barriers: IntArray,
) -> dict[str, BoolArray]:
    """What the runtime does not execute, in words, and for which of these layouts that matters."""
    of_layout = {
        "context parallelism": cp > 1,
        "expert parallelism": ep > 1,
        "a vocabulary spread over stages": vocab_barriers > 0,
        "offloaded activations of split layers": (tp * pp > 1)
        & (recipe.offload is Offload.ACTIVATIONS),
        "adapters on split matrices": (tp > 1) & (recipe.tuning is not Tuning.FULL),
        "queries normalised over split heads": (tp > 1)
        & any(block.attention.qk_norm is QkNorm.FULL for block in model.blocks),
    }
    of_all = {
        "pure fp16": recipe.precision is Precision.FP16,
        "quantised weights": recipe.tuning is Tuning.QLORA,
    }
    return of_layout | {words: np.full(len(tp), applies) for words, applies in of_all.items()}
