"""Pollux: the search keeps its rules and finds the best sharing; autoscaling keeps its bounds."""

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
from tiny import job, node, option_set, snapshot

from drystone.describe.cluster import make_nodes
from drystone.describe.market import Offer
from drystone.run.events import Finished, NodeJoined, NodeReleased
from drystone.run.loop import drive
from drystone.run.simulate.world import SimulatedWorld
from drystone.schedule.baselines.pollux.autoscale import (
    Bounds,
    best_size,
    make_pollux_autoscale,
    pollux_autoscale,
    shared_speedup,
    utility_now,
)
from drystone.schedule.baselines.pollux.policy import blind_speedups, option_lookup, pollux
from drystone.schedule.baselines.pollux.search import SharingSearch, score_states, search_sharing
from drystone.schedule.check import check_decisions
from drystone.schedule.decision import Refuse, Rent

OFFER = Offer(name="four", gpu="A", num_gpus=4, price_dollars_per_hour=4.0, most_nodes=10)
GROWING = option_set(*(([count], float(count) ** 0.8) for count in range(1, 17)))


def sharing(num_jobs: int, num_nodes: int, seed: int = 0, num_types: int = 1) -> SharingSearch:
    chance = np.random.default_rng(seed)
    exponents = chance.uniform(0.3, 1.0, num_jobs)
    counts = np.arange(4 * num_nodes + 1)
    values = np.where(counts > 0, np.maximum(counts, 1) ** exponents[:, None], 0.0)
    return SharingSearch(
        node_gpus=np.full(num_nodes, 4),
        node_type=np.arange(num_nodes) % num_types,
        type_gpus_per_node=np.full(num_types, 4),
        values=np.repeat(values[:, None, :], num_types, axis=1),
        max_gpus=np.full(num_jobs, 4 * num_nodes),
        base=np.zeros((num_jobs, num_nodes), dtype=np.int64),
        change_factor=np.ones(num_jobs),
    )


def best_by_counts(problem: SharingSearch) -> float:
    """The best score over all counts that fit one node of 4, jobs never spread."""
    num_jobs = len(problem.base)
    scores = []
    for counts in itertools.product(range(5), repeat=num_jobs):
        if sum(counts) <= 4:
            state = np.array(counts)[None, :, None]
            scores.append(score_states(problem, state)[0])
    return max(scores)


@pytest.mark.parametrize("seed", range(5))
def test_on_one_node_the_search_finds_the_best_counts(seed: int):
    problem = sharing(3, 1, seed)

    states = search_sharing(problem, np.random.default_rng(seed))

    assert score_states(problem, states[:1])[0] == pytest.approx(best_by_counts(problem))


