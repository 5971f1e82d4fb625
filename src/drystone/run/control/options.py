"""The options of live jobs on this cluster, and the plan of the one that is chosen.

Tables come from `plan.options`; what runs have taught corrects them (`live_state.Lesson`). A row of
an option set stays the same option for as long as the controller lives: what turned out not to fit
gets speed 0, and what a correction brings up is added at the end.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from drystone.describe.files.cluster import ClusterSpec
from drystone.describe.job import (
    Shape,
    TrainingJob,
    find_module,
    find_shape,
    recipe_of,
)
from drystone.describe.machine import Machine
from drystone.describe.model import ModelSpec, ModuleSpec
from drystone.describe.option import OptionSet
from drystone.describe.pool import GpuGroup, Pool, make_pool
from drystone.describe.profile import Profile, TimedPace
from drystone.describe.recipe import Recipe
from drystone.describe.trainable import refuse_untrainable
from drystone.errors import NothingFits
from drystone.estimate.module.tracer import probe_module
from drystone.plan.options import JobOptions, job_options
from drystone.plan.plan import Plan
from drystone.plan.rivals import plan_words, rival_plans
from drystone.plan.search import plan_executable, priced
from drystone.plan.uneven.modules import plan_module
from drystone.run.control.lesson import Lesson
from drystone.run.data_look import look_at_data
from drystone.run.engines.agent.environment import job_environment

Counts = tuple[int, ...]  # GPUs of each type of the cluster
_NOTHING_LEARNED: Final = Lesson()


class _Basis(NamedTuple):
    """What plans are made with, of what runs have taught."""

    memory_share: float = 1.0
    paces: tuple[tuple[str, int, float], ...] = ()


def _basis(lesson: Lesson) -> _Basis:
    return _Basis(lesson.memory_share, lesson.paces)


@dataclass(slots=True)
class _Listed:
    """The options of one kind of job, in an order that does not change."""

    basis: _Basis  # that their plans were made with
    planned: JobOptions | None  # None: there are no GPUs that the job may use
    row_of: dict[Counts, int]  # all that were ever listed, in the order of their rows
    planned_row: dict[Counts, int]  # of those that are options now: the row of `planned`
    estimated: dict[Counts, float]  # samples a second, of those and of what was added by hand


class OptionBook:
    """Options by kind of job, with what was learned so far: `lessons` is the live state's own."""

    def __init__(
        self,
        cluster: ClusterSpec,
        types: tuple[str, ...] = (),
        lessons: Mapping[str, Lesson] | None = None,
    ) -> None:
        self._lessons = lessons if lessons is not None else {}
        self.cluster = cluster
        self.types = types or cluster.gpu_types  # also those of which there are no nodes now
        self._totals = dict.fromkeys(self.types, 0)
        for node in cluster.nodes:
            self._totals[node.gpu] += node.num_gpus
        self._shapes: dict[tuple[str, bool], Shape | None] = {}
        self._listed: dict[str, _Listed] = {}
        self._sets: dict[str, tuple[Lesson, OptionSet]] = {}

    def shape(self, job: TrainingJob) -> Shape | None:
        """The shape of its model, read once."""
        if job.module is not None:
            return job.module
        named = (job.model, job.from_scratch)
        if named not in self._shapes:
            self._shapes[named] = find_shape(job)
        return self._shapes[named]

    def needs_process(self, job: TrainingJob) -> bool:
        """Whether a look at the job takes a process of its own."""
        return not job.is_command and (job.data != "synthetic" or find_module(job) is not None)

    def looked_at(self, job: TrainingJob) -> TrainingJob:
        """The job with what a look tells at its Python function, if it has one, and at its data.

        It takes seconds, so nobody should wait for it: call it without the journal's lock.
        """
        if job.is_command:
            return job
        found = find_module(job)
        if found is not None:
            seen = job_environment(os.environ)
            module = probe_module(found, self.recipe(job, None), environment=seen)
            job = replace(job, module=module)
        self.check(job)
        return look_at_data(job, find_shape(job))

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

    def lesson(self, job: TrainingJob) -> Lesson:
        """What runs have taught about its work."""
        return self._lessons.get(work_of(job), _NOTHING_LEARNED)

    def options(self, job: TrainingJob) -> OptionSet:
        """Resources against speed, with what was learned."""
        kind, lesson = job_kind(job), self.lesson(job)
        known = self._sets.get(kind)
        if known is None or known[0] is not lesson:
            listed = self._list(job, _basis(lesson))
            known = self._sets[kind] = (lesson, self._corrected(job, listed, lesson))
        return known[1]

    def counts_of(self, job: TrainingJob, option: int) -> Counts:
        """GPUs of each type that an option takes."""
        return list(self._listed[job_kind(job)].row_of)[option]

    def estimated_speed(self, job: TrainingJob, counts: Counts) -> float:
        """What the formulas said, uncorrected."""
        return self._listed[job_kind(job)].estimated.get(counts, 0.0)

    def for_cluster(self, cluster: ClusterSpec, types: tuple[str, ...]) -> OptionBook:
        """The book of other nodes; shapes of models that were read need not be read again."""
        other = OptionBook(cluster, types, self._lessons)
        other._shapes = self._shapes
        return other

    def row_of(self, job: TrainingJob, counts: Counts, speed: float = 0.0) -> int:
        """The option with just these GPUs, added with this speed if it was not there."""
        listed = self._listed[job_kind(job)]
        if counts not in listed.row_of:
            listed.row_of[counts] = len(listed.row_of)
            listed.estimated[counts] = speed
            self._sets.pop(job_kind(job), None)
        return listed.row_of[counts]

    def named(self, counts: Counts) -> tuple[tuple[str, int], ...]:
        """The same by name, without those of which there are none."""
        return tuple((gpu, n) for gpu, n in zip(self.types, counts, strict=True) if n)

    def plan(self, job: TrainingJob, counts: Counts) -> Plan | None:
        """Who computes what on these GPUs: the plan of the option, made once.

        None for a script whose model nobody told us.
        """
        basis = _basis(self.lesson(job))
        listed = self._list(job, basis)
        row = listed.planned_row.get(counts)
        if row is not None and listed.planned is not None:
            plan = listed.planned.plan(row)
        else:
            plan = self._plan_unlisted(job, counts, basis)
        kept = self.lesson(job).kept.get(self.named(counts))
        if plan is not None and kept:
            rivals = self._rivals(job, counts, plan)
            plan = next((rival for rival in rivals if plan_words(rival) == kept), plan)
        return priced(plan, self.cluster.dollars_per_gpu_hour) if plan is not None else None

    def rivals(self, job: TrainingJob, counts: Counts, plan: Plan) -> tuple[Plan, ...]:
        """Other plans that a launch should try for a few steps: the estimate may be wrong.

        None once they were tried, by whatever job of the same work.
        """
        is_known = self.named(counts) in self.lesson(job).kept
        return () if is_known else self._rivals(job, counts, plan)

    def _rivals(self, job: TrainingJob, counts: Counts, plan: Plan) -> tuple[Plan, ...]:
        shape, named = self.shape(job), dict(self.named(counts))
        if not isinstance(shape, ModelSpec) or len(named) != 1:
            return ()
        [group] = self._pool(job, named, _basis(self.lesson(job))).groups
        unpriced = replace(plan, dollars_per_hour=None)
        return rival_plans(shape, self.recipe(job, shape), group, unpriced)

    def _plan_unlisted(self, job: TrainingJob, counts: Counts, basis: _Basis) -> Plan | None:
        """For a job that has GPUs which are no option of its own any more."""
        shape, pool = self.shape(job), self._pool(job, dict(self.named(counts)), basis)
        if shape is None:
            return None
        recipe = self.recipe(job, shape)
        if isinstance(shape, ModuleSpec):
            plan = plan_module(shape, recipe, pool)
        else:
            plan = plan_executable(shape, recipe, pool)
        if not isinstance(plan, Plan):
            raise NothingFits(f"{job.name} does not fit on {pool} any more")
        return plan

    def _usable_types(self, job: TrainingJob) -> list[str]:
        return [
            gpu
            for gpu in self.types
            if self._totals[gpu]
            and (not job.allowed_gpus or gpu in job.allowed_gpus)
            and gpu not in job.denied_gpus
        ]

    def _pool(self, job: TrainingJob, counts: Mapping[str, int], basis: _Basis) -> Pool:
        """The GPUs, at the pace that ranks had, and with less memory where it did not suffice."""
        groups, paces = [], {gpu: (size, ratio) for gpu, size, ratio in basis.paces}
        for gpu, count in counts.items():
            machine = self.cluster.group(gpu, count).machine
            if basis.memory_share != 1.0:
                usable = int(machine.gpu.usable_bytes / basis.memory_share)
                machine = replace(machine, gpu=replace(machine.gpu, usable_bytes=usable))
            if gpu in paces:
                machine = replace(machine, profile=self._paced(job, machine, *paces[gpu]))
            groups.append(GpuGroup(machine=machine, count=count))
        return make_pool(groups)

    def _paced(self, job: TrainingJob, machine: Machine, size: int, ratio: float) -> Profile:
        """The profile of a GPU type with the pace that ranks of this job's work had."""
        shape = self.shape(job)
        pace = TimedPace(
            model=shape.name if shape is not None else "",
            launcher=self.recipe(job, shape).launcher,
            micro_batch=size,
            measured_seconds=ratio,
            estimated_seconds=1.0,
        )
        profile = machine.profile or Profile(device=machine.gpu.name)
        return profile.model_copy(update={"paces": (*profile.paces, pace)})

    def _list(self, job: TrainingJob, basis: _Basis) -> _Listed:
        """The table of its kind, planned anew where memory or paces are judged otherwise."""
        kind, shape = job_kind(job), self.shape(job)
        known = self._listed.get(kind)
        if known is not None and known.basis == basis:
            return known
        rows = known.row_of if known is not None else {}
        listed = _Listed(basis, None, rows, {}, {})
        # Divisions of a module share whole samples; layers and matrices can be split further.
        is_module = isinstance(shape, ModuleSpec)
        largest = min(job.max_gpus, job.global_batch) if is_module else job.max_gpus
        limits = {gpu: min(self._totals[gpu], largest) for gpu in self._usable_types(job)}
        if limits:
            listed.planned = job_options(
                shape,
                self.recipe(job, shape),
                self._pool(job, limits, basis),
                prunes=job.min_gpus == 1,
            )
            table = listed.planned.table
            columns = [self.types.index(gpu) for gpu in limits]
            whole = np.zeros((len(table), len(self.types)), dtype=np.int64)
            whole[:, columns] = table.counts
            for row, counts in enumerate(map(tuple, whole.tolist())):
                if job.min_gpus <= sum(counts) <= job.max_gpus:
                    listed.row_of.setdefault(counts, len(listed.row_of))
                    listed.planned_row[counts] = row
                    listed.estimated[counts] = float(table.samples_per_second[row])
        self._listed[kind] = listed  # not before: what could not be planned is tried again
        return listed

    def _corrected(self, job: TrainingJob, listed: _Listed, lesson: Lesson) -> OptionSet:
        """What was measured replaces its estimate, and moves those of the same types."""
        factors = type_factors(lesson)
        other = 1.0
        if self.shape(job) is None and factors:
            other = float(np.exp(np.mean(np.log(list(factors.values())))))
        rows = list(listed.row_of)
        counts = np.array(rows, dtype=np.int64).reshape(len(rows), len(self.types))
        uses = counts > 0
        mean = uses @ np.array([factors.get(gpu, other) for gpu in self.types]) / uses.sum(axis=1)
        speeds = np.array([listed.estimated.get(row, 0.0) for row in rows]) * mean
        # What was measured has its speed also where it is listed no longer: a job may run on it.
        # Where memory did not suffice, what is not listed does not fit.
        known = speeds > 0 if listed.basis.memory_share > 1.0 else np.ones(len(rows), dtype=bool)
        for at in np.flatnonzero(known).tolist() if lesson.speeds else ():
            speeds[at] = lesson.speeds.get(self.named(rows[at])) or speeds[at]
        return OptionSet(
            counts=counts,
            samples_per_second=speeds,
            memory_bytes=np.zeros(len(rows)),  # judged when they were listed
        )


