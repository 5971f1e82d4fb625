"""Bytes of state for each parameter, by precision, optimizer and launcher; and who holds them."""

from dataclasses import replace

import numpy as np
import pytest

from drystone.describe.layout import Layout, Layouts, Sharding
from drystone.describe.model import Attention, Block, Experts, Mlp, ModelSpec
from drystone.describe.recipe import (
    Lora,
    Offload,
    Optimizer,
    Precision,
    Recipe,
    StepKernel,
    Tuning,
)
from drystone.estimate.launchers import LAUNCHERS, find_launcher
from drystone.estimate.memory.state import Held, State, held_parameters, split_stage, stage_state
from drystone.estimate.memory.terms import StateBytes, adapter_parameters, memory_terms, state_bytes
from drystone.estimate.parameters import count_block, count_model


def bytes_of(launcher: str = "pytorch", **changes) -> StateBytes:
    recipe = replace(Recipe(seq_len=128, global_batch=8, launcher=launcher), **changes)
    return state_bytes(recipe, find_launcher(launcher))


def persistent(state: StateBytes) -> float:
    return state.weights + state.gradients + state.master + state.moments


@pytest.mark.parametrize(
    ("launcher", "precision", "expected"),
    [
        ("pytorch", Precision.FP32, 16),
        ("pytorch", Precision.TF32, 16),
        ("pytorch", Precision.BF16, 8),
        ("pytorch", Precision.FP16, 8),
        ("pytorch", Precision.BF16_MIXED, 16),
        ("pytorch", Precision.AMP_BF16, 16),
        ("megatron-te", Precision.BF16_MIXED, 18),  # 2 + 4 + 4 + 8
        ("megatron-te", Precision.FP8_MIXED, 18),
        ("megatron-te", Precision.FP16_MIXED, 16),  # 2 + 2 + 4 + 8
        ("megatron-te", Precision.FP32, 16),
        ("megatron-deepspeed", Precision.BF16_MIXED, 20),  # 2 + (2 + 4) + 4 + 8
        ("megatron-deepspeed", Precision.FP16_MIXED, 16),
        ("nanotron", Precision.BF16_MIXED, 20),
        ("deepspeed", Precision.FP16_MIXED, 16),
    ],
)
def test_adam_keeps_what_precision_and_launcher_say(launcher, precision, expected):
    assert persistent(bytes_of(launcher, precision=precision)) == expected


@pytest.mark.parametrize(
    ("precision", "copy"),
    [
        (Precision.FP32, 0),
        (Precision.BF16, 0),
        (Precision.BF16_MIXED, 2),
        (Precision.AMP_FP16, 2),
    ],
)
def test_autocast_keeps_a_16_bit_copy_beside_fp32_weights(precision, copy):
    assert bytes_of(precision=precision).compute_copy == copy


@pytest.mark.parametrize(
    ("optimizer", "moments"),
    [
        (Optimizer.ADAM, 8),
        (Optimizer.LAMB, 8),
        (Optimizer.SGD, 0),
        (Optimizer.SGD_MOMENTUM, 4),
        (Optimizer.LION, 4),
        (Optimizer.MUON, 4),
        (Optimizer.ADAFACTOR, 0.04),
        (Optimizer.ADAM_8BIT, 2 * (1 + 4 / 256)),
    ],
)
def test_each_optimizer_keeps_its_moments(optimizer, moments):
    assert bytes_of(optimizer=optimizer).moments == pytest.approx(moments)


def test_every_optimizer_and_precision_is_known_to_every_launcher():
    for launcher in LAUNCHERS:
        for optimizer in Optimizer:
            for precision in Precision:
                found = bytes_of(launcher, optimizer=optimizer, precision=precision)
                assert persistent(found) >= 4


def test_the_step_takes_one_more_tensor_for_each_and_none_when_fused():
    assert bytes_of().step == 0
    assert bytes_of(step_kernel=StepKernel.LOOP).step == 0
    assert bytes_of(step_kernel=StepKernel.FOREACH).step == 4
    assert bytes_of(step_kernel=StepKernel.FOREACH, precision=Precision.BF16).step == 2
    foreach_8bit = bytes_of(step_kernel=StepKernel.FOREACH, optimizer=Optimizer.ADAM_8BIT)
    assert foreach_8bit.step == 0


