"""Answers about one job: its ranked plans, the GPUs that would do, and ways out if nothing fits.

`plan` is `drystone.plan(...)`. `find_gpus_for` is Frenzy's question (arXiv:2412.14479; there by
memory alone, here by the whole Cell search): for each GPU type, the fewest that fit the job, the
count that makes a token cheapest, and the count that is fastest. `refuse` tries every way out with
the same search before it offers it: a shorter sequence, a leaner optimizer state, more GPUs of the
same type, or another type. They are ordered by what they add to the price, then by how much they
change of what was asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from drystone.describe.catalogue import load_gpus
from drystone.describe.gpu import GpuSpec
from drystone.describe.machine import default_machine
from drystone.describe.model import ModelSpec
from drystone.describe.model_source import ModuleReference, resolve_model
from drystone.describe.pool import GpuGroup, Pool, parse_pool
from drystone.describe.recipe import Offload, Optimizer, Recipe, Tuning, auto_precision
from drystone.errors import InvalidSpec, NothingFits
from drystone.plan.cells.search import Cells, cell_plan, search_cells
from drystone.plan.options import count_grid
from drystone.plan.plan import Plan
from drystone.plan.search import Miss, PlanList, plan_job, priced
from drystone.units import format_bytes


def plan(
    model: str | ModelSpec,
    gpus: str | Pool,
    recipe: Recipe | None = None,
    *,
    dollars_per_gpu_hour: Mapping[str, float] | None = None,
    chooses_precision: bool | None = None,
) -> PlanList:
    """The ranked plans of a model on GPUs, the fastest first.

    `model` is a name, a path to a config or a `ModelSpec`; `gpus` as in `8xA100-80G,8xV100-32G`.
    Without a recipe: 256 sequences of 4096 tokens, or the model's context if that is shorter; the
    precision is chosen unless a recipe is given. Raises `NothingFits` with the nearest miss and the
    cheapest ways out.
    """
    found = resolve_model(model) if isinstance(model, str) else model
    if isinstance(found, ModuleReference):
        raise InvalidSpec("a Python function cannot be planned", where=str(model))
    pool = parse_pool(gpus) if isinstance(gpus, str) else gpus
    chooses = recipe is None if chooses_precision is None else chooses_precision
    wanted = recipe or Recipe(seq_len=min(found.context_length or 4096, 4096), global_batch=256)
    answer = plan_job(
        found,
        wanted,
        pool,
        dollars_per_gpu_hour=dollars_per_gpu_hour,
        chooses_precision=chooses,
    )
    if not answer.plans:
        refusal = refuse(found, wanted, pool, answer, dollars_per_gpu_hour=dollars_per_gpu_hour)
        raise refusal.error()
    return answer


# One setting of micro-batches is enough to compare types; the chosen plans are searched in full.
_MAX_MICRO_BATCH = 8


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
            model, mine, group.machine, _few_counts(most_gpus), most_micro_batch=_MAX_MICRO_BATCH
        )
        if len(cells):
            answers.append(_answer(model, cells.best(), group, prices))
    return sorted(answers, key=_token_price)


def _few_counts(most: int) -> tuple[int, ...]:
    return tuple(count for count in count_grid(most) if count <= 8 or count % 4 == 0)


def _answer(model: ModelSpec, best: Cells, group: GpuGroup, prices: Mapping[str, float]) -> Answer:
    seconds, number = best.step_seconds, best.layouts.num_gpus
    rows = (int(number.argmin()), int((seconds * number).argmin()), int(seconds.argmin()))
    plans = [priced(cell_plan(model, best, row, group), prices) for row in rows]
    return Answer(gpu=group.gpu.name, smallest=plans[0], cheapest=plans[1], fastest=plans[2])


def _token_price(answer: Answer) -> tuple[bool, float, float]:
    dollars = answer.cheapest.dollars_per_billion_tokens
    return dollars is None, dollars or 0.0, answer.cheapest.step_seconds


_MAX_TIMES_MORE = 8  # GPUs of the same type are tried up to this multiple
_MAX_OF_OTHERS = 64  # GPUs of another type are tried up to this number


@dataclass(frozen=True, slots=True, kw_only=True)
class WayOut:
    """One change that makes it fit."""

    change: str
    added_dollars_per_hour: float  # inf where a price is not known
    keeps_training: bool  # whether what is computed stays the same


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why nothing fits, and what would."""

    job: str
    nearest: Miss | None
    ways_out: tuple[WayOut, ...]

    def error(self) -> NothingFits:
        """The refusal as one message: the nearest miss and the two cheapest ways out."""
        message = f"{self.job}: no plan fits"
        if self.nearest is not None:
            miss = self.nearest.miss
            message += (
                f". The closest, {miss.layout} with recompute {miss.recompute}, lacks "
                f"{format_bytes(miss.missing_bytes)} on each {self.nearest.gpu} "
                f"of stage {miss.stage}"
            )
        hint = " or ".join(way.change for way in self.ways_out[:2])
        return NothingFits(message, hint=f"Try {hint}" if hint else "Try far more GPUs")


