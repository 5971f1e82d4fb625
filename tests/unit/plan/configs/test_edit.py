"""A plan written into a config that is there: comments and order stay, its meaning is the plan."""

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from drystone.cli.main import run
from drystone.describe.layout import Sharding
from drystone.describe.recipe import Loss, Offload, Precision, Recompute
from drystone.errors import InvalidSpec
from drystone.plan.configs.edit import edit_config
from drystone.plan.configs.read import read_configs
from drystone.plan.configs.write import write_config

sys.path.insert(0, str(Path(__file__).parent))

from test_round_trip import random_setup, written

CONFIG = """\
# my run
base_model: gpt2   # weights
sequence_len: 2048
micro_batch_size: 1  # tuned by hand
gradient_accumulation_steps: 8

bf16: auto
liger_fused_linear_cross_entropy: true
# memory
gradient_checkpointing: true
datasets:
  - {path: my/data, type: alpaca}
fsdp_version: 2
fsdp_config:
  reshard_after_forward: true   # as the docs say
  # wrap
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
output_dir: "out # 1"  # keep
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "train.yaml"
    path.write_text(CONFIG)
    return path


def test_only_what_the_plan_changes_is_touched(config):
    asked = read_configs([config], num_gpus=8).setup
    wanted = replace(asked, micro_batch=4, accumulation=2, recompute=Recompute(), loss=Loss.PLAIN)
    text, difference = edit_config(config, wanted, "axolotl")

    expected = (
        CONFIG.replace("micro_batch_size: 1 ", "micro_batch_size: 4 ")
        .replace("steps: 8", "steps: 2")
        .replace("gradient_checkpointing: true", "gradient_checkpointing: false")
        .replace("liger_fused_linear_cross_entropy: true\n", "")
    )
    assert text == expected
    changed = [line for line in difference.splitlines()[2:] if line[0] in "+-"]
    assert len(changed) == 7
    assert edit_config(config, asked, "axolotl") == (CONFIG, "")


def test_how_state_is_shared_changes_together(config):
    asked = read_configs([config], num_gpus=8).setup
    whole, _ = edit_config(config, replace(asked, sharding=Sharding.NONE), "axolotl")
    assert "fsdp" not in whole
    assert whole.endswith('output_dir: "out # 1"  # keep\n')

    text, _ = edit_config(config, replace(asked, offload=Offload.STATE), "axolotl")
    assert "  reshard_after_forward: true   # as the docs say\n  # wrap\n" in text
    assert yaml.safe_load(text)["fsdp_config"]["offload_params"] is True

    by_deepspeed, _ = edit_config(config, replace(asked, sharding=Sharding.ZERO1), "axolotl")
    assert yaml.safe_load(by_deepspeed)["deepspeed"] == "deepspeed.json"
    assert "fsdp" not in by_deepspeed


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["axolotl", "llama-factory", "trl", "trainer", "deepspeed"])
def test_any_plan_can_be_written_over_any_other(tool, tmp_path):
    dice = random.Random(tool)
    num_written = 0
    while num_written < 100:
        first, second = (random_setup(dice, tool) for _ in range(2))
        if tool == "deepspeed":
            first, second = (replace(one, keep_gathered=False) for one in (first, second))
        if tool == "axolotl":
            written(tmp_path, replace(first, keep_gathered=False), "deepspeed")
        path = tmp_path / ("config.json" if tool == "deepspeed" else "train.yaml")
        table = write_config(first, tool)
        if tool == "deepspeed":
            path.write_text(json.dumps(table))
        else:
            path.write_text("# first\n" + yaml.safe_dump(table) + "# last\n")
        text, _ = edit_config(path, second, tool)
        assert tool == "deepspeed" or (text.startswith("# first\n") and "# last\n" in text)
        made, fresh = yaml.safe_load(text), write_config(second, tool)
        if tool in ("axolotl", "deepspeed"):
            path.write_text(text)
            assert edit_config(path, second, tool) == (text, "")
        assert {name: made[name] for name in fresh if name in table} == {
            name: fresh[name] for name in fresh if name in table
        }
        num_written += 1


def test_what_cannot_be_changed_is_refused(config, tmp_path):
    asked = read_configs([config], num_gpus=8).setup
    with pytest.raises(InvalidSpec, match="of axolotl, not of trl"):
        edit_config(config, asked, "trl")
    script = tmp_path / "train.sh"
    script.write_text("trl sft --model_name_or_path gpt2\n")
    with pytest.raises(InvalidSpec, match="launch script"):
        edit_config(script, asked, "trl")
    trl = tmp_path / "sft.yaml"
    trl.write_text("model_name_or_path: gpt2\nmax_length: 512\nfsdp_config: {fsdp_version: 2}\n")
    with pytest.raises(InvalidSpec, match="how state is shared"):
        edit_config(trl, replace(asked, sharding=Sharding.NONE), "trl")


def test_the_command_shows_a_diff_and_writes_when_told(config, tmp_path, capsys):
    plan = str(tmp_path / "plan.json")
    words = ["plan", "--config", str(config), "--gpus", "4xA100-80G", "--precision", "fp16-mixed"]
    assert run([*words, "--save", plan]) == 0
    capsys.readouterr()
    words = ["export", plan, "--to", "axolotl", "--config", str(config)]
    assert run(words) == 0
    shown = capsys.readouterr()
    assert "-bf16: auto\n" in shown.out
    assert "+fp16: true\n" in shown.out
    assert "Nothing was written" in shown.err
    assert config.read_text() == CONFIG

    assert run([*words, "-o", str(config)]) == 0
    assert "# tuned by hand" in config.read_text()
    beside = str(tmp_path / "deepspeed.json")
    assert run(["export", plan, "--to", "deepspeed", "-o", beside]) == 0
    assert read_configs([config], num_gpus=4).setup.precision is Precision.FP16_MIXED
