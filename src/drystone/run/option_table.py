"""The options of all jobs, stacked: each set once, as rows of a table that only grows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from drystone.describe.job import JobSpec
from drystone.describe.option import FloatArray, OptionRow, OptionSet
from drystone.schedule.snapshot import JobStatus, OptionTable


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What the options of a job say in one of its phases."""

    samples_per_second: list[float]  # by option
    end_samples: float  # the work done when the phase ends; infinity for the last one
    row: int  # of the table
    options: OptionSet
    waiting: JobStatus  # of a job in this phase that waits
    known_facts: dict[int, OptionRow]  # by option, of those that were asked for and can be run


class OptionStack:
    """The options of every job that was asked for: a row for each phase of each set."""

    def __init__(
        self, gpu_types: tuple[str, ...], options_of: Callable[[JobSpec], OptionSet]
    ) -> None:
        self._gpu_types, self._options_of = gpu_types, options_of
        # By identity of the set: its phases. Holding the set keeps its identity from being reused.
        self._phases: dict[int, list[RunFacts]] = {}
        self._rows: list[tuple[OptionSet, int]] = []  # the set and the phase of each row
        self._end_samples: list[float] = []  # by row: the work done when its phase ends
        self._has_phases = False
        self.first_runs: dict[str, RunFacts] = {}  # by job that was asked for, of its first phase
        self._requested: dict[tuple[int, str, int], int] = {}
        self._table = OptionTable(
            counts=np.zeros((0, 0, len(gpu_types)), dtype=np.int64),
            samples_per_second=np.zeros((0, 0)),
            memory_bytes=np.zeros((0, 0)),
        )
        self._room = self._table  # the same arrays, with rows to spare
        self._known: dict[tuple[int, int], OptionRow] = {}  # by row and option

    def options(self, job: JobSpec) -> OptionSet:
        """What a job can choose from; asked for once."""
        return self.run_facts(job, 0).options

    def run_facts(self, job: JobSpec, phase: int) -> RunFacts:
        """The speeds of a job in a phase, and when the phase ends."""
        first = self.first_runs.get(job.id) or self.first_run(job)
        return first if phase == 0 else self._phases[id(first.options)][phase]

    def first_run(self, job: JobSpec) -> RunFacts:
        """The same of its first phase, for a job that is not in `first_runs` yet."""
        options_of = self._options_of
        options = options_of(job)
        phases = self._phases.get(id(options)) or self._add(options)
        self.first_runs[job.id] = phases[0]
        return phases[0]

    def _add(self, options: OptionSet) -> list[RunFacts]:
        """All phases of a set get their rows at once."""
        self._has_phases |= options.num_phases > 1
        phases = self._phases[id(options)] = []
        for phase in range(options.num_phases):
            row = len(self._rows)
            self._rows.append((options, phase))
            speeds: list[float] = options.speeds(phase).tolist()
            end_samples = options.phase_end_samples(phase)
            self._end_samples.append(end_samples)
            waiting = JobStatus(-1, row, ())
            phases.append(RunFacts(speeds, end_samples, row, options, waiting, {}))
        return phases

    def facts(self, option_set: int, option: int) -> OptionRow | None:
        """What `OptionTable.facts` says, without a table; kept for the next time."""
        known = self._known.get((option_set, option))
        if known is None:
            options, phase = self._rows[option_set]
            known = options.row(option, phase)
            if known is not None:
                self._known[option_set, option] = known
        return known

    def row_of(self, job: JobSpec, phase: int) -> int:
        """The row of a job's options."""
        return self.run_facts(job, phase).row

    def requested(self, job: JobSpec) -> int:
        """The option with just the GPUs that the owner named: -1 if it cannot run, -2 if none."""
        if not job.requested_gpu:
            return -2
        if job.requested_gpu not in self._gpu_types:
            return -1
        key = (self.row_of(job, 0), job.requested_gpu, job.requested_count)
        if key not in self._requested:
            wanted = np.zeros(len(self._gpu_types), dtype=np.int64)
            wanted[self._gpu_types.index(job.requested_gpu)] = job.requested_count
            matches = np.flatnonzero((self.options(job).counts == wanted).all(axis=1))
            self._requested[key] = int(matches[0]) if len(matches) else -1
        return self._requested[key]

    def table(self) -> OptionTable:
        """All rows so far. Rows are only ever added, so an earlier table stays as it was."""
        done, number = len(self._table.samples_per_second), len(self._rows)
        if done < number:
            room = self._room = self._with_room(number)
            for row in range(done, number):
                options, phase = self._rows[row]
                room.counts[row, : len(options)] = options.counts
                room.samples_per_second[row, : len(options)] = options.speeds(phase)
                room.memory_bytes[row, : len(options)] = options.memory_bytes
            self._table = OptionTable(
                counts=room.counts[:number],
                samples_per_second=room.samples_per_second[:number],
                memory_bytes=room.memory_bytes[:number],
            )
            if self._has_phases:
                ends = np.array(self._end_samples)
                next_set = np.where(np.isinf(ends), -1, np.arange(1, number + 1))
                self._table = replace(self._table, next_set=next_set, end_samples=ends)
        return self._table

    def least_samples(self, seconds: float) -> FloatArray:
        """By row: what its fastest option does in so many seconds."""
        fastest: FloatArray = self.table().samples_per_second.max(axis=1, initial=0.0)
        return seconds * fastest

    def _with_room(self, num_rows: int) -> OptionTable:
        """The table's arrays with space for so many rows; twice as many when they must grow."""
        old = self._room
        rows, columns = old.samples_per_second.shape
        new = self._rows[len(self._table.samples_per_second) :]
        width = max(columns, *(len(options) for options, _ in new))
        if num_rows <= rows and width <= columns:
            return old
        more = (max(rows, 2 * num_rows) - rows, width - columns)
        return OptionTable(
            counts=np.pad(old.counts, ((0, more[0]), (0, more[1]), (0, 0))),
            samples_per_second=np.pad(old.samples_per_second, ((0, more[0]), (0, more[1]))),
            memory_bytes=np.pad(old.memory_bytes, ((0, more[0]), (0, more[1]))),
        )
