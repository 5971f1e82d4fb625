"""What can each job choose from on this cluster, and what is its plan once it has chosen?

Estimates come from `plan.options`; what runs have taught corrects them (`live_state.Lesson`). A row
of an option set stays the same option for as long as the controller lives: what turned out not to
fit gets speed 0, and what a correction brings up is added at the end.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from functools import lru_cache
from itertools import combinations
from typing import Final

import numpy as np

from drystone.describe.files.cluster import ClusterSpec
from drystone.describe.job import (
    Shape,
    TrainingJob,
    find_module,
    find_shape,
    recipe_of,
)
from drystone.describe.model import ModelSpec, ModuleSpec
from drystone.describe.pool import GpuGroup, Pool, make_pool
from drystone.describe.recipe import Recipe
from drystone.describe.trainable import refuse_untrainable
from drystone.errors import NothingFits
from drystone.estimate.module.tracer import probe_module
from drystone.plan.options import count_grid, enumerate_options, pair_grid
from drystone.plan.plan import Plan
from drystone.plan.search import plan_executable, priced
from drystone.plan.uneven.modules import plan_module
from drystone.run.control.live_state import Lesson, type_factors
from drystone.schedule.snapshot import OptionSet

Counts = tuple[int, ...]  # GPUs of each type of the cluster
# An assumption about scripts whose model nobody told us: each doubling of the GPUs gains this much.
# It only decides what is tried first; what is measured replaces it.
_SCRIPT_EFFICIENCY: Final = 0.9

_NOTHING_LEARNED: Final = Lesson()


@dataclass(slots=True)
class _Listed:
    """The options of one kind of job, in an order that does not change."""

    counts: list[Counts] = field(default_factory=list)
    row_of: dict[Counts, int] = field(default_factory=dict)
    estimated: dict[Counts, float] = field(default_factory=dict)  # with the memory known now
    memory_bytes: dict[Counts, float] = field(default_factory=dict)

    def put(self, counts: Counts, speed: float, memory_bytes: float) -> None:
        if counts not in self.row_of:
            self.row_of[counts] = len(self.counts)
            self.counts.append(counts)
        self.estimated[counts], self.memory_bytes[counts] = speed, memory_bytes


class OptionBook:
    """Options by kind of job."""

    def __init__(self, cluster: ClusterSpec, types: tuple[str, ...] = ()) -> None:
        self.cluster = cluster
        self.types = types or cluster.gpu_types  # also those of which there are no nodes now
        self._totals = dict.fromkeys(self.types, 0)
        for node in cluster.nodes:
            self._totals[node.gpu] += node.num_gpus
        self._shapes: dict[str, Shape | None] = {}
        self._listed: dict[str, tuple[float, _Listed]] = {}  # memory share they were listed with
        self._sets: dict[str, tuple[Lesson, OptionSet]] = {}
        self._plans: dict[tuple[str, Counts, float], Plan] = {}

    def shape(self, job: TrainingJob) -> Shape | None:
        """The shape of its model, read once."""
        if job.module is not None:
            return job.module
        if job.model not in self._shapes:
            self._shapes[job.model] = find_shape(job)
        return self._shapes[job.model]

    def looked_at(self, job: TrainingJob) -> TrainingJob:
        """The job with what a look at its Python function tells, where its model is one.

        It takes seconds, so nobody should wait for it: call it without the journal's lock.
        """
        found = find_module(job)
        if found is None or job.is_command:
            return job
        return replace(job, module=probe_module(found, self.recipe(job, None)))

    def check(self, job: TrainingJob) -> None:
        """Refuse what the runtime cannot train as what it is, before anything is priced.

        The file is read anew: it may have been mended, or weights may have come, since the last
        job. Scripts train what they like.
        """
        if job.is_command or job.module is not None:
            return
        shape = find_shape(job)
        if isinstance(shape, ModelSpec):
            refuse_untrainable(shape)

    def recipe(self, job: TrainingJob, shape: Shape | None) -> Recipe:
        """How it is trained, wherever it runs: the precision is chosen once for all its options."""
        gpus = [self.cluster.gpu(name) for name in self._usable_types(job)]
        return recipe_of(job, shape, gpus, is_emulated=self.cluster.is_emulated)

    def settled(self, job: TrainingJob) -> TrainingJob:
        """The job with its precision decided: nodes that join or leave later do not change it."""
        shape = self.shape(job)
        if shape is None or job.precision != "auto":
            return job
        return replace(job, precision=self.recipe(job, shape).precision.value)

    def options(self, job: TrainingJob, lesson: Lesson | None = None) -> OptionSet:
        """Resources against speed, with what was learned."""
        kind, lesson = kind_of(job), lesson or _NOTHING_LEARNED
        known = self._sets.get(kind)
        if known is None or known[0] is not lesson:
            listed = self._list(job, kind, lesson)
            known = self._sets[kind] = (lesson, self._option_set(job, listed, lesson))
        return known[1]

    def counts_of(self, job: TrainingJob, option: int) -> Counts:
        """GPUs of each type that an option takes."""
        return self._listed[kind_of(job)][1].counts[option]

    def estimated_speed(self, job: TrainingJob, counts: Counts) -> float:
        """What the formulas said, uncorrected."""
        return self._listed[kind_of(job)][1].estimated.get(counts, 0.0)

    def for_cluster(self, cluster: ClusterSpec, types: tuple[str, ...]) -> OptionBook:
        """The book of other nodes; shapes of models that were read need not be read again."""
        other = OptionBook(cluster, types)
        other._shapes = self._shapes
        return other

    def row_of(self, job: TrainingJob, counts: Counts, speed: float = 0.0) -> int:
        """The option with just these GPUs, added with this speed if it was not there."""
        listed = self._listed[kind_of(job)][1]
        if counts not in listed.row_of:
            listed.put(counts, speed, 0.0)
            self._sets.pop(kind_of(job), None)
        return listed.row_of[counts]

    def named(self, counts: Counts) -> tuple[tuple[str, int], ...]:
        """The same by name, without those of which there are none."""
        return tuple((gpu, n) for gpu, n in zip(self.types, counts, strict=True) if n)

    def plan(self, job: TrainingJob, counts: Counts, lesson: Lesson | None = None) -> Plan | None:
        """Who computes what on these GPUs; None for a script whose model nobody told us."""
        shape = self.shape(job)
        if shape is None:
            return None
        share = (lesson or _NOTHING_LEARNED).memory_share
        key = (kind_of(job), counts, share)
        if key not in self._plans:
            pool = self._pool(dict(self.named(counts)), share)
            recipe = self.recipe(job, shape)
            if isinstance(shape, ModuleSpec):
                found = plan_module(shape, recipe, pool)
            else:
                found = plan_executable(shape, recipe, pool)
            if not isinstance(found, Plan):
                raise NothingFits(f"{job.name} does not fit on {pool} any more")
            self._plans[key] = priced(found, self.cluster.dollars_per_gpu_hour)
        return self._plans[key]

    def _usable_types(self, job: TrainingJob) -> list[str]:
        return [
            gpu
            for gpu in self.types
            if self._totals[gpu]
            and (not job.allowed_gpus or gpu in job.allowed_gpus)
            and gpu not in job.denied_gpus
        ]

    def _pool(self, counts: Mapping[str, int], memory_share: float) -> Pool:
        """The GPUs, with less memory where estimates turned out too low."""
        groups = []
        for gpu, count in counts.items():
            group = self.cluster.group(gpu, count)
            if memory_share != 1.0:
                usable = int(group.gpu.usable_bytes / memory_share)
                machine = replace(group.machine, gpu=replace(group.gpu, usable_bytes=usable))
                group = GpuGroup(machine=machine, count=count)
            groups.append(group)
        return make_pool(groups)

    def _list(self, job: TrainingJob, kind: str, lesson: Lesson) -> _Listed:
        known = self._listed.get(kind)
        if known is not None and known[0] == lesson.memory_share:
            return known[1]
        listed = known[1] if known is not None else _Listed()
        listed.estimated.clear()
        usable = self._usable_types(job)
        shape = self.shape(job)
        if usable and isinstance(shape, ModuleSpec):
            self._list_module(job, shape, usable, listed, lesson)
        elif usable and isinstance(shape, ModelSpec):
            self._list_model(job, shape, usable, listed, lesson)
        elif usable:
            self._list_script(job, usable, listed)
        self._listed[kind] = (lesson.memory_share, listed)
        return listed

    def _list_model(
        self,
        job: TrainingJob,
        shape: ModelSpec,
        usable: list[str],
        listed: _Listed,
        lesson: Lesson,
    ) -> None:
        most = {gpu: min(self._totals[gpu], job.max_gpus, job.global_batch) for gpu in usable}
        pool = self._pool(most, lesson.memory_share)
        recipe = self.recipe(job, shape)
        found = enumerate_options(
            shape, recipe, pool, prunes=job.min_gpus == 1, is_for_runtime=True
        )
        columns = [self.types.index(gpu) for gpu in found.gpus]
        for row in range(len(found)):
            whole = np.zeros(len(self.types), dtype=np.int64)
            whole[columns] = found.counts[row]
            total = int(whole.sum())
            if job.min_gpus <= total <= job.max_gpus:
                counts = tuple(int(one) for one in whole)
                listed.put(counts, float(found.samples_per_second[row]), found.high_bytes[row])

    def _list_module(
        self,
        job: TrainingJob,
        module: ModuleSpec,
        usable: list[str],
        listed: _Listed,
        lesson: Lesson,
    ) -> None:
        """One type alone, and two together where that is faster than each of them alone."""
        most = {gpu: min(self._totals[gpu], job.max_gpus, job.global_batch) for gpu in usable}
        alone = [{gpu: number} for gpu in usable for number in pair_grid(most[gpu])]
        pairs = [
            {one: number, other: more}
            for one, other in combinations(usable, 2)
            for number in pair_grid(most[one])
            for more in pair_grid(most[other])
        ]
        recipe, speeds = self.recipe(job, module), dict[Counts, float]()
        for named in alone + pairs:
            plan = plan_module(module, recipe, self._pool(named, lesson.memory_share))
            if not isinstance(plan, Plan):
                continue
            counts = tuple(named.get(gpu, 0) for gpu in self.types)
            speed = speeds[counts] = recipe.global_batch / plan.step_seconds
            parts = [
                speeds.get(tuple(named[gpu] if one == gpu else 0 for one in self.types), 0.0)
                for gpu in named
            ]
            is_worth_it = len(named) == 1 or job.min_gpus > 1 or speed > max(parts)
            if is_worth_it and job.min_gpus <= sum(counts) <= job.max_gpus:
                listed.put(counts, speed, max(need.high_bytes for need in plan.needs))

    def _list_script(self, job: TrainingJob, usable: list[str], listed: _Listed) -> None:
        rates = {gpu: _rate(self.cluster, gpu) for gpu in usable}
        slowest = min(rates.values())
        for gpu in usable:
            for number in count_grid(min(self._totals[gpu], job.max_gpus)):
                if number >= job.min_gpus:
                    gain = _SCRIPT_EFFICIENCY ** np.log2(number) * number
                    counts = tuple(number if one == gpu else 0 for one in self.types)
                    listed.put(counts, float(rates[gpu] / slowest * gain), 0.0)

    def _option_set(self, job: TrainingJob, listed: _Listed, lesson: Lesson) -> OptionSet:
        factors = type_factors(lesson)
        other = 1.0
        if self.shape(job) is None and factors:
            other = float(np.exp(np.mean(np.log(list(factors.values())))))
        speeds = np.zeros(len(listed.counts))
        for row, counts in enumerate(listed.counts):
            named = self.named(counts)
            speed = listed.estimated.get(counts, 0.0)
            if speed > 0:
                mean = np.mean([factors.get(gpu, other) for gpu, _ in named])
                speeds[row] = lesson.speeds.get(named) or speed * float(mean)
        return OptionSet(
            counts=np.array(listed.counts, dtype=np.int64).reshape(len(speeds), len(self.types)),
            samples_per_second=speeds,
            memory_bytes=np.zeros(len(speeds)),  # judged when they were listed
        )


def _rate(cluster: ClusterSpec, name: str) -> float:
    gpu = cluster.gpu(name)
    return gpu.bf16_flops or gpu.fp16_flops or gpu.fp32_flops


@lru_cache(maxsize=65_536)
def kind_of(job: TrainingJob) -> str:
    """Jobs of one kind have the same options: the same work within the same limits."""
    limits = (sorted(job.allowed_gpus), sorted(job.denied_gpus), job.min_gpus, job.max_gpus)
    return _digest([work_of(job), *limits])


@lru_cache(maxsize=65_536)
def work_of(job: TrainingJob) -> str:
    """Jobs that do the same work teach about each other."""
    traced = astuple(job.module) if job.module is not None else ()
    told = [job.model, job.seq_len, job.global_batch, job.precision, job.optimizer, job.command]
    return _digest([*told, *traced])


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
