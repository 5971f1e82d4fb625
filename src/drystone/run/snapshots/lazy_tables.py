"""Tables whose columns are made when a policy first reads them.

They show the state of now, and the state moves on. So whoever changes it first calls `keep` on the
tables that somebody still holds: what was not read yet is read then, and a snapshot never changes.
"""

# ruff: noqa: D102 - what the columns mean stands in `schedule/snapshot.py`

from __future__ import annotations

from dataclasses import fields
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np

from drystone.describe.job import JobSpec
from drystone.run.snapshots.job_columns import Index, JobColumns, Number
from drystone.run.snapshots.node_columns import NodeColumns
from drystone.schedule.snapshot import (
    BoolArray,
    FloatArray,
    IntArray,
    JobStatus,
    JobTable,
    NodeTable,
    Placement,
    WaitingJob,
)

# What a job of unknown length is taken to need at least, at its fastest.
GUESSED_SECONDS: Final = 3600.0


class LazyJobTable(JobTable):
    """The jobs of now. A copy made by `dataclasses.replace` has all columns, and is not lazy."""

    if TYPE_CHECKING:
        _columns: JobColumns
        _now_seconds: float
        _knows_lengths: bool

    @classmethod
    def of(
        cls,
        columns: JobColumns,
        now_seconds: float,
        num_requeued: int,
        knows_lengths: bool,
    ) -> LazyJobTable:
        """Where lengths are not known, what is left is not shown but guessed."""
        table = object.__new__(cls)
        own = table.__dict__
        own["_columns"], own["_now_seconds"] = columns, now_seconds
        own["_num_requeued"], own["_knows_lengths"] = num_requeued, knows_lengths
        return table

    def keep(self) -> None:
        """Read all that was not read yet: the state is about to change."""
        for one in fields(JobTable):
            getattr(self, one.name)
        num_seen = self.num_seen
        order = self._columns.order.copy()
        self.__dict__["_kept"] = (num_seen, order)
        self.__dict__["_columns"] = None

    @property
    def _is_live(self) -> bool:
        return self.__dict__.get("_columns") is not None

    def __len__(self) -> int:
        return self._columns.num_jobs if self._is_live else len(self.specs)

    @property
    def num_seen(self) -> int:
        """Above the sequence number of every job here, and of every job that is gone."""
        if self._is_live:
            return self._columns.num_seen
        kept = self.__dict__.get("_kept")
        return int(kept[0]) if kept is not None else len(self.specs)

    @property
    def num_requeued(self) -> int:
        """How often a job has come back to wait; -1 where nobody counts."""
        return int(self.__dict__.get("_num_requeued", -1))

    def status(self, job_id: str) -> JobStatus | None:
        """What a job does; None where there is no such job."""
        return self._columns.status(job_id) if self._is_live else super().status(job_id)

    def waiting_from(self, sequence: int, most: int) -> list[WaitingJob]:
        """The first jobs that wait, `most` of them, from a sequence number on."""
        if self._is_live:
            return self._columns.waiting_from(sequence, most)
        kept = self.__dict__.get("_kept")
        if kept is None:
            return super().waiting_from(sequence, most)
        order = kept[1]
        waiting = super().waiting_from(int(order.searchsorted(sequence)), most)
        return [one._replace(sequence=int(order[one.sequence])) for one in waiting]

    @cached_property
    def specs(self) -> tuple[JobSpec, ...]:
        return self._columns.specs()

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        return self._columns.placements()

    @cached_property
    def option_set(self) -> IntArray:
        return self._columns.index(Index.OPTION_SET)

    @cached_property
    def requested(self) -> IntArray:
        return self._columns.index(Index.REQUESTED)

    @cached_property
    def option(self) -> IntArray:
        return self._columns.index(Index.OPTION)

    @cached_property
    def num_starts(self) -> IntArray:
        return self._columns.index(Index.NUM_STARTS)

    @cached_property
    def waiting_since_seconds(self) -> FloatArray:
        return self._columns.number(Number.WAITING)

    @cached_property
    def running_since_seconds(self) -> FloatArray:
        return self._columns.number(Number.STARTED)

    @cached_property
    def weights(self) -> FloatArray:
        return self._columns.number(Number.WEIGHT)

    @cached_property
    def deadline_seconds(self) -> FloatArray:
        return self._columns.number(Number.DEADLINE)

    @cached_property
    def own_startup_seconds(self) -> FloatArray:
        return self._columns.number(Number.STARTUP)

    @cached_property
    def is_limited(self) -> BoolArray:
        is_limited: BoolArray = self._columns.index(Index.IS_LIMITED) != 0
        return is_limited

    @cached_property
    def _ran_seconds(self) -> FloatArray:
        since = self._columns.number(Number.COUNTED)
        ran: FloatArray = np.maximum(self._now_seconds - since, 0.0)
        return ran

    @cached_property
    def remaining_samples(self) -> FloatArray:
        speeds = self._columns.number(Number.SPEED)
        done = self._columns.number(Number.DONE) + speeds * self._ran_seconds
        if not self._knows_lengths:
            least = self._columns.book.least_samples(GUESSED_SECONDS)
            guessed: FloatArray = np.maximum(done, least[self.option_set])
            return guessed
        return self._columns.number(Number.TOTAL) - done

    @cached_property
    def attained_gpu_seconds(self) -> FloatArray:
        since = self.running_since_seconds
        held = np.where(self.option >= 0, self._now_seconds - since, 0.0)
        num_gpus = self._columns.number(Number.NUM_GPUS)
        return self._columns.number(Number.ATTAINED) + num_gpus * held

    @cached_property
    def measured_speeds(self) -> FloatArray | None:
        speeds = self._columns.number(Number.SPEED)
        return np.where((self.option >= 0) & (self._ran_seconds > 0), speeds, 0.0)


class LazyNodeTable(NodeTable):
    """The nodes of now: only what is free changes from one event to the next."""

    if TYPE_CHECKING:
        _free: list[int]

    @classmethod
    def of(cls, columns: NodeColumns, free: list[int]) -> LazyNodeTable:
        """`free` is the state's own list."""
        table = object.__new__(cls)
        table.__dict__.update(columns.shared)
        table.__dict__["_free"] = free
        return table

    def keep(self) -> None:
        """Read all that was not read yet: the state is about to change."""
        _ = self.free

    @cached_property
    def free(self) -> IntArray:
        return np.array(self._free, dtype=np.int64)
