"""Which options does a job have? Each set is kept once, as rows of a table that only grows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from drystone.describe.job import JobSpec
from drystone.schedule.phases import Options, PhasedOptions, phase_end_samples, phase_set
from drystone.schedule.snapshot import FloatArray, JobStatus, OptionFacts, OptionSet, OptionTable


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What the options of a job say in one of its phases."""

    samples_per_second: list[float]  # by option
    end_samples: float  # the work done when the phase ends; infinity for the last one
    row: int  # of the table
    options: Options
    waiting: JobStatus  # of a job in this phase that waits
    known_facts: dict[int, OptionFacts]  # by option, of those that were asked for and can be run


class OptionBook:
    """The options of every job that was asked for, and the table of their sets."""

    def __init__(
        self, gpu_types: tuple[str, ...], options_of: Callable[[JobSpec], Options]
    ) -> None:
        self._gpu_types, self._options_of = gpu_types, options_of
        self._sets: list[OptionSet] = []
        self._rows: dict[int, int] = {}  # by identity of the options: the row of the first phase
        self._next_set: list[int] = []  # by row: that of the next phase, or -1
        self._end_samples: list[float] = []  # by row: the work done when its phase ends
        self._has_phases = False
        self._runs: dict[tuple[int, int], RunFacts] = {}  # by identity of the options, and phase
        self.first_runs: dict[str, RunFacts] = {}  # by job that was asked for, of its first phase
        self._requested: dict[tuple[int, str, int], int] = {}
        self._table = OptionTable(
            counts=np.zeros((0, 0, len(gpu_types)), dtype=np.int64),
            samples_per_second=np.zeros((0, 0)),
            memory_bytes=np.zeros((0, 0)),
        )
        self._room = self._table  # the same arrays, with rows to spare
        self.known_facts = self._table._known_facts  # by set and option, of those that can be run

    def options(self, job: JobSpec) -> Options:
        """What a job can choose from; asked for once."""
        return self.run_facts(job, 0).options

    def run_facts(self, job: JobSpec, phase: int) -> RunFacts:
        """The speeds of a job in a phase, and when the phase ends."""
        first = self.first_runs.get(job.id) or self.first_run(job)
        return first if phase == 0 else self._facts_of(first.options, phase)

    def first_run(self, job: JobSpec) -> RunFacts:
        """The same of its first phase, for a job that is not in `first_runs` yet."""
        options_of = self._options_of
        options = options_of(job)
        # Most jobs have options that others had before.
        facts = self._runs.get((id(options), 0)) or self._facts_of(options, 0)
        self.first_runs[job.id] = facts
        return facts

    def _facts_of(self, options: Options, phase: int) -> RunFacts:
        facts = self._runs.get((id(options), phase))
        if facts is None:
            one = phase_set(options, phase)
            speeds: list[float] = one.samples_per_second.tolist()
            row = self._row(options, phase)
            # Holding the options keeps their identity from being used again.
            facts = RunFacts(
                speeds, phase_end_samples(options, phase), row, options, JobStatus(-1, row, ()), {}
            )
            self._runs[id(options), phase] = facts
        return facts

    def facts(self, option_set: int, option: int) -> OptionFacts | None:
        """What `OptionTable.facts` says, without a table."""
        known = self.known_facts.get((option_set, option))
        if known is None:
            one = self._sets[option_set]
            if not 0 <= option < len(one) or not one.samples_per_second[option] > 0:
                return None
            known = self.known_facts[option_set, option] = OptionFacts(
                tuple(one.counts[option].tolist()),
                int(one.counts[option].sum()),
                float(one.samples_per_second[option]),
                float(one.memory_bytes[option]),
            )
        return known

    def row_of(self, job: JobSpec, phase: int) -> int:
        """The row of a job's options."""
        return self.run_facts(job, phase).row

    def _row(self, options: Options, phase: int) -> int:
        """The row of a set; a new one gets the next, and all phases of a job their rows at once."""
        sets = options.sets if isinstance(options, PhasedOptions) else (options,)
        first = self._rows.get(id(options))
        if first is None:
            first = self._rows[id(options)] = len(self._sets)
            self._sets.extend(sets)
            for number in range(len(sets)):
                is_last = number + 1 == len(sets)
                self._next_set.append(-1 if is_last else first + number + 1)
                self._end_samples.append(phase_end_samples(options, number))
            self._has_phases |= len(sets) > 1
        return first + phase

    def requested(self, job: JobSpec) -> int:
        """The option with just the GPUs that the owner named: -1 if it cannot run, -2 if none."""
        if not job.requested_gpu:
            return -2
        if job.requested_gpu not in self._gpu_types:
            return -1
        options = phase_set(self.options(job), 0)
        key = (self.row_of(job, 0), job.requested_gpu, job.requested_count)
        if key not in self._requested:
            wanted = np.zeros(len(self._gpu_types), dtype=np.int64)
            wanted[self._gpu_types.index(job.requested_gpu)] = job.requested_count
            matches = np.flatnonzero((options.counts == wanted).all(axis=1))
            self._requested[key] = int(matches[0]) if len(matches) else -1
        return self._requested[key]

    def table(self) -> OptionTable:
        """All sets so far. Rows are only ever added, so an earlier table stays as it was."""
        done = len(self._table.samples_per_second)
        if done < len(self._sets):
            new = self._sets[done:]
            width = max(self._room.samples_per_second.shape[1], *(len(one) for one in new))
            self._make_room(len(self._sets), width)
            for row, one in enumerate(new, start=done):
                self._room.counts[row, : len(one)] = one.counts
                self._room.samples_per_second[row, : len(one)] = one.samples_per_second
                self._room.memory_bytes[row, : len(one)] = one.memory_bytes
            number = len(self._sets)
            self._table = OptionTable(
                counts=self._room.counts[:number],
                samples_per_second=self._room.samples_per_second[:number],
                memory_bytes=self._room.memory_bytes[:number],
            )
            if self._has_phases:
                self._table = replace(
                    self._table,
                    next_set=np.array(self._next_set, dtype=np.int64),
                    end_samples=np.array(self._end_samples),
                )
            self._table.__dict__["_known_facts"] = self.known_facts
        return self._table

    def least_samples(self, seconds: float) -> FloatArray:
        """By set: what its fastest option does in so many seconds."""
        fastest: FloatArray = self.table().samples_per_second.max(axis=1, initial=0.0)
        return seconds * fastest

    def _make_room(self, num_sets: int, width: int) -> None:
        old = self._room
        rows, columns = old.samples_per_second.shape
        if num_sets <= rows and width <= columns:
            return
        rows = max(rows, 2 * num_sets)
        counts = np.zeros((rows, width, len(self._gpu_types)), dtype=np.int64)
        speeds, memory = np.zeros((rows, width)), np.zeros((rows, width))
        used = len(old.samples_per_second)
        counts[:used, :columns] = old.counts
        speeds[:used, :columns] = old.samples_per_second
        memory[:used, :columns] = old.memory_bytes
        self._room = OptionTable(counts=counts, samples_per_second=speeds, memory_bytes=memory)
