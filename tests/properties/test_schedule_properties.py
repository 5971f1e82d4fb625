"""What holds of every policy, whatever the cluster, the queue and the market.

Every policy of the table is tested, so a new one is covered as soon as it is listed.
"""

import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "schedule"))
from tiny import snapshot as make_snapshot

from drystone.describe.cluster import NodeSpec
from drystone.describe.job import JobSpec
from drystone.describe.market import Offer, PriceChange
from drystone.describe.option import OptionSet
from drystone.run.events import (
    Finished,
    Interrupted,
    NodeJoined,
    NodeReclaimed,
    NodeReleased,
    PriceChanged,
    Refused,
    RentalAsked,
    RentalFailed,
    Started,
    StartFailed,
    Stopped,
    Submitted,
    parse_events,
    render_event,
)
from drystone.run.loop import drive
from drystone.run.simulate.faults import FaultSpec
from drystone.run.simulate.world import SimulatedWorld
from drystone.run.state import replay
from drystone.schedule.check import check_decisions
from drystone.schedule.decision import POLICIES, find_policy
from drystone.schedule.options import types_of
from drystone.schedule.packing import make_room
from drystone.schedule.snapshot import Snapshot, StartupCost

every_policy = pytest.mark.parametrize("name", sorted(POLICIES))
STARTUP = StartupCost(seconds_per_gpu=5.0, most_seconds=30.0)
FAULTS = FaultSpec(
    seed=7, node_losses_per_hour=5, repair_seconds=60, node_slowdowns_per_hour=5, slow_seconds=60,
    failed_start_share=0.1, checkpoint_seconds=30, stock_out_share=0.1, price_changes_per_hour=5,
)  # fmt: skip
BUDGETS = st.sampled_from([2.0, 20.0, float("inf")])
CAPS = st.sampled_from([15.0, 60.0, float("inf")])


@st.composite
def clusters(draw) -> tuple[NodeSpec, ...]:
    nodes = []
    for gpu in ("A", "B", "C")[: draw(st.integers(1, 3))]:
        size = draw(st.sampled_from([1, 2, 4, 8]))
        for index in range(draw(st.integers(1, 4))):
            nodes.append(NodeSpec(id=f"{gpu}{index}", gpu=gpu, num_gpus=size))
    return tuple(nodes)


@st.composite
def markets(draw, nodes: tuple[NodeSpec, ...]) -> tuple[Offer, ...]:
    """Some of the cluster's types can be rented; some offers are spot, some change their price."""
    offers = []
    for index in range(draw(st.integers(0, 2))):
        changes = draw(st.lists(st.sampled_from([30.0, 300.0]), max_size=2, unique=True))
        offers.append(
            Offer(
                name=f"offer{index}",
                gpu=draw(st.sampled_from(types_of(nodes))),
                num_gpus=draw(st.sampled_from([1, 4, 8])),
                price_dollars_per_hour=draw(st.sampled_from([0.0, 1.0, 4.0, 10.0])),
                start_delay_seconds=draw(st.sampled_from([0.0, 60.0])),
                most_nodes=draw(st.integers(0, 4)),
                reclaims_per_hour=draw(st.sampled_from([0.0, 10.0])),
                price_changes=tuple(
                    PriceChange(at_seconds=at, price_dollars_per_hour=3.0) for at in sorted(changes)
                ),
            )
        )
    return tuple(offers)


@st.composite
def option_sets(draw, nodes: tuple[NodeSpec, ...]) -> OptionSet:
    """Options that fit on the empty cluster; some take two types at once."""
    gpu_types = types_of(nodes)
    total = [sum(one.num_gpus for one in nodes if one.gpu == gpu) for gpu in gpu_types]
    rows: dict[tuple[int, ...], float] = {}
    for _ in range(draw(st.integers(1, 5))):
        row = [0] * len(gpu_types)
        for kind in draw(
            st.lists(st.integers(0, len(total) - 1), min_size=1, max_size=2, unique=True)
        ):
            row[kind] = draw(st.integers(1, total[kind]))
        rows[tuple(row)] = draw(st.floats(0.1, 50.0))
    return OptionSet(
        counts=np.array(list(rows), dtype=np.int64),
        samples_per_second=np.array(list(rows.values())),
        memory_bytes=np.zeros(len(rows)),
    )


