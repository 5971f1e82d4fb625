"""Which GPUs would do? Frenzy's question: no hardware is named, and the answer is what to get.

For each GPU type: the fewest that fit the job, the count that makes a token cheapest, and the count
that is fastest (arXiv:2412.14479; there by memory alone, here by the whole Cell search).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from drystone.describe.gpu import GpuSpec
from drystone.describe.machine import default_machine
from drystone.describe.model import ModelSpec
from drystone.describe.pool import GpuGroup
from drystone.describe.recipe import Recipe, auto_precision
from drystone.plan.cells.search import Cells, cell_plan, search_cells
from drystone.plan.options import count_grid
from drystone.plan.plan import Plan
from drystone.plan.search import priced

# One setting of micro-batches is enough to compare types; the chosen plans are searched in full.
_MOST_MICRO_BATCH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one GPU type would need."""

    gpu: str
    smallest: Plan
    cheapest: Plan  # for a token
    fastest: Plan


def find_gpus_for(
    model: ModelSpec,
    recipe: Recipe,
    gpus: Sequence[GpuSpec],
    *,
    most_gpus: int = 64,
    dollars_per_gpu_hour: Mapping[str, float] | None = None,
    chooses_precision: bool = False,
) -> list[Answer]:
    """Each type that can run the job, the cheapest for a token first."""
    prices = dollars_per_gpu_hour or {}
    answers = []
    for gpu in gpus:
        mine = replace(recipe, precision=auto_precision([gpu])) if chooses_precision else recipe
        group = GpuGroup(machine=default_machine(gpu), count=most_gpus)
        cells = search_cells(
            model, mine, group.machine, _few_counts(most_gpus), most_micro_batch=_MOST_MICRO_BATCH
        )
        if len(cells):
            answers.append(_answer(model, cells.best(), group, prices))
    return sorted(answers, key=_token_price)


def _few_counts(most: int) -> tuple[int, ...]:
    return tuple(one for one in count_grid(most) if one <= 8 or one % 4 == 0)


def _answer(model: ModelSpec, best: Cells, group: GpuGroup, prices: Mapping[str, float]) -> Answer:
    seconds, number = best.step_seconds, best.layouts.num_gpus
    rows = (int(number.argmin()), int((seconds * number).argmin()), int(seconds.argmin()))
    plans = [priced(cell_plan(model, best, row, group), prices) for row in rows]
    return Answer(gpu=group.gpu.name, smallest=plans[0], cheapest=plans[1], fastest=plans[2])


def _token_price(answer: Answer) -> tuple[bool, float, float]:
    dollars = answer.cheapest.dollars_per_billion_tokens
    return dollars is None, dollars or 0.0, answer.cheapest.step_seconds
