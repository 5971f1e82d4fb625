"""From the state of a cluster to what a policy sees: records as tables of arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Final

import numpy as np

from drystone.describe.job import JobSpec
from drystone.describe.market import Offer
from drystone.describe.trace_cluster import NodeSpec
from drystone.run.job_columns import JobColumns
from drystone.run.lifecycle import TERMINAL
from drystone.run.node_columns import NodeColumns, node_columns
from drystone.run.rentals import RentalState
from drystone.run.state import ClusterState, JobRecord
from drystone.schedule.phases import Options, PhasedOptions, phase_end_samples, phase_set
from drystone.schedule.snapshot import (
    ComingNodes,
    NodeTable,
    OptionSet,
    OptionTable,
    Rentals,
    Snapshot,
    StartupCost,
    stack_options,
)

# What a job of unknown length is taken to need at least, at its fastest.
GUESSED_SECONDS: Final = 3600.0


_NOTHING_RENTED: Final = Rentals()


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
        offers: Sequence[Offer] = (),
        budget_dollars_per_hour: float = math.inf,
        hard_cap_dollars_per_hour: float = math.inf,
    ) -> None:
        self._gpu_types, self._startup = gpu_types, startup
        self._listed = self._offers = tuple(offers)
        self._offer_rows = {offer.name: row for row, offer in enumerate(offers)}
        self._prices: dict[str, float] = {}  # that `_offers` shows instead of the listed ones
        self._budget, self._hard_cap = budget_dollars_per_hour, hard_cap_dollars_per_hour
        self._options_of, self._knows_lengths = options_of, knows_lengths
        self._sets: list[OptionSet] = []
        self._kept: list[Options] = []
        self._set_rows: dict[tuple[int, int], int] = {}  # by identity of the options, and phase
        self._next_set: dict[int, int] = {}  # from a row to the row of its next phase
        self._end_samples: dict[int, float] = {}  # of the work, by row, where a phase ends
        self._job_options: dict[str, tuple[Options, int]] = {}  # and the option that was named
        self._table: OptionTable | None = None
        self._node_columns: NodeColumns | None = None
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
            self._columns.update(record, self._row(options, record.phase), requested)

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
            offers=self._offers_now(state.rentals),
            rentals=self._rentals(state.rentals),
            spent_dollars=state.rentals.spent_dollars(now_seconds),
            budget_dollars_per_hour=self._budget,
            hard_cap_dollars_per_hour=self._hard_cap,
            knows_lengths=self._knows_lengths,
        )

    def _node_table(self, state: ClusterState) -> NodeTable:
        columns = self._node_columns
        if columns is None or columns.num_node_changes != state.num_node_changes:
            columns = self._node_columns = node_columns(state, self._gpu_types)
        return NodeTable(
            ids=columns.ids,
            type_index=columns.type_index,
            num_gpus=columns.num_gpus,
            free=np.array(state.free, dtype=np.int64),
            memory_bytes=columns.memory_bytes,
            rows_by_type=columns.rows_by_type,
        )

    def _offers_now(self, rentals: RentalState) -> tuple[Offer, ...]:
        """The offers at their prices of now, without what will be."""
        if rentals.prices != self._prices or self._offers is self._listed:
            self._prices = rentals.prices.copy()
            self._offers = tuple(
                one.seen_at(self._prices.get(one.name, one.price_dollars_per_hour))
                for one in self._listed
            )
        return self._offers

    def _rentals(self, rentals: RentalState) -> Rentals:
        if not rentals.rented and not rentals.asked:
            return _NOTHING_RENTED
        rows = self._offer_rows
        nodes = sorted(rentals.rented.items())
        return Rentals(
            nodes=np.array([node for node, _ in nodes], dtype=np.int64),
            offer=np.array([rows[one.offer] for _, one in nodes], dtype=np.int64),
            since_seconds=np.array([one.since_seconds for _, one in nodes]),
            coming=tuple(
                ComingNodes(
                    offer=rows[one.offer],
                    num_nodes=len(list(same)),
                    asked_seconds=one.asked_seconds,
                    ready_seconds=one.ready_seconds,
                )
                for one, same in groupby(rentals.asked.values())
            ),
            dollars_per_hour=rentals.dollars_per_hour(),
        )

    def _option_table(self) -> OptionTable:
        if self._table is None:
            table = stack_options(self._sets, len(self._gpu_types))
            if self._next_set:
                rows = range(len(self._sets))
                following = [self._next_set.get(row, -1) for row in rows]
                ends = [self._end_samples.get(row, math.inf) for row in rows]
                table = replace(
                    table,
                    next_set=np.array(following, dtype=np.int64),
                    end_samples=np.array(ends),
                )
            self._table = table
        return self._table

    def _options(self, job: JobSpec) -> tuple[Options, int]:
        if job.id not in self._job_options:
            found = self._options_of(job)
            self._job_options[job.id] = (found, self._requested(job, phase_set(found, 0)))
        return self._job_options[job.id]

    def _row(self, options: Options, phase: int) -> int:
        """The row of a phase's set; all phases of a job come into the table at once."""
        row = self._set_rows.get((id(options), phase))
        return self._add_rows(options) + phase if row is None else row

    def _add_rows(self, options: Options) -> int:
        first = len(self._sets)
        self._kept.append(options)  # which keeps its identity from being used again
        sets = options.sets if isinstance(options, PhasedOptions) else (options,)
        for phase, one in enumerate(sets):
            self._set_rows[(id(options), phase)] = first + phase
            self._sets.append(one)
            if phase + 1 < len(sets):
                self._next_set[first + phase] = first + phase + 1
                self._end_samples[first + phase] = phase_end_samples(options, phase)
        self._table = None
        return first

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
