"""Which GPUs are ours to plan with: computed from looks at Slurm, without Slurm."""

from pathlib import Path

from drystone.run.engines.slurm.dialect import SlurmJob, SlurmNode, parse_jobs, parse_nodes
from drystone.run.engines.slurm.inventory import (
    Inventory,
    by_type,
    drained_rest,
    lost_nodes,
    taken_by_others,
)
from drystone.run.engines.slurm.watch import SlurmView

SAMPLES = Path(__file__).parent / "samples"


def node(name: str, *states: str, gpu: str = "a100", in_use: int = 0) -> SlurmNode:
    return SlurmNode(
        name=name, address=name, gpus={gpu: 2}, gpus_in_use={gpu: in_use}, cpus=8,
        memory_mib=8000, partitions=("gpu",), features=(), states=frozenset(states or {"IDLE"}),
    )  # fmt: skip


def job(number: int, name: str, state: str, **gpus: int) -> SlurmJob:
    return SlurmJob(
        id=number, het_id=0, name=name, user="ann", states=frozenset({state}), reason="", gpus=gpus
    )


def look(*things: SlurmNode | SlurmJob, asked: float = 1.0) -> SlurmView:
    nodes = {one.name: one for one in things if isinstance(one, SlurmNode)}
    jobs = {one.id: (one,) for one in things if isinstance(one, SlurmJob)}
    return SlurmView(asked=asked, nodes=nodes, jobs=jobs)


def test_what_is_in_use_and_not_ours_is_taken():
    nodes = parse_nodes((SAMPLES / "slurm-24.11.5-nodes.json").read_text())
    jobs = parse_jobs((SAMPLES / "slurm-24.11.5-jobs.json").read_text())
    seen = look(*nodes, *jobs)
    names = [one.name for one in nodes]
    assert taken_by_others(seen, names, "drystone-x-") == {"a1": 1, "a2": 2, "t1": 1, "v1": 1}
    assert taken_by_others(seen, names, "s.sh") == {"a1": 1, "t1": 1, "v1": 1}


def test_jobs_that_we_may_not_see_count_too():
    seen = look(node("n1", in_use=2), job(1, "drystone-x-1.1", "RUNNING", n1=1))
    assert taken_by_others(seen, ["n1"], "drystone-x-") == {"n1": 1}


def test_our_own_job_that_completes_is_still_ours():
    seen = look(node("n1", in_use=2), job(1, "drystone-x-1.1", "COMPLETING", n1=2))
    assert taken_by_others(seen, ["n1"], "drystone-x-") == {}


def test_what_only_one_look_says_is_not_believed():
    inventory = Inventory("drystone-x-", None)
    inventory.describe([node("n1")])
    for asked, in_use, taken in ((1, 0, {}), (2, 2, {}), (3, 2, {"n1": 2}), (4, 0, {})):
        seen = look(node("n1", in_use=in_use), asked=asked)
        inventory.renew(seen)
        assert inventory.taken(seen, {}) == taken


def test_on_a_drained_node_what_runs_stays_and_nothing_more_comes():
    seen = look(node("n1", "MIXED", "DRAIN"), node("n2", "IDLE", "DRAIN"))
    assert drained_rest(seen, {"n1": 1}, ["n1", "n2"]) == {"n1": 1}
    assert list(lost_nodes(seen, {"n1"}, ["n1", "n2"])) == ["n2"]


def test_a_node_that_missed_a_ping_is_not_lost_while_our_agent_answers():
    seen = look(node("n1", "MIXED", "NOT_RESPONDING"), node("n2", "DOWN"))
    assert list(lost_nodes(seen, {"n1", "n2"}, ["n1", "n2", "n3"])) == ["n2", "n3"]
    assert "n1" in lost_nodes(seen, set(), ["n1"])


def test_without_a_choice_of_nodes_others_are_put_where_we_planned_nothing():
    nodes = {one: node(one) for one in ("n1", "n2")} | {"t1": node("t1", gpu="t4")}
    moved = by_type({"n1": 2, "t1": 1}, {"n1": 2}, nodes, list(nodes))
    assert moved == {"n2": 2, "t1": 1}


def test_a_lost_node_is_back_when_slurm_has_got_rid_of_our_job():
    inventory = Inventory("drystone-x-", None)
    inventory.describe([node("n1")])
    inventory.suspects["n1"] = (7, 10.0)
    stuck = job(7, "drystone-x-1.1", "COMPLETING", n1=1)
    assert "n1" in inventory.lost(look(node("n1"), asked=9.0), set())  # a look before that
    assert "n1" in inventory.lost(look(node("n1"), stuck, asked=11.0), set())
    assert inventory.lost(look(node("n1"), asked=12.0), set()) == {}
    assert inventory.suspects == {}


def test_nodes_that_join_are_told_once():
    inventory = Inventory("drystone-x-", None)
    inventory.describe([node("n1")])
    assert inventory.renew(look(node("n1"), asked=1.0)) is None
    found = inventory.renew(look(node("n1"), node("n2"), asked=2.0))
    assert found is not None
    assert [one.id for one in found.nodes] == ["n1", "n2"]
    assert inventory.renew(look(node("n1"), node("n2"), asked=3.0)) is None


def test_gpus_that_slurm_took_back_are_not_planned_with_before_somebody_has_them():
    inventory = Inventory("drystone-x-", None)
    inventory.describe([node("n1")])
    inventory.recalled[7] = ({"n1": 2}, 1.0)
    steps = [
        (1.0, "RUNNING", 0, {"n1": 2}),  # begun before it left
        (1.5, "COMPLETING", 0, {"n1": 2}),
        (2.0, "PREEMPTED", 0, {"n1": 2}),  # nobody has come yet
        (3.0, "PREEMPTED", 2, {"n1": 2}),
        (4.0, "PREEMPTED", 2, {"n1": 2}),  # two looks show them in use: it is as with all others
        (5.0, "PREEMPTED", 0, {}),
    ]
    for asked, state, in_use, taken in steps:
        seen = look(node("n1", in_use=in_use), job(7, "drystone-x-1.1", state), asked=asked)
        inventory.renew(seen)
        assert inventory.taken(seen, {}) == taken, asked


def test_gpus_that_nobody_comes_for_are_planned_with_again():
    inventory = Inventory("drystone-x-", None)
    inventory.describe([node("n1")])
    for state, asked in (("PREEMPTED", 40.0), ("COMPLETED", 2.0)):
        inventory.recalled[7] = ({"n1": 1}, 1.0)
        assert inventory.taken(look(node("n1"), asked=1.0), {}) == {"n1": 1}
        seen = look(node("n1"), job(7, "drystone-x-1.1", state), asked=asked)
        assert inventory.taken(seen, {}) == {}
