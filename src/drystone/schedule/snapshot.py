"""What a policy sees: time, jobs with their options and progress, nodes, offers, money. Frozen.

Jobs and nodes are tables of arrays, one row each. Many jobs have the same options (the same model
on the same GPUs), so options are kept once per set: `OptionTable.counts` is (sets, options, types),
and a gather by `JobTable.option_set` gives (jobs, options, types).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from drystone.describe.job import JobSpec
from drystone.describe.market import Offer
from drystone.describe.option import FloatArray as FloatArray
from drystone.describe.option import IntArray as IntArray
from drystone.describe.option import OptionRow, OptionSet
from drystone.schedule.budget.spot import PlaceHistory

BoolArray = npt.NDArray[np.bool_]
Placement = tuple[tuple[int, int], ...]  # (row of the node, GPUs on it), nodes ascending


@dataclass(frozen=True, kw_only=True, eq=False)
class OptionTable:
    """The option sets of all jobs, padded to one width; a speed of 0 marks a row of padding."""

    counts: IntArray  # (sets, options, types)
    samples_per_second: FloatArray  # (sets, options)
    memory_bytes: FloatArray  # (sets, options)
    # Phases: the set of the next phase or -1, and the work done when a set's phase ends, (sets,).
    # Empty where no job has phases.
    next_set: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    end_samples: FloatArray = field(default_factory=lambda: np.zeros(0))

    @cached_property
    def num_gpus(self) -> IntArray:
        """GPUs of any type, (sets, options)."""
        total: IntArray = self.counts.sum(axis=2)
        return total

    @cached_property
    def by_type(self) -> FloatArray:
        """`counts` as (types, sets, options)."""
        return np.ascontiguousarray(self.counts.transpose(2, 0, 1), dtype=np.float64)

    @cached_property
    def empty_sets(self) -> BoolArray:
        """Which sets have no option at all."""
        return np.asarray(~(self.samples_per_second > 0).any(axis=1))

    @cached_property
    def has_empty_sets(self) -> bool:
        """Whether there is such a set."""
        return bool(self.empty_sets.any())

    @cached_property
    def _known_startups(self) -> dict[StartupCost, FloatArray]:
        return {}

    def paid(self, prices: FloatArray) -> FloatArray:
        """What options cost at these prices of the types, (sets, options)."""
        flat = self.by_type.reshape(len(prices), -1)
        paid: FloatArray = (prices @ flat).reshape(self.samples_per_second.shape)
        return paid

    def startup_seconds(self, rule: StartupCost) -> FloatArray:
        """Seconds without progress after a start by a rule, (sets, options)."""
        known = self._known_startups.get(rule)
        if known is None:
            known = self._known_startups[rule] = rule.seconds(self.num_gpus)
        return known

    def facts(self, option_set: int, option: int) -> OptionRow | None:
        """One option; None where there is no such."""
        padded = OptionSet(
            counts=self.counts[option_set],
            samples_per_second=self.samples_per_second[option_set],
            memory_bytes=self.memory_bytes[option_set],
        )
        return padded.row(option)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupCost:
    """Seconds without progress after every start: so many for each GPU, up to a limit."""

    seconds_per_gpu: float = 0.0
    most_seconds: float = 0.0
    free_gpus: int = 0  # that many start at once

    def seconds_on(self, num_gpus: int) -> float:
        """For one job on so many GPUs."""
        return min(self.seconds_per_gpu * max(num_gpus - self.free_gpus, 0), self.most_seconds)

    def seconds(self, num_gpus: IntArray) -> FloatArray:
        """For jobs on so many GPUs."""
        paid = np.maximum(num_gpus - self.free_gpus, 0)
        result: FloatArray = np.minimum(self.seconds_per_gpu * paid, self.most_seconds)
        return result


@dataclass(frozen=True, kw_only=True, eq=False)
class NodeTable:
    """The nodes, one row each."""

    ids: tuple[str, ...]
    type_index: IntArray
    num_gpus: IntArray  # that can be used: 0 on a node that is lost
    free: IntArray
    memory_bytes: FloatArray  # of each GPU; 0: not stated
    rows_by_type: tuple[IntArray, ...]

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def kinds(self) -> list[int]:
        """`type_index`, for those who look at a few nodes only."""
        kinds: list[int] = self.type_index.tolist()
        return kinds


@dataclass(frozen=True, slots=True)
class JobStatus:
    """What one job does now."""

    option: int  # that it runs, or -1 while it waits
    option_set: int
    placement: Placement


class WaitingJob(NamedTuple):
    """A job that waits."""

    sequence: int  # of jobs, the later was submitted later; it stays the same
    spec: JobSpec
    option_set: int
    requested: int


@dataclass(frozen=True, kw_only=True, eq=False)
class JobTable:
    """The jobs that wait or run, one row each, in order of submission."""

    specs: tuple[JobSpec, ...]
    option_set: IntArray  # row of the OptionTable
    requested: IntArray  # the option that the owner named; -1: it cannot run; -2: none was named
    option: IntArray  # the option it runs, or -1 while it waits
    placements: tuple[Placement, ...]  # empty while it waits
    remaining_samples: FloatArray  # a guess where lengths are not known
    attained_gpu_seconds: FloatArray
    num_starts: IntArray
    waiting_since_seconds: FloatArray  # nan while it runs
    running_since_seconds: FloatArray  # nan while it waits
    weights: FloatArray  # the priority of each job
    deadline_seconds: FloatArray  # infinity where there is none
    own_startup_seconds: FloatArray  # after every start; below 0: as the cluster says
    is_limited: BoolArray  # whether its owner limits types, numbers, money or time
    # Samples a second that each job was last seen to make: 0 while it waits or starts up.
    measured_speeds: FloatArray | None = None  # None: nobody measures

    def __len__(self) -> int:
        return len(self.specs)

    @cached_property
    def row_of(self) -> dict[str, int]:
        """From an id to its row."""
        return {spec.id: row for row, spec in enumerate(self.specs)}

    @cached_property
    def is_running(self) -> BoolArray:
        """Whether each job has GPUs now."""
        running: BoolArray = self.option >= 0
        return running


@dataclass(frozen=True, slots=True, kw_only=True)
class ComingNodes:
    """Nodes that were asked for at one time and are not here yet."""

    offer: int  # row of `Snapshot.offers`
    num_nodes: int
    asked_seconds: float
    ready_seconds: float  # when they should be here


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rentals:
    """Which nodes are rented and which are on their way; all others belong to the owner."""

    nodes: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # rows
    offer: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # of each of them
    since_seconds: FloatArray = field(default_factory=lambda: np.zeros(0))  # paid since then
    coming: tuple[ComingNodes, ...] = ()
    dollars_per_hour: float = 0.0  # what the rented nodes cost now

    def num_nodes(self, offer: int) -> int:
        """Nodes of an offer, here or on their way."""
        here = int((self.offer == offer).sum())
        return here + sum(nodes.num_nodes for nodes in self.coming if nodes.offer == offer)


_NO_RENTALS = Rentals()


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """Everything a policy may know. The same snapshot gives the same decisions."""

    now_seconds: float
    gpu_types: tuple[str, ...]
    nodes: NodeTable
    jobs: JobTable
    options: OptionTable
    startup: StartupCost = StartupCost()
    offers: tuple[Offer, ...] = ()  # at their prices of now
    rentals: Rentals = _NO_RENTALS
    spent_dollars: float = 0.0
    budget_dollars_per_hour: float = float("inf")  # to be kept on average
    hard_cap_dollars_per_hour: float = float("inf")  # never to be rented above
    knows_lengths: bool = True
    # What a GPU of the owner's costs, by type; none where nobody charges for it.
    gpu_dollars_per_hour: Mapping[str, float] = field(default_factory=dict)

    # What was seen of the nodes of offers, by name.
    histories: Mapping[str, PlaceHistory] = field(default_factory=dict)
    # Options that jobs are not to take or keep for now, (jobs, options); None: there are none.
    barred: BoolArray | None = None

    def complete(self) -> Snapshot:
        """A snapshot for whoever keeps it: one of a running world is read before the next event."""
        return self

    @cached_property
    def capacity(self) -> IntArray:
        """Usable GPUs by type, taken or not."""
        return np.bincount(
            self.nodes.type_index, weights=self.nodes.num_gpus, minlength=len(self.gpu_types)
        ).astype(np.int64)

    @cached_property
    def node_offer(self) -> IntArray:
        """By node: the row of its offer, or -1 for a node of the owner's."""
        offer = np.full(len(self.nodes), -1, dtype=np.int64)
        offer[self.rentals.nodes] = self.rentals.offer
        return offer

    @property
    def committed_dollars_per_hour(self) -> float:
        """What all rented nodes cost once those on their way are here, at the prices of now."""
        coming = (
            nodes.num_nodes * self.offers[nodes.offer].price_dollars_per_hour
            for nodes in self.rentals.coming
        )
        return self.rentals.dollars_per_hour + sum(coming)

    @cached_property
    def job_speeds(self) -> FloatArray:
        """Samples a second, (jobs, options); 0 where there is no such option."""
        speeds: FloatArray = self.options.samples_per_second.take(self.jobs.option_set, axis=0)
        return speeds

    @cached_property
    def job_num_gpus(self) -> IntArray:
        """GPUs of any type, (jobs, options)."""
        total: IntArray = self.options.num_gpus.take(self.jobs.option_set, axis=0)
        return total

    @cached_property
    def running(self) -> IntArray:
        """The rows of the jobs that run."""
        rows: IntArray = self.jobs.is_running.nonzero()[0]
        return rows

    @cached_property
    def running_cells(self) -> IntArray:
        """What each of them runs, as a cell of a table (jobs, options) read row by row."""
        width = self.options.samples_per_second.shape[1]
        cells: IntArray = self.running * width + self.jobs.option.take(self.running)
        return cells

    @cached_property
    def startup_seconds(self) -> FloatArray:
        """Seconds without progress after a start, (jobs, options): the job's own, or the rule's."""
        table, own = self.options.startup_seconds(self.startup), self.jobs.own_startup_seconds
        seconds: FloatArray = table.take(self.jobs.option_set, axis=0)
        if (own >= 0).any():
            seconds = np.where(own[:, None] >= 0, own[:, None], seconds)
        return seconds

    def job_status(self, job_id: str) -> JobStatus | None:
        """What a job does; None where there is no such job."""
        jobs, row = self.jobs, self.jobs.row_of.get(job_id)
        if row is None:
            return None
        return JobStatus(int(jobs.option[row]), int(jobs.option_set[row]), jobs.placements[row])

    def waiting_from(self, sequence: int, limit: int) -> list[WaitingJob]:
        """The first jobs that wait, at most `limit`, from a sequence number on."""
        jobs = self.jobs
        rows = np.flatnonzero(jobs.option[sequence:] < 0)[:limit] + sequence
        return [
            WaitingJob(row, jobs.specs[row], int(jobs.option_set[row]), int(jobs.requested[row]))
            for row in rows.tolist()
        ]

    @property
    def num_seen(self) -> int:
        """Above the sequence number of every job here, and of every job that is gone."""
        return len(self.jobs)

    @property
    def num_requeued(self) -> int:
        """How often a job has come back to wait; -1 where nobody counts.

        While it stays, who waited before waits still or has started: sequence numbers can be kept.
        """
        return -1

    def option_facts(self, option_set: int, option: int) -> OptionRow | None:
        """One option of one set; None where there is no such."""
        return self.options.facts(option_set, option)

    def start_facts(self, job_id: str, option: int) -> OptionRow | None:
        """An option of a job that waits; None where it does not, or has no such option."""
        status = self.job_status(job_id)
        if status is None or status.option >= 0:
            return None
        return self.option_facts(status.option_set, option)

    def node_kinds(self) -> Sequence[int]:
        """By node: its GPU type."""
        return self.nodes.kinds

    def free_by_node(self) -> Sequence[int]:
        """By node: GPUs that are free."""
        free: list[int] = self.nodes.free.tolist()
        return free

    def counts(self, row: int, option: int) -> IntArray:
        """GPUs of each type that one option of one job takes."""
        counts: IntArray = self.options.counts[self.jobs.option_set[row], option]
        return counts

    def speed(self, row: int, option: int) -> float:
        """Samples a second of one option of one job."""
        return float(self.options.samples_per_second[self.jobs.option_set[row], option])
