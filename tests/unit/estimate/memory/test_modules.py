"""Recomputation by module, and inputs that are kept as narrow as they were multiplied."""

from dataclasses import replace

import pytest

from drystone.describe.model_source import find_model
from drystone.describe.recipe import Precision, Recipe, Recompute, RecomputeKind
from drystone.errors import DrystoneError
from drystone.estimate.launchers import find_launcher
from drystone.estimate.memory.activations import SavedBytes, block_activations, saved_by_block
from drystone.estimate.memory.terms import state_bytes

MODEL = find_model("deepseek-v3")
DENSE, SPARSE = MODEL.stack[0][0], MODEL.stack[-1][0]
HIDDEN = MODEL.hidden_size
RECIPE = Recipe(seq_len=4096, global_batch=64, launcher="nemo")
NEMO = find_launcher("nemo")


def dropped(block, *modules: str, precision: Precision = Precision.BF16_MIXED) -> SavedBytes:
    """What is no longer kept."""
    recompute = Recompute(kind=RecomputeKind.SELECTIVE, modules=modules)
    recipe = replace(RECIPE, precision=precision, recompute=recompute)
    found = block_activations(block, HIDDEN, recipe, NEMO)
    everything = saved_by_block(block, HIDDEN, replace(recipe, recompute=Recompute()), NEMO)
    difference = everything + found.kept.scaled(-1)
    return difference


def test_each_module_drops_its_own_tensors():
    attention, experts = SPARSE.attention, SPARSE.feed_forward
    wide = attention.num_heads * (2 * attention.head_dim + attention.v_dim)

    assert dropped(SPARSE, "mla_up_proj").divided == pytest.approx(2 * wide)
    assert dropped(SPARSE, "layernorm").whole == pytest.approx(4 * HIDDEN)
    product = 2 * experts.top_k * experts.ffn_size
    assert dropped(SPARSE, "moe_act").inner == pytest.approx(product)
    assert dropped(SPARSE, "shared_experts").divided == pytest.approx(6 * experts.shared_ffn_size)
    assert dropped(SPARSE, "mlp") == SavedBytes()  # a dense network only
    assert dropped(DENSE, "mlp").divided == pytest.approx(6 * DENSE.feed_forward.ffn_size)
    both = dropped(SPARSE, "moe_act", "mla_up_proj")
    assert (both.inner, both.divided) == (pytest.approx(product), pytest.approx(2 * wide))


def test_all_behind_the_router_can_be_recomputed():
    found = dropped(SPARSE, "moe")

    assert found.routed == pytest.approx(4 * SPARSE.feed_forward.top_k * HIDDEN)


@pytest.mark.parametrize(
    ("precision", "num_bytes"),
    [
        (Precision.BF16_MIXED, 2.0),
        (Precision.FP8_MIXED, 1.0),
        (Precision.MXFP8_MIXED, 1 + 1 / 32),
        (Precision.NVFP4_MIXED, 0.5 + 1 / 16),
    ],
)
def test_transformer_engine_keeps_inputs_as_narrow_as_it_multiplied_them(precision, num_bytes):
    found = dropped(SPARSE, "layernorm", precision=precision)

    assert found.whole == pytest.approx(2 * num_bytes * HIDDEN)
    # torchao keeps the wide input and casts again.
    recipe = replace(RECIPE, precision=precision, launcher="torchtitan")
    wide = replace(recipe, precision=Precision.BF16_MIXED)
    titan = find_launcher("torchtitan")
    assert saved_by_block(SPARSE, HIDDEN, recipe, titan) == saved_by_block(
        SPARSE, HIDDEN, wide, titan
    )


def test_gradients_of_performance_recipes_are_narrow():
    assert state_bytes(RECIPE, NEMO).gradients == 2
    assert state_bytes(RECIPE, find_launcher("megatron-te")).gradients == 4


@pytest.mark.parametrize("text", ["none", "full", "full/2", "full/2.5", "selective[moe_act,mlp]"])
def test_recomputation_is_written_as_it_is_read(text):
    assert str(Recompute.parse(text)) == text


def test_a_part_of_the_layers_keeps_a_part():
    none, some, every = (
        block_activations(DENSE, HIDDEN, replace(RECIPE, recompute=Recompute.parse(text)), NEMO)
        for text in ("none", "full/2.5", "full")
    )

    assert some.kept.divided == pytest.approx(0.6 * none.kept.divided + 0.4 * every.kept.divided)


@pytest.mark.parametrize("text", ["selective[attn]", "full[moe_act]", "full/0.5", "most"])
def test_what_cannot_be_recomputed_is_refused(text):
    with pytest.raises(DrystoneError):
        Recompute.parse(text)
