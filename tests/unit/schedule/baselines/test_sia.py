"""Sia: which options it looks at, what its programme chooses, and who moves for it."""

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny import job, node, option_set, snapshot

from drystone.schedule.baselines.sia import reassign
from drystone.schedule.check import check_decisions
from drystone.schedule.decision import Move, Preempt, Refuse, Resize, Start, Wake
from drystone.schedule.snapshot import StartupCost

pytest.importorskip("highspy")
from drystone.schedule.baselines.sia import (
    allowed_options,
    programme_costs,
    relative_speeds,
    restart_factors,
    sia,
    sia_freed,
)
from drystone.schedule.programme import choose_exactly

GROWING = option_set(*(([count], float(count)) for count in range(1, 17)))


def allowed_counts(shot, most) -> list[int]:
    allowed = allowed_options(shot, np.array(most))
    return shot.job_num_gpus[0][allowed[0]].tolist()


def test_counts_are_powers_of_two_within_a_node_and_whole_nodes_beyond():
    nodes = [node(f"n{index}") for index in range(4)]
    shot = snapshot(nodes, [job("a")], GROWING)

    assert allowed_counts(shot, [100]) == [1, 2, 4, 8, 12, 16]


@pytest.mark.parametrize(("most", "counts"), [(0, [1]), (1, [1, 2]), (4, [1, 2, 4, 8])])
def test_a_job_begins_with_one_gpu_and_at_most_doubles(most: int, counts: list[int]):
    nodes = [node(f"n{index}") for index in range(4)]

    assert allowed_counts(snapshot(nodes, [job("a")], GROWING), [most]) == counts


def test_options_of_several_types_are_not_looked_at():
    options = option_set(([1, 1], 9.0), ([1, 0], 1.0), ([0, 1], 2.0))
    shot = snapshot([node("a"), node("b", "B")], [job("a")], options)

    assert allowed_options(shot, np.array([9])).tolist() == [[False, True, True]]


def test_a_job_with_odd_counts_only_is_not_left_out():
    options = option_set(([3], 3.0), ([5], 5.0))
    shot = snapshot([node("a", num_gpus=8)], [job("a")], options)

    assert sia(shot, None)[0][0].option == 0


def test_a_job_of_several_types_only_is_refused():
    shot = snapshot([node("a"), node("b", "B")], [job("a")], option_set(([1, 1], 9.0)))

    assert isinstance(sia(shot, None)[0][0], Refuse)


def test_speeds_are_relative_to_the_slowest_and_a_restart_takes_its_share():
    """After 100 s with one start of 10 s: another leaves 100 / 110 of the time."""
    startup = StartupCost(seconds_per_gpu=10, most_seconds=10)
    shot = snapshot(
        [node("n")],
        [job("a"), job("b")],
        GROWING,
        {"a": (0, ((0, 1),))},
        startup=startup,
        now_seconds=100.0,
    )
    speeds = relative_speeds(shot, allowed_options(shot, np.array([1, 1])))

    assert restart_factors(shot) == pytest.approx([100 / 110, 100 / 110])
    assert speeds[0, :2] == pytest.approx([1.0, 2 * 100 / 110])
    assert speeds[1, :2] == pytest.approx([1.0, 2.0])  # it waits: nothing to restart


def test_costs_are_the_power_of_the_speed_less_what_no_gpus_cost():
    costs = programme_costs(np.array([[1.0, 4.0, 0.0, 1e-9]]))

    assert costs[0, :2] == pytest.approx([1 - 1.1, 0.5 - 1.1])
    assert costs[0, 2] == np.inf
    assert costs[0, 3] == pytest.approx(3000 - 1.1)


@pytest.mark.parametrize("seed", range(12))
def test_the_programme_finds_what_trying_everything_finds(seed: int):
    chance = np.random.default_rng(seed)
    num_jobs, num_options, num_types = 4, 4, 2
    costs = np.round(chance.uniform(-1, 0.3, (num_jobs, num_options)), 2)
    costs[chance.random(costs.shape) < 0.2] = np.inf
    counts = np.zeros((num_jobs, num_options, num_types), dtype=np.int64)
    kinds = chance.integers(num_types, size=(num_jobs, num_options))
    np.put_along_axis(
        counts, kinds[:, :, None], chance.integers(1, 5, (num_jobs, num_options, 1)), axis=2
    )
    capacity = chance.integers(2, 8, num_types)
    rows = np.arange(num_jobs)

    def total(picks: np.ndarray) -> float:
        taken = picks >= 0
        used = counts[rows[taken], picks[taken]].sum(axis=0)
        return float(costs[rows[taken], picks[taken]].sum()) if (used <= capacity).all() else np.inf

    best = min(
        total(np.array(picks))
        for picks in itertools.product(range(-1, num_options), repeat=num_jobs)
    )

    chosen = choose_exactly(costs, counts, capacity, relative_gap=0.0)

    assert total(chosen) == pytest.approx(best)


def test_everybody_gets_something_before_anybody_gets_much():
    """Four GPUs, two jobs that have had two each: both get two, none three and one."""
    shot = snapshot([node("n")], [job("a"), job("b")], GROWING)

    decisions, _ = sia(shot, {"a": 2, "b": 2})

    starts = [one for one in decisions if isinstance(one, Start)]
    assert sorted((one.job_id, one.option) for one in starts) == [("a", 1), ("b", 1)]
    assert check_decisions(shot, decisions) == []