@lru_cache(maxsize=65_536)
def job_kind(job: TrainingJob) -> str:
    """Jobs of one kind have the same options: the same work within the same limits."""
    limits = (sorted(job.allowed_gpus), sorted(job.denied_gpus), job.min_gpus, job.max_gpus)
    return _digest([work_of(job), *limits])


@lru_cache(maxsize=65_536)
def work_of(job: TrainingJob) -> str:
    """Jobs that do the same work teach about each other."""
    traced = astuple(job.module) if job.module is not None else ()
    told = [job.model, job.seq_len, job.global_batch, job.precision, job.optimizer, job.command]
    if job.tuning != "full":  # work of older logs keeps its name
        told += [job.tuning, job.lora.rank, job.lora.targets, job.lora.train_embeddings]
    if job.is_compiled:
        told.append("compiled")
    return _digest([*told, *traced])


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def type_factors(lesson: Lesson) -> dict[str, float]:
    """By GPU type: measured over estimated, the geometric mean over what was run on that type."""
    logs: dict[str, list[float]] = {}
    for gpus, factor in lesson.factors.items():
        for gpu, _ in gpus:
            logs.setdefault(gpu, []).append(math.log(factor))
    return {gpu: math.exp(sum(some) / len(some)) for gpu, some in logs.items()}
