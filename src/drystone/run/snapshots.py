"""From the state of a cluster to what a policy sees: records as tables of arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from drystone.describe.job import JobSpec
from drystone.describe.trace_cluster import NodeSpec
from drystone.run.job_columns import JobColumns
from drystone.run.lifecycle import TERMINAL
from drystone.run.state import ClusterState, JobRecord
from drystone.schedule.phases import Options, phase_end_samples, phase_set
from drystone.schedule.snapshot import (
    NodeTable,
    OptionSet,
    OptionTable,
    Snapshot,
    StartupCost,
    stack_options,
)

# What a job of unknown length is taken to need at least, at its fastest.
GUESSED_SECONDS: Final = 3600.0


class SnapshotMaker:
    """Keeps what does not change between snapshots: nodes, and the options of each kind of job."""

    def __init__(
        self,
        nodes: tuple[NodeSpec, ...],
        gpu_types: tuple[str, ...],
        options_of: Callable[[JobSpec], Options],
        startup: StartupCost,
        *,
        knows_lengths: bool = True,
    ) -> None:
        self._nodes, self._gpu_types, self._startup = nodes, gpu_types, startup
        self._options_of, self._knows_lengths = options_of, knows_lengths
        self._sets: list[OptionSet] = []
        self._set_rows: dict[int, int] = {}  # by identity of the set
        self._job_options: dict[str, tuple[Options, int]] = {}  # and the option that was named
        self._table: OptionTable | None = None
        self._ids = tuple(node.id for node in nodes)
        self._type_index = np.array([gpu_types.index(node.gpu) for node in nodes], dtype=np.int64)
        self._num_gpus = np.array([node.num_gpus for node in nodes], dtype=np.int64)
        self._memory = np.array([node.memory_bytes for node in nodes])
        self._rows_by_type = tuple(
            np.flatnonzero(self._type_index == kind) for kind in range(len(gpu_types))
        )
        self._columns = JobColumns()

    def speed(self, job: JobSpec, option: int, phase: int = 0) -> float:
        """Samples a second of one option in a phase of a job."""
        return float(phase_set(self._options(job)[0], phase).samples_per_second[option])

    def phase_end_samples(self, job: JobSpec, phase: int) -> float:
        """The work done when a phase of a job ends; infinity for the last one."""
        return phase_end_samples(self._options(job)[0], phase)

    def update(self, record: JobRecord) -> None:
        """Take notice of what an event did to a job."""
        if record.state in TERMINAL:
            self._columns.remove(record.spec.id)
        else:
            options, requested = self._options(record.spec)
            self._columns.update(record, self._row(phase_set(options, record.phase)), requested)

    def make(self, state: ClusterState, now_seconds: float) -> Snapshot:
        """The snapshot of a state, whose every job was brought up to date by `update`."""
        options = self._option_table()
        least = None
        if not self._knows_lengths:
            least = GUESSED_SECONDS * options.samples_per_second.max(axis=1, initial=0.0)
        return Snapshot(
            now_seconds=now_seconds,
            gpu_types=self._gpu_types,
            nodes=self._node_table(state),
            jobs=self._columns.table(now_seconds, least),
            options=options,
            startup=self._startup,
            knows_lengths=self._knows_lengths,
        )

    def _node_table(self, state: ClusterState) -> NodeTable:
        usable = self._num_gpus
        if state.lost:
            usable = usable.copy()
            usable[sorted(state.lost)] = 0
        return NodeTable(
            ids=self._ids,
            type_index=self._type_index,
            num_gpus=usable,
            free=state.free.copy(),
            memory_bytes=self._memory,
            rows_by_type=self._rows_by_type,
        )

    def _option_table(self) -> OptionTable:
        if self._table is None:
            self._table = stack_options(self._sets, len(self._gpu_types))
        return self._table

    def _options(self, job: JobSpec) -> tuple[Options, int]:
        if job.id not in self._job_options:
            found = self._options_of(job)
            self._job_options[job.id] = (found, self._requested(job, phase_set(found, 0)))
        return self._job_options[job.id]

    def _row(self, options: OptionSet) -> int:
        row = self._set_rows.setdefault(id(options), len(self._sets))
        if row == len(self._sets):
            self._sets.append(options)  # which also keeps its identity from being used again
            self._table = None
        return row

    def _requested(self, job: JobSpec, options: OptionSet) -> int:
        """The option with just the GPUs that the owner named: -1 if it cannot run, -2 if none."""
        if not job.requested_gpu:
            return -2
        if job.requested_gpu not in self._gpu_types:
            return -1
        wanted = np.zeros(len(self._gpu_types), dtype=np.int64)
        wanted[self._gpu_types.index(job.requested_gpu)] = job.requested_count
        matches = np.flatnonzero((options.counts == wanted).all(axis=1))
        return int(matches[0]) if len(matches) else -1
