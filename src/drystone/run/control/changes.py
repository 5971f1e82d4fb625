"""Checks of events about nodes and rentals before they are written: can they follow the log?"""

from __future__ import annotations

from collections.abc import Mapping

from drystone.describe.cluster import NodeSpec
from drystone.errors import DrystoneError
from drystone.run.events import (
    BillSettled,
    Event,
    NodeAdded,
    NodeJoined,
    NodeLost,
    NodeReclaimed,
    NodeReleased,
    NodeRemoved,
    ReleaseAsked,
    RentalAsked,
    RentalFailed,
)
from drystone.run.lifecycle import JobState
from drystone.run.state import ClusterState


class Changes:
    """Whether nodes may come and go as events say, one after the other."""

    def __init__(self, state: ClusterState) -> None:
        self._state, rentals = state, state.rentals
        self._num_nodes, self._gone = len(state.nodes), set(state.gone)
        self._asked, self._num_asked = set(rentals.asked), rentals.num_asked
        self._rented, self._settled = set(rentals.rented), set(rentals.settled)

    def check(self, event: Event, states: Mapping[str, JobState]) -> None:
        """Raise if it cannot follow; `states` are those of jobs that earlier events changed."""
        match event:
            case NodeAdded(node=row, spec=spec):
                self._check_row(row, spec)
            case NodeJoined(node=row, spec=spec, rental=rental):
                self._check_row(row, spec)
                self._check_asked(rental)
                self._rented.add(row)
            case NodeLost(node=row) | NodeRemoved(node=row):
                self._check_leaving(row, states, is_lost=isinstance(event, NodeLost))
            case NodeReleased(node=row) | NodeReclaimed(node=row):
                self._check_leaving(row, states, is_lost=False)
                self._check_rented(row)
                self._rented.discard(row)
            case ReleaseAsked(node=row):
                self._check_leaving(row, states, is_lost=True)
                self._check_rented(row)
            case RentalAsked() | RentalFailed() | BillSettled():
                self._check_rental(event)
            case _:
                pass

    def _check_row(self, row: int, spec: NodeSpec) -> None:
        if row == self._num_nodes:
            self._num_nodes += 1
        elif row in self._gone and self._state.nodes[row].gpu == spec.gpu:
            self._gone.remove(row)
        else:
            raise DrystoneError(f"node {spec.id} cannot have row {row}")

    def _check_leaving(self, row: int, states: Mapping[str, JobState], *, is_lost: bool) -> None:
        if row >= self._num_nodes or row in self._gone:
            raise DrystoneError(f"there is no node in row {row} that could leave")
        for job_id, record in self._state.active.items():
            is_there = any(one == row for one, _ in record.placement)
            if is_there and states.get(job_id, record.state) is JobState.RUNNING:
                raise DrystoneError(f"node {row} leaves while job {job_id} runs on it")
        if not is_lost:
            self._gone.add(row)

    def _check_rented(self, row: int) -> None:
        if row not in self._rented:
            raise DrystoneError(f"node {row} is given back, and is not rented")

    def _check_rental(self, event: RentalAsked | RentalFailed | BillSettled) -> None:
        match event:
            case RentalAsked(first_rental=first, num_nodes=number):
                if first != self._num_asked:
                    raise DrystoneError(
                        f"rental {first} is asked for, {self._num_asked} were before"
                    )
                self._asked |= {*range(first, first + number)}
                self._num_asked += number
            case RentalFailed(rental=rental):
                self._check_asked(rental)
            case BillSettled(rental=rental):
                if rental in self._settled or rental in self._asked:
                    raise DrystoneError(f"rental {rental} is settled twice, or before it is over")
                self._settled.add(rental)

    def _check_asked(self, rental: int) -> None:
        if rental not in self._asked:
            raise DrystoneError(f"rental {rental} comes or fails, and is not on its way")
        self._asked.remove(rental)
