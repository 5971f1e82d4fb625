"""Both dialects of Slurm's JSON say the same, and what is asked of sbatch is what was planned.

`samples/` holds what 22.05.8 (Debian 12) and 24.11.5 (Debian 13) wrote about the same situation in
the cluster of `slurm_fixture.py`: a heterogeneous job on a1, v1 and t1, two jobs that fill a2, a
third one that waits for it, and t1 drained ("broken fan"). Paths and host names were replaced.
"""

import json
import subprocess
from pathlib import Path

import pytest

from drystone.describe.files.cluster import parse_cluster
from drystone.errors import DrystoneError, InvalidSpec
from drystone.run.engines.slurm.dialect import (
    NotSlurm,
    count_gpus,
    expand_hosts,
    number,
    parse_jobs,
    parse_nodes,
)
from drystone.run.engines.slurm.inventory import make_cluster, usable_nodes
from drystone.run.engines.slurm.script import ScriptSettings, make_groups, write_script

SAMPLES = Path(__file__).parent / "samples"
VERSIONS = ("22.05.8", "24.11.5")
SETTINGS = ScriptSettings(python="/usr/bin/python3", python_path="/usr/lib/src")


def read(version: str, what: str) -> str:
    return (SAMPLES / f"slurm-{version}-{what}.json").read_text()


def nodes(version: str = VERSIONS[0]):
    return {one.name: one for one in parse_nodes(read(version, "nodes"))}


@pytest.mark.parametrize("version", VERSIONS)
def test_nodes_of_both_dialects(version):
    found = nodes(version)
    assert {name: dict(one.gpus) for name, one in found.items()} == {
        "a1": {"a100": 2}, "a2": {"a100": 2}, "t1": {"t4": 2}, "v1": {"v100": 2},
    }  # fmt: skip
    in_use = {name: one.num_gpus_in_use for name, one in found.items()}
    assert in_use == {"a1": 1, "a2": 2, "t1": 1, "v1": 1}
    assert [name for name, one in found.items() if one.is_drained] == ["t1"]
    assert not any(one.is_lost for one in found.values())
    t1 = found["t1"]
    assert (t1.reason, t1.cpus, t1.memory_mib) == ("broken fan", 16, 16000)
    assert (t1.partitions, t1.address) == (("gpu",), "127.0.0.1")


@pytest.mark.parametrize("version", VERSIONS)
def test_jobs_of_both_dialects(version):
    jobs = parse_jobs(read(version, "jobs"))
    assert [(one.id, one.first_id, one.user) for one in jobs] == [
        (1, 1, "root"), (2, 1, "root"), (3, 3, "root"), (4, 4, "root"), (5, 5, "root"),
    ]  # fmt: skip
    assert [dict(one.gpus) for one in jobs] == [{"a1": 1}, {"t1": 1, "v1": 1}, {"a2": 1},
                                                {"a2": 1}, {}]  # fmt: skip
    assert [one.is_running for one in jobs] == [True, True, True, True, False]
    assert [one.is_waiting for one in jobs] == [False, False, False, False, True]
    assert not any(one.is_over for one in jobs)


def test_the_dialects_differ_where_it_matters():
    old, new = (json.loads(read(version, "jobs"))["jobs"][1] for version in VERSIONS)
    assert (old["het_job_id"], old["job_state"]) == (1, "RUNNING")
    assert new["het_job_id"] == {"set": True, "infinite": False, "number": 1}
    assert new["job_state"] == ["RUNNING"]


@pytest.mark.parametrize(
    ("state", "flags", "is_lost", "is_drained"),
    [
        ("idle", [], False, False),
        (["IDLE"], None, False, False),
        ("down", ["NOT_RESPONDING"], True, False),
        (["DOWN", "NOT_RESPONDING"], None, True, False),
        (["IDLE", "DRAIN"], None, False, True),
        ("down*+DRAIN", [], True, True),
        (["MIXED", "COMPLETING", "PLANNED"], None, False, False),
    ],
)
def test_states_of_nodes(state, flags, is_lost, is_drained):
    table = {"name": "n", "gres": "gpu:a100:1", "state": state, "state_flags": flags}
    [node] = parse_nodes(json.dumps({"nodes": [table]}))
    assert (node.is_lost, node.is_drained) == (is_lost, is_drained)


