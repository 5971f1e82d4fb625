"""Spot nodes in the policies that rent: places, deadlines, and what is learned of them."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from drystone.describe.job import JobSpec
from drystone.describe.market import Offer, Outage
from drystone.describe.option import OptionSet
from drystone.run.events import NodeReclaimed, RentalAsked, Started
from drystone.run.simulate.faults import FaultSpec
from drystone.run.simulate.world import SimulatedWorld
from drystone.run.world import apply
from drystone.schedule.budget.spot import PlaceHistory
from drystone.schedule.check import check_decisions
from drystone.schedule.decision import Resize, Start, find_policy
from drystone.schedule.snapshot import StartupCost
from drystone.schedule.spot_places import find_places, split

HOUR = 3600.0
ON_DEMAND = Offer(name="on-demand", gpu="V100", num_gpus=1, price_dollars_per_hour=3.0)
EAST = Offer(
    name="east", gpu="V100", num_gpus=1, price_dollars_per_hour=1.0, is_spot=True, infra="aws/east"
)
WEST = Offer(
    name="west", gpu="V100", num_gpus=1, price_dollars_per_hour=1.2, is_spot=True, infra="aws/west"
)


def out(offer: Offer, *hours: tuple[float, float], **fields) -> Offer:
    outages = tuple(
        Outage(from_seconds=begin * HOUR, until_seconds=end * HOUR) for begin, end in hours
    )
    known = {name: getattr(offer, name) for name in Offer.__dataclass_fields__}
    return Offer(**known | {"outages": outages} | fields)


def job(hours: float, deadline_hours: float = math.inf, **fields) -> JobSpec:
    return JobSpec(
        id=fields.pop("id", "job"),
        submit_seconds=fields.pop("submit_seconds", 0.0),
        model="one",
        total_samples=hours * HOUR,
        deadline_seconds=deadline_hours * HOUR,
        **fields,
    )


def widths(*speeds: float) -> OptionSet:
    """On 1, 2, 4 GPUs of the one type."""
    return OptionSet(
        counts=np.array([[2**power] for power in range(len(speeds))]),
        samples_per_second=np.array(speeds),
        memory_bytes=np.zeros(len(speeds)),
    )


def world(
    jobs, offers, options=None, *, budget=50.0, checkpoint_seconds=60.0, **settings
) -> SimulatedWorld:
    given = options or widths(1.0)
    return SimulatedWorld(
        jobs=jobs,
        nodes=(),
        options_of=lambda _job: given,
        gpu_types=("V100",),
        offers=offers,
        startup=StartupCost(seconds_per_gpu=360.0, most_seconds=360.0),
        budget_dollars_per_hour=budget,
        faults=FaultSpec(checkpoint_seconds=checkpoint_seconds),
        **settings,
    )


def run(found: SimulatedWorld, policy_name: str) -> SimulatedWorld:
    """To the end; every list of decisions is checked against the real market."""
    policy, memory = find_policy(policy_name), None
    while not found.is_over:
        snapshot = found.observe().complete()
        decisions, memory = policy(snapshot, memory)
        assert check_decisions(snapshot, decisions) == []
        apply(decisions, found, snapshot)
        found.advance()
    return found


def asked(found: SimulatedWorld, offer: str) -> list[float]:
    """Hours at which nodes of an offer were asked for."""
    return [
        event.time_seconds / HOUR
        for event in found.log
        if isinstance(event, RentalAsked) and event.offer == offer
    ]


def ended_hours(found: SimulatedWorld, job_id: str = "job") -> float:
    record = found.state.jobs[job_id]
    assert record.state.value == "done"
    return record.end_seconds / HOUR


@pytest.mark.parametrize("policy", ["budget", "prices"])
def test_a_job_with_time_waits_for_spot_nodes_and_pays_nothing_else(policy: str):
    found = run(world([job(5, 20)], (out(EAST, (2, 6)), ON_DEMAND)), policy)

    assert ended_hours(found) < 20
    assert asked(found, "on-demand") == []
    assert found.spent_dollars == pytest.approx(5.2, abs=0.2)  # with two starts


@pytest.mark.parametrize("policy", ["budget", "prices"])
def test_when_the_deadline_nears_a_job_goes_on_demand_and_keeps_it(policy: str):
    found = run(world([job(5, 8)], (out(EAST, (2, 100)), ON_DEMAND)), policy)

    assert ended_hours(found) <= 8
    [late] = asked(found, "on-demand")
    assert 3 < late < 5  # three hours of work are left, of which each costs three times as much
    assert found.spent_dollars == pytest.approx(2 + 3 * 3.1, abs=0.5)


@pytest.mark.parametrize("policy", ["budget", "prices"])
def test_without_slack_a_job_begins_on_demand(policy: str):
    found = run(world([job(5, 5.15)], (EAST, ON_DEMAND)), policy)

    assert ended_hours(found) <= 5.15
    assert asked(found, "east") == []


def test_a_job_leaves_a_spot_node_that_may_be_lost_when_there_is_no_time_for_that():
    offer = out(EAST, (1, 1.4), (2, 2.4), (3.2, 3.3), (3.5, 3.7), (3.9, 100))
    found = run(world([job(4, 5.5)], (offer, ON_DEMAND)), "budget")

    assert ended_hours(found) <= 5.5
    assert asked(found, "on-demand")


@pytest.mark.parametrize("policy", ["budget", "prices"])
def test_the_next_zone_takes_over(policy: str):
    offers = (out(EAST, (2, 50)), WEST, ON_DEMAND)
    found = run(world([job(5, 20)], offers), policy)

    assert asked(found, "on-demand") == []
    assert asked(found, "west")
    assert ended_hours(found) < 5.5


def test_the_gpus_of_a_job_are_in_one_zone_and_of_one_kind():
    offers = (
        out(EAST, (3, 4), most_nodes=3),
        out(WEST, most_nodes=3),
        ON_DEMAND,
    )
    jobs = [job(4, id=f"job-{row}", submit_seconds=600.0 * row) for row in range(6)]
    found = world(jobs, offers, widths(1.0, 1.9, 3.5), budget=20.0)
    policy, memory = find_policy("budget"), None
    num_wide = 0
    while not found.is_over:
        snapshot = found.observe().complete()
        decisions, memory = policy(snapshot, memory)
        for decision in decisions:
            if isinstance(decision, Start | Resize):
                nodes = [node for node, _ in decision.placement]
                assert len({int(snapshot.node_offer[node]) for node in nodes}) == 1
                num_wide += len(nodes) > 1
        apply(decisions, found, snapshot)
        found.advance()
    assert num_wide > 0
    assert all(record.state.value == "done" for record in found.state.jobs.values())


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_out_when_no_deadline_is_missed_that_nodes_on_demand_keep(seed: int):
    """With checkpoints every ten minutes, and nodes that take two minutes to come."""
    dice = np.random.default_rng(seed)
    offers = []
    for offer in (EAST, WEST):
        lengths = dice.exponential(1.0, 60).cumsum()
        hours = [(float(begin), float(end)) for begin, end in lengths.reshape(-1, 2)]
        offers.append(out(offer, *hours, start_delay_seconds=120.0))
    offers.append(out(ON_DEMAND, start_delay_seconds=120.0))
    startup_hours = (120 + 360) / HOUR
    hours = dice.uniform(1, 8, 6)
    jobs = [
        job(
            hours[row],
            2.0 * row + hours[row] + startup_hours + 1e-3 + dice.exponential(0.5),
            id=f"job-{row}",
            submit_seconds=2.0 * row * HOUR,
        )
        for row in range(6)
    ]
    for policy in ("budget", "prices"):
        found = run(world(jobs, tuple(offers), checkpoint_seconds=600.0), policy)
        ends = {one.id: ended_hours(found, one.id) * HOUR for one in jobs}
        late = [one.id for one in jobs if ends[one.id] > one.deadline_seconds + 1]
        assert late == [], policy


def test_without_deadlines_spot_nodes_are_taken_and_on_demand_ones_where_there_are_none():
    found = run(world([job(8)], (out(EAST, (2, 5)), ON_DEMAND)), "budget")

    starts = [event.time_seconds / HOUR for event in found.log if isinstance(event, Started)]
    assert asked(found, "east")[0] == 0
    assert asked(found, "on-demand")[0] == pytest.approx(2.0, abs=0.2)
    assert ended_hours(found) < 9  # it never waited
    assert len(starts) >= 2


def test_a_place_that_loses_its_nodes_again_and_again_is_left_for_nodes_that_stay():
    """Where an hour of a job is worth a dollar; most of the hours there are restarts."""
    dear = out(ON_DEMAND, price_dollars_per_hour=1.3)
    flickers = [(0.25 * row + 0.2, 0.25 * row + 0.201) for row in range(400)]
    assert all(later[0] > before[1] for before, later in pairwise(flickers))
    found = run(world([job(12)], (out(EAST, *flickers), dear)), "steady:1")

    losses = [event for event in found.log if isinstance(event, NodeReclaimed)]
    assert 1 <= len(losses) < 10
    assert asked(found, "on-demand")


def test_who_names_a_type_means_its_spot_nodes_too():
    limited = job(3, allowed_gpus=frozenset({"V100"}))
    assert asked(run(world([limited], (EAST, ON_DEMAND)), "budget"), "east")


def test_places_are_types_with_slower_options_of_their_own():
    found = world([job(3)], (EAST, WEST, ON_DEMAND), widths(1.0, 1.9))
    snapshot = found.observe().complete()

    places = find_places(snapshot)
    seen = split(snapshot, places)

    assert [place.name for place in places] == ["V100 (spot aws/east)", "V100 (spot aws/west)"]
    assert seen.gpu_types == ("V100", *(place.name for place in places))
    assert seen.options.counts[0].tolist() == [
        [1, 0, 0], [2, 0, 0], [0, 1, 0], [0, 2, 0], [0, 0, 1], [0, 0, 2]
    ]  # fmt: skip
    speeds = seen.options.samples_per_second[0]
    assert speeds[:2].tolist() == [1.0, 1.9]
    # One node of three hours' life, 360 s to start and 300 s of work lost; two are lost as often
    # again, and start 360 s as well.
    assert speeds[2] == pytest.approx(1.0 / (1 + 660 / (3 * HOUR)))
    assert speeds[3] == pytest.approx(1.9 / (1 + 2 * 660 / (3 * HOUR)))


def test_what_nodes_did_is_counted_by_offer():
    found = run(world([job(5, 20)], (out(EAST, (2, 6)), ON_DEMAND)), "budget")

    history = found.state.rentals.histories(found.now_seconds)["east"]

    assert history.num_losses == 1
    assert history.available_hours == pytest.approx(5.2, abs=0.2)
    assert history.watched_hours - history.available_hours == pytest.approx(4.0, abs=0.5)
    assert history.life_hours > PlaceHistory().life_hours