def test_an_empty_queue_needs_no_decision():
    assert sia(snapshot([node("n")], [], GROWING), None) == ([], {})


def test_a_job_that_starts_up_is_left_alone():
    startup = StartupCost(seconds_per_gpu=60, most_seconds=60)
    options = option_set(([1], 1.0), ([2], 100.0))
    for now, changes in ((30.0, False), (90.0, True)):
        shot = snapshot(
            [node("n")],
            [job("a")],
            options,
            {"a": (0, ((0, 1),))},
            startup=startup,
            now_seconds=now,
        )
        decisions, _ = sia(shot, {"a": 2})
        assert [type(one) for one in decisions] == [Resize] * changes + [Wake]


def test_it_asks_to_be_woken_at_the_first_round_after_a_startup():
    """The job has run since 0 s and starts up until 90 s; another one starts now, until 170 s."""
    startup = StartupCost(seconds_per_gpu=90, most_seconds=90)
    shot = snapshot(
        [node("n")],
        [job("a"), job("b")],
        GROWING,
        {"a": (0, ((0, 1),))},
        startup=startup,
        now_seconds=80.0,
    )

    decisions, _ = sia(shot, None)

    assert [one.at_seconds for one in decisions if isinstance(one, Wake)] == [120.0]


def test_it_remembers_what_a_job_has_worked_with_only_after_it_has_worked():
    startup = StartupCost(seconds_per_gpu=60, most_seconds=60)
    for now, memory in ((60.0, {}), (61.0, {"a": 1})):
        shot = snapshot(
            [node("n")],
            [job("a")],
            GROWING,
            {"a": (0, ((0, 1),))},
            startup=startup,
            now_seconds=now,
        )
        assert sia(shot, None)[1] == memory


def test_a_small_job_makes_way_for_a_large_one_and_nobody_else_moves():
    nodes = [node("n0"), node("n1"), node("n2")]
    jobs = [job("one"), job("two"), job("full"), job("large")]
    running = {"one": (0, ((0, 1),)), "two": (0, ((1, 1),)), "full": (2, ((2, 4),))}
    options = option_set(([1], 1.0), ([2], 2.0), ([4], 4.0))
    shot = snapshot(nodes, jobs, options, running)

    decisions = reassign(shot, np.array([0, 0, 2, 2]), reason="test")

    assert check_decisions(shot, decisions) == []
    (start,) = [one for one in decisions if isinstance(one, Start)]
    (move,) = [one for one in decisions if isinstance(one, Move)]
    assert len(decisions) == 2
    assert start.job_id == "large"
    assert start.placement in (((0, 4),), ((1, 4),))
    assert move.placement == (((1 - start.placement[0][0]), 1),)


def test_who_gets_nothing_is_stopped_and_who_keeps_everything_is_left():
    shot = snapshot(
        [node("n")], [job("a"), job("b")], GROWING, {"a": (1, ((0, 2),)), "b": (1, ((0, 2),))}
    )

    decisions = reassign(shot, np.array([1, -1]), reason="test")

    assert [(type(one), one.job_id) for one in decisions] == [(Preempt, "b")]


@pytest.mark.parametrize("seed", range(20))
def test_powers_of_two_always_find_a_place(seed: int):
    """Whatever runs where, counts that fit by type are all placed."""
    chance = np.random.default_rng(seed)
    nodes = [node(f"n{index}", num_gpus=8) for index in range(4)]
    options = option_set(([1], 1.0), ([2], 2.0), ([4], 4.0), ([8], 8.0), ([16], 16.0))
    sizes = [1, 2, 4, 8, 16]
    jobs, running, free, left = [], {}, [8, 8, 8, 8], 32
    chosen = []
    for index in range(20):
        now, then = int(chance.integers(3)), int(chance.integers(-1, 5))
        places = [at for at in range(4) if free[at] >= sizes[now]]
        if then >= 0 and sizes[then] > left:
            then = -1
        left -= sizes[then] if then >= 0 else 0
        chosen.append(then)
        jobs.append(job(f"j{index}"))
        if places and chance.random() < 0.7:
            at = int(chance.choice(places))
            free[at] -= sizes[now]
            running[f"j{index}"] = (now, ((at, sizes[now]),))
    shot = snapshot(nodes, jobs, options, running)

    decisions = reassign(shot, np.array(chosen), reason="test")

    assert check_decisions(shot, decisions) == []
    stopped = {one.job_id for one in decisions if isinstance(one, Preempt)}
    assert stopped == {one for one in running if chosen[int(one[1:])] < 0}
    started = {one.job_id for one in decisions if isinstance(one, Start)}
    assert started == {
        one.id
        for one, then in zip(jobs, chosen, strict=True)
        if then >= 0 and one.id not in running
    }


def test_freed_of_doubling_a_job_starts_on_all_that_it_can_use():
    nodes = [node(f"n{index}") for index in range(4)]
    shot = snapshot(nodes, [job("a")], GROWING)

    as_published, freed = sia(shot, None)[0], sia_freed(shot, None)[0]

    assert shot.job_num_gpus[0, as_published[0].option] == 1
    assert shot.job_num_gpus[0, freed[0].option] == 16
