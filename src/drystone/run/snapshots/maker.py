"""From the state of a cluster to what a policy sees: tables, made as far as they are read."""

# ruff: noqa: D102 - what the fields of a snapshot mean stands in `schedule/snapshot.py`

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from sys import getrefcount
from typing import TYPE_CHECKING, Final

import numpy as np

from drystone.describe.cluster import NodeSpec
from drystone.describe.job import JobSpec
from drystone.describe.market import Offer
from drystone.describe.option import OptionRow, OptionSet
from drystone.run.lifecycle import JobState
from drystone.run.option_table import OptionStack
from drystone.run.rentals import RentalState
from drystone.run.snapshots.job_columns import JobColumns
from drystone.run.snapshots.lazy_tables import LazyJobTable, LazyNodeTable
from drystone.run.snapshots.node_columns import NodeColumns, node_columns
from drystone.run.state import ClusterState, JobRecord
from drystone.schedule.snapshot import (
    ComingNodes,
    JobStatus,
    JobTable,
    NodeTable,
    OptionTable,
    Rentals,
    Snapshot,
    StartupCost,
)

_NOTHING_RENTED: Final = Rentals()
_QUEUED: Final = JobState.QUEUED
_THERE: Final = (JobState.QUEUED, JobState.RUNNING)
_NUM_BARE: Final = 3  # fields of a lazy snapshot of which nothing was read yet


class _Alone:
    """Something that nobody else has a reference to, looked at as `SnapshotMaker.keep` looks."""

    def __init__(self) -> None:
        self._last: object = object()

    def num_references(self) -> int:
        """As this version of Python counts them."""
        return getrefcount(self._last)


_REFS_OF_OURS: Final = _Alone().num_references()


class SnapshotMaker:
    """Keeps what does not change between snapshots, and hears of every job that does.

    `look` gives a snapshot whose columns are made when they are read, and asks the state to call
    `keep` before it changes, which completes the snapshot for whoever still holds it.
    """

    def __init__(
        self,
        nodes: tuple[NodeSpec, ...],
        gpu_types: tuple[str, ...],
        options_of: Callable[[JobSpec], OptionSet],
        startup: StartupCost,
        *,
        knows_lengths: bool = True,
        offers: Sequence[Offer] = (),
        budget_dollars_per_hour: float = math.inf,
        hard_cap_dollars_per_hour: float = math.inf,
    ) -> None:
        self.gpu_dollars_per_hour: Mapping[str, float] = {}  # of the owner's GPUs, by type
        self.book = OptionStack(gpu_types, options_of)
        self.gpu_types, self.startup, self.knows_lengths = gpu_types, startup, knows_lengths
        self.budget_dollars_per_hour = budget_dollars_per_hour
        self.hard_cap_dollars_per_hour = hard_cap_dollars_per_hour
        self._listed = tuple(offers)
        self._offers = tuple(one.seen_at(one.price_dollars_per_hour) for one in offers)
        self._offer_rows = {offer.name: row for row, offer in enumerate(offers)}
        self._prices: dict[str, float] = {}  # that differ from the listed ones
        self._columns = JobColumns(self.book)
        self.changed = self._columns.changed  # jobs that events have changed
        self._node_columns: NodeColumns | None = None
        self.state = ClusterState([])  # that is looked at
        # What the last look gave out: whether somebody still holds it is known when it matters.
        self._last = LazySnapshot.of(self)
        self._own = self._last.__dict__  # its fields, which are frozen otherwise
        self._held_tables: list[weakref.ref[LazyJobTable] | weakref.ref[LazyNodeTable]] = []
        self._keep = self.keep

    def speed(self, job: JobSpec, option: int, phase: int = 0) -> float:
        """Samples a second of one option in a phase of a job."""
        return self.book.run_facts(job, phase).samples_per_second[option]

    def update(self, record: JobRecord) -> None:
        """Take notice of what an event did to a job."""
        self._columns.touch(record)

    def watch(self, state: ClusterState) -> None:
        """Let this be the state that is looked at."""
        self.state = state

    def make(self, state: ClusterState, now_seconds: float) -> Snapshot:
        """The snapshot of a state, whose every job was brought up to date by `update`."""
        self.watch(state)
        snapshot = self.look()
        self._own["now_seconds"] = now_seconds
        self.keep()
        return snapshot

    def look(self) -> Snapshot:
        """The state as it is now, with tables and columns that are made when they are read.

        Whoever looks again before anything has changed gets the same.
        """
        state = self.state
        if state.before_change is None:
            self._own["now_seconds"] = state.now_seconds
            state.before_change = self._keep
        return self._last

    def keep(self) -> None:
        """Complete the last snapshot, if somebody still holds it: the state is about to change."""
        self.state.before_change = None
        # What nobody holds, and nobody has read, is the next look again.
        if getrefcount(self._last) > _REFS_OF_OURS or len(self._own) > _NUM_BARE:
            self._let_go(getrefcount(self._last) > _REFS_OF_OURS)

    def _let_go(self, is_held: bool) -> None:
        """Complete what somebody holds, and make a snapshot for the next look."""
        if is_held:
            self._last.keep()
        self._last = LazySnapshot.of(self)  # so its tables are gone, if nobody else holds them
        self._own = self._last.__dict__
        for held in self._held_tables:
            if (table := held()) is not None:
                table.keep()
        self._held_tables = []

    def job_table(self, state: ClusterState, now_seconds: float) -> JobTable:
        """The jobs of now."""
        table = LazyJobTable.of(self._columns, now_seconds, state.num_requeued, self.knows_lengths)
        self._held_tables.append(weakref.ref(table))
        return table

    def node_columns(self, state: ClusterState) -> NodeColumns:
        """What all tables of nodes share until a node comes, goes or is lost."""
        columns = self._node_columns
        if columns is None or columns.num_node_changes != state.num_node_changes:
            columns = self._node_columns = node_columns(state, self.gpu_types)
        return columns

    def node_table(self, state: ClusterState) -> NodeTable:
        """The nodes of now."""
        table = LazyNodeTable.of(self.node_columns(state), state.free)
        self._held_tables.append(weakref.ref(table))
        return table

    def option_table(self) -> OptionTable:
        """The options of all jobs. It only grows, and so need not be kept."""
        self._columns.flush()
        return self.book.table()

    def offers(self, rentals: RentalState, now_seconds: float) -> tuple[Offer, ...]:
        """At their prices of now, without what will be."""
        if rentals.prices != self._prices:
            self._prices = rentals.prices.copy()
            self._offers = tuple(
                one.seen_at(self._prices.get(one.name, one.price_dollars_per_hour))
                for one in self._listed
            )
        if rentals.shortages:
            return tuple(
                dataclasses.replace(one, is_short=rentals.is_short(one.name, now_seconds))
                for one in self._offers
            )
        return self._offers

    def rentals(self, state: ClusterState) -> Rentals:
        rentals = state.rentals
        if not rentals.rented and not rentals.asked:
            return _NOTHING_RENTED
        rows = self._offer_rows
        # Nodes that are being given back cost money still, and cannot be given back once more.
        nodes = [one for one in sorted(rentals.rented.items()) if one[0] not in state.closing]
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