@st.composite
def queues(draw, nodes: tuple[NodeSpec, ...]) -> tuple[list[JobSpec], dict[str, OptionSet]]:
    gpu_types = types_of(nodes)
    jobs, options = [], {}
    for index in range(draw(st.integers(0, 8))):
        name = f"job{index}"
        options[name] = draw(option_sets(nodes))
        jobs.append(
            JobSpec(
                id=name,
                submit_seconds=float(draw(st.integers(0, 50))),
                model="m",
                total_samples=draw(st.floats(1.0, 1e4)),
                priority=draw(st.sampled_from([0.5, 1.0, 4.0])),
                requested_gpu=draw(st.sampled_from(["", gpu_types[0]])),
                requested_count=draw(st.integers(1, 4)),
            )
        )
    return jobs, options


@st.composite
def snapshots(draw) -> Snapshot:
    """Some jobs of a queue run where they fit; the others wait; nothing is rented yet."""
    nodes = draw(clusters())
    jobs, options = draw(queues(nodes))
    room = make_room(make_snapshot(nodes, jobs, options))
    running = {}
    for job in jobs:
        if draw(st.booleans()):
            option = draw(st.integers(0, len(options[job.id]) - 1))
            placement = room.place(options[job.id].counts[option])
            if placement is not None:
                running[job.id] = (option, placement)
    return make_snapshot(
        nodes,
        jobs,
        options,
        running,
        startup=STARTUP,
        now_seconds=draw(st.sampled_from([0.0, 1e3, 1e5])),
        offers=draw(markets(nodes)),
        budget_dollars_per_hour=draw(BUDGETS),
        hard_cap_dollars_per_hour=draw(CAPS),
    )


@every_policy
@settings(max_examples=50)
@given(snapshot=snapshots())
def test_every_decision_is_sound(name: str, snapshot: Snapshot):
    """No GPU is given out twice, nothing is unknown, every placement is its option, caps hold."""
    decisions, memory = find_policy(name)(snapshot, None)

    assert check_decisions(snapshot, decisions) == []
    assert check_decisions(snapshot, find_policy(name)(snapshot, memory)[0]) == []


@every_policy
@settings(max_examples=50)
@given(snapshot=snapshots())
def test_the_same_snapshot_gives_the_same_decisions(name: str, snapshot: Snapshot):
    assert find_policy(name)(snapshot, None)[0] == find_policy(name)(snapshot, None)[0]


@every_policy
@settings(max_examples=50)
@given(snapshot=snapshots(), chance=st.randoms(use_true_random=False))
def test_other_ids_change_nothing_but_ids(name: str, snapshot: Snapshot, chance):
    ids = [spec.id for spec in snapshot.jobs.specs]
    others = ids.copy()
    chance.shuffle(others)
    renamed = dict(zip(ids, others, strict=True))
    specs = tuple(replace(spec, id=renamed[spec.id]) for spec in snapshot.jobs.specs)
    other = replace(snapshot, jobs=replace(snapshot.jobs, specs=specs))

    decisions = find_policy(name)(snapshot, None)[0]

    def rename(decision):
        words = re.sub(r"\bjob\d+\b", lambda found: renamed[found[0]], decision.reason)
        decision = replace(decision, reason=words)
        if not hasattr(decision, "job_id"):
            return decision
        return replace(decision, job_id=renamed[decision.job_id])

    assert find_policy(name)(other, None)[0] == [rename(decision) for decision in decisions]


