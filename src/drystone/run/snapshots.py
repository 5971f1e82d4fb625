"""Snapshots: the state of a cluster as the tables that policies read.

The numbers of all jobs are kept in growing arrays, which hear of every job that an event changes.
A table is a copy of the rows of the jobs that wait or run, so nothing changes it afterwards.

A simulation takes a decision at every event, and most decisions look at a few jobs only. So
a `PresentSnapshot` copies a table when it is first read, and can be read only until the next event.
`SnapshotMaker.make` copies all tables at once.
"""

# ruff: noqa: D102 - what the fields of a snapshot mean stands in `schedule/snapshot.py`

from __future__ import annotations

import dataclasses
import math
from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from drystone.describe.job import JobSpec
from drystone.describe.market import Offer
from drystone.describe.option import OptionRow, OptionSet
from drystone.errors import DrystoneError
from drystone.run.lifecycle import TERMINAL, JobState
from drystone.run.option_table import OptionStack
from drystone.run.rentals import RentalState
from drystone.run.state import ClusterState, JobRecord
from drystone.schedule.budget.spot import PlaceHistory
from drystone.schedule.snapshot import (
    ComingNodes,
    IntArray,
    JobStatus,
    JobTable,
    NodeTable,
    OptionTable,
    Rentals,
    Snapshot,
    StartupCost,
    WaitingJob,
)

# What a job of unknown length is taken to need at least, at its fastest.
GUESSED_SECONDS: Final = 3600.0

_NO_RENTALS: Final = Rentals()
_QUEUED: Final = JobState.QUEUED  # looked up once: this is asked at every start
_VISIBLE: Final = (JobState.QUEUED, JobState.RUNNING)  # a paused job is not
# What the columns of numbers hold of each record; those of whole numbers are in `_write`.
_FLOAT_FIELDS: Final = (
    "spec.total_samples",
    "done_samples",
    "counted_seconds",
    "samples_per_second",
    "attained_gpu_seconds",
    "num_gpus",
    "started_seconds",
    "waiting_seconds",
    "spec.priority",
    "spec.deadline_seconds",
    "spec.startup_seconds",
)
_NUM_INT_FIELDS: Final = 5
_floats_of = attrgetter(*_FLOAT_FIELDS)


class StaleSnapshot(DrystoneError):
    """A table of a `PresentSnapshot` was first read after the cluster had changed."""


class JobColumns:
    """The numbers of every job, by sequence number: a job that was submitted later has a higher."""

    def __init__(self, book: OptionStack) -> None:
        self.book = book
        self.changed: list[JobRecord] = []  # not written yet, in the order of their events
        self._floats = np.zeros((len(_FLOAT_FIELDS), 64))
        self._ints = np.zeros((_NUM_INT_FIELDS, 64), dtype=np.int64)
        self._records: list[JobRecord] = []
        self._sequences: dict[str, int] = {}  # by job that has not ended
        self._visible = array("q")  # sequence numbers of the jobs that wait or run, ascending

    @property
    def num_seen(self) -> int:
        """The sequence number of the next job."""
        self._write_changed()
        return len(self._records)

    def table(self, now_seconds: float, *, knows_lengths: bool) -> JobTable:
        """The jobs that wait or run; where lengths are not known, what is left is a guess."""
        self._write_changed()
        rows: IntArray = np.array(self._visible, dtype=np.int64)
        records = [self._records[row] for row in self._visible]
        option_set, requested, option, num_starts, is_limited = self._ints.take(rows, axis=1)
        floats = dict(zip(_FLOAT_FIELDS, self._floats.take(rows, axis=1), strict=True))
        speeds, started_seconds = floats["samples_per_second"], floats["started_seconds"]
        ran_seconds = np.maximum(now_seconds - floats["counted_seconds"], 0.0)
        done_samples = floats["done_samples"] + speeds * ran_seconds
        if knows_lengths:
            remaining_samples = floats["spec.total_samples"] - done_samples
        else:
            guesses = self.book.least_samples(GUESSED_SECONDS)
            remaining_samples = np.maximum(done_samples, guesses[option_set])
        held_seconds = np.where(option >= 0, now_seconds - started_seconds, 0.0)
        return JobTable(
            specs=tuple([record.spec for record in records]),
            option_set=option_set,
            requested=requested,
            option=option,
            placements=tuple([record.placement for record in records]),
            remaining_samples=remaining_samples,
            attained_gpu_seconds=floats["attained_gpu_seconds"] + floats["num_gpus"] * held_seconds,
            num_starts=num_starts,
            waiting_since_seconds=floats["waiting_seconds"],
            running_since_seconds=started_seconds,
            weights=floats["spec.priority"],
            deadline_seconds=floats["spec.deadline_seconds"],
            own_startup_seconds=floats["spec.startup_seconds"],
            is_limited=is_limited != 0,
            measured_speeds=np.where((option >= 0) & (ran_seconds > 0), speeds, 0.0),
        )

    def waiting_from(self, sequence: int, limit: int) -> list[WaitingJob]:
        """The first jobs that wait, at most `limit`, from a sequence number on."""
        self._write_changed()
        found: list[WaitingJob] = []
        for number in self._visible[bisect_left(self._visible, sequence) :]:
            record = self._records[number]
            if record.option < 0:
                option_set = self.book.row_of(record.spec, record.phase)
                requested = self.book.requested(record.spec)
                found.append(WaitingJob(number, record.spec, option_set, requested))
                if len(found) == limit:
                    break
        return found

    def _write_changed(self) -> None:
        if not self.changed:
            return
        visible = self._visible
        for record in dict.fromkeys(self.changed):  # each once, in order
            job_id, has_ended = record.spec.id, record.state in TERMINAL
            sequence = self._sequences.get(job_id)
            if sequence is None:
                if has_ended:
                    continue  # it came and went since the last look
                sequence = self._add(record)
            row = bisect_left(visible, sequence)
            was_visible = row < len(visible) and visible[row] == sequence
            if record.state in _VISIBLE:
                if not was_visible:
                    visible.insert(row, sequence)
                self._write(sequence, record)
            elif was_visible:
                del visible[row]
            if has_ended:
                del self._sequences[job_id]
        self.changed.clear()

    def _add(self, record: JobRecord) -> int:
        sequence = self._sequences[record.spec.id] = len(self._records)
        if sequence == self._floats.shape[1]:
            self._floats = np.concatenate((self._floats, np.zeros_like(self._floats)), axis=1)
            self._ints = np.concatenate((self._ints, np.zeros_like(self._ints)), axis=1)
        self._records.append(record)
        return sequence

    def _write(self, sequence: int, record: JobRecord) -> None:
        spec = record.spec
        self._floats[:, sequence] = _floats_of(record)
        self._ints[:, sequence] = (
            self.book.row_of(spec, record.phase),
            self.book.requested(spec),
            record.option,
            record.num_starts,
            spec.is_limited,
        )


