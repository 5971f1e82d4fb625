"""From goodput to the options of a job: one row a GPU type and count, one phase an epoch.

A job of n GPUs of a type goes on as few nodes as that takes: whole ones, and the rest on one more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from drystone.describe.cluster import NodeSpec
from drystone.describe.job import JobSpec
from drystone.describe.option import OptionSet
from drystone.errors import UnknownName
from drystone.schedule.options import types_of
from goodput.model import GoodputModel


def goodput_options(
    models: Mapping[str, GoodputModel],
    nodes: Sequence[NodeSpec],
    *,
    gpu_types: Sequence[str] = (),
    rigid: bool = False,
) -> Callable[[JobSpec], OptionSet]:
    """A function from a job to its options on these nodes; speeds in samples of the least batch.

    `rigid`: only the number of GPUs and the batch that the owner of the job named, on any type; and
    work is counted in `rigid_unit_samples`.
    """
    types = tuple(gpu_types) or types_of(nodes)
    sizes = {gpu: [one.num_gpus for one in nodes if one.gpu == gpu] for gpu in types}
    cache: dict[tuple[object, ...], OptionSet] = {}

    def options_of(job: JobSpec) -> OptionSet:
        if job.model not in models:
            raise UnknownName("model", job.model, models)
        named = (job.requested_count, job.global_batch) if rigid else ()
        key = (job.model, job.allowed_gpus, job.denied_gpus, job.min_gpus, job.max_gpus, *named)
        if key not in cache:
            cache[key] = _phased(job, models[job.model], types, sizes, rigid=rigid)
        return cache[key]

    return options_of


def rigid_unit_samples(model: GoodputModel, batch: float) -> float:
    """What a step of a job's own batch is worth, on average over its epochs.

    In this unit a rigid job's speed is its steps a second, whose sum Gavel maximises.
    """
    gain = model.noise.gain(np.array([batch]))[0]
    share = np.diff(model.noise.end_steps, prepend=0.0) / model.noise.end_steps[-1]
    return model.noise.least_batch / float((share / gain).sum())


def fewest_nodes(num_gpus: int, gpus_per_node: int) -> tuple[int, ...]:
    """So many GPUs on as few nodes as possible: the rest first, then whole nodes."""
    whole, rest = divmod(num_gpus, gpus_per_node)
    return (rest,) * (rest > 0) + (gpus_per_node,) * whole


def _phased(
    job: JobSpec,
    model: GoodputModel,
    types: Sequence[str],
    sizes: Mapping[str, Sequence[int]],
    *,
    rigid: bool,
) -> OptionSet:
    rows: list[tuple[int, int]] = []
    speeds: list[np.ndarray] = []
    for kind, gpu in enumerate(types):
        for count in range(1, sum(sizes[gpu]) + 1):
            if not job.allows(gpu, count) or (rigid and count != job.requested_count):
                continue
            placement = fewest_nodes(count, max(sizes[gpu]))
            batch = float(job.global_batch) if rigid else 0.0
            goodput = model.goodput(gpu, placement, batch=batch)
            if (goodput > 0).all():
                rows.append((kind, count))
                speeds.append(goodput)
    counts = np.zeros((len(rows), len(types)), dtype=np.int64)
    for row, (kind, count) in enumerate(rows):
        counts[row, kind] = count
    unit = rigid_unit_samples(model, float(job.global_batch)) if rigid else 1.0
    ends = model.noise.end_samples / unit
    table = np.array(speeds).reshape(len(rows), len(ends)) / unit
    by_epoch = [np.ascontiguousarray(speeds) for speeds in table.T]
    return OptionSet(
        counts=counts,
        samples_per_second=by_epoch[0],
        memory_bytes=np.zeros(len(rows)),
        phase_ends_samples=tuple(ends[:-1].tolist()),
        later_speeds=tuple(by_epoch[1:]),
    )