class LazySnapshot(Snapshot):
    """A snapshot of now. A copy made by `dataclasses.replace` has all fields, and is not lazy."""

    if TYPE_CHECKING:
        _maker: SnapshotMaker
    _is_live = False  # whether nothing has changed since the look

    @classmethod
    def of(cls, maker: SnapshotMaker) -> LazySnapshot:
        """One whose time is set when somebody looks."""
        snapshot = object.__new__(cls)  # the constructor would set all fields one by one
        own = snapshot.__dict__
        own["_maker"], own["_is_live"] = maker, True
        return snapshot

    def keep(self) -> None:
        """Read all that was not read yet: the state is about to change."""
        self.__dict__["_is_live"] = False
        for one in dataclasses.fields(Snapshot):
            getattr(self, one.name)

    @cached_property
    def gpu_types(self) -> tuple[str, ...]:
        return self._maker.gpu_types

    @cached_property
    def nodes(self) -> NodeTable:
        return self._maker.node_table(self._maker.state)

    @cached_property
    def jobs(self) -> JobTable:
        return self._maker.job_table(self._maker.state, self.now_seconds)

    @cached_property
    def options(self) -> OptionTable:
        return self._maker.option_table()

    @cached_property
    def startup(self) -> StartupCost:
        return self._maker.startup

    @cached_property
    def offers(self) -> tuple[Offer, ...]:
        return self._maker.offers(self._maker.state.rentals, self.now_seconds)

    @cached_property
    def rentals(self) -> Rentals:
        return self._maker.rentals(self._maker.state)

    @cached_property
    def spent_dollars(self) -> float:
        return self._maker.state.rentals.spent_dollars(self.now_seconds)

    @cached_property
    def budget_dollars_per_hour(self) -> float:
        return self._maker.budget_dollars_per_hour

    @cached_property
    def hard_cap_dollars_per_hour(self) -> float:
        return self._maker.hard_cap_dollars_per_hour

    @cached_property
    def knows_lengths(self) -> bool:
        return self._maker.knows_lengths

    @cached_property
    def gpu_dollars_per_hour(self) -> Mapping[str, float]:
        return self._maker.gpu_dollars_per_hour

    # What a checker asks for, of a few jobs and nodes: without tables, while this is the present.

    def job_status(self, job_id: str) -> JobStatus | None:
        if not self._is_live:
            return super().job_status(job_id)
        record = self._maker.state.active.get(job_id)
        if record is None or record.state not in _THERE:
            return None
        facts = self._maker.book.run_facts(record.spec, record.phase)
        if record.option < 0:
            return facts.waiting
        return JobStatus(record.option, facts.row, record.placement)

    def option_facts(self, option_set: int, option: int) -> OptionRow | None:
        if not self._is_live:
            return super().option_facts(option_set, option)
        return self._maker.book.facts(option_set, option)

    def start_facts(self, job_id: str, option: int) -> OptionRow | None:
        if not self._is_live:
            return super().start_facts(job_id, option)
        maker = self._maker
        job = maker.state.active.get(job_id)
        if job is None or job.state is not _QUEUED:
            return None
        run = maker.book.first_runs.get(job_id) or maker.book.first_run(job.spec)
        if job.phase:
            run = maker.book.run_facts(job.spec, job.phase)
        facts = run.known_facts.get(option)
        if facts is None:
            facts = maker.book.facts(run.row, option)
            if facts is not None:
                run.known_facts[option] = facts
        return facts

    def node_kinds(self) -> Sequence[int]:
        if not self._is_live:
            return super().node_kinds()
        return self._maker.node_columns(self._maker.state).kinds

    def free_by_node(self) -> Sequence[int]:
        return self._maker.state.free if self._is_live else super().free_by_node()


def take_jobs(jobs: JobTable, rows: np.ndarray) -> JobTable:
    """Some rows of a table of jobs."""
    values = {}
    for name in JobTable.__dataclass_fields__:
        column = getattr(jobs, name)
        if isinstance(column, np.ndarray):
            values[name] = column[rows]
        elif isinstance(column, tuple):
            values[name] = tuple(column[row] for row in rows)
        else:
            values[name] = column
    return JobTable(**values)
