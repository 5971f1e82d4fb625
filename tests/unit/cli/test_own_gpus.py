"""A GPU type of one's own in the commands: used by name, shown, and marked as one's own."""

import json

import pytest

from drystone.cli.main import run

FILE = """
gpu_types:
  Mine-96GB: {like: L40S, memory: 96GiB, price_dollars_per_hour: 1.2, source: a letter}
nodes:
  - {gpu: Mine-96GB, count: 2, gpus_per_node: 4}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE, encoding="utf-8")
    return str(path)


def test_gpus_lists_it_marked(capsys, file):
    assert run(["gpus", "--cluster", file]) == 0
    assert "Mine-96GB (own)" in capsys.readouterr().out
    assert run(["gpus", "mine", "--cluster", file, "--json"]) == 0
    (mine,) = json.loads(capsys.readouterr().out)["gpus"]
    assert mine["is_own"]
    assert mine["prices"][0]["on_demand_dollars_per_gpu_hour"] == 1.2


def test_plan_takes_the_nodes_of_the_file_and_says_whose_type_it_is(capsys, file):
    assert run(["plan", "gpt2-xl", "--cluster", file, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["gpus"] == "8xMine-96GB"
    assert answer["own_gpu_types"] == ["Mine-96GB"]
    assert answer["plans"][0]["derived"]["dollars_per_billion_tokens"] > 0

    assert run(["plan", "gpt2-xl", "--gpus", "2xmine 96gb", "--cluster", file]) == 0
    said = capsys.readouterr()
    assert "2 x Mine-96GB" in said.out
    assert "Mine-96GB is a GPU type of your own: a letter" in said.err


def test_estimate_knows_it_with_the_file_only(capsys, file):
    arguments = ["estimate", "gpt2-xl", "--gpu", "Mine-96GB"]
    assert run([*arguments, "--cluster", file]) == 0
    assert "Mine-96GB is a GPU type of your own" in capsys.readouterr().err


def test_without_the_file_it_is_unknown(capsys):
    assert run(["plan", "gpt2-xl", "--gpus", "2xMine-96GB"]) == 2
    assert "gpu_types" in capsys.readouterr().err


def test_simulate_runs_on_it_and_notes_it(capsys, file, tmp_path):
    trace = tmp_path / "jobs.csv"
    assert run(["trace", "generate", "--jobs", "3", "--hours", "1", "--out", str(trace)]) == 0
    capsys.readouterr()
    told = ["--trace", str(trace), "--cluster", file, "--policy", "fifo", "--json"]
    assert run(["simulate", *told]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["num_gpus"] == 8
    assert any("Mine-96GB is a GPU type of your own" in note for note in answer["notes"])


def test_plan_and_cluster_files_take_what_was_measured(capsys, tmp_path):
    slow = {"measure": "speed", "gpu": "L40S", "launcher": "drystone", "family": "gpt2", "ratio": 2}
    (tmp_path / "profile.json").write_text(
        json.dumps({"device": "L40S", "readings": [slow] * 9}), encoding="utf-8"
    )
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "gpu_types: {Ours: {like: L40S, profile: profile.json}}\n"
        "nodes: [{gpu: Ours, count: 1, gpus_per_node: 4}]\n",
        encoding="utf-8",
    )

    def step_seconds(*arguments):
        assert run(["plan", "gpt2-xl", *arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)["plans"][0]["plan"]["step_seconds"]

    plain = step_seconds("--gpus", "4xL40S")
    by_option = step_seconds("--gpus", "4xL40S", "--profile", str(tmp_path / "profile.json"))
    by_file = step_seconds("--cluster", str(path))
    assert by_option > 1.1 * plain
    assert by_file == pytest.approx(by_option)


def test_a_profile_of_another_gpu_is_refused(capsys, tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"device": "L40S"}), encoding="utf-8")
    assert run(["plan", "gpt2-xl", "--gpus", "4xT4", "--profile", str(path)]) == 2
    assert "the profile is of 'L40S'" in capsys.readouterr().err
