"""From measured steps to the options of a job: one row a GPU type and count."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from drystone.describe.cluster import NodeSpec
from drystone.describe.job import JobSpec
from drystone.describe.traces.speeds import MeasuredStep
from drystone.errors import UnknownName
from drystone.schedule.durations import duration_options as duration_options
from drystone.schedule.phases import Options, phase_set
from drystone.schedule.snapshot import OptionSet


def measured_options(
    steps: Sequence[MeasuredStep], nodes: Sequence[NodeSpec]
) -> Callable[[JobSpec], OptionSet]:
    """A function from a job to its options on these nodes.

    Only measurements on as few nodes as the count needs are options: that is how jobs are placed.
    """
    gpu_types = types_of(nodes)
    largest = {gpu: max(one.num_gpus for one in nodes if one.gpu == gpu) for gpu in gpu_types}
    total = {gpu: sum(one.num_gpus for one in nodes if one.gpu == gpu) for gpu in gpu_types}
    by_work: dict[tuple[str, int], list[MeasuredStep]] = defaultdict(list)
    for step in steps:
        if not step.succeeded or step.num_gpus > total.get(step.gpu, 0):
            continue
        if step.num_nodes in (0, math.ceil(step.num_gpus / largest[step.gpu])):
            by_work[step.model, step.global_batch].append(step)
    cache: dict[tuple[object, ...], OptionSet] = {}

    def options_of(job: JobSpec) -> OptionSet:
        work = (job.model, job.global_batch)
        if work not in by_work:
            known = [f"{model}, batch {batch}" for model, batch in by_work]
            raise UnknownName("work", f"{job.model}, batch {job.global_batch}", known)
        key = (*work, job.allowed_gpus, job.denied_gpus, job.min_gpus, job.max_gpus)
        if key not in cache:
            cache[key] = _option_set(job, by_work[work], gpu_types)
        return cache[key]

    return options_of


def types_of(nodes: Sequence[NodeSpec]) -> tuple[str, ...]:
    """The GPU types of some nodes, in order of appearance."""
    return tuple(dict.fromkeys(node.gpu for node in nodes))


def types_that_do(
    options_of: Callable[[JobSpec], Options], gpu_types: Sequence[str]
) -> Callable[[JobSpec], frozenset[str]]:
    """A function from a job to the types on which it can run in the number that it asked for."""
    cache: dict[tuple[int, int], frozenset[str]] = {}  # by identity of the options, and count

    def runs_on(job: JobSpec) -> frozenset[str]:
        options = phase_set(options_of(job), 0)
        key = (id(options), job.requested_count)
        if key not in cache:
            alone = (options.counts > 0).sum(axis=1) == 1
            columns = (options.counts[alone] == job.requested_count).any(axis=0)
            cache[key] = frozenset(gpu_types[kind] for kind in np.flatnonzero(columns).tolist())
            kept.append(options)  # so that its identity is not used again
        return cache[key]

    kept: list[OptionSet] = []
    return runs_on


def _option_set(
    job: JobSpec, steps: Sequence[MeasuredStep], gpu_types: tuple[str, ...]
) -> OptionSet:
    fastest: dict[tuple[int, int], float] = {}  # the same GPUs may have been measured twice
    for step in steps:
        if job.allows(step.gpu, step.num_gpus):
            key = (gpu_types.index(step.gpu), step.num_gpus)
            fastest[key] = min(step.step_seconds, fastest.get(key, math.inf))
    rows = sorted((kind, number, seconds) for (kind, number), seconds in fastest.items())
    counts = np.zeros((len(rows), len(gpu_types)), dtype=np.int64)
    for row, (kind, number, _) in enumerate(rows):
        counts[row, kind] = number
    seconds = np.array([one for _, _, one in rows])
    return OptionSet(
        counts=counts,
        samples_per_second=job.global_batch / seconds,
        memory_bytes=np.zeros(len(rows)),
    )