def test_16_bit_gradients_are_cast_for_the_step():
    assert bytes_of("megatron-te", precision=Precision.FP16_MIXED).step == 4
    assert bytes_of("megatron-te", precision=Precision.BF16_MIXED).step == 0


# --- who holds it ----------------------------------------------------------------------------


def dense_model(*, kv_heads: int = 8, layers: int = 4) -> ModelSpec:
    attention = Attention(num_heads=8, num_kv_heads=kv_heads, head_dim=64)
    block = Block(attention=attention, feed_forward=Mlp(ffn_size=2048, gated=True))
    return ModelSpec(name="dense", hidden_size=512, stack=((block, layers),), vocab_size=32000)


def expert_model() -> ModelSpec:
    model = dense_model()
    experts = Experts(num_experts=8, top_k=2, ffn_size=1024)
    block = replace(model.blocks[0], feed_forward=experts)
    return replace(model, name="experts", stack=((block, 4),))


RECIPE = Recipe(seq_len=128, global_batch=64, launcher="megatron-te")


def held_and_state(
    model: ModelSpec, layout: Layout, recipe: Recipe = RECIPE, stage: int = 0
) -> tuple[Held, State]:
    terms = memory_terms(model, recipe)
    split = split_stage(terms, Layouts.of([layout]), np.array([[stage]]))
    held = held_parameters(terms, split)
    return held, stage_state(terms, split, held)


def state(model: ModelSpec, layout: Layout, recipe: Recipe = RECIPE, stage: int = 0) -> State:
    return held_and_state(model, layout, recipe, stage)[1]


@pytest.mark.parametrize(
    ("sharding", "weights", "gradients", "optimizer"),
    [
        (Sharding.NONE, 2, 4, 12),
        (Sharding.ZERO1, 2, 4, 12 / 8),
        (Sharding.ZERO2, 2, 4 / 8, 12 / 8),
        (Sharding.ZERO3, 2 / 8, 4 / 8, 12 / 8),
    ],
)
def test_each_stage_of_zero_divides_more(sharding, weights, gradients, optimizer):
    """arXiv:1910.02054 section 5, at Megatron's 2 + 4 + 12 bytes."""
    model = dense_model()
    num_params = count_model(model).total
    found = state(model, Layout(dp=8, sharding=sharding))

    assert found.weights.item() == weights * num_params
    assert found.gradients.item() == gradients * num_params
    assert found.optimizer.item() == optimizer * num_params


def test_context_parallel_ranks_share_the_state_too():
    with_cp = state(dense_model(), Layout(dp=2, cp=4, sharding=Sharding.ZERO3))
    without = state(dense_model(), Layout(dp=8, sharding=Sharding.ZERO3))

    assert with_cp.weights == without.weights
    assert with_cp.optimizer == without.optimizer


def test_hybrid_sharding_divides_by_its_group_only():
    hybrid = state(dense_model(), Layout(dp=16, shard_size=4, sharding=Sharding.ZERO3))
    small = state(dense_model(), Layout(dp=4, sharding=Sharding.ZERO3))

    for found, expected in zip(hybrid, small, strict=True):
        assert found == expected


def test_tensor_parallelism_divides_all_but_the_norms():
    model = dense_model()
    counted = count_model(model)
    whole, split = (held_and_state(model, Layout(tp=tp))[0] for tp in (1, 4))
    norms = 4 * 2 * 512 + 512

    assert whole.whole.item() == counted.total
    assert split.whole.item() == (counted.total - norms) / 4 + norms


def test_ranks_past_the_key_value_heads_repeat_them():
    model = dense_model(kv_heads=2)
    in_kv = 4 * 2 * (64 + 64) * 512  # layers x heads x (key + value) x hidden
    rest = count_model(model).total - in_kv
    norms = 4 * 2 * 512 + 512

    for tp, kv_parts in ((1, 1), (2, 2), (4, 2), (8, 2)):
        held = held_and_state(model, Layout(tp=tp))[0].whole.item()
        assert held == pytest.approx((rest - norms) / tp + norms + in_kv / kv_parts)


def test_a_pipeline_puts_the_embedding_first_and_the_head_last():
    model = dense_model(layers=5)
    layer = count_block(model.blocks[0], 512).total
    vocabulary = 32000 * 512
    first, second = (
        held_and_state(model, Layout(pp=2), stage=stage)[0].whole.item() for stage in (0, 1)
    )

    assert first == 3 * layer + vocabulary
    assert second == 2 * layer + vocabulary + 512
    assert first + second == count_model(model).total