@every_policy
@settings(max_examples=30)
@given(data=st.data(), has_faults=st.booleans(), has_rounds=st.booleans())
def test_a_run_keeps_what_it_must(
    name: str, data: st.DataObject, has_faults: bool, has_rounds: bool
):
    """No job is lost, no GPU used twice, no cap broken, no cent missing, and the log replays."""
    nodes = data.draw(clusters())
    jobs, options = data.draw(queues(nodes))
    offers, cap = data.draw(markets(nodes)), data.draw(CAPS)
    world = SimulatedWorld(
        jobs=jobs,
        nodes=nodes,
        options_of=lambda job: options[job.id],
        gpu_types=types_of(nodes),
        startup=STARTUP,
        round_seconds=60.0 if has_rounds else 0.0,
        faults=FAULTS if has_faults else None,
        horizon_seconds=1e7,
        offers=offers,
        budget_dollars_per_hour=data.draw(BUDGETS),
        hard_cap_dollars_per_hour=cap,
    )
    drive(world, find_policy(name))

    settled = [one.job_id for one in world.log if isinstance(one, Finished | Refused)]
    assert sorted(settled) == sorted(job.id for job in jobs)
    assert sum(isinstance(one, Submitted) for one in world.log) == len(jobs)
    again = replay(nodes, parse_events([render_event(one) for one in world.log]))
    again.now_seconds = world.state.now_seconds
    assert repr(again) == repr(world.state)
    _check_gpus(nodes, world)
    _check_money(world)
    _check_cap(world, {offer.name: offer for offer in offers}, cap)


def _check_gpus(nodes: tuple[NodeSpec, ...], world: SimulatedWorld) -> None:
    """From the events alone: no node ever gives out more GPUs than it has."""
    sizes = {row: node.num_gpus for row, node in enumerate(nodes)}
    used: Counter[int] = Counter()
    held: dict[str, tuple[tuple[int, int], ...]] = {}
    for event in world.log:
        if isinstance(event, NodeJoined):
            sizes[event.node] = event.spec.num_gpus
        elif isinstance(event, NodeReleased | NodeReclaimed):
            assert used[event.node] == 0
            del sizes[event.node]
        elif isinstance(event, Started):
            held[event.job_id] = event.placement
            for row, count in event.placement:
                used[row] += count
                assert used[row] <= sizes[row]
        elif isinstance(event, Stopped | Interrupted | StartFailed | Finished):
            for row, count in held.pop(event.job_id):
                used[row] -= count


def _check_cap(world: SimulatedWorld, offers: dict[str, Offer], cap: float) -> None:
    """From the events alone: whenever nodes are asked for, all stay within cap and limit."""
    prices = {name: offer.price_dollars_per_hour for name, offer in offers.items()}
    number = dict.fromkeys(offers, 0)  # rented and on their way
    offer_of: dict[int, str] = {}
    for event in world.log:
        if isinstance(event, RentalAsked):
            number[event.offer] += event.num_nodes
            assert number[event.offer] <= offers[event.offer].most_nodes
            assert sum(number[one] * prices[one] for one in offers) <= cap * (1 + 1e-9)
        elif isinstance(event, RentalFailed):
            number[event.offer] -= 1
        elif isinstance(event, NodeJoined):
            offer_of[event.node] = event.offer
        elif isinstance(event, NodeReleased | NodeReclaimed):
            number[offer_of[event.node]] -= 1
        elif isinstance(event, PriceChanged):
            prices[event.offer] = event.price_dollars_per_hour


def _check_money(world: SimulatedWorld) -> None:
    """From the events alone: what every node cost adds up to what was spent, to the cent."""
    prices: dict[int, tuple[str, float, float]] = {}  # by node: offer, price, since
    total = 0.0

    def pay(node: int, until_seconds: float) -> str:
        nonlocal total
        offer, price, since = prices.pop(node)
        total += price * (until_seconds - since) / 3600
        return offer

    for event in world.log:
        if isinstance(event, NodeJoined):
            at = event.time_seconds
            prices[event.node] = (event.offer, event.price_dollars_per_hour, at)
        elif isinstance(event, NodeReleased | NodeReclaimed):
            pay(event.node, event.time_seconds)
        elif isinstance(event, PriceChanged):
            for node in [one for one, paid in prices.items() if paid[0] == event.offer]:
                pay(node, event.time_seconds)
                prices[node] = (event.offer, event.price_dollars_per_hour, event.time_seconds)
    for node in list(prices):
        pay(node, world.now_seconds)
    rentals = world.state.rentals
    assert world.spent_dollars == pytest.approx(total, abs=0.005)
    owed = [one.bill_micro_dollars(world.now_seconds) for one in rentals.rented.values()]
    paid = [bill.micro_dollars for bill in rentals.bills]
    assert world.spent_dollars == (sum(paid) + sum(owed)) / 1e6