@pytest.mark.parametrize(
    ("states", "is_over", "is_running"),
    [
        ("RUNNING", False, True),
        (["RUNNING"], False, True),
        (["CANCELLED", "COMPLETING"], True, False),
        (["RUNNING", "COMPLETING"], True, False),
        ("COMPLETED", True, False),
        ("TIMEOUT", True, False),
        ("NODE_FAIL", True, False),
        ("PREEMPTED", True, False),
        (["PENDING", "REQUEUED"], False, False),
    ],
)
def test_states_of_jobs(states, is_over, is_running):
    [job] = parse_jobs(json.dumps({"jobs": [{"job_id": 7, "job_state": states}]}))
    assert (job.is_over, job.is_running) == (is_over, is_running)


@pytest.mark.parametrize(
    ("gres", "counts"),
    [
        ("gpu:a100:2", {"a100": 2}),
        ("gpu:a100:2(S:0-1),gpu:t4:1(S:1)", {"a100": 2, "t4": 1}),
        ("gpu:a100:2(IDX:0,3),tmpdisk:50G", {"a100": 2}),
        ("gpu:4", {"": 4}),
        ("gpu:t4:0(IDX:N/A)", {"t4": 0}),
        ("craynetwork:1", {}),
        ("(null)", {}),
        ("", {}),
    ],
)
def test_gpus_of_a_gres_text(gres, counts):
    assert count_gpus(gres) == counts


def test_numbers_that_are_not_set_have_a_default():
    assert number({"set": True, "infinite": False, "number": 3}, 9) == 3
    assert number({"set": False, "infinite": False, "number": 3}, 9) == 9
    assert number({"set": True, "infinite": True, "number": 3}, 9) == 9
    assert number(None, 9) == number("4", 9) == number(True, 9) == 9
    assert number(4, 9) == 4


@pytest.mark.parametrize("text", ["", "slurm_load_jobs error", "[]", '{"jobs": 3}', "{}"])
def test_what_is_not_slurms_json_is_refused(text):
    with pytest.raises(NotSlurm):
        parse_jobs(text)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a1", ["a1"]),
        ("a[1-2,7],b3", ["a1", "a2", "a7", "b3"]),
        ("r[0-1]n[08-10]", ["r0n08", "r0n09", "r0n10", "r1n08", "r1n09", "r1n10"]),
        ("", []),
    ],
)
def test_lists_of_nodes(text, names):
    assert list(expand_hosts(text)) == names


@pytest.mark.parametrize("text", ["a[1-2", "a[x-2]", "a[0-99999999]"])
def test_lists_of_nodes_that_are_none(text):
    with pytest.raises(DrystoneError):
        expand_hosts(text)


def test_the_cluster_is_what_slurm_shows():
    cluster = make_cluster(usable_nodes(nodes().values()))
    assert [(one.id, one.gpu, one.num_gpus) for one in cluster.nodes] == [
        ("a1", "A100-80GB-SXM", 2), ("a2", "A100-80GB-SXM", 2), ("t1", "T4-16GB", 2),
        ("v1", "V100-16GB-SXM", 2),
    ]  # fmt: skip
    assert not cluster.is_emulated
    assert all(one.memory_bytes == cluster.gpu(one.gpu).usable_bytes for one in cluster.nodes)


def test_a_file_says_what_slurm_cannot_know():
    table = {"name": "x1", "gres": "gpu:4", "partitions": ["big"], "state": "idle"}
    unnamed = parse_nodes(json.dumps({"nodes": [table]}))
    with pytest.raises(InvalidSpec):
        make_cluster(unnamed)
    file = parse_cluster(
        "nodes: [{name: x1, gpu: L40S}, {gpu: T4, emulate: {speed: 0.001, memory: 4GiB}}]\n"
        "prices: {T4: 0.1}"
    )
    cluster = make_cluster([*unnamed, nodes()["t1"]], file)
    assert [(one.id, one.gpu, one.num_gpus) for one in cluster.nodes] == [
        ("t1", "T4-16GB", 2), ("x1", "L40S-48GB", 4),
    ]  # fmt: skip
    assert cluster.emulations["T4-16GB"].memory_bytes == 4 * 2**30
    assert cluster.dollars_per_gpu_hour["T4-16GB"] == 0.1