def test_a_tied_head_is_a_copy_when_it_stands_on_another_stage():
    model = replace(dense_model(), tied_embeddings=True)
    stages = [held_and_state(model, Layout(pp=2), stage=stage)[0].around for stage in (0, 1)]

    assert stages[0].item() == 32000 * 512
    assert stages[1].item() == 32000 * 512 + 512
    alone = held_and_state(model, Layout())[0].around.item()
    assert alone == 32000 * 512 + 512


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_spread_vocabulary_is_divided_by_the_stages(is_tied):
    model = replace(dense_model(), tied_embeddings=is_tied)
    layout = Layout(pp=4, vocab_barriers=1)
    parts = [held_and_state(model, layout, stage=stage)[0].around.item() for stage in range(4)]

    assert parts[0] == (1 if is_tied else 2) * 32000 * 512 / 4
    assert parts[3] == parts[0] + 512  # the last norm
    assert sum(parts) == count_model(model).around_blocks


@pytest.mark.parametrize(
    ("layout", "parts"),
    [
        (Layout(dp=8), 1),
        (Layout(dp=8, ep=4), 4),
        (Layout(dp=8, ep=8), 8),
        (Layout(dp=4, tp=2, ep=4), 4),  # experts are not divided by tp ...
        (Layout(dp=4, tp=2, ep=4, etp=2), 8),  # ... unless asked
        (Layout(dp=1, tp=4, ep=2), 2),  # they take the place of tensor parallelism
        (Layout(dp=2, tp=4, ep=8), 8),
        (Layout(dp=2, tp=4), 4),  # without expert parallelism tp divides them
    ],
)
def test_experts_are_cut_by_the_ranks_there_are(layout, parts):
    experts = 4 * count_block(expert_model().blocks[0], 512).expert

    assert held_and_state(expert_model(), layout)[0].expert.item() == experts / parts


def test_experts_have_fewer_data_parallel_ranks():
    """An expert on every fourth rank: ZeRO finds a quarter of the ranks to share it."""
    model = expert_model()
    experts = 4 * count_block(model.blocks[0], 512).expert
    dense = count_model(model).total - experts
    found = state(model, Layout(dp=8, ep=4, sharding=Sharding.ZERO1))

    assert found.optimizer.item() == 12 * (dense / 8 + experts / 4 / 2)
    assert found.weights.item() == 2 * (dense + experts / 4)


def test_offload_leaves_the_gpu():
    kept = state(dense_model(), Layout())
    optimizer = state(dense_model(), Layout(), replace(RECIPE, offload=Offload.OPTIMIZER))
    everything = state(dense_model(), Layout(), replace(RECIPE, offload=Offload.STATE))
    activations = state(dense_model(), Layout(), replace(RECIPE, offload=Offload.ACTIVATIONS))

    assert optimizer.optimizer == 0
    assert optimizer.weights == kept.weights
    assert all(part == 0 for part in everything)
    assert activations == kept


# --- adapters --------------------------------------------------------------------------------

LORA = replace(RECIPE, tuning=Tuning.LORA, precision=Precision.BF16, launcher="hf-trainer")


def test_adapters_have_two_factors_beside_each_target():
    block = dense_model(kv_heads=2).blocks[0]
    attention = replace(LORA, lora=Lora(rank=8, targets=("q", "v")))
    plain = replace(block, feed_forward=Mlp(ffn_size=2048, gated=False))

    assert adapter_parameters(block, 512, attention.lora) == 8 * ((512 + 512) + (512 + 128))
    every = adapter_parameters(block, 512, LORA.lora)
    assert every - adapter_parameters(plain, 512, LORA.lora) == 16 * (512 + 2048)


def test_only_adapters_have_gradients_and_moments():
    model = dense_model()
    adapters = 4 * adapter_parameters(model.blocks[0], 512, LORA.lora)
    found = state(model, Layout(), LORA)

    assert found.weights.item() == 2 * count_model(model).total + 2 * adapters
    assert found.gradients.item() == 2 * adapters
    assert found.optimizer.item() == 4 * adapters
    assert found.step.item() == 2 * adapters