def refuse(
    model: ModelSpec,
    recipe: Recipe,
    pool: Pool,
    found: PlanList,
    *,
    dollars_per_gpu_hour: Mapping[str, float] | None = None,
) -> Refusal:
    """Look for ways out of a plan list without plans."""
    prices = dollars_per_gpu_hour or {}
    nearest = min(found.misses, key=lambda miss: miss.miss.missing_bytes, default=None)
    ways = [
        *_other_recipes(model, recipe, pool),
        *_more_gpus(model, recipe, pool, prices),
        *_other_types(model, recipe, pool, prices),
    ]
    ways.sort(key=lambda way: (not way.keeps_training, way.added_dollars_per_hour, way.change))
    return Refusal(job=f"{model.name} on {pool}", nearest=nearest, ways_out=tuple(ways))


def _fits(model: ModelSpec, recipe: Recipe, group: GpuGroup) -> bool:
    return len(search_cells(model, recipe, group.machine, (group.count,), most_micro_batch=1)) > 0


def _other_recipes(model: ModelSpec, recipe: Recipe, pool: Pool) -> Iterator[WayOut]:
    """Changes of the recipe on the GPUs that are there; the first of each kind that fits."""
    offers = [
        ("--offload optimizer", True, replace(recipe, offload=Offload.OPTIMIZER)),
        ("--optimizer adam-8bit", False, replace(recipe, optimizer=Optimizer.ADAM_8BIT)),
        ("--tuning qlora", False, replace(recipe, tuning=Tuning.QLORA)),
    ]
    length = recipe.seq_len // 2
    while length >= 256:
        words = f"--seq-len {length}"
        offers.append((words, False, replace(recipe, seq_len=length)))
        length //= 2
    has_shorter = False
    for words, keeps, changed in offers:
        if words.startswith("--seq-len") and has_shorter:
            continue
        if any(_fits(model, changed, group) for group in pool.groups):
            has_shorter = has_shorter or words.startswith("--seq-len")
            yield WayOut(change=words, added_dollars_per_hour=0.0, keeps_training=keeps)


def _more_gpus(
    model: ModelSpec, recipe: Recipe, pool: Pool, prices: Mapping[str, float]
) -> Iterator[WayOut]:
    """For each type, the fewest GPUs that do."""
    for group in pool.groups:
        counts = tuple(range(group.count + 1, _MAX_TIMES_MORE * group.count + 1))
        cells = search_cells(model, recipe, group.machine, counts[:256], most_micro_batch=1)
        if not len(cells):
            continue
        count = int(cells.counts()[0])
        price = prices.get(group.gpu.name, float("inf"))
        yield WayOut(
            change=f"{count} x {group.gpu.name}",
            added_dollars_per_hour=(count - group.count) * price,
            keeps_training=True,
        )


def _other_types(
    model: ModelSpec, recipe: Recipe, pool: Pool, prices: Mapping[str, float]
) -> Iterator[WayOut]:
    """The cheapest set of another type that does, as few GPUs of it as can be."""
    used = {group.gpu.name for group in pool.groups}
    spent = sum(prices.get(group.gpu.name, 0.0) * group.count for group in pool.groups)
    best: WayOut | None = None
    for gpu in load_gpus():
        if gpu.name in used or gpu.name not in prices:
            continue
        counts = tuple(
            count for count in range(1, _MAX_OF_OTHERS + 1) if count <= 8 or count % 8 == 0
        )
        cells = search_cells(model, recipe, default_machine(gpu), counts, most_micro_batch=1)
        if not len(cells):
            continue
        count = int(cells.counts()[0])
        added = prices[gpu.name] * count - spent
        if best is None or added < best.added_dollars_per_hour:
            best = WayOut(
                change=f"{count} x {gpu.name}", added_dollars_per_hour=added, keeps_training=True
            )
    if best is not None:
        yield best
