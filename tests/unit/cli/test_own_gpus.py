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
