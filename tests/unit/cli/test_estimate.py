"""`drystone estimate`: the answer, its shape as JSON, and what it refuses."""

import json

import pytest

from drystone.cli.main import run

LAYOUT = ["--gpu", "A100-80G", "--layout", "dp=8,micro=2,zero=3"]


def as_json(capsys, *arguments):
    assert run(["estimate", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_items_of_each_stage_add_up(capsys):
    answer = as_json(capsys, "llama-3-8b", *LAYOUT)

    for stage in answer["memory"]["stages"]:
        assert sum(stage["items"].values()) == pytest.approx(stage["device_bytes"])
        assert stage["low_bytes"] < stage["required_bytes"] < stage["high_bytes"]
    assert set(answer["memory"]["stages"][0]["items"]) == set(answer["memory"]["sources"])


def test_the_seconds_of_a_step_add_up(capsys):
    speed = as_json(capsys, "llama-3-8b", *LAYOUT)["speed"]

    assert sum(speed["items_seconds"].values()) == pytest.approx(speed["step_seconds"])
    assert set(speed["items_seconds"]) == set(speed["sources"])
    assert 0 < speed["model_flops_utilisation"] < 1


def test_there_is_one_entry_for_each_pipeline_stage(capsys):
    answer = as_json(
        capsys, "gpt2-xl", "--gpu", "V100-32G", "--layout", "pp=4", "--global-batch", "8"
    )

    assert [stage["stage"] for stage in answer["memory"]["stages"]] == [0, 1, 2, 3]


def test_a_gpu_without_bf16_trains_in_fp16(capsys):
    assert as_json(capsys, "gpt2", "--gpu", "T4")["recipe"]["precision"] == "fp16-mixed"
    assert as_json(capsys, "gpt2", "--gpu", "L4")["recipe"]["precision"] == "bf16-mixed"


def test_a_price_of_ones_own_counts(capsys):
    cheap = as_json(capsys, "gpt2", "--gpu", "L4", "--price", "0.5")["price"]
    dear = as_json(capsys, "gpt2", "--gpu", "L4", "--price", "1.0")["price"]

    twice = 2 * cheap["dollars_per_billion_tokens"]
    assert dear["dollars_per_billion_tokens"] == pytest.approx(twice)


def test_people_see_a_verdict(capsys):
    assert run(["estimate", "llama-3-8b", "--gpu", "T4"]) == 0
    assert "does not fit" in capsys.readouterr().out


def test_must_fit_ends_with_3(capsys):
    assert run(["estimate", "llama-3-8b", "--gpu", "T4", "--must-fit"]) == 3
    assert run(["estimate", "gpt2", "--gpu", "T4", "--must-fit"]) == 0


def test_a_config_file_is_a_model(capsys, tmp_path):
    config = {
        "model_type": "llama", "hidden_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 8, "intermediate_size": 1024, "vocab_size": 1000,
        "num_key_value_heads": 8, "max_position_embeddings": 2048,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert as_json(capsys, str(tmp_path), "--gpu", "T4")["model"]["parameters"] > 1e6


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["llama-3-8b", "--gpu", "A1OO"], "A100"),
        (["lama-3-8b", "--gpu", "A100"], "llama-3-8b"),
        (["llama-3-8b", "--gpu", "A100", "--layout", "tp=3"], "not divisible by tp=3"),
        (["llama-3-8b", "--gpu", "A100", "--layout", "dp=3", "--global-batch", "16"], "16"),
        (["llama-3-8b", "--gpu", "A100", "--layout", "dq=3"], "dp"),
        (["llama-3-8b", "--gpu", "A100", "--layout", "dp=x"], "whole number"),
        (["llama-3-8b", "--gpu", "A100", "--layout", "ep=2,dp=2"], "experts"),
        (["llama-3-8b", "--gpu", "A100", "--seq-len", "-4"], "--sequence"),
        (["llama-3-8b", "--gpu", "A100", "--global-batch", "9" * 23], "global_batch"),
        (["llama-3-8b", "--gpu", "A100", "--layout", "dp=" + "9" * 12], "dp is"),
        (["llama-3-8b", "--gpu", "A100", "--price", "nan"], "price"),
        (["llama-3-8b", "--gpu", "A100", "--precision", "bf61"], "bf16"),
        (["llama-3-8b", "--gpu", "A100", "--launcher", "megatorn-te"], "megatron-te"),
        (["llama-3-8b", "--gpu", "A100", "--recompute", "half"], "selective"),
        (["llama-3-8b", "--gpu", "A100", "--network", "Infiniband HDDR"], "InfiniBand HDR"),
        (["no/such/config.json", "--gpu", "A100"], "config.json"),
        (["no_such.py:build", "--gpu", "A100"], "no_such.py"),
    ],
)
def test_a_wrong_word_is_refused_with_a_hint(capsys, arguments, words):
    assert run(["estimate", *arguments]) == 2
    said = capsys.readouterr()

    assert said.out == ""
    assert words in said.err
    assert "Traceback" not in said.err


def test_readings_of_your_own_correct_an_estimate_and_are_explained(capsys, tmp_path):
    arguments = ["estimate", "gpt2-xl", "--gpu", "A100", "--layout", "dp=8,micro=4"]
    assert run([*arguments, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    path = tmp_path / "run.csv"
    path.write_text(f"step_time_s\n{1.5 * plain['speed']['step_seconds']}\n", encoding="utf-8")
    assert run([*arguments, "--observed", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert 1.25 < told["speed"]["step_seconds"] / plain["speed"]["step_seconds"] < 1.5
    assert told["learned"]["speed"]["num_readings"] == 1
    assert told["learned"]["memory"]["num_readings"] == 0

    assert run([*arguments, "--observed", str(path), "--explain"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "by 1 readings of your own" in shown
    assert "no reading has anything in common" in shown
    assert "chosen by runs of" in shown
