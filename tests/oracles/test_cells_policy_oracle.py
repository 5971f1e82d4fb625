"""The policy `cells` against the same procedure in plain loops, decision by decision.

`cells` leaves out what cannot matter: candidates that cannot be better any more, and changes in an
order that leads to a board it has seen. The plain one places and values every candidate and
searches every order. Each has a memory of its own; what they decide must be the same to the node,
and so must what they expect to gain.
"""

import sys
from dataclasses import astuple
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from cell_queues import make_world
from plain_cells import plain_cells

from decision_time import take_moments
from drystone.run.loop import drive
from drystone.schedule.baselines.cells.policy import CellsMemory, cells
from drystone.schedule.decision import Decision, Move, Preempt, Resize, Start
from drystone.schedule.snapshot import Snapshot


def said(decision: Decision) -> tuple:
    """What is decided, without the words."""
    return (
        type(decision).__name__,
        decision.job_id,
        getattr(decision, "option", None),
        getattr(decision, "placement", None),
        dict(decision.numbers),
    )


def remembered(memory: CellsMemory) -> tuple:
    free = dict(enumerate(memory.free.tolist()))
    return memory.known, memory.opportunists, dict(memory.wanted), free


class Both:
    """A policy that decides in both ways and compares; it keeps what was decided."""

    def __init__(self) -> None:
        self.decisions: list[Decision] = []
        self.num_opportunists = 0

    def __call__(self, snapshot: Snapshot, memory: tuple | None) -> tuple[list[Decision], tuple]:
        ours, plain = memory or (None, None)
        decisions, ours = cells(snapshot, ours)
        expected, plain = plain_cells(snapshot, plain)

        assert [said(one) for one in decisions] == [said(one) for one in expected]
        assert remembered(ours) == astuple(plain)
        self.decisions += decisions
        self.num_opportunists += len(ours.opportunists)
        return decisions, (ours, plain)

    def num_of(self, *kinds: type) -> int:
        return sum(isinstance(one, kinds) for one in self.decisions)


def compare_runs(seeds: range, **size: int) -> Both:
    both = Both()
    for seed in seeds:
        drive(make_world(seed, **size), both)
    return both


@pytest.mark.parametrize("seed", [*range(9), 12, 21, 28, 33, 36, 39, 42, 51, 54, 57])
def test_on_a_small_cluster_it_decides_as_the_plain_search_does(seed: int):
    """A whole run: jobs come, run, make room, are lent GPUs, lose them, grow and end."""
    both = compare_runs(range(seed, seed + 1))

    assert both.num_of(Start) >= 20


@pytest.mark.slow
def test_on_many_small_clusters_every_kind_of_decision_is_the_same():
    both = compare_runs(range(100, 200))

    assert both.num_of(Start) > 2000
    assert both.num_of(Resize) > 1000
    assert both.num_of(Move) > 100
    assert both.num_of(Preempt) > 20
    assert both.num_opportunists > 100


@pytest.mark.slow
def test_on_clusters_of_middle_size_it_decides_as_the_plain_search_does():
    both = compare_runs(range(10), num_jobs=120, nodes_of_a_type=12)

    assert both.num_of(Resize) > 100


@pytest.mark.slow
def test_on_moments_of_a_crowded_trace_it_decides_as_the_plain_search_does():
    """About 150 jobs of Arena's Philly trace on 1,280 GPUs, two decisions each."""
    both = Both()
    for before, after in take_moments("prices", 150, 8)[0]:
        _, memory = both(before, None)
        both(after, memory)

    assert both.num_of(Start, Resize) > 50
