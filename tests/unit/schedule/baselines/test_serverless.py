"""The policy `serverless`: plans by speed, the first that fits, by best fit."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny import job, node, option_set, snapshot

from drystone.schedule.baselines.serverless import rank_options, serverless
from drystone.schedule.decision import Refuse, Start


def test_plans_come_by_speed_then_by_fewer_gpus():
    options = option_set(([4], 33.0), ([1], 10.0), ([2], 20.0), ([3], 33.0))

    given = snapshot([node("a")], [job("one")], options)

    assert rank_options(given, 0).tolist() == [3, 0, 2, 1]


def test_a_plan_that_does_not_fit_gives_way_to_the_next():
    options = option_set(([4], 50.0), ([2], 20.0))
    given = snapshot(
        [node("a", num_gpus=4)], [job("one"), job("two"), job("three")], options,
        {"one": (1, ((0, 2),))},
    )  # fmt: skip

    decisions, _ = serverless(given, None)

    assert [type(one) for one in decisions] == [Start]
    assert decisions[0].job_id == "two"
    assert decisions[0].option == 1
    assert decisions[0].numbers == {"rank": 1.0, "num_plans": 2.0}


def test_the_fullest_node_that_has_room_is_taken_and_none_is_spread_thin():
    options = option_set(([2], 20.0))
    nodes = [node("a", num_gpus=4), node("b", num_gpus=4)]
    running = {"one": (0, ((0, 2),))}

    decisions, _ = serverless(snapshot(nodes, [job("one"), job("two")], options, running), None)
    assert decisions[0].placement == ((0, 2),)

    spread = {"one": (0, ((0, 3),)), "two": (0, ((1, 3),))}
    options = {
        "one": option_set(([3], 3.0)),
        "two": option_set(([3], 3.0)),
        "three": option_set(([2], 2.0)),
    }
    jobs = [job("one"), job("two"), job("three")]
    assert serverless(snapshot(nodes, jobs, options, spread), None)[0] == []


def test_memory_is_kept():
    options = option_set(([1, 0], 20.0), ([0, 1], 10.0), memory=30e9)
    nodes = [node("a", "A", 1, memory_bytes=24e9), node("b", "B", 1, memory_bytes=40e9)]

    decisions, _ = serverless(snapshot(nodes, [job("one")], options), None)

    assert decisions[0].option == 1
    assert decisions[0].placement == ((1, 1),)


def test_a_job_without_options_is_refused():
    given = snapshot([node("a")], [job("one")], option_set(([4], 0.0)))

    assert isinstance(serverless(given, None)[0][0], Refuse)
