"""Rented nodes in virtual time: they join, fail, are given back and taken back, and cost money."""

import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "schedule"))
from tiny import job, node, option_set

from drystone.describe.market import Offer, PriceChange
from drystone.errors import DrystoneError, InvalidSpec, UnknownName
from drystone.run.events import (
    Finished,
    Interrupted,
    NodeJoined,
    NodeReclaimed,
    NodeReleased,
    PriceChanged,
    RentalAsked,
    RentalFailed,
    Started,
    parse_events,
    render_event,
)
from drystone.run.loop import UnsoundDecisions, drive
from drystone.run.simulate.faults import FaultSpec
from drystone.run.simulate.world import SimulatedWorld
from drystone.run.state import ClusterState, replay
from drystone.schedule.decision import Release, Rent, Start, Wake

OPTIONS = option_set(([4], 2.0))
OFFER = Offer(name="a", gpu="A", num_gpus=4, price_dollars_per_hour=3.6, start_delay_seconds=30.0)


def rent(number: int = 1, offer: str = "a") -> Rent:
    return Rent(offer=offer, num_nodes=number, reason="test")


def release(node_row: int) -> Release:
    return Release(node=node_row, reason="test")


def start(name: str, node_row: int) -> Start:
    return Start(job_id=name, option=0, placement=((node_row, 4),), reason="test")


def rent_for_each(snapshot, memory):
    """A node for every waiting job, given back as soon as it is idle."""
    decisions = []
    nodes = snapshot.nodes
    idle = [
        row for row in snapshot.rentals.nodes.tolist() if nodes.free[row] == nodes.num_gpus[row]
    ]
    idle = [row for row in idle if nodes.num_gpus[row] > 0]
    waiting = [
        spec.id
        for spec, runs in zip(snapshot.jobs.specs, snapshot.jobs.is_running, strict=True)
        if not runs
    ]
    for name in list(waiting):
        if idle:
            decisions.append(start(name, idle.pop(0)))
            waiting.remove(name)
    decisions += [release(row) for row in idle]
    missing = len(waiting) - sum(one.num_nodes for one in snapshot.rentals.coming)
    room = OFFER.most_nodes - snapshot.rentals.num_nodes(0) + len(idle)
    if min(missing, room) > 0:
        decisions.append(rent(min(missing, room)))
    return decisions, memory


def world_of(jobs, *, nodes=(), offers=(OFFER,), **settings) -> SimulatedWorld:
    return SimulatedWorld(
        jobs=jobs,
        nodes=nodes,
        options_of=lambda _: OPTIONS,
        gpu_types=("A",),
        offers=offers,
        **settings,
    )


def queue(number: int, samples: float = 100.0, apart: float = 10.0):
    return [replace(job(f"j{i}", samples), submit_seconds=apart * i) for i in range(number)]


def ends(world: SimulatedWorld) -> dict[str, float]:
    return {one.job_id: one.time_seconds for one in world.log if isinstance(one, Finished)}


def of_kind(world: SimulatedWorld, kind: type) -> list:
    return [one for one in world.log if isinstance(one, kind)]


def test_a_node_joins_after_its_delay_and_is_paid_until_it_is_given_back():
    """Asked for at 0 s, here from 30 s to 80 s: 50 s at 3.6 dollars an hour are 5 cents."""
    world = world_of(queue(1))
    drive(world, rent_for_each)

    assert ends(world) == {"j0": 80.0}
    assert [type(one) for one in world.log][1:] == [
        RentalAsked, NodeJoined, Started, Finished, NodeReleased,
    ]  # fmt: skip
    assert world.spent_dollars == 0.05
    assert world.state.rentals.dollars_per_hour() == 0.0
    (bill,) = world.state.rentals.bills
    assert (bill.since_seconds, bill.until_seconds, bill.micro_dollars) == (30.0, 80.0, 50_000)


