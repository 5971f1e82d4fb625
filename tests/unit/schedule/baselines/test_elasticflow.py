"""ElasticFlow: least shares that keep deadlines, and the rest to who gains most."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny import job, node, option_set, snapshot

from drystone.schedule.baselines.elasticflow import ROUND_SECONDS, elasticflow, elasticflow_moving
from drystone.schedule.check import check_decisions
from drystone.schedule.decision import Move, Refuse, Resize, Start

POWERS = option_set(([1], 10.0), ([2], 18.0), ([4], 30.0))


def decided(given, policy=elasticflow):
    decisions, _ = policy(given, None)
    assert check_decisions(given, decisions) == []
    return {one.job_id: one for one in decisions}


def test_what_is_left_goes_to_who_gains_most():
    quick = option_set(([1], 100.0), ([2], 180.0))
    jobs, options = [job("slow"), job("quick")], {"slow": POWERS, "quick": quick}

    found = decided(snapshot([node("a", num_gpus=3)], jobs, options))

    assert (found["slow"].option, found["quick"].option) == (0, 1)


def test_the_least_share_keeps_the_deadline():
    """1,800 samples: 180 s on one GPU, 100 s on two; a round of 300 s is added."""
    jobs = [job("urgent", 1800, deadline_seconds=ROUND_SECONDS + 120), job("any"), job("more")]

    found = decided(snapshot([node("a", num_gpus=4)], jobs, POWERS))

    assert found["urgent"].numbers["least_gpus"] == 2
    assert found["any"].numbers["least_gpus"] == 1
    assert sum(one.numbers["gpus"] for one in found.values()) == 4


def test_what_cannot_end_in_time_is_refused():
    late = job("late", 1e6, deadline_seconds=400.0)

    found = decided(snapshot([node("a")], [late], POWERS))

    assert isinstance(found["late"], Refuse)
    assert "deadline" in found["late"].reason


def test_jobs_are_admitted_in_order_while_least_shares_fit():
    jobs = [job("first"), job("second"), job("third")]

    found = decided(snapshot([node("a", num_gpus=2)], jobs, POWERS))

    assert set(found) == {"first", "second"}


def test_a_running_job_shrinks_for_a_new_one():
    given = snapshot([node("a")], [job("old"), job("new")], POWERS, {"old": (2, ((0, 4),))})

    found = decided(given)

    assert isinstance(found["old"], Resize)
    assert isinstance(found["new"], Start)
    assert found["old"].option == found["new"].option == 1


def test_a_job_stays_on_the_type_that_its_owner_named():
    both = option_set(([1, 0], 10.0), ([0, 1], 20.0))
    nodes = [node("a", "A", 1), node("b", "B", 1)]
    jobs = [job("one", requested_gpu="A", requested_count=1),
            job("two", requested_gpu="A", requested_count=1)]  # fmt: skip

    found = decided(snapshot(nodes, jobs, both))

    assert set(found) == {"one"}
    assert found["one"].option == 0


def test_who_keeps_its_count_keeps_its_nodes_unless_all_are_placed_anew():
    nodes = [node("a", num_gpus=2), node("b", num_gpus=2)]
    ones = option_set(([1], 10.0))
    given = snapshot(nodes, [job("one"), job("two")], ones, {"one": (0, ((1, 1),))})

    assert set(decided(given)) == {"two"}
    assert isinstance(decided(given, elasticflow_moving)["one"], Move)
