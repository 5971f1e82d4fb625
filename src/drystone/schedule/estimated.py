"""From a model known by name to the options of a job: Drystone's own estimates, nothing measured.

Each kind of job (model, batch, sequence length, what is trained) is planned once on the GPUs of the
cluster (`plan/options.py`): every type alone and pairs of types; the rest is looking up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from drystone.describe.catalogue import find_gpu
from drystone.describe.cluster import NodeSpec
from drystone.describe.job import JobSpec
from drystone.describe.machine import default_machine
from drystone.describe.model import ModelSpec
from drystone.describe.model_source import ModuleReference, resolve_model
from drystone.describe.pool import GpuGroup, Pool, make_pool
from drystone.describe.recipe import Recipe, Tuning, auto_precision
from drystone.errors import InvalidSpec, RequestError
from drystone.plan.options import Options, enumerate_options
from drystone.schedule.snapshot import OptionSet

_USUAL_SEQ_LEN: Final = 4096
# Options of one type beyond this many GPUs are not looked for.
MOST_GPUS: Final = 256

Kind = tuple[str, int, int, str]  # model, batch, sequence length, tuning


def kind_of(job: JobSpec) -> Kind:
    """What decides the speeds of a job."""
    return (job.model, job.global_batch, job.seq_len, job.tuning)


def estimated_options(nodes: Sequence[NodeSpec]) -> Callable[[JobSpec], OptionSet]:
    """A function from a job to its options on these nodes; each kind is planned when first met."""
    pool = pool_of(nodes)
    planned: dict[Kind, Options] = {}
    cache: dict[tuple[object, ...], OptionSet] = {}

    def options_of(job: JobSpec) -> OptionSet:
        kind = kind_of(job)
        key = (kind, job.allowed_gpus, job.denied_gpus, job.min_gpus, job.max_gpus)
        if key not in cache:
            if kind not in planned:
                planned[kind] = _plan(job, pool)
            cache[key] = _option_set(job, planned[kind], types)
        return cache[key]

    types = tuple(dict.fromkeys(node.gpu for node in nodes))
    return options_of


def pool_of(nodes: Sequence[NodeSpec]) -> Pool:
    """The GPUs of a cluster by type, each type on nodes as large as its largest."""
    groups = []
    for gpu in dict.fromkeys(node.gpu for node in nodes):
        mine = [node.num_gpus for node in nodes if node.gpu == gpu]
        machine = default_machine(find_gpu(gpu), max(mine))
        groups.append(GpuGroup(machine=machine, count=min(sum(mine), MOST_GPUS)))
    return make_pool(groups)


def recipe_of(job: JobSpec, model: ModelSpec, pool: Pool) -> Recipe:
    """How a job is trained: traces name no precision, so it is what `auto` means on the pool."""
    usual = min(model.context_length or _USUAL_SEQ_LEN, _USUAL_SEQ_LEN)
    if model.vision is not None:
        usual = model.vision.num_tokens
    try:
        tuning = Tuning(job.tuning)
    except ValueError:
        raise InvalidSpec(
            f"job {job.id}: tuning is {job.tuning!r}", hint="Write full, lora or qlora"
        ) from None
    return Recipe(
        seq_len=job.seq_len or usual,
        global_batch=job.global_batch,
        precision=auto_precision(group.gpu for group in pool.groups),
        tuning=tuning,
    )


def _plan(job: JobSpec, pool: Pool) -> Options:
    try:
        model = resolve_model(job.model)
    except RequestError as error:
        raise InvalidSpec(
            f"job {job.id}: {error.message}, and no speeds are given",
            hint=f"Give --speeds FILE, or name a model of `drystone models`. {error.hint}",
        ) from error
    if isinstance(model, ModuleReference):
        raise InvalidSpec(f"job {job.id}: a Python function cannot be planned", where=job.model)
    return enumerate_options(model, recipe_of(job, model, pool), pool)


def _option_set(job: JobSpec, options: Options, types: Sequence[str]) -> OptionSet:
    """The options that the job allows, without counts that are near to others."""
    totals = options.counts.sum(axis=1)
    allowed = np.isfinite(options.samples_per_second) & (options.samples_per_second > 0)
    allowed &= (totals >= job.min_gpus) & (totals <= job.max_gpus)
    if job.allowed_gpus or job.denied_gpus:
        denied = np.array([not job.names(name) for name in types])
        allowed &= ~(options.counts[:, denied] > 0).any(axis=1)
    usual = np.array(_usual_counts(int(options.counts.max(initial=1))))
    asked = (options.counts == job.requested_count).any(axis=1)
    allowed &= np.isin(options.counts, usual).all(axis=1) | asked
    rows = np.flatnonzero(allowed)
    return OptionSet(
        counts=options.counts[rows],
        samples_per_second=options.samples_per_second[rows],
        memory_bytes=options.high_bytes[rows],
    )


def _usual_counts(most: int) -> list[int]:
    """0 to 8, then powers of two and half-way between them: what people give a job."""
    powers = [1 << power for power in range(4, most.bit_length() + 1)]
    return [*range(9), *(value for power in powers for value in (power * 3 // 4, power))]