def test_a_snapshot_tells_what_is_rented_and_what_is_on_its_way():
    seen = []

    def watch(snapshot, memory):
        seen.append(snapshot.complete())
        return rent_for_each(snapshot, memory)

    world = world_of(queue(2, apart=60.0), nodes=[node("own", num_gpus=2)])
    drive(world, watch)
    first, joined, later = seen[:3]

    assert first.node_offer.tolist() == [-1]
    assert (first.spent_dollars, first.committed_dollars_per_hour) == (0.0, 0.0)
    assert joined.now_seconds == 30.0
    assert joined.node_offer.tolist() == [-1, 0]
    assert joined.rentals.since_seconds.tolist() == [30.0]
    assert joined.rentals.dollars_per_hour == 3.6
    assert later.now_seconds == 60.0
    assert later.spent_dollars == pytest.approx(0.03)
    coming = seen[3].rentals.coming if seen[3].now_seconds < 90 else ()
    assert [(one.num_nodes, one.ready_seconds) for one in coming] == [(1, 90.0)]


def test_rows_of_nodes_that_are_gone_are_used_again():
    world = world_of(queue(5, apart=200.0))
    drive(world, rent_for_each)

    joined = of_kind(world, NodeJoined)
    assert [one.node for one in joined] == [0] * 5
    assert len({one.spec.id for one in joined}) == 5
    assert len(world.state.nodes) == 1


def test_a_new_price_holds_for_nodes_that_are_rented_already():
    """30 s to 50 s at 3.6 dollars an hour, then until 80 s at 7.2."""
    changes = (PriceChange(at_seconds=50.0, price_dollars_per_hour=7.2),)
    world = world_of(queue(1), offers=[replace(OFFER, price_changes=changes)])
    seen = []

    def watch(snapshot, memory):
        seen.append(snapshot.offers[0])
        return rent_for_each(snapshot, memory)

    drive(world, watch)

    assert world.spent_dollars == pytest.approx(0.02 + 0.06, abs=1e-9)
    assert [one.price_dollars_per_hour for one in seen] == [3.6, 3.6, 7.2, 7.2]
    assert all(one.price_changes == () for one in seen)


def test_what_is_out_of_stock_fails_after_the_delay_and_costs_nothing():
    world = world_of(queue(3), faults=FaultSpec(seed=1, stock_out_share=0.7))
    drive(world, rent_for_each)

    failed = of_kind(world, RentalFailed)
    assert failed
    assert len(ends(world)) == 3
    assert len(world.state.rentals.bills) == len(of_kind(world, NodeJoined))
    assert world.state.rentals.num_asked == len(failed) + len(of_kind(world, NodeJoined))


def test_a_spot_node_is_taken_back_and_its_job_goes_on_elsewhere():
    spot = replace(OFFER, reclaims_per_hour=60.0)
    world = world_of(queue(3, samples=400.0), offers=[spot], faults=FaultSpec(seed=2))
    drive(world, rent_for_each)

    assert of_kind(world, NodeReclaimed)
    assert len(of_kind(world, Interrupted)) == len(of_kind(world, NodeReclaimed))
    assert len(ends(world)) == 3


def test_prices_change_late_as_a_fault():
    faults = FaultSpec(seed=4, price_changes_per_hour=100.0, price_change_share=0.5)
    world = world_of(queue(4, samples=1000.0), faults=faults)
    drive(world, rent_for_each)

    prices = [one.price_dollars_per_hour for one in of_kind(world, PriceChanged)]
    assert len(prices) > 3
    assert all(1.8 <= price <= 5.4 for price in prices)


CHAOS = FaultSpec(
    seed=5, node_losses_per_hour=20, repair_seconds=100, node_slowdowns_per_hour=20,
    slow_seconds=100, failed_start_share=0.1, checkpoint_seconds=20, stock_out_share=0.2,
    price_changes_per_hour=30,
)  # fmt: skip


@pytest.mark.parametrize("round_seconds", [0.0, 60.0])
@pytest.mark.parametrize("nodes", [(), (node("own"),)])
def test_the_log_replays_to_the_same_nodes_and_the_same_money(nodes, round_seconds: float):
    def run() -> SimulatedWorld:
        world = world_of(
            queue(20, samples=500.0),
            nodes=nodes,
            offers=[replace(OFFER, reclaims_per_hour=10.0)],
            faults=CHAOS,
            round_seconds=round_seconds,
        )
        drive(world, rent_for_each)
        return world

    world = run()

    assert world.log == run().log
    assert len(ends(world)) == 20
    state = replay(nodes, parse_events([render_event(one) for one in world.log]))
    state.now_seconds = world.state.now_seconds
    assert repr(state) == repr(world.state)
    paid = sum(bill.micro_dollars for bill in state.rentals.bills)
    owed = [one.bill_micro_dollars(world.now_seconds) for one in state.rentals.rented.values()]
    assert (paid + sum(owed)) / 1e6 == world.spent_dollars > 0


