"""Options of the jobs of a trace: by Drystone's own estimates, by measured steps, by durations.

Each source gives a function from a job to its `OptionSet` on given nodes. Jobs with the same work
and the same limits share one set: policies and the simulator know sets by their identity.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from drystone.describe.catalogue import find_gpu
from drystone.describe.cluster import NodeSpec
from drystone.describe.job import JobSpec
from drystone.describe.machine import default_machine
from drystone.describe.model import ModelSpec
from drystone.describe.model_source import ModuleReference, resolve_model
from drystone.describe.option import FloatArray, IntArray, OptionSet
from drystone.describe.pool import GpuGroup, Pool, make_pool
from drystone.describe.recipe import Recipe, Tuning, auto_precision
from drystone.describe.traces.speeds import MeasuredStep
from drystone.errors import InvalidSpec, RequestError, UnknownName
from drystone.plan.options import enumerate_options

OptionsOf = Callable[[JobSpec], OptionSet]

_USUAL_SEQ_LEN: Final = 4096
# Options of one type beyond this many GPUs are not looked for.
MAX_GPUS: Final = 256
_SCALINGS: Final = ("rigid", "linear", "amdahl")


def types_of(nodes: Sequence[NodeSpec]) -> tuple[str, ...]:
    """The GPU types of some nodes, in order of appearance."""
    return tuple(dict.fromkeys(node.gpu for node in nodes))


def option_key(job: JobSpec) -> tuple[object, ...]:
    """What decides the options of a job whose model is known: its work and its limits."""
    work = (job.model, job.global_batch, job.seq_len, job.tuning)
    return (*work, job.allowed_gpus, job.denied_gpus, job.min_gpus, job.max_gpus)


def types_that_do(
    options_of: OptionsOf, gpu_types: Sequence[str]
) -> Callable[[JobSpec], frozenset[str]]:
    """A function from a job to the types on which it can run in the number that it asked for."""
    # By identity of the set, which is held so that its identity is not used again.
    cache: dict[tuple[int, int], tuple[OptionSet, frozenset[str]]] = {}

    def runs_on(job: JobSpec) -> frozenset[str]:
        options = options_of(job)
        key = (id(options), job.requested_count)
        if key not in cache:
            alone = options.counts[(options.counts > 0).sum(axis=1) == 1]
            columns = np.flatnonzero((alone == job.requested_count).any(axis=0))
            cache[key] = (options, frozenset(gpu_types[column] for column in columns.tolist()))
        return cache[key][1]

    return runs_on


def option_seconds(options: OptionSet, samples: float, *, done_samples: float = 0.0) -> FloatArray:
    """From `done_samples` to `samples` of work, by option; infinite where one cannot run."""
    total = np.zeros(len(options))
    for work, speeds in _work_by_phase(options, samples, done_samples):
        with np.errstate(divide="ignore"):
            total += work / speeds
    return total


def fastest_seconds(options: OptionSet, samples: float, *, done_samples: float = 0.0) -> float:
    """The same for a job that has its fastest option in every phase: nothing can be quicker."""
    total = 0.0
    for work, speeds in _work_by_phase(options, samples, done_samples):
        fastest = float(speeds.max(initial=0.0))
        total += work / fastest if fastest > 0 else math.inf
    return total


def _work_by_phase(
    options: OptionSet, samples: float, done_samples: float
) -> list[tuple[float, FloatArray]]:
    """Samples that each phase still has to do, and the speeds in it."""
    found = []
    begin = done_samples
    for phase in range(options.num_phases):
        end = min(samples, options.phase_end_samples(phase))
        if end > begin:
            found.append((end - begin, options.speeds(phase)))
            begin = end
    return found


def _one_type_each(
    rows: Sequence[tuple[int, int]], num_types: int, speeds: FloatArray
) -> OptionSet:
    """Options of one GPU type each: (its column, GPUs of it). That they fit was seen."""
    counts = np.zeros((len(rows), num_types), dtype=np.int64)
    for row, (column, number) in enumerate(rows):
        counts[row, column] = number
    return OptionSet(counts=counts, samples_per_second=speeds, memory_bytes=np.zeros(len(rows)))


# --- estimated: a model known by name ---------------------------------------------------------


def estimated_options(nodes: Sequence[NodeSpec]) -> OptionsOf:
    """Options by Drystone's own estimates; each kind of work is planned when first met."""
    pool = pool_of(nodes)
    planned: dict[tuple[object, ...], OptionSet] = {}
    cache: dict[tuple[object, ...], OptionSet] = {}

    def options_of(job: JobSpec) -> OptionSet:
        key = option_key(job)
        if key not in cache:
            work = key[:4]
            if work not in planned:
                planned[work] = _estimate(job, pool)
            cache[key] = _usual_options(job, planned[work], pool)
        return cache[key]

    return options_of


