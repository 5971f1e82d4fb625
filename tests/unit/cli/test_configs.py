"""`plan --config` and `export --to` of another trainer, from the command line."""

import json
from pathlib import Path

import pytest

from drystone.cli.main import run
from drystone.plan.configs.read import read_configs
from drystone.plan.plan import load_plan

EXAMPLES = Path(__file__).parents[3] / "examples" / "configs"
AXOLOTL, TRL, ACCELERATE = (str(EXAMPLES / f"{name}.yaml") for name in
                            ("axolotl", "trl", "accelerate"))  # fmt: skip


def test_a_config_is_judged_as_it_is_and_against_what_its_tool_can_do(capsys, tmp_path):
    saved = tmp_path / "plan.json"
    words = ["plan", "--config", AXOLOTL, "--gpus", "4xA100-80G", "--save", str(saved), "--json"]
    assert run(words) == 0
    told = json.loads(capsys.readouterr().out)

    assert told["config"]["tools"] == ["axolotl"]
    assert told["config"]["unused"] == ["unfrozen_parameters"]
    assert told["config"]["layout"] == "dp=4,tp=1,pp=1,micro=1"
    assert told["config"]["fits"]
    assert told["recipe"]["global_batch"] == 1 * 16 * 4
    assert told["recipe"]["tuning"] == "lora"
    for entry in told["plans"]:
        layout = entry["plan"]["layout"]
        assert (layout["tp"], layout["pp"], layout["cp"]) == (1, 1, 1)
        assert entry["plan"]["recipe"]["recompute"]["kind"] in ("none", "full")
    pace = told["plans"][0]["derived"]["tokens_per_second"]
    assert pace >= told["config"]["tokens_per_second"]


@pytest.mark.parametrize("tool", ["axolotl", "llama-factory", "trl", "trainer"])
def test_a_saved_plan_is_written_and_read_back_as_the_same_layout(tool, capsys, tmp_path):
    saved, train, beside = (tmp_path / name for name in ("plan.json", "train.yaml", "acc.yaml"))
    words = ["plan", "gpt2-xl", "--tool", tool, "--gpus", "4xA100-80G", "--global-batch", "64"]
    assert run([*words, "--save", str(saved)]) == 0
    assert run(["export", str(saved), "--to", tool, "-o", str(train)]) == 0
    assert "Start it with: " in capsys.readouterr().err
    paths = [train]
    if tool != "axolotl":
        assert run(["export", str(saved), "--to", "accelerate", "-o", str(beside)]) == 0
        paths.append(beside)
    elif "deepspeed" in train.read_text():
        to = str(tmp_path / "deepspeed.json")
        assert run(["export", str(saved), "--to", "deepspeed", "-o", to]) == 0
    plan = load_plan(saved)
    setup = read_configs(paths, num_gpus=plan.num_gpus).setup

    assert setup.layout() == plan.layout
    assert setup.recompute == plan.recipe.recompute
    assert setup.precision == plan.recipe.precision
    assert setup.global_batch() == 64


def test_accelerate_says_how_many_gpus_and_how_state_is_shared(capsys):
    words = ["plan", "--config", TRL, "--config", ACCELERATE, "--gpus", "8xH100", "--json"]
    assert run(words) == 0
    told = json.loads(capsys.readouterr().out)

    assert told["config"]["tools"] == ["trl", "accelerate"]
    assert told["config"]["layout"] == "dp=8,tp=1,pp=1,micro=1,zero=3"
    assert told["config"]["recompute"] == "full"
    assert told["recipe"]["launcher"] == "accelerate"


def test_the_command_line_counts_for_the_config(capsys):
    words = ["plan", "--config", TRL, "--gpus", "8xH100", "--seq-len", "512", "--json"]
    assert run([*words, "--global-batch", "32"]) == 0
    recipe = json.loads(capsys.readouterr().out)["recipe"]

    assert (recipe["seq_len"], recipe["global_batch"]) == (512, 32)


def test_without_gpus_the_config_is_answered_by_gpu_type(capsys):
    assert run(["plan", "--config", AXOLOTL, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)

    assert told["answers"]
    assert told["config"]["unused"] == ["unfrozen_parameters"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["plan"], "no model is named"),
        (["plan", "gpt2", "--gpus", "L4", "--tool", "nonsense"], "nonsense"),
        (["plan", "gpt2", "--tool", "trl"], "--gpus"),
        (["plan", "--config", ACCELERATE, "--gpus", "L4"], "not what to train"),
    ],
)
def test_wrong_requests_say_what_to_try(words, told, capsys):
    assert run(words) == 2
    assert told in capsys.readouterr().err


def test_what_fits_only_by_splitting_matrices_is_said(capsys):
    words = ["plan", "llama-3-8b", "--gpus", "8xA100-80G", "--global-batch", "1"]
    assert run(words) == 0
    assert run([*words, "--tool", "trl"]) == 3
    assert "--tool any" in capsys.readouterr().err


def test_a_plan_over_unlike_gpus_is_refused_with_the_way_out(capsys, tmp_path):
    saved = tmp_path / "plan.json"
    assert run(["plan", "gpt2-xl", "--gpus", "2xL4,2xT4", "--save", str(saved)]) == 0
    assert load_plan(saved).layout is None
    assert run(["export", str(saved), "--to", "trl"]) == 2
    assert "--tool" in capsys.readouterr().err