def test_adapters_can_be_wider_than_what_they_stand_beside():
    narrow = state(dense_model(), Layout(), LORA)
    wide = state(dense_model(), Layout(), replace(LORA, lora=Lora(dtype_bytes=4)))

    assert wide.gradients.item() == 2 * narrow.gradients.item()
    assert wide.optimizer.item() == 2 * narrow.optimizer.item()
    assert wide.weights.item() - narrow.weights.item() == narrow.gradients.item()


def test_the_optimizer_counts_for_adapters_as_well():
    found = state(dense_model(), Layout(), replace(LORA, optimizer=Optimizer.SGD))

    assert found.optimizer.item() == 0


def test_frozen_weights_are_as_wide_as_the_precision_says():
    narrow = state(dense_model(), Layout(), LORA)
    wide = state(dense_model(), Layout(), replace(LORA, precision=Precision.FP32))

    assert wide.weights.item() == 2 * narrow.weights.item()


def test_quantised_weights_take_few_bits_and_norms_stay():
    model = dense_model()
    counted = count_model(model)
    recipe = replace(LORA, tuning=Tuning.QLORA, keeps_16_bit=True)
    adapters = 4 * adapter_parameters(model.blocks[0], 512, recipe.lora)
    matrices = counted.blocks - 4 * 2 * 512
    found = state(model, Layout(), recipe)

    assert found.weights.item() - 2 * adapters == pytest.approx(
        matrices * 4.5 / 8 + 2 * (counted.total - matrices)
    )
    fewer = state(model, Layout(), replace(recipe, weight_bits=4.127))
    assert found.weights.item() - fewer.weights.item() == pytest.approx(matrices * 0.373 / 8)


def test_peft_turns_what_is_not_quantised_into_fp32():
    """PEFT's prepare_model_for_kbit_training; not under accelerate's FSDP, where nothing is."""
    model = dense_model()
    counted = count_model(model)
    recipe = replace(LORA, tuning=Tuning.QLORA)
    adapters = 4 * adapter_parameters(model.blocks[0], 512, recipe.lora)
    matrices = counted.blocks - 4 * 2 * 512

    assert state(model, Layout(), recipe).weights.item() == pytest.approx(
        matrices * 4.5 / 8 + 4 * (counted.total - matrices) + 4 * adapters
    )
    kept, plain = (
        memory_terms(model, replace(recipe, keeps_16_bit=flag)).boundary for flag in (False, True)
    )
    assert kept == 2 * plain  # bitsandbytes returns what it was given: fp32 between the layers
    sharded = replace(recipe, launcher="accelerate")
    assert memory_terms(model, sharded).boundary == plain


@pytest.mark.parametrize("layout", [Layout(dp=8, ep=8), Layout(tp=4), Layout(dp=4, tp=2, ep=4)])
def test_quantised_experts_are_divided_like_all_experts(layout):
    recipe = replace(LORA, tuning=Tuning.QLORA)
    held, found = held_and_state(expert_model(), layout, recipe)

    router_and_norms = 4 * (8 * 512 + 2 * 512)
    in_layers = (held.whole - held.around).item()
    assert held.quantised.item() == pytest.approx(in_layers - router_and_norms)
    assert found.weights.item() > 0


def test_sharding_divides_adapters_and_what_is_frozen():
    whole = state(dense_model(), Layout(dp=8), LORA)
    sharded = state(dense_model(), Layout(dp=8, sharding=Sharding.ZERO3), LORA)

    for name in ("weights", "gradients", "optimizer", "step"):
        assert getattr(sharded, name).item() == pytest.approx(getattr(whole, name).item() / 8)


def test_trained_embeddings_are_a_second_copy():
    plain = state(dense_model(), Layout(), LORA)
    trained = state(dense_model(), Layout(), replace(LORA, lora=Lora(train_embeddings=True)))
    around = count_model(dense_model()).around_blocks

    assert (trained.weights - plain.weights).item() == 2 * around
    assert (trained.optimizer - plain.optimizer).item() == 4 * around


def test_tensor_parallelism_divides_one_factor_of_each_adapter():
    one, four = (held_and_state(dense_model(), Layout(tp=tp), LORA)[0] for tp in (1, 4))

    assert four.adapter.item() == one.adapter.item() * (0.5 + 0.5 / 4)
