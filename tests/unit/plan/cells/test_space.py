"""Every layout that is enumerated can be run; what cannot is left out."""

from dataclasses import replace

import pytest

from drystone.describe.layout import check_layout
from drystone.describe.model import Attention, Block, Mlp, ModelSpec
from drystone.describe.model_source import find_model
from drystone.describe.recipe import Recipe
from drystone.plan.cells.search import layout_at
from drystone.plan.cells.space import (
    context_degrees,
    divisors,
    enumerate_layouts,
    expert_degrees,
    model_tensor_degrees,
    tensor_degrees,
    virtual_stages,
)


def model_of(*, heads: int, kv_heads: int, num_layers: int = 12) -> ModelSpec:
    attention = Attention(num_heads=heads, num_kv_heads=kv_heads, head_dim=64)
    block = Block(attention=attention, feed_forward=Mlp(ffn_size=3840, gated=True))
    return ModelSpec(
        name="small", hidden_size=64 * heads, stack=((block, num_layers),), vocab_size=100
    )


MODELS = [
    find_model("llama-3.1-8b"),
    find_model("mixtral-8x7b"),
    find_model("gemma-2-9b"),
    find_model("deepseek-v2-lite"),
    find_model("gpt2"),
    model_of(heads=12, kv_heads=2),
    model_of(heads=40, kv_heads=10),
    model_of(heads=24, kv_heads=8, num_layers=7),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize("batch", [1, 6, 64])
def test_every_layout_can_be_run(model, batch):
    counts = (1, 2, 3, 5, 6, 8, 12, 16, 24, 40)
    recipe = Recipe(seq_len=16384, global_batch=batch)
    layouts = enumerate_layouts(
        model, seq_len=16384, global_batch=batch, gpus_per_node=8, counts=counts
    )

    assert set(layouts.num_gpus.tolist()) <= set(counts)
    assert 1 in layouts.num_gpus
    for index in range(len(layouts)):
        layout = layout_at(layouts, index)
        # A batch that does not divide makes one more micro-batch that is not full.
        full = replace(recipe, global_batch=layout.dp * layout.micro_batch)
        assert check_layout(model, full, layout) == []


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_no_sample_is_left_out_and_no_rank_has_nothing_to_do(model):
    layouts = enumerate_layouts(
        model, seq_len=2048, global_batch=10, gpus_per_node=4, counts=(1, 3, 4, 7, 8)
    )
    num_micro = -(-10 // (layouts.dp * layouts.micro_batch))

    assert (layouts.dp <= 10).all()
    assert (num_micro * layouts.dp * layouts.micro_batch >= 10).all()
    assert ((num_micro - 1) * layouts.dp * layouts.micro_batch < 10).all()


def test_tensor_parallelism_never_leaves_a_node():
    model = model_of(heads=24, kv_heads=8)

    assert tensor_degrees(model, 8, 64) == (1, 2, 4, 8)  # 24 heads and 8 GPUs
    assert tensor_degrees(model, 6, 64) == (1, 2)  # 4 does not divide 6
    assert tensor_degrees(model, 6, 4) == (1, 2, 4)  # all in one node
    assert tensor_degrees(model, 8, 2) == (1, 2)


def test_key_value_heads_are_divided_or_repeated():
    assert model_tensor_degrees(model_of(heads=12, kv_heads=2)) == (1, 2, 4, 6, 12)
    assert 8 not in model_tensor_degrees(model_of(heads=40, kv_heads=10))


def test_nothing_is_enumerated_twice():
    layouts = enumerate_layouts(
        MODELS[1], seq_len=8192, global_batch=12, gpus_per_node=8, counts=(8, 12, 24)
    )
    found = [str(layout_at(layouts, index)) for index in range(len(layouts))]

    assert len(found) == len(set(found))


def test_sharding_needs_somebody_to_share_with():
    layouts = enumerate_layouts(
        MODELS[0], seq_len=8192, global_batch=4, gpus_per_node=8, counts=(1, 2, 4)
    )

    alone = layouts.dp * layouts.cp == 1
    assert not layouts.sharding[alone].any()
    assert layouts.sharding[~alone].any()


def test_interleaving_needs_layers_and_micro_batches_that_divide():
    assert virtual_stages(32, 4) == (1, 2, 4)
    assert virtual_stages(32, 1) == (1,)
    assert virtual_stages(30, 4) == (1,)
    assert virtual_stages(24, 4) == (1, 2)
    layouts = enumerate_layouts(
        MODELS[0], seq_len=2048, global_batch=12, gpus_per_node=8, counts=(4, 8)
    )
    many = layouts.virtual_stages > 1
    num_micro = -(-12 // (layouts.dp * layouts.micro_batch))
    assert many.any()
    assert (num_micro[many] % layouts.pp[many] == 0).all()


def test_context_parallelism_is_for_long_sequences():
    assert context_degrees(4096) == (1,)
    assert context_degrees(8192) == (1, 2)
    assert context_degrees(32768) == (1, 2, 4, 8)
    assert context_degrees(12289) == (1,)


def test_expert_parallelism_divides_experts_and_ranks():
    assert expert_degrees(MODELS[0], 8) == (1,)
    assert expert_degrees(MODELS[1], 12) == (1, 2, 4)


def test_a_limit_on_the_micro_batch():
    layouts = enumerate_layouts(
        MODELS[0], seq_len=2048, global_batch=64, gpus_per_node=8, counts=(2,), most_micro_batch=4
    )

    assert set(layouts.micro_batch.tolist()) == {1, 2, 4}


def test_nothing_for_more_ranks_than_sequences_and_layers():
    prime = 97
    layouts = enumerate_layouts(
        MODELS[4], seq_len=512, global_batch=4, gpus_per_node=8, counts=(prime,)
    )

    assert len(layouts) == 0


def test_divisors():
    assert divisors(1) == (1,)
    assert divisors(36) == (1, 2, 3, 4, 6, 9, 12, 18, 36)