@pytest.mark.parametrize("seed", range(5))
def test_every_state_keeps_the_rules(seed: int):
    problem = replace(sharing(6, 5, seed, num_types=2), max_gpus=np.array([1, 2, 8, 8, 8, 8]))

    states = search_sharing(problem, np.random.default_rng(seed))

    counts, spans = states.sum(axis=2), np.count_nonzero(states, axis=2)
    assert (states.sum(axis=1) <= problem.node_gpus).all()
    assert (counts <= problem.max_gpus).all()
    assert (spans == -(-counts // 4)).all()  # as few nodes as possible
    of_type = np.stack([(states * (problem.node_type == kind)).any(axis=2) for kind in (0, 1)])
    assert (of_type.sum(axis=0) <= 1).all()
    wide = (states > 0) & (spans[:, :, None] > 1)
    assert (wide.sum(axis=1) <= 1).all()  # one job that spans nodes on each


def test_a_change_that_is_not_worth_a_restart_is_not_made():
    base = np.array([[2], [2]])
    for factor, changes in ((0.5, False), (1.0, True)):
        problem = replace(
            sharing(2, 1),
            base=base,
            max_gpus=np.array([3, 1]),
            change_factor=np.full(2, factor),
            values=np.array([[[0, 1, 1.0, 1.4, 0]], [[0, 1.0, 1.0, 1, 0]]]),
        )
        best = search_sharing(problem, np.random.default_rng(0))[0]
        assert (not np.array_equal(best, base)) == changes


def test_the_same_snapshot_gives_the_same_decisions_twice():
    shot = snapshot([node("n0"), node("n1")], [job(f"j{index}") for index in range(5)], GROWING)

    first, memory = pollux(shot, None)
    second, _ = pollux(shot, None)
    third, _ = pollux(shot, memory)

    assert first == second
    assert check_decisions(shot, first) == []
    assert check_decisions(shot, third) == []


def test_a_new_job_gets_one_gpu_and_then_at_most_twice_what_it_had():
    nodes = [node("n0"), node("n1")]
    start, wake = pollux(snapshot(nodes, [job("a")], GROWING), None)[0]
    assert wake.at_seconds == 60.0
    assert start.placement in (((0, 1),), ((1, 1),))

    running = snapshot(nodes, [job("a")], GROWING, {"a": (0, ((0, 1),))}, now_seconds=1e6)
    resize, _ = pollux(running, None)[0]
    assert sum(count for _, count in resize.placement) == 2


@pytest.mark.parametrize("policy", [pollux, pollux_autoscale])
def test_an_empty_queue_needs_no_decision(policy):
    assert policy(snapshot([node("n")], [], GROWING), None)[0] == []


def test_it_is_blind_to_types():
    """B is ten times as fast as A, and speeds grow alike: both look alike."""
    options = option_set(([1, 0], 1.0), ([2, 0], 1.5), ([0, 1], 10.0), ([0, 2], 19.0))
    shot = snapshot([node("a"), node("b", "B")], [job("a")], options)

    lookup = option_lookup(shot)

    assert lookup[0].tolist() == [[-1, 0, 1], [-1, 2, 3]]
    assert blind_speedups(shot, lookup)[0] == pytest.approx([0.0, 1.0, (1.5 + 1.9) / 2])


def test_a_job_with_options_of_several_types_only_is_refused():
    shot = snapshot([node("a"), node("b", "B")], [job("a")], option_set(([1, 1], 1.0)))

    assert [type(one) for one in pollux(shot, None)[0]] == [Refuse]


@pytest.mark.parametrize("seed", range(5))
def test_the_exact_sharing_by_counts_is_the_best_one(seed: int):
    chance = np.random.default_rng(seed)
    blind = np.concatenate(
        (np.zeros((3, 1)), np.sort(chance.uniform(1, 4, (3, 5)), axis=1)), axis=1
    )
    blind[:, 1:] /= blind[:, 1:2]
    fair = blind[:, 2:3]  # 6 GPUs, 3 jobs

    def cost(counts) -> float:
        return sum(
            1 / (blind[row, count] / fair[row, 0] + 1e-3) for row, count in enumerate(counts)
        )

    best = min(
        (counts for counts in itertools.product(range(6), repeat=3) if sum(counts) <= 6), key=cost
    )

    assert shared_speedup(blind, 6) == pytest.approx(
        sum(blind[row, count] for row, count in enumerate(best))
    )


def test_utility_is_speedup_over_gpus():
    shot = snapshot([node("n0"), node("n1")], [job("a")], GROWING, {"a": (3, ((0, 4),))})

    assert utility_now(shot, np.array([0, 1])) == pytest.approx(4**0.8 / 8)


def test_without_nodes_some_are_rented_at_once():
    shot = snapshot([node("own")], [job("a")], GROWING, offers=(OFFER,))
    decide = make_pollux_autoscale(Bounds(min_nodes=3))

    rents = [one for one in decide(shot, None)[0] if isinstance(one, Rent)]

    assert [(one.offer, one.num_nodes) for one in rents] == [("four", 2)]


def test_the_size_sought_comes_nearest_to_the_utility_aimed_at():
    """Ten jobs whose speedup is the root of their GPUs, with no limit but their options."""
    roots = option_set(*(([count], float(count) ** 0.5) for count in range(1, 17)))
    jobs = [job(f"j{index}") for index in range(10)]
    running = {f"j{index}": (15, ((index * 4, 4), (index * 4 + 1, 4), (index * 4 + 2, 4),
                                  (index * 4 + 3, 4))) for index in range(10)}  # fmt: skip
    shot = snapshot([node(f"n{at:02d}") for at in range(40)], jobs, roots, running, offers=(OFFER,))
    bounds = Bounds(low_utility=0.4, high_utility=0.6, max_nodes=40)

    # n GPUs each: sqrt(n) / n = 0.5 at n = 4, which makes 10 nodes of 4.
    assert best_size(shot, None, 0, bounds) == 10


@pytest.mark.slow
def test_an_autoscaled_run_finishes_and_gives_nodes_back():
    """Many jobs at first, then one: nodes come and go, and nobody is lost."""
    jobs = [replace(job(f"j{index}", 3000.0), submit_seconds=index * 5.0) for index in range(12)]
    jobs.append(job("long", 20000.0))
    world = SimulatedWorld(
        jobs=jobs,
        nodes=(),
        options_of=lambda _: GROWING,
        gpu_types=("A",),
        round_seconds=60.0,
        decides_every_round=True,
        offers=(OFFER,),
    )

    drive(world, pollux_autoscale)

    assert sum(isinstance(one, Finished) for one in world.log) == len(jobs)
    assert sum(isinstance(one, NodeJoined) for one in world.log) > 2
    assert any(isinstance(one, NodeReleased) for one in world.log)


def test_without_offers_it_is_plain_pollux():
    nodes = tuple(make_nodes("A", count=2, gpus_per_node=4))
    shot = snapshot(nodes, [job("a"), job("b")], GROWING)

    assert pollux_autoscale(shot, None)[0] == pollux(shot, None)[0]
