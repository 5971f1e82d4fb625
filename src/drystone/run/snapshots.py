"""From the state of a cluster to what a policy sees: tables, made as far as they are read."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, Final

import numpy as np

from drystone.describe.job import JobSpec
from drystone.describe.market import Offer
from drystone.describe.trace_cluster import NodeSpec
from drystone.run.job_columns import JobColumns
from drystone.run.lazy_tables import LazyJobTable, LazyNodeTable, LazySnapshot
from drystone.run.node_columns import NodeColumns, node_columns
from drystone.run.option_book import OptionBook
from drystone.run.rentals import RentalState
from drystone.run.state import ClusterState, JobRecord
from drystone.schedule.phases import Options
from drystone.schedule.snapshot import ComingNodes, Rentals, Snapshot, StartupCost

_NOTHING_RENTED: Final = Rentals()


class SnapshotMaker:
    """Keeps what does not change between snapshots, and hears of every job that does.

    `look` gives a snapshot whose columns are made when they are read: before the state changes,
    `keep` must be called, which completes it for whoever still holds it. `make` needs no such care.
    """

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
        self.book = OptionBook(gpu_types, options_of)
        self._gpu_types, self._knows_lengths = gpu_types, knows_lengths
        self._listed = tuple(offers)
        self._offer_rows = {offer.name: row for row, offer in enumerate(offers)}
        self._prices: dict[str, float] = {}  # that differ from the listed ones
        self._columns = JobColumns(self.book)
        self._node_columns: NodeColumns | None = None
        # Fields of every snapshot, until something changes them.
        self._same: dict[str, Any] = {
            "gpu_types": gpu_types,
            "startup": startup,
            "offers": tuple(one.seen_at(one.price_dollars_per_hour) for one in offers),
            "rentals": _NOTHING_RENTED,
            "spent_dollars": 0.0,
            "budget_dollars_per_hour": budget_dollars_per_hour,
            "hard_cap_dollars_per_hour": hard_cap_dollars_per_hour,
            "knows_lengths": knows_lengths,
        }
        self._held_jobs: weakref.ref[LazyJobTable] | None = None
        self._held_nodes: weakref.ref[LazyNodeTable] | None = None

    def speed(self, job: JobSpec, option: int, phase: int = 0) -> float:
        """Samples a second of one option in a phase of a job."""
        return self.book.speed(job, option, phase)

    def update(self, record: JobRecord) -> None:
        """Take notice of what an event did to a job."""
        self._columns.touch(record)

    def make(self, state: ClusterState, now_seconds: float) -> Snapshot:
        """The snapshot of a state, whose every job was brought up to date by `update`."""
        snapshot = self.look(state, now_seconds)
        self.keep()
        return snapshot

    def look(self, state: ClusterState, now_seconds: float) -> Snapshot:
        """The same, with columns that are made when they are read."""
        columns = self._node_columns
        if columns is None or columns.num_node_changes != state.num_node_changes:
            columns = self._node_columns = node_columns(state, self._gpu_types)
        if self._listed:
            self._update_market(state.rentals, now_seconds)
        nodes = LazyNodeTable.of(columns, state.free)
        jobs = LazyJobTable.of(self._columns, now_seconds, state.num_requeued, self._knows_lengths)
        self._held_nodes, self._held_jobs = weakref.ref(nodes), weakref.ref(jobs)
        return LazySnapshot.of(self._columns, self._same, now_seconds, nodes, jobs)

    def keep(self) -> None:
        """Complete the last snapshot, if somebody still holds it: the state is about to change."""
        if self._held_jobs is None or self._held_nodes is None:
            return
        jobs, nodes = self._held_jobs(), self._held_nodes()
        if jobs is not None:
            jobs.keep()
        if nodes is not None:
            nodes.keep()
        self._held_jobs = self._held_nodes = None

    def _update_market(self, rentals: RentalState, now_seconds: float) -> None:
        if rentals.prices != self._prices:
            self._prices = rentals.prices.copy()
            self._same["offers"] = tuple(
                one.seen_at(self._prices.get(one.name, one.price_dollars_per_hour))
                for one in self._listed
            )
        self._same["rentals"] = self._rentals(rentals)
        self._same["spent_dollars"] = rentals.spent_dollars(now_seconds)

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