def test_a_wake_up_calls_the_policy_where_nothing_happens():
    times = []

    def patient(snapshot, memory):
        now = snapshot.now_seconds
        times.append(now)
        if now < 100:
            return [Wake(at_seconds=100.0, reason="test")], memory
        return [start("j0", 0)] if not snapshot.jobs.is_running[0] else [], memory

    world = world_of(queue(1), nodes=[node("own")])
    drive(world, patient)

    assert times == [0.0, 100.0]
    assert ends(world) == {"j0": 150.0}


def test_a_wake_up_comes_at_the_next_round():
    times = []

    def patient(snapshot, memory):
        times.append(snapshot.now_seconds)
        return [Wake(at_seconds=70.0, reason="test")] if len(times) < 2 else [], memory

    drive(world_of(queue(1), nodes=[node("own")], round_seconds=60.0), patient)

    assert times == [0.0, 120.0]


def test_a_run_ends_where_nothing_is_rented_and_nobody_waits_to_be_called():
    world = world_of(queue(2))
    drive(world, lambda snapshot, memory: ([], memory))

    assert len(world.state.active) == 2
    assert world.spent_dollars == 0.0


def test_nodes_that_a_policy_keeps_are_paid_until_the_run_ends():
    def keep(snapshot, memory):
        decisions, memory = rent_for_each(snapshot, memory)
        return [one for one in decisions if not isinstance(one, Release)], memory

    world = world_of(queue(1))
    drive(world, keep)

    assert world.now_seconds == 80.0
    assert world.spent_dollars == 0.05
    assert world.state.rentals.rented


@pytest.mark.parametrize(
    ("decisions", "says"),
    [
        ([release(1), start("j1", 1)], "jobs run on"),
        ([release(1)], "jobs run on"),
        ([release(0)], "not rented"),
    ],
)
def test_nodes_that_are_in_use_or_not_rented_are_not_given_back(decisions, says: str):
    def careless(snapshot, memory):
        if len(snapshot.nodes) < 2:
            return ([] if snapshot.rentals.coming else [rent()]), memory
        if not snapshot.jobs.is_running.any():
            return [start("j0", 1)], memory
        return decisions, memory

    world = world_of(queue(3, apart=35.0), nodes=[node("own")])
    with pytest.raises(UnsoundDecisions, match=says):
        drive(world, careless)


def test_the_world_itself_gives_nothing_back_that_is_not_rented():
    world = world_of(queue(1), nodes=[node("own")])
    with pytest.raises(DrystoneError, match="not rented"):
        world.release(0, "test")
    with pytest.raises(UnknownName):
        world.rent("b", 1, "test")


def test_a_log_that_cannot_be_is_refused():
    state = ClusterState([node("own")])
    joined = NodeJoined(
        time_seconds=0, node=1, rental=0, offer="a", spec=OFFER.node("x"), price_dollars_per_hour=1
    )
    with pytest.raises(DrystoneError, match="not on its way"):
        state.record(joined)
    state.record(
        RentalAsked(time_seconds=0, offer="a", num_nodes=1, first_rental=0, ready_seconds=5)
    )
    with pytest.raises(DrystoneError, match="cannot have row"):
        state.record(msgspec.structs.replace(joined, node=0))


@pytest.mark.parametrize(
    ("offers", "gpu_types"), [((), ("A",)), ((OFFER, OFFER), ("A",)), ((OFFER,), ("B",))]
)
def test_a_world_needs_nodes_or_offers_that_make_sense(offers, gpu_types):
    with pytest.raises((InvalidSpec, UnknownName)):
        SimulatedWorld(
            jobs=queue(1),
            nodes=(),
            options_of=lambda _: OPTIONS,
            gpu_types=gpu_types,
            offers=offers,
        )