def test_features_name_the_type_where_the_gres_does_not():
    table = {"name": "x1", "gres": "gpu:4", "features": ["ib", "h100"], "state": ["IDLE"]}
    [node] = parse_nodes(json.dumps({"nodes": [table]}))
    assert make_cluster([node]).nodes[0].gpu == "H100-80GB-SXM"


def test_only_partitions_that_are_named_are_used():
    assert usable_nodes(nodes().values(), ["gpu"]) == list(nodes().values())
    assert usable_nodes(nodes().values(), ["other"]) == []


def test_equal_counts_are_one_plain_job_of_whatever_types():
    [group] = make_groups({"a1": 1, "t1": 1}, nodes())
    assert (group.nodes, group.gpu, group.gpus_per_node) == (("a1", "t1"), "", 1)
    assert (group.cpus_per_node, group.memory_mib) == (8, 7600)  # half a node each
    script = write_script(Path("/shared/1.1"), "drystone-x-1.1", [group], SETTINGS)
    assert "#SBATCH --nodelist=a1,t1\n" in script
    assert "#SBATCH --gres=gpu:1\n" in script
    assert "hetjob" not in script
    assert "--het-group" not in script


def test_unequal_counts_are_a_heterogeneous_job():
    groups = make_groups({"a1": 2, "v1": 1, "t1": 1}, nodes())
    assert [(one.nodes, one.gpus_per_node) for one in groups] == [(("a1",), 2), (("v1", "t1"), 1)]
    script = write_script(Path("/shared/1.1"), "drystone-x-1.1", groups, SETTINGS)
    first, second = script.split("#SBATCH hetjob\n")
    assert "--gres=gpu:2" in first
    assert "--nodelist=a1" in first
    assert "--gres=gpu:1" in second
    assert "--nodelist=v1,t1" in second
    assert "srun --het-group=0,1 " in second
    assert "--no-requeue" in first
    assert "--signal=B:USR1@60" in first


def test_without_pins_types_and_counts_are_asked_for():
    groups = make_groups({"a1": 1, "a2": 1, "t1": 1}, nodes(), pins_nodes=False)
    assert [(one.gpu, one.nodes) for one in groups] == [("a100", ("a1", "a2")), ("t4", ("t1",))]
    settings = ScriptSettings(
        python="/p", python_path="/s", pins_nodes=False, options=("--account=physics",)
    )
    script = write_script(Path("/shared/1.1"), "x", groups, settings)
    assert "--nodelist" not in script
    assert script.count("--gres=gpu:a100:1\n") == script.count("--gres=gpu:t4:1\n") == 1
    assert script.count("#SBATCH --account=physics\n") == 2


def test_nodes_without_a_common_partition_are_asked_for_apart():
    tables = [
        {"name": "x1", "gres": "gpu:a100:4", "partitions": ["all", "big"], "state": "idle"},
        {"name": "x2", "gres": "gpu:a100:4", "partitions": ["big"], "state": "idle"},
        {"name": "x3", "gres": "gpu:t4:4", "partitions": ["small"], "state": "idle"},
    ]
    known = {one.name: one for one in parse_nodes(json.dumps({"nodes": tables}))}
    groups = make_groups({"x1": 2, "x2": 2, "x3": 2}, known)
    assert [(one.nodes, one.partition) for one in groups] == [(("x1", "x2"), "big"),
                                                              (("x3",), "small")]  # fmt: skip
    assert [one.partition for one in make_groups({"x1": 2}, known, allowed=["big"])] == ["big"]


def test_the_script_is_sound_bash(tmp_path):
    groups = make_groups({"a1": 2, "t1": 1}, nodes())
    path = tmp_path / "job.sh"
    path.write_text(write_script(tmp_path / "it's here", "x", groups, SETTINGS))
    assert subprocess.run(["bash", "-n", path], check=False, timeout=30).returncode == 0
