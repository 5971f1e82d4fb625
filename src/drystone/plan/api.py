"""`drystone.plan(...)`: the plans of one job, from Python."""

from __future__ import annotations

from collections.abc import Mapping

from drystone.describe.model import ModelSpec
from drystone.describe.model_source import ModuleReference, resolve_model
from drystone.describe.pool import Pool, parse_pool
from drystone.describe.recipe import Recipe
from drystone.errors import InvalidSpec
from drystone.plan.refusal import refuse
from drystone.plan.search import PlanList, plan_job


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