def pool_of(nodes: Sequence[NodeSpec]) -> Pool:
    """The GPUs of a cluster by type, each type on nodes as large as its largest."""
    groups = []
    for gpu in types_of(nodes):
        sizes = [node.num_gpus for node in nodes if node.gpu == gpu]
        machine = default_machine(find_gpu(gpu), max(sizes))
        groups.append(GpuGroup(machine=machine, count=min(sum(sizes), MAX_GPUS)))
    return make_pool(groups)


def traced_recipe(job: JobSpec, model: ModelSpec, pool: Pool) -> Recipe:
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


def _estimate(job: JobSpec, pool: Pool) -> OptionSet:
    try:
        model = resolve_model(job.model)
    except RequestError as error:
        raise InvalidSpec(
            f"job {job.id}: {error.message}, and no speeds are given",
            hint=f"Give --speeds FILE, or name a model of `drystone models`. {error.hint}",
        ) from error
    if isinstance(model, ModuleReference):
        raise InvalidSpec(f"job {job.id}: a Python function cannot be planned", where=job.model)
    return enumerate_options(model, traced_recipe(job, model, pool), pool).table


def _usual_options(job: JobSpec, options: OptionSet, pool: Pool) -> OptionSet:
    """The options that the job allows, without counts that are near to others."""
    totals = options.counts.sum(axis=1)
    allowed = np.isfinite(options.samples_per_second) & (options.samples_per_second > 0)
    allowed &= (totals >= job.min_gpus) & (totals <= job.max_gpus)
    denied = np.array([not job.names(group.gpu.name) for group in pool.groups])
    allowed &= ~(options.counts[:, denied] > 0).any(axis=1)
    usual = np.array(_usual_counts(int(options.counts.max(initial=1))))
    asked = (options.counts == job.requested_count).any(axis=1)
    allowed &= np.isin(options.counts, usual).all(axis=1) | asked
    rows = np.flatnonzero(allowed)
    return OptionSet(
        counts=options.counts[rows],
        samples_per_second=options.samples_per_second[rows],
        memory_bytes=options.memory_bytes[rows],
    )


