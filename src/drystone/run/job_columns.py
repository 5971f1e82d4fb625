"""The active jobs as columns of numbers, changed one job at a time: a snapshot is then a copy.

Building every table anew from records costs Python time for every job at every decision. Here an
event writes one column, and a job that ends has the columns after it moved up by one.
"""

from __future__ import annotations

from bisect import bisect_left
from enum import IntEnum

import numpy as np

from drystone.describe.job import JobSpec
from drystone.run.state import JobRecord
from drystone.schedule.snapshot import FloatArray, JobTable, Placement


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


class Index(IntEnum):
    """The rows of the array of whole numbers."""

    OPTION_SET = 0
    REQUESTED = 1
    OPTION = 2
    NUM_STARTS = 3


class JobColumns:
    """Jobs in order of submission. A job is found by its sequence number, which only grows."""

    def __init__(self) -> None:
        self._numbers = np.zeros((len(Number), 64))
        self._indices = np.zeros((len(Index), 64), dtype=np.int64)
        self._specs: list[JobSpec] = []
        self._placements: list[Placement] = []
        self._order: list[int] = []
        self._sequence: dict[str, int] = {}
        self._next = 0

    def update(self, record: JobRecord, option_set: int, requested: int) -> None:
        """Write what a record says now; a new job goes to the end."""
        job_id = record.spec.id
        if job_id not in self._sequence:
            self._append(record.spec)
        at = bisect_left(self._order, self._sequence[job_id])
        self._numbers[:, at] = (
            record.spec.total_samples, record.done_samples, record.counted_seconds,
            record.samples_per_second, record.attained_gpu_seconds, record.num_gpus,
            record.started_seconds, record.waiting_seconds, record.spec.priority,
        )  # fmt: skip
        self._indices[:, at] = (option_set, requested, record.option, record.num_starts)
        self._placements[at] = record.placement

    def remove(self, job_id: str) -> None:
        """A job has ended."""
        at = bisect_left(self._order, self._sequence.pop(job_id))
        end = len(self._order)
        for array in (self._numbers, self._indices):
            array[:, at : end - 1] = array[:, at + 1 : end]
        del self._specs[at], self._placements[at], self._order[at]

    def table(self, now_seconds: float, least_samples: FloatArray | None = None) -> JobTable:
        """The jobs as a policy sees them.

        With `least_samples` (by option set), what is left is not shown but guessed: as much again
        as was done, and at least that many.
        """
        numbers = self._numbers[:, : len(self._order)].copy()
        indices = self._indices[:, : len(self._order)].copy()
        ran = np.maximum(now_seconds - numbers[Number.COUNTED], 0.0)
        done = numbers[Number.DONE] + numbers[Number.SPEED] * ran
        runs = indices[Index.OPTION] >= 0
        held = np.where(runs, now_seconds - numbers[Number.STARTED], 0.0)
        remaining = numbers[Number.TOTAL] - done
        if least_samples is not None:
            remaining = np.maximum(done, least_samples[indices[Index.OPTION_SET]])
        return JobTable(
            specs=tuple(self._specs),
            option_set=indices[Index.OPTION_SET],
            requested=indices[Index.REQUESTED],
            option=indices[Index.OPTION],
            placements=tuple(self._placements),
            remaining_samples=remaining,
            attained_gpu_seconds=numbers[Number.ATTAINED] + numbers[Number.NUM_GPUS] * held,
            num_starts=indices[Index.NUM_STARTS],
            waiting_since_seconds=numbers[Number.WAITING],
            running_since_seconds=numbers[Number.STARTED],
            weights=numbers[Number.WEIGHT],
            measured_speeds=np.where(runs & (ran > 0), numbers[Number.SPEED], 0.0),
        )

    def _append(self, spec: JobSpec) -> None:
        if len(self._order) == self._numbers.shape[1]:
            self._numbers = np.concatenate((self._numbers, np.zeros_like(self._numbers)), axis=1)
            self._indices = np.concatenate((self._indices, np.zeros_like(self._indices)), axis=1)
        self._sequence[spec.id] = self._next
        self._order.append(self._next)
        self._specs.append(spec)
        self._placements.append(())
        self._next += 1
