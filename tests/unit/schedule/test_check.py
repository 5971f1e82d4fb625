import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from tiny import job, node, option_set, snapshot

from drystone.describe.market import Offer
from drystone.schedule.check import check_decisions
from drystone.schedule.decision import Move, Preempt, Refuse, Release, Rent, Resize, Start

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


def test_an_offer_has_its_limit():
    with pytest.raises(Exception, match="price"):
        Offer(name="x", gpu="A", num_gpus=8, price_dollars_per_hour=-1)
