"""Gavel: shares of the time by linear programmes, and rounds that realise them."""

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("highspy")
sys.path.insert(0, str(Path(__file__).parents[2]))
from tiny import job, node, option_set, snapshot

from drystone.schedule.baselines.gavel.admission import gavel_admission
from drystone.schedule.baselines.gavel.policy import ROUND_SECONDS, gavel, gavel_throughput
from drystone.schedule.baselines.gavel.time_shares import (
    SharingProblem,
    fairest_finish,
    greatest_least,
    greatest_sum,
)
from drystone.schedule.check import check_decisions
from drystone.schedule.decision import Preempt, Resize, Start, Wake


def sharing(
    speeds, capacity, *, num_gpus=None, weights=None, elapsed=None, left=None
) -> SharingProblem:
    speeds = np.array(speeds, dtype=float)
    ones = np.ones(len(speeds))
    remaining = np.array(left) if left is not None else 100 * ones
    return SharingProblem(
        speeds=speeds,
        num_gpus=np.array(num_gpus or [1] * len(speeds)),
        weights=np.array(weights) if weights else ones,
        capacity=np.array(capacity),
        elapsed_seconds=np.array(elapsed) if elapsed is not None else 0 * ones,
        remaining_samples=remaining,
        total_samples=np.maximum(remaining, 100.0),
    )


def test_the_greatest_sum_gives_each_type_to_who_gains_most_from_it():
    shares = greatest_sum(sharing([[4, 1], [3, 2]], [1, 1]))

    assert shares == pytest.approx(np.eye(2))


def test_equals_share_equally_and_weights_count():
    assert greatest_least(sharing([[5], [5]], [1]))[:, 0] == pytest.approx([0.5, 0.5])
    weighted = greatest_least(sharing([[5], [5]], [1], weights=[3.0, 1.0]))
    assert weighted[:, 0] == pytest.approx([0.75, 0.25], abs=1e-3)


def test_nobody_gets_more_time_than_there_is_and_no_type_more_jobs_than_gpus():
    chance = np.random.default_rng(0)
    for _ in range(20):
        speeds = chance.uniform(0, 5, (12, 3)) * (chance.random((12, 3)) < 0.7)
        given = sharing(speeds, [4, 6, 8], num_gpus=chance.integers(1, 4, 12).tolist())
        for objective in (greatest_sum, greatest_least, fairest_finish):
            shares = objective(given)
            assert (shares >= 0).all()
            assert (shares.sum(axis=1) <= 1 + 1e-6).all()
            assert (given.num_gpus @ shares <= given.capacity + 1e-6).all()
            assert (shares[speeds == 0] == 0).all()


def test_max_min_fairness_is_better_for_everybody_than_equal_shares():
    """Gavel's point: jobs that gain more from the fast type trade with those that gain less."""
    speeds = np.array([[4.0, 1.0], [1.0, 3.0]])
    given = sharing(speeds, [1, 1])

    got = (greatest_least(given) * speeds).sum(axis=1)
    equal = (speeds / 2).sum(axis=1)

    assert (got >= equal * (1 - 1e-6)).all()
    assert (got / equal).min() > 1.05


def test_finish_time_fairness_favours_who_is_behind():
    shares = fairest_finish(sharing([[1], [1]], [1], elapsed=[1000.0, 0.0], left=[50.0, 50.0]))

    assert shares[0, 0] > 0.6 > shares[1, 0]


def test_two_jobs_take_turns_on_one_gpu():
    options, nodes = option_set(([1], 10.0)), [node("a", num_gpus=1)]
    jobs = [job("one", samples=1e6), job("two", samples=1e6)]
    running, memory, turns = {}, None, []
    for turn in range(8):
        given = snapshot(nodes, jobs, options, running, now_seconds=turn * ROUND_SECONDS)
        decisions, memory = gavel(given, memory)
        assert check_decisions(given, decisions) == []
        assert any(isinstance(one, Wake) for one in decisions)
        for one in decisions:
            if isinstance(one, Preempt):
                del running[one.job_id]
        for one in decisions:
            if isinstance(one, Start):
                running[one.job_id] = (one.option, one.placement)
        turns += running
    assert turns.count("one") == turns.count("two") == 4


def test_within_a_round_nothing_is_taken_away():
    options, nodes = option_set(([1], 10.0)), [node("a", num_gpus=1)]
    jobs = [job("one"), job("two")]
    _, memory = gavel(snapshot(nodes, jobs, options), None)
    running = {"one": (0, ((0, 1),))}
    middle = snapshot(nodes, jobs, options, running, now_seconds=ROUND_SECONDS / 2)

    decisions, _ = gavel(middle, memory)

    assert [type(one) for one in decisions] == [Wake]


def test_the_greatest_sum_moves_a_job_to_the_type_that_it_gains_from():
    options = {"one": option_set(([1, 0], 4.0), ([0, 1], 1.0)),
               "two": option_set(([1, 0], 3.0), ([0, 1], 2.0))}  # fmt: skip
    nodes = [node("a", "A", 1), node("b", "B", 1)]
    jobs = [job("one", requested_gpu="A", requested_count=1),
            job("two", requested_gpu="A", requested_count=1)]  # fmt: skip
    given = snapshot(nodes, jobs, options, {"one": (1, ((1, 1),)), "two": (0, ((0, 1),))})

    for policy in (gavel_throughput,):
        decisions, _ = policy(given, None)
        assert check_decisions(given, decisions) == []
        assert {one.job_id: one.option for one in decisions} == {"one": 0, "two": 1}
        assert all(isinstance(one, Resize) for one in decisions)


def test_admission_changes_types_to_let_a_job_in():
    options = {"one": option_set(([1, 0], 4.0), ([0, 1], 3.0)), "two": option_set(([1, 0], 3.0))}
    nodes = [node("a", "A", 1), node("b", "B", 1)]
    given = snapshot(nodes, [job("one"), job("two")], options, {"one": (0, ((0, 1),))})

    decisions, _ = gavel_admission(given, None)

    assert check_decisions(given, decisions) == []
    assert [(type(one), one.job_id) for one in decisions] == [(Resize, "one"), (Start, "two")]
