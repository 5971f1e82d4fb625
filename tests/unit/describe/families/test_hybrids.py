"""Models whose layers keep a state, and what stands in for their layers in estimates."""

import numpy as np
import pytest

from drystone.describe.catalogue import find_gpu
from drystone.describe.families.huggingface import parse_config
from drystone.describe.layout import Layout, Layouts, Sharding
from drystone.describe.machine import default_machine
from drystone.describe.model import Experts, Mlp
from drystone.describe.model_source import find_model
from drystone.describe.recipe import Recipe
from drystone.describe.trainable import check_trainable
from drystone.errors import InvalidSpec
from drystone.estimate.memory.peak import estimate_memory
from drystone.estimate.time.speed import estimate_speed

HYBRIDS = ("qwen3-next-80b-a3b", "minimax-text-01", "jamba-v0.1", "nemotron-h-8b",
           "nemotron-3-nano")  # fmt: skip
NEMOTRON = {
    "model_type": "nemotron_h", "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000,
    "num_attention_heads": 8, "mamba_num_heads": 8, "mamba_head_dim": 32, "n_groups": 2,
}  # fmt: skip


def test_a_mixer_and_the_network_behind_it_are_one_layer():
    spec = parse_config(NEMOTRON | {"hybrid_override_pattern": "M-M*-"}, where="config.json")
    kinds = [(layer.attention.recurrence is not None, layer.num_norms) for layer in spec.layers()]
    sizes = [layer.feed_forward.ffn_size for layer in spec.layers()]

    assert kinds == [(True, 2), (True, 1), (False, 2)]
    assert sizes == [512, 0, 512]


@pytest.mark.parametrize("pattern", ["-M", "M--", "M?", ""])
def test_a_pattern_that_makes_no_layers_is_refused(pattern):
    with pytest.raises(InvalidSpec, match=r"config\.json"):
        parse_config(NEMOTRON | {"hybrid_override_pattern": pattern}, where="config.json")


def test_three_of_four_layers_of_qwen3_next_keep_a_state():
    spec = find_model("qwen3-next-80b-a3b")
    with_state = [layer.attention.recurrence is not None for layer in spec.layers()]

    assert with_state == [True, True, True, False] * 12
    assert all(isinstance(layer.feed_forward, Experts) for layer in spec.layers())


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_are_estimated_and_never_trained_as_something_else(name):
    spec = find_model(name)
    recipe = Recipe(seq_len=4096, global_batch=64, launcher="nemo")
    layouts = Layouts.of([Layout(dp=8, sharding=Sharding.ZERO3)])
    gpu = find_gpu("H200-141GB-SXM")
    speed = estimate_speed(spec, recipe, layouts, default_machine(gpu)).row(0)
    memory = estimate_memory(spec, recipe, layouts, gpu=gpu)

    assert 0.02 < speed.model_flops_utilisation < 0.7
    assert np.isfinite(memory.required).all()
    assert any("keep a state" in problem for problem in check_trainable(spec))


def test_a_state_costs_no_more_for_longer_sequences():
    """Attention takes a longer look for each token; a layer that keeps a state does not."""
    machine = default_machine(find_gpu("H100-80GB-SXM"))

    def growth(name: str) -> float:
        short, long = (
            estimate_speed(
                find_model(name),
                Recipe(seq_len=seq_len, global_batch=8),
                Layouts.of([Layout(dp=8, sharding=Sharding.ZERO3)]),
                machine,
            ).row(0)
            for seq_len in (8192, 65536)
        )
        return long.items["attention"] / short.items["attention"] / 8

    assert growth("nemotron-h-8b") < 0.6 * growth("llama-3-8b")


def test_the_tower_of_a_model_that_sees_is_counted_beside_its_text():
    spec = find_model("qwen2.5-vl-7b")
    text = find_model("qwen2.5-7b")

    assert [name for name, _ in spec.other_params] == ["vision tower"]
    assert spec.stack == text.stack
    assert isinstance(spec.blocks[0].feed_forward, Mlp)
