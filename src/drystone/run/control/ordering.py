"""Which launch follows from a start in the log? Devices, plan and processes of one job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from drystone.describe.training_job import count_steps
from drystone.run.control.journal import Journal
from drystone.run.control.launching import LaunchOrder, make_order, seat_ranks, take_seats
from drystone.run.control.options import work_of
from drystone.run.engines.contract import Engine, Seen
from drystone.run.state import JobRecord


def order_launch(
    journal: Journal,
    record: JobRecord,
    engine: Engine,
    *,
    busy: Mapping[str, set[int]],
    folder: Path,
    lease_seconds: float,
) -> LaunchOrder | None:
    """What the agents are to start; None while devices are taken by processes that still leave.

    Raises `AgentGone` if the node of the first rank does not answer.
    """
    nodes = journal.live.state.nodes
    placed = [(nodes[row].id, nodes[row].gpu, count) for row, count in record.placement]
    seats = take_seats(placed, busy, {node.id: node.num_gpus for node in nodes})
    if seats is None:
        return None
    job = journal.live.jobs[record.spec.id].job
    journal.options_of(record.spec)
    counts = journal.book.counts_of(job, record.option)
    plan = journal.book.plan(job, counts, journal.live.lessons.get(work_of(job)))
    seats = seat_ranks(seats, plan)
    return make_order(
        job,
        job_id=record.spec.id,
        epoch=record.num_starts,
        num_steps=count_steps(job, journal.book.shape(job)),
        plan=plan,
        seats=seats,
        rendezvous=engine.rendezvous(seats[0].node),
        cluster=journal.cluster,
        folder=folder,
        lease_seconds=lease_seconds,
    )


def busy_devices(
    seen: Iterable[Sequence[Seen]], orders: Iterable[LaunchOrder]
) -> dict[str, set[int]]:
    """Devices by node that cannot be given away: processes are there, or were ordered there."""
    busy: dict[str, set[int]] = {}
    for parts in seen:
        for part in parts:
            if not part.is_over:
                busy.setdefault(part.node, set()).update(part.devices)
    for order in orders:
        for seat in order.seats:
            busy.setdefault(seat.node, set()).add(seat.device)
    return busy
