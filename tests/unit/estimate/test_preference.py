"""DPO and reward models: two sequences a sample, and a frozen copy of the model."""

from dataclasses import replace

import pytest

from drystone.describe.catalogue import find_gpu
from drystone.describe.layout import parse_layout
from drystone.describe.machine import default_machine
from drystone.describe.model_source import find_model
from drystone.describe.recipe import Recipe, Tuning
from drystone.estimate.parameters import count_model
from drystone.estimate.preference import Objective, estimate_objective
from drystone.estimate.whole import estimate_layout

MODEL = find_model("llama-3-8b")
MACHINE = default_machine(find_gpu("H100"))
RECIPE = Recipe(seq_len=1024, global_batch=64, launcher="accelerate")
LAYOUT = parse_layout("dp=8,micro=2,zero=3")


def asked(objective: Objective, recipe: Recipe = RECIPE, layout: str = ""):  # type: ignore[no-untyped-def]
    split = parse_layout(layout) if layout else LAYOUT
    return estimate_objective(MODEL, recipe, split, MACHINE, objective)


def test_the_usual_objective_changes_nothing() -> None:
    plain = estimate_layout(MODEL, RECIPE, LAYOUT, MACHINE)
    assert asked(Objective.NEXT_TOKEN).to_json() == plain.to_json()


def test_dpo_is_twice_the_sequences_a_second_model_and_its_forward_pass() -> None:
    twice = estimate_layout(
        MODEL, replace(RECIPE, global_batch=128), parse_layout("dp=8,micro=4,zero=3"), MACHINE
    )
    dpo = asked(Objective.DPO)
    more = dpo.hungriest.device_bytes - twice.hungriest.device_bytes
    assert more == pytest.approx(2 * count_model(MODEL).total / 8, rel=0.02)  # 16 bit, sharded
    assert sum(dpo.hungriest.items.values()) == pytest.approx(dpo.hungriest.device_bytes)
    ratio = dpo.speed.step_seconds / twice.speed.step_seconds
    assert 1.25 < ratio < 1.34  # 8 products of multiplications instead of 6
    assert dpo.speed.tokens_per_step == 128 * 1024


def test_a_reference_that_is_not_divided_is_there_whole_on_every_gpu() -> None:
    plain = asked(Objective.DPO, layout="dp=8,micro=1,zero=1")
    assert plain.hungriest.items["reference"] == pytest.approx(
        2 * count_model(MODEL).total, rel=0.02
    )


def test_adapters_need_no_second_copy() -> None:
    lora = replace(RECIPE, tuning=Tuning.LORA)
    dpo = asked(Objective.DPO, lora)
    assert "reference" not in dpo.hungriest.items
    assert dpo.speed.items["reference"] > 0


def test_a_reward_model_has_no_logits() -> None:
    reward = asked(Objective.REWARD)
    assert reward.hungriest.items["logits"] < 0.01 * asked(Objective.DPO).hungriest.items["logits"]
    assert "reference" not in reward.speed.items