class SnapshotMaker:
    """Makes the snapshots of one cluster, and keeps what does not change between them."""

    def __init__(
        self,
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
        self.constants = {  # fields of a snapshot
            "gpu_types": gpu_types,
            "startup": startup,
            "knows_lengths": knows_lengths,
            "budget_dollars_per_hour": budget_dollars_per_hour,
            "hard_cap_dollars_per_hour": hard_cap_dollars_per_hour,
        }
        self.columns = JobColumns(self.book)
        self.changed = self.columns.changed  # where to put jobs that events have changed
        self._gpu_types = gpu_types
        self._offers = tuple(offers)
        self._offer_rows = {offer.name: row for row, offer in enumerate(offers)}
        self._nodes: NodeTable | None = None
        self._num_node_changes = -1

    def update(self, record: JobRecord) -> None:
        """Take notice of what an event did to a job."""
        self.changed.append(record)

    def make(self, state: ClusterState, now_seconds: float) -> Snapshot:
        """The snapshot of a state, whose every job was brought up to date by `update`."""
        return PresentSnapshot(self, state, now_seconds).complete()

    def nodes(self, state: ClusterState) -> NodeTable:
        """The nodes with what is free on each."""
        return dataclasses.replace(self.nodes_but_free(state), free=np.array(state.free, np.int64))

    def nodes_but_free(self, state: ClusterState) -> NodeTable:
        """A table that is right but for what is free; it stays until nodes come, go or are lost."""
        nodes = self._nodes
        if nodes is None or self._num_node_changes != state.num_node_changes:
            nodes = self._nodes = _node_table(state, self._gpu_types)
            self._num_node_changes = state.num_node_changes
        return nodes

    def options(self) -> OptionTable:
        """The options of all jobs so far; rows are only ever added."""
        _ = self.columns.num_seen  # a job that has just come in may add some
        return self.book.table()

    def offers(self, rentals: RentalState, now_seconds: float) -> tuple[Offer, ...]:
        """At their prices of now, without the changes of price to come."""
        prices = rentals.prices
        seen = (o.seen_at(prices.get(o.name, o.price_dollars_per_hour)) for o in self._offers)
        if not rentals.shortages:
            return tuple(seen)
        return tuple(
            dataclasses.replace(offer, is_short=rentals.is_short(offer.name, now_seconds))
            for offer in seen
        )

    def rentals(self, state: ClusterState) -> Rentals:
        """The nodes that are rented, or asked for."""
        rentals, rows = state.rentals, self._offer_rows
        if not rentals.rented and not rentals.asked:
            return _NO_RENTALS
        # Nodes that are being given back cost money still, and cannot be given back once more.
        nodes = [node for node in sorted(rentals.rented) if node not in state.closing]
        rented = [rentals.rented[node] for node in nodes]
        return Rentals(
            nodes=np.array(nodes, dtype=np.int64),
            offer=np.array([rows[rental.offer] for rental in rented], dtype=np.int64),
            since_seconds=np.array([rental.since_seconds for rental in rented]),
            coming=tuple(
                ComingNodes(
                    offer=rows[asked.offer],
                    num_nodes=len(list(same)),
                    asked_seconds=asked.asked_seconds,
                    ready_seconds=asked.ready_seconds,
                )
                for asked, same in groupby(rentals.asked.values())
            ),
            dollars_per_hour=rentals.dollars_per_hour(),
        )


class PresentSnapshot(Snapshot):
    """A snapshot that copies a table when it is first read, until the next event."""

    if TYPE_CHECKING:
        _maker: SnapshotMaker
        _present: ClusterState
        _num_events: int

    def __new__(cls, *_: object, **fields: Any) -> Any:
        """With fields, as `dataclasses.replace` gives them: a snapshot of what is not the case."""
        return Snapshot(**fields) if fields else object.__new__(cls)

    def __init__(self, maker: SnapshotMaker, state: ClusterState, now_seconds: float) -> None:
        fields = self.__dict__  # which are frozen otherwise
        fields.update(maker.constants)
        fields["now_seconds"] = now_seconds
        fields["_maker"], fields["_present"] = maker, state
        fields["_num_events"] = len(state.log)

    def __repr__(self) -> str:  # the fields may be out of reach
        return f"<snapshot of {self.now_seconds} s>"

    def complete(self) -> Snapshot:
        """All tables at once, for whoever keeps a snapshot longer than until the next event."""
        names = [field.name for field in dataclasses.fields(Snapshot)]
        return Snapshot(**{name: getattr(self, name) for name in names})

    @property
    def _state(self) -> ClusterState:
        if len(self._present.log) != self._num_events:
            raise StaleSnapshot(
                f"the snapshot of {self.now_seconds:.0f} s was read after the cluster had changed: "
                "read its tables while deciding, or keep `snapshot.complete()` instead"
            )
        return self._present

    @cached_property
    def nodes(self) -> NodeTable:
        return self._maker.nodes(self._state)

    @cached_property
    def jobs(self) -> JobTable:
        _ = self._state
        return self._maker.columns.table(self.now_seconds, knows_lengths=self.knows_lengths)

    @cached_property
    def options(self) -> OptionTable:
        return self._maker.options()

    @cached_property
    def offers(self) -> tuple[Offer, ...]:
        return self._maker.offers(self._state.rentals, self.now_seconds)

    @cached_property
    def rentals(self) -> Rentals:
        return self._maker.rentals(self._state)

    @cached_property
    def histories(self) -> Mapping[str, PlaceHistory]:
        return self._state.rentals.histories(self.now_seconds)

    @cached_property
    def spent_dollars(self) -> float:
        return self._state.rentals.spent_dollars(self.now_seconds)

    @cached_property
    def gpu_dollars_per_hour(self) -> Mapping[str, float]:
        return self._maker.gpu_dollars_per_hour

    # What checks and simple policies ask of a few jobs and nodes needs no tables.

    def job_status(self, job_id: str) -> JobStatus | None:
        record = self._state.active.get(job_id)
        if record is None or record.state not in _VISIBLE:
            return None
        option_set = self._maker.book.row_of(record.spec, record.phase)
        return JobStatus(record.option, option_set, record.placement)

    def option_facts(self, option_set: int, option: int) -> OptionRow | None:
        return self._maker.book.facts(option_set, option)

    def start_facts(self, job_id: str, option: int) -> OptionRow | None:
        record = self._state.active.get(job_id)
        if record is None or record.state is not _QUEUED:
            return None
        book = self._maker.book
        return book.facts(book.run_facts(record.spec, record.phase).row, option)

    def waiting_from(self, sequence: int, limit: int) -> list[WaitingJob]:
        _ = self._state
        return self._maker.columns.waiting_from(sequence, limit)

    @property
    def num_seen(self) -> int:
        _ = self._state
        return self._maker.columns.num_seen

    @property
    def num_requeued(self) -> int:
        return self._state.num_requeued

    def node_kinds(self) -> Sequence[int]:
        return self._maker.nodes_but_free(self._state).kinds

    def free_by_node(self) -> Sequence[int]:
        return self._state.free


def _node_table(state: ClusterState, gpu_types: tuple[str, ...]) -> NodeTable:
    """The nodes of a state; those that are lost, gone or being given back have no GPUs."""
    nodes = state.nodes
    kinds = {gpu: kind for kind, gpu in enumerate(gpu_types)}
    type_index = np.array([kinds[node.gpu] for node in nodes], dtype=np.int64)
    num_gpus = np.array([node.num_gpus for node in nodes], dtype=np.int64)
    num_gpus[sorted(state.lost | state.gone | state.closing)] = 0
    return NodeTable(
        ids=tuple(node.id for node in nodes),
        type_index=type_index,
        num_gpus=num_gpus,
        free=num_gpus,
        memory_bytes=np.array([node.memory_bytes for node in nodes], dtype=np.float64),
        rows_by_type=tuple(np.flatnonzero(type_index == kind) for kind in range(len(gpu_types))),
    )
