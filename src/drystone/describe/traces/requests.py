"""GPU requests of a trace, translated to the GPU types of a cluster.

A trace names types in its own way (`a100`, `A800-80GB`), or only a number of GPUs. Policies that
change nothing about a job need one type of the cluster; nobody else looks at it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from drystone.describe.catalogue import find_gpu
from drystone.describe.cluster import NodeSpec
from drystone.describe.job import JobSpec
from drystone.errors import UnknownName


def match_requests(
    jobs: Sequence[JobSpec],
    nodes: Sequence[NodeSpec],
    runs_on: Callable[[JobSpec], Collection[str]] | None = None,
) -> tuple[tuple[JobSpec, ...], tuple[str, ...]]:
    """The jobs with types of the cluster where they named any, and what has to be said of it.

    `runs_on` says on which types a job can run in the number that it asked for; else on all.
    """
    totals = Counter[str]()
    for node in nodes:
        totals[node.gpu] += node.num_gpus
    names = {job.requested_gpu for job in jobs if job.requested_gpu}
    known = {name: _match(name, list(totals)) for name in names}
    taken = Counter[str]()
    matched, foreign, assigned = [], 0, 0
    for job in jobs:
        gpu = known.get(job.requested_gpu, "")
        foreign += bool(job.requested_gpu) and not gpu
        is_free = len(totals) > 1 or job.min_gpus < job.max_gpus
        if not gpu and job.requested_count and is_free:
            able = totals if runs_on is None else runs_on(job)
            gpu = _fair_type(job, totals, taken, able)
            assigned += bool(gpu)
        matched.append(job if gpu == job.requested_gpu else replace(job, requested_gpu=gpu))
    notes = []
    if foreign:
        told = f"{_jobs(foreign)} asked for types that this cluster has not: any will do"
        notes.append(told)
    if assigned:
        notes.append(
            f"{_jobs(assigned)} asked for a number of GPUs only: policies that change nothing "
            "take a type for each, in proportion to the cluster"
        )
    return tuple(matched), tuple(notes)


def _jobs(number: int) -> str:
    return "1 job" if number == 1 else f"{number:,} jobs"


def _match(name: str, types: Sequence[str]) -> str:
    """The type of the cluster that a name means; nothing where none or several could be meant."""
    lowered = {gpu.lower(): gpu for gpu in types}
    if name.lower() in lowered:
        return lowered[name.lower()]
    by_gpu = {found: gpu for gpu in types if (found := _catalogue_name(gpu))}
    if (found := _catalogue_name(name)) in by_gpu:
        return by_gpu[found]
    near = [gpu for gpu in types if gpu.lower().startswith(f"{name.lower()}-")]
    return near[0] if len(near) == 1 else ""


def _catalogue_name(name: str) -> str:
    try:
        return find_gpu(name).name
    except UnknownName:
        return ""


def _fair_type(
    job: JobSpec, totals: Counter[str], taken: Counter[str], able: Collection[str]
) -> str:
    """The type that has had the least asked of it for its size, of those that do."""
    count = job.requested_count
    fits = [
        gpu
        for gpu, total in totals.items()
        if total >= count and gpu in able and job.allows(gpu, count)
    ]
    if not fits:
        return ""
    gpu = min(fits, key=lambda gpu_type: (taken[gpu_type] + count) / totals[gpu_type])
    taken[gpu] += count
    return gpu
