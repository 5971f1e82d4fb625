"""The active jobs as columns of numbers, changed one job at a time: a snapshot is then a copy.

Building every table anew from records costs time in the number of jobs at each decision. Here an
event touches one column, a job that ends leaves a gap, and gaps are closed once they are many.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from drystone.run.state import JobRecord
from drystone.schedule.snapshot import FloatArray, JobTable


class Field(IntEnum):
    """The rows of the array: one number of each job."""

    OPTION_SET = 0
    REQUESTED = 1
    OPTION = 2
    TOTAL = 3
    DONE = 4
    COUNTED = 5
    SPEED = 6
    ATTAINED = 7
    NUM_GPUS = 8
    STARTED = 9
    WAITING = 10
    NUM_STARTS = 11
    WEIGHT = 12


class JobColumns:
    """Jobs in order of submission, with gaps where one has ended."""

    def __init__(self) -> None:
        self._numbers = np.zeros((len(Field), 64))
        self._objects: npt.NDArray[Any] = np.empty((2, 64), dtype=object)  # specs, placements
        self._is_there = np.zeros(64, dtype=bool)
        self._position: dict[str, int] = {}
        self._num_used = 0

    def update(self, record: JobRecord, option_set: int, requested: int) -> None:
        """Write what a record says now; a new job goes to the end."""
        at = self._position.get(record.spec.id)
        if at is None:
            at = self._append(record.spec.id)
        self._numbers[:, at] = (
            option_set, requested, record.option, record.spec.total_samples, record.done_samples,
            record.counted_seconds, record.samples_per_second, record.attained_gpu_seconds,
            record.num_gpus, record.started_seconds, record.waiting_seconds, record.num_starts,
            record.spec.priority,
        )  # fmt: skip
        self._objects[0, at] = record.spec
        self._objects[1, at] = record.placement

    def remove(self, job_id: str) -> None:
        """A job has ended."""
        at = self._position.pop(job_id)
        self._is_there[at] = False
        self._objects[:, at] = None

    def table(self, now_seconds: float, least_samples: FloatArray | None = None) -> JobTable:
        """The jobs as a policy sees them.

        With `least_samples` (by option set), what is left is not shown but guessed: as much again
        as was done, and at least that many.
        """
        rows = np.flatnonzero(self._is_there[: self._num_used])
        numbers = self._numbers[:, rows]
        ran = np.maximum(now_seconds - numbers[Field.COUNTED], 0.0)
        done = numbers[Field.DONE] + numbers[Field.SPEED] * ran
        held = np.where(numbers[Field.OPTION] >= 0, now_seconds - numbers[Field.STARTED], 0.0)
        specs, placements = self._objects[:, rows].tolist()
        whole = numbers[[Field.OPTION_SET, Field.REQUESTED, Field.OPTION, Field.NUM_STARTS]]
        option_set, requested, option, num_starts = whole.astype(np.int64)
        remaining = numbers[Field.TOTAL] - done
        if least_samples is not None:
            remaining = np.maximum(done, least_samples[option_set])
        return JobTable(
            specs=tuple(specs),
            option_set=option_set,
            requested=requested,
            option=option,
            placements=tuple(placements),
            remaining_samples=remaining,
            attained_gpu_seconds=numbers[Field.ATTAINED] + numbers[Field.NUM_GPUS] * held,
            num_starts=num_starts,
            waiting_since_seconds=numbers[Field.WAITING],
            running_since_seconds=numbers[Field.STARTED],
            weights=numbers[Field.WEIGHT],
        )

    def _append(self, job_id: str) -> int:
        if self._num_used == self._numbers.shape[1]:
            self._close_gaps()
        at = self._position[job_id] = self._num_used
        self._is_there[at] = True
        self._num_used += 1
        return at

    def _close_gaps(self) -> None:
        """Move the jobs together, and double the room if they fill half of it."""
        rows = np.flatnonzero(self._is_there)
        size = len(self._is_there)
        size = 2 * size if len(rows) > size // 2 else size
        numbers = np.zeros((len(Field), size))
        objects: npt.NDArray[Any] = np.empty((2, size), dtype=object)
        numbers[:, : len(rows)] = self._numbers[:, rows]
        objects[:, : len(rows)] = self._objects[:, rows]
        self._numbers, self._objects = numbers, objects
        self._is_there = np.arange(size) < len(rows)
        self._num_used = len(rows)
        for at, spec in enumerate(objects[0, : len(rows)]):
            self._position[spec.id] = at
