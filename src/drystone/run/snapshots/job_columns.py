"""The jobs that wait or run as columns of numbers, brought up to date when somebody reads them.

An event only notes that a job has changed. Whoever reads a column has the changed jobs written, and
pays for that column alone; nothing is done for jobs that did not change, or columns nobody reads.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from drystone.describe.job import JobSpec
from drystone.run.lifecycle import TERMINAL, JobState
from drystone.run.option_table import OptionStack
from drystone.run.state import JobRecord
from drystone.schedule.snapshot import FloatArray, IntArray, JobStatus, Placement, WaitingJob

_CHUNK = 32
_THERE = (JobState.QUEUED, JobState.RUNNING)


class Number(IntEnum):
    """The rows of the array of numbers."""

    TOTAL = 0
    DONE = 1
    COUNTED = 2
    SPEED = 3
    ATTAINED = 4
    NUM_GPUS = 5
    STARTED = 6
    WAITING = 7
    WEIGHT = 8
    DEADLINE = 9
    STARTUP = 10


class Index(IntEnum):
    """The rows of the array of whole numbers."""

    OPTION_SET = 0
    REQUESTED = 1
    OPTION = 2
    NUM_STARTS = 3
    IS_LIMITED = 4


class JobColumns:
    """Jobs by sequence number, which grows with submission; `order` has those that are there."""

    def __init__(self, book: OptionStack) -> None:
        self.book = book
        self._numbers = np.zeros((len(Number), 64))
        self._indices = np.zeros((len(Index), 64), dtype=np.int64)
        self._specs: list[JobSpec] = []
        self._placements: list[Placement] = []
        self._sequence: dict[str, int] = {}
        self._order = np.zeros(64, dtype=np.int64)
        self._num_jobs = 0
        self.changed: list[JobRecord] = []  # since columns were read last, in order
        self._records: dict[str, JobRecord] = {}

    def touch(self, record: JobRecord) -> None:
        """An event has changed a job."""
        self.changed.append(record)

    def flush(self) -> None:
        """Write the jobs that have changed."""
        if not self.changed:
            return
        for record in dict.fromkeys(self.changed):
            job_id = record.spec.id
            is_there = record.state in _THERE
            sequence = self._sequence.get(job_id)
            if is_there:
                if sequence is None:
                    sequence = self._append(record.spec)
                if job_id not in self._records:
                    self._records[job_id] = record
                    self._insert(sequence)
                self._write(sequence, record)
            elif sequence is not None:
                if self._records.pop(job_id, None) is not None:
                    self._remove(sequence)
                if record.state in TERMINAL:
                    del self._sequence[job_id]
        self.changed.clear()

    @property
    def num_jobs(self) -> int:
        """Jobs that wait or run."""
        self.flush()
        return self._num_jobs

    @property
    def num_seen(self) -> int:
        """The sequence number of the next job."""
        self.flush()
        return len(self._specs)

    @property
    def order(self) -> IntArray:
        """The sequence numbers of the jobs that are there."""
        self.flush()
        return self._order[: self._num_jobs]

    def number(self, which: Number) -> FloatArray:
        """A column of numbers, copied."""
        order = self.order  # first, for it may make new arrays
        column: FloatArray = self._numbers[which, order]
        return column

    def index(self, which: Index) -> IntArray:
        """A column of whole numbers, copied."""
        order = self.order
        column: IntArray = self._indices[which, order]
        return column

    def specs(self) -> tuple[JobSpec, ...]:
        """What was submitted."""
        order, specs = self.order.tolist(), self._specs
        return tuple([specs[sequence] for sequence in order])

    def placements(self) -> tuple[Placement, ...]:
        """Where each job runs."""
        order, placements = self.order.tolist(), self._placements
        return tuple([placements[sequence] for sequence in order])

    def status(self, job_id: str) -> JobStatus | None:
        """What one job does."""
        self.flush()
        record = self._records.get(job_id)
        if record is None or record.state not in _THERE:
            return None
        option_set = self.book.row_of(record.spec, record.phase)
        return JobStatus(record.option, option_set, record.placement)

    def waiting_from(self, sequence: int, most: int) -> list[WaitingJob]:
        """The first jobs that wait, from a sequence number on."""
        order = self.order
        found: list[WaitingJob] = []
        at, chunk = int(order.searchsorted(sequence)), min(most, _CHUNK)
        while at < len(order) and len(found) < most:
            part = order[at : at + chunk]
            rows = self._indices[:, part]
            for one in np.flatnonzero(rows[Index.OPTION] < 0).tolist():
                number = int(part[one])
                option_set, requested = rows[Index.OPTION_SET, one], rows[Index.REQUESTED, one]
                found.append(
                    WaitingJob(number, self._specs[number], int(option_set), int(requested))
                )
            at += chunk
            chunk *= 2
        return found[:most]

    def _write(self, sequence: int, record: JobRecord) -> None:
        spec = record.spec
        self._numbers[:, sequence] = (
            spec.total_samples, record.done_samples, record.counted_seconds,
            record.samples_per_second, record.attained_gpu_seconds, record.num_gpus,
            record.started_seconds, record.waiting_seconds, spec.priority,
            spec.deadline_seconds, spec.startup_seconds,
        )  # fmt: skip
        self._indices[:, sequence] = (
            self.book.row_of(spec, record.phase), self.book.requested(spec), record.option,
            record.num_starts, spec.is_limited,
        )  # fmt: skip
        self._placements[sequence] = record.placement

    def _append(self, spec: JobSpec) -> int:
        sequence = self._sequence[spec.id] = len(self._specs)
        if sequence == self._numbers.shape[1]:
            self._numbers = np.concatenate((self._numbers, np.zeros_like(self._numbers)), axis=1)
            self._indices = np.concatenate((self._indices, np.zeros_like(self._indices)), axis=1)
        self._specs.append(spec)
        self._placements.append(())
        return sequence

    def _insert(self, sequence: int) -> None:
        end = self._num_jobs
        if end == len(self._order):
            self._order = np.concatenate((self._order, np.zeros_like(self._order)))
        order = self._order
        at = (
            end
            if end == 0 or order[end - 1] < sequence
            else int(order[:end].searchsorted(sequence))
        )
        if at < end:
            order[at + 1 : end + 1] = order[at:end]
        order[at] = sequence
        self._num_jobs = end + 1

    def _remove(self, sequence: int) -> None:
        end, order = self._num_jobs, self._order
        at = int(order[:end].searchsorted(sequence))
        order[at : end - 1] = order[at + 1 : end]
        self._num_jobs = end - 1
