import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from tiny import job, node, option_set, snapshot

from drystone.describe.market import Offer
from drystone.errors import InvalidSpec
from drystone.schedule.check import check_decisions
from drystone.schedule.decision import Move, Preempt, Refuse, Release, Rent, Resize, Start, Wake
from drystone.schedule.snapshot import ComingNodes, Rentals

NODES = [node("n0"), node("n1")]
OPTIONS = option_set(([2], 2.0), ([4], 3.0))
SNAPSHOT = snapshot(
    NODES, [job("runs"), job("waits"), job("too")], OPTIONS, running={"runs": (1, ((0, 4),))}
)


def start(name: str = "waits", option: int = 0, placement=((1, 2),)) -> Start:
    return Start(job_id=name, option=option, placement=placement, reason="test")


@pytest.mark.parametrize(
    "decisions",
    [
        [],
        [start()],
        [start(), start("too")],
        [Refuse(job_id="waits", reason="test")],
        [Preempt(job_id="runs", reason="test"), start(option=1, placement=((0, 4),))],
        [Resize(job_id="runs", option=0, placement=((0, 2),), reason="test")],
        [
            Move(job_id="runs", placement=((1, 4),), reason="test"),
            start(option=1, placement=((0, 4),)),
        ],
    ],
)
def test_sound_lists_have_no_problems(decisions):
    assert check_decisions(SNAPSHOT, decisions) == []


@pytest.mark.parametrize(
    ("decisions", "says"),
    [
        ([start("nobody")], "no job 'nobody'"),
        ([start(), start()], "decided on twice"),
        ([start("runs")], "runs"),
        ([Preempt(job_id="waits", reason="test")], "waits"),
        ([start(option=7)], "no option 7"),
        ([start(placement=((9, 2),))], "does not exist"),
        ([start(placement=((1, 1),))], "needs [2]"),
        ([start(placement=((1, 1), (1, 1)))], "a node twice"),
        ([start(placement=((0, 2),))], "n0 gives out 2 GPUs more than it has"),
        ([start(option=1, placement=((1, 4),)), start("too")], "n1 gives out 2"),
        ([Release(node=5, reason="test")], "no node 5"),
        ([Rent(offer="x", num_nodes=1, reason="test")], "no offer 'x'"),
    ],
)
def test_every_fault_is_named(decisions, says: str):
    problems = check_decisions(SNAPSHOT, decisions)

    assert any(says in problem for problem in problems), problems


def test_memory_is_kept():
    tight = snapshot([node("n0", memory_bytes=10)], [job("a")], option_set(([2], 1.0), memory=11))

    assert "needs 11 bytes" in check_decisions(tight, [start("a", placement=((0, 2),))])[0]


MARKET = replace(
    SNAPSHOT,
    offers=(
        Offer(name="x", gpu="A", num_gpus=4, price_dollars_per_hour=2.0, most_nodes=4),
        Offer(name="y", gpu="A", num_gpus=4, price_dollars_per_hour=5.0),
    ),
    rentals=Rentals(
        nodes=np.array([1]),
        offer=np.array([0]),
        since_seconds=np.array([0.0]),
        coming=(ComingNodes(offer=0, num_nodes=2, asked_seconds=0.0, ready_seconds=9.0),),
        dollars_per_hour=2.0,
    ),
    budget_dollars_per_hour=1.0,
    hard_cap_dollars_per_hour=13.0,
)


def rent(offer: str, number: int = 1) -> Rent:
    return Rent(offer=offer, num_nodes=number, reason="test")


def release(node: int) -> Release:
    return Release(node=node, reason="test")


@pytest.mark.parametrize(
    "decisions",
    [
        [rent("x")],  # 8 dollars an hour, far above the budget, which is an average
        [rent("y")],
        [rent("y"), rent("x")],
        [release(1)],
        [release(1), rent("x", 2)],
        [release(1), rent("x"), rent("y")],
        [release(1), Move(job_id="runs", placement=((0, 4),), reason="test")],
        [Wake(at_seconds=5.0, reason="test")],
    ],
)
def test_sound_rentals_have_no_problems(decisions):
    assert check_decisions(MARKET, decisions) == []


@pytest.mark.parametrize(
    ("decisions", "says"),
    [
        ([rent("x", 2)], "5 nodes of x in all, limit 4"),
        ([rent("x"), rent("x")], "5 nodes of x in all, limit 4"),
        ([rent("x", 0)], "0 nodes"),
        ([rent("y", 2)], "16.00 dollars an hour in all, the hard cap is 13.00"),
        ([rent("y"), rent("x", 2)], "hard cap"),
        ([release(0)], "n0 is not rented"),
        ([release(1), release(1)], "n1 is given back twice"),
        ([release(1), start()], "jobs run on node n1"),
        ([release(1), Move(job_id="runs", placement=((1, 4),), reason="test")], "jobs run on"),
        ([Wake(at_seconds=0.0, reason="test")], "it is 0.0 s already"),
        ([Wake(at_seconds=math.nan, reason="test")], "Wake"),
        ([Wake(at_seconds=math.inf, reason="test")], "Wake"),
    ],
)
def test_every_fault_of_a_rental_is_named(decisions, says: str):
    problems = check_decisions(MARKET, decisions)

    assert any(says in problem for problem in problems), problems


def test_a_cap_that_prices_have_passed_stops_only_new_rentals():
    """A price may rise above the cap by itself: nobody is to blame, and nothing else may wait."""
    risen = replace(MARKET, hard_cap_dollars_per_hour=3.0)

    assert check_decisions(risen, [start()]) == []
    assert check_decisions(risen, [release(1)]) == []
    assert "hard cap" in check_decisions(risen, [rent("x")])[0]


def test_an_offer_s_numbers_make_sense():
    with pytest.raises(InvalidSpec, match="price"):
        Offer(name="x", gpu="A", num_gpus=8, price_dollars_per_hour=-1)
    with pytest.raises(InvalidSpec, match="num_gpus"):
        Offer(name="x", gpu="A", num_gpus=0, price_dollars_per_hour=1)
