import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny import job, node, option_set, snapshot

from drystone.schedule.baselines.queues import fifo, least_attained, shortest
from drystone.schedule.decision import Preempt, Refuse, Start

NODES = [node("a0"), node("b0", "B", 4)]
OPTIONS = option_set(([2, 0], 2.0), ([4, 0], 3.0), ([0, 2], 1.0))


def wants(name: str, gpu: str, count: int, samples: float = 100.0):
    return job(name, samples, requested_gpu=gpu, requested_count=count)


def starts(decisions) -> list[str]:
    return [one.job_id for one in decisions if isinstance(one, Start)]


def test_fifo_holds_back_only_those_that_want_the_same_type():
    jobs = [wants("1", "A", 2), wants("2", "A", 4), wants("3", "A", 2), wants("4", "B", 2)]

    decisions, _ = fifo(snapshot(NODES, jobs, OPTIONS), None)

    assert starts(decisions) == ["1", "4"]


def test_fifo_refuses_what_cannot_run_as_asked():
    decisions, _ = fifo(snapshot(NODES, [wants("1", "B", 4)], OPTIONS), None)

    assert [type(one) for one in decisions] == [Refuse]


def test_a_job_that_asks_for_nothing_gets_the_most_work_from_each_gpu():
    decisions, _ = fifo(snapshot(NODES, [job("1")], OPTIONS), None)

    assert decisions[0].option == 0


def test_shortest_preempts_the_longer_job():
    jobs = [wants("long", "A", 4, 1000), wants("short", "A", 4, 10)]
    seen = snapshot(NODES, jobs, OPTIONS, running={"long": (1, ((0, 4),))})

    decisions, _ = shortest(seen, None)

    assert [type(one) for one in decisions] == [Preempt, Start]
    assert decisions[1].job_id == "short"


def test_shortest_leaves_a_running_job_that_is_ahead_where_it_is():
    jobs = [wants("short", "A", 4, 10), wants("long", "A", 4, 1000)]
    seen = snapshot(NODES, jobs, OPTIONS, running={"short": (1, ((0, 4),))})

    assert shortest(seen, None)[0] == []


def test_least_attained_turns_to_whoever_had_less():
    jobs = [wants("old", "A", 4, 1e9), wants("new", "A", 4, 1e9)]
    running = {"old": (1, ((0, 4),))}

    early = snapshot(NODES, jobs, OPTIONS, running=running, now_seconds=100)
    late = snapshot(NODES, jobs, OPTIONS, running=running, now_seconds=3600)

    assert least_attained(early, None)[0] == []
    assert starts(least_attained(late, None)[0]) == ["new"]