def _usual_counts(most: int) -> list[int]:
    """0 to 8, then powers of two and half-way between them: what people give a job."""
    powers = [1 << power for power in range(4, most.bit_length() + 1)]
    return [*range(9), *(value for power in powers for value in (power * 3 // 4, power))]


# --- measured: steps of the same work, one row a GPU type and count ------------------------------


def measured_options(steps: Sequence[MeasuredStep], nodes: Sequence[NodeSpec]) -> OptionsOf:
    """Options by measured steps.

    Only measurements on as few nodes as the count needs are options: that is how jobs are placed.
    """
    gpu_types = types_of(nodes)
    sizes = {gpu: [node.num_gpus for node in nodes if node.gpu == gpu] for gpu in gpu_types}
    by_work: dict[tuple[str, int], list[MeasuredStep]] = defaultdict(list)
    for step in steps:
        if not step.succeeded or step.num_gpus > sum(sizes.get(step.gpu, ())):
            continue
        if step.num_nodes in (0, math.ceil(step.num_gpus / max(sizes[step.gpu]))):
            by_work[step.model, step.global_batch].append(step)
    cache: dict[tuple[object, ...], OptionSet] = {}

    def options_of(job: JobSpec) -> OptionSet:
        work = (job.model, job.global_batch)
        if work not in by_work:
            known = [f"{model}, batch {batch}" for model, batch in by_work]
            raise UnknownName("work", f"{job.model}, batch {job.global_batch}", known)
        key = (*work, job.allowed_gpus, job.denied_gpus, job.min_gpus, job.max_gpus)
        if key not in cache:
            fastest: dict[tuple[int, int], float] = {}  # the same GPUs may be measured twice
            for step in by_work[work]:
                if job.allows(step.gpu, step.num_gpus):
                    row = (gpu_types.index(step.gpu), step.num_gpus)
                    fastest[row] = min(step.step_seconds, fastest.get(row, math.inf))
            rows = sorted(fastest)
            speeds = job.global_batch / np.array([fastest[row] for row in rows])
            cache[key] = _one_type_each(rows, len(gpu_types), speeds)
        return cache[key]

    return options_of


# --- durations: all that is known is how long a job took -----------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """How a job's speed is taken to change with the number and the type of its GPUs.

    A trace of durations says: n GPUs, d seconds. What the job would do on other GPUs, it does not
    say, so that is assumed, in the open: `statement` goes into every report.
    """

    kind: str = "rigid"
    serial_share: float = 0.0  # of the work on one GPU, that no further GPU makes shorter
    by_peak: bool = False  # types differ as their 16-bit peaks do; else all are alike

    @classmethod
    def parse(cls, text: str, *, by_peak: bool = False) -> Scaling:
        """`rigid`, `linear`, or `amdahl:0.05`."""
        kind, _, share = text.strip().lower().partition(":")
        hint = "Write rigid, linear, or amdahl:0.05 (the serial share)"
        if kind not in _SCALINGS or (kind == "amdahl") != bool(share):
            raise InvalidSpec(f"scaling {text!r} is not known", hint=hint)
        try:
            serial = float(share or 0.0)
        except ValueError:
            raise InvalidSpec(f"scaling {text!r}: the share is not a number", hint=hint) from None
        if not 0 <= serial < 1:
            raise InvalidSpec(f"scaling {text!r}: the share must be 0 to 1", hint=hint)
        return cls(kind=kind, serial_share=serial, by_peak=by_peak)

    @property
    def is_elastic(self) -> bool:
        """Whether a job may get another number of GPUs than it had."""
        return self.kind != "rigid"

    def speedups(self, num_gpus: IntArray) -> FloatArray:
        """Over one GPU (Amdahl's law; linear where nothing is serial)."""
        result: FloatArray = num_gpus / (1 + self.serial_share * (num_gpus - 1))
        return result

    def statement(self) -> str:
        """For the report."""
        number = {
            "rigid": "run on just the number of GPUs they had",
            "linear": "are taken to speed up in proportion to their GPUs",
            "amdahl": f"are taken to speed up by Amdahl's law, {self.serial_share:.0%} serial",
        }[self.kind]
        types = (
            "are as fast as their 16-bit peaks say" if self.by_peak else "are taken as equally fast"
        )
        return f"Jobs without a model {number}; GPU types {types}."


def duration_options(nodes: Sequence[NodeSpec], scaling: Scaling | None = None) -> OptionsOf:
    """Options of jobs that count GPU seconds."""
    scaling = scaling or Scaling()
    gpu_types = types_of(nodes)
    total = [sum(node.num_gpus for node in nodes if node.gpu == gpu) for gpu in gpu_types]
    rates = _rates(gpu_types) if scaling.by_peak else np.ones(len(gpu_types))
    cache: dict[tuple[object, ...], OptionSet] = {}

    def options_of(job: JobSpec) -> OptionSet:
        asked = job.requested_count or job.min_gpus
        home = gpu_types.index(job.requested_gpu) if job.requested_gpu in gpu_types else 0
        limits = (job.min_gpus, job.max_gpus, job.allowed_gpus, job.denied_gpus)
        key = (asked, *limits, home if scaling.by_peak else 0)
        if key not in cache:
            rows = [
                (column, count)
                for column, gpu in enumerate(gpu_types)
                for count in _counts(asked, min(job.max_gpus, total[column]))
                if count <= total[column] and job.allows(gpu, count)
            ]
            columns = np.array([column for column, _ in rows], dtype=np.int64)
            numbers = np.array([number for _, number in rows], dtype=np.int64)
            speeds = asked * scaling.speedups(numbers) / scaling.speedups(np.array(asked))
            speeds = speeds * rates[columns] / rates[home]
            cache[key] = _one_type_each(rows, len(gpu_types), speeds)
        return cache[key]

    return options_of


def _counts(asked: int, most: int) -> list[int]:
    """What was asked for, and powers of two up to `most`."""
    powers = [1 << power for power in range(max(most, 1).bit_length())]
    return sorted({asked, *powers})


def _rates(gpu_types: Sequence[str]) -> FloatArray:
    gpus = [find_gpu(name) for name in gpu_types]
    return np.array([max(gpu.bf16_flops, gpu.fp16_flops, gpu.fp32_flops) for gpu in gpus])
