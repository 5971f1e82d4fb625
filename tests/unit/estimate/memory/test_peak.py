"""Memory of one rank: exact bytes where they are published, and which moment and stage peak."""

from dataclasses import replace

import numpy as np
import pytest

from drystone.describe.catalogue import find_gpu
from drystone.describe.layout import Layout, Layouts, Sharding
from drystone.describe.model import Attention, Block, Experts, Mlp, ModelSpec
from drystone.describe.model_source import find_model
from drystone.describe.recipe import (
    Loss,
    Offload,
    Precision,
    Recipe,
    Recompute,
    RecomputeKind,
    StepKernel,
    Tuning,
)
from drystone.estimate.memory.peak import (
    ITEM_SOURCES,
    MOMENTS,
    MemoryEstimates,
    estimate_memory,
)
from drystone.estimate.memory.terms import memory_terms
from drystone.estimate.parameters import count_model
from drystone.units import GiB, MiB

FULL = Recompute(kind=RecomputeKind.FULL)


def estimate(model: ModelSpec, recipe: Recipe, layout: Layout, **options) -> MemoryEstimates:
    return estimate_memory(model, recipe, Layouts.of([layout]), **options)


def moment_of(found: MemoryEstimates) -> str:
    return MOMENTS[found.moment.item()]


def small_model(*, layers: int = 8, vocab: int = 32000) -> ModelSpec:
    attention = Attention(num_heads=8, num_kv_heads=8, head_dim=64)
    block = Block(attention=attention, feed_forward=Mlp(ffn_size=2048, gated=True))
    return ModelSpec(name="small", hidden_size=512, stack=((block, layers),), vocab_size=vocab)


def late_experts(*, layers: int = 16) -> ModelSpec:
    """Like DeepSeek: the first layers are dense, the others are larger."""
    model = small_model()
    dense = model.blocks[0]
    wide = replace(dense, feed_forward=Experts(num_experts=16, top_k=2, ffn_size=1024))
    return replace(model, name="late experts", stack=((dense, 3), (wide, layers - 3)))


@pytest.mark.parametrize("micro_batch", [4, 8])
def test_pure_bf16_adam_peaks_in_the_step_at_ten_bytes(micro_batch):
    """fms-acceleration, Mistral-7B, 4,096 tokens, one A100: 67.46 GiB at both batch sizes."""
    model = find_model("Mistral-7B-v0.1")
    recipe = Recipe(
        seq_len=4096,
        global_batch=micro_batch,
        precision=Precision.BF16,
        step_kernel=StepKernel.FOREACH,
        recompute=FULL,
        launcher="accelerate",
    )
    found = estimate(model, recipe, Layout(micro_batch=micro_batch))

    assert moment_of(found) == "step"
    allocated = found.allocated.item() - found.workspace.item()
    assert allocated == 10 * count_model(model).total
    assert found.allocated.item() / GiB == pytest.approx(67.46, rel=0.002)


def test_fsdp_under_accelerate_takes_twenty_bytes_a_shard():
    """Weights in fp32, gradients, two moments and the temporaries of the step: 4 + 4 + 8 + 4."""
    model = find_model("Mistral-7B-v0.1")
    recipe = Recipe(
        seq_len=512,
        global_batch=4,
        precision=Precision.BF16_MIXED,
        recompute=FULL,
        loss=Loss.CHUNKED,
        launcher="accelerate",
    )
    found = estimate(model, recipe, Layout(dp=4, sharding=Sharding.ZERO3))
    at_step = found.weights + found.optimizer + found.items()["gradients"] + found.items()["step"]

    assert moment_of(found) == "step"
    assert at_step.item() == 20 * count_model(model).total / 4


@pytest.mark.parametrize(
    ("sharding", "num_bytes"),
    [
        (Sharding.NONE, 18),
        (Sharding.ZERO1, 6 + 12 / 8),
        (Sharding.ZERO2, 2 + 16 / 8),
        (Sharding.ZERO3, 18 / 8),
    ],
)
def test_megatron_takes_eighteen_bytes_and_less_with_zero(sharding, num_bytes):
    model = small_model()
    recipe = Recipe(seq_len=128, global_batch=64, launcher="megatron-te")
    found = estimate(model, recipe, Layout(dp=8, sharding=sharding))
    state = found.weights + found.optimizer + found.items()["gradients"]

    assert state.item() == num_bytes * count_model(model).total


def test_items_have_a_source_and_add_up():
    recipe = Recipe(seq_len=1024, global_batch=64)
    layouts = Layouts.build(dp=[1, 4, 8], pp=[1, 2, 4], sharding=[0, 1, 3], micro_batch=2)
    found = estimate_memory(small_model(), recipe, layouts)

    assert found.items().keys() == ITEM_SOURCES.keys()
    np.testing.assert_allclose(sum(found.items().values()), found.device, rtol=1e-12)
    np.testing.assert_array_equal(found.device, found.reserved + found.context)
    np.testing.assert_array_equal(found.required, found.allocated + found.context)
    assert (found.allocated < found.reserved).all()


# --- moments ---------------------------------------------------------------------------------


def test_a_large_vocabulary_peaks_at_the_loss():
    recipe = Recipe(seq_len=2048, global_batch=8, recompute=FULL, launcher="megatron-te")
    found = estimate(small_model(vocab=256_000), recipe, Layout(micro_batch=8))

    assert moment_of(found) == "loss"
    per_token = 6 * 256_000 + 2 * 512 + 2 * 512  # logits, last norm, input of the head
    assert found.items()["logits"].item() == 8 * 2048 * per_token


def test_recomputation_without_logits_peaks_in_backward():
    recipe = Recipe(
        seq_len=4096, global_batch=8, recompute=FULL, loss=Loss.CHUNKED, launcher="megatron-te"
    )
    found = estimate(small_model(vocab=1000), recipe, Layout(micro_batch=8))

    assert moment_of(found) == "backward"


def test_gradients_that_come_late_peak_last():
    """Without accumulation gradients are only there when the first layer's backward ends."""
    recipe = Recipe(seq_len=256, global_batch=1, recompute=FULL, launcher="pytorch")
    found = estimate(small_model(vocab=1000), recipe, Layout())

    assert moment_of(found) == "last"
    assert found.items()["gradients"].item() == 4 * count_model(small_model(vocab=1000)).total


def test_accumulation_keeps_gradients_through_the_loss():
    recipe = Recipe(seq_len=2048, global_batch=8, launcher="pytorch")
    once = estimate(small_model(), recipe, Layout(micro_batch=8))
    twice = estimate(small_model(), replace(recipe, global_batch=16), Layout(micro_batch=8))

    assert moment_of(once) == moment_of(twice) == "loss"
    assert once.items()["gradients"].item() == 0
    assert twice.items()["gradients"].item() == 4 * count_model(small_model()).total


def test_a_launcher_that_loads_the_whole_model_may_peak_there():
    recipe = Recipe(
        seq_len=64,
        global_batch=8,
        precision=Precision.BF16,
        tuning=Tuning.LORA,
        recompute=FULL,
        launcher="litgpt",
    )
    layout = Layout(dp=8, sharding=Sharding.ZERO3)

    assert moment_of(estimate(find_model("Llama-2-7b-hf"), recipe, layout)) == "load"
    elsewhere = replace(recipe, launcher="hf-trainer")
    assert moment_of(estimate(find_model("Llama-2-7b-hf"), elsewhere, layout)) != "load"


# --- stages ----------------------------------------------------------------------------------


def hungriest_by_trying(model: ModelSpec, recipe: Recipe, layout: Layout) -> tuple[float, int]:
    required = [
        estimate(model, recipe, layout, stage=[stage]).required.item() for stage in range(layout.pp)
    ]
    return max(required), int(np.argmax(required))


@pytest.mark.parametrize("model", [small_model(layers=16), late_experts()], ids=lambda m: m.name)
@pytest.mark.parametrize("pp", [1, 2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("micro_batch", [1, 4])
def test_the_hungriest_stage_is_found(model, pp, micro_batch):
    recipe = Recipe(seq_len=512, global_batch=64, launcher="megatron-te")
    layout = Layout(pp=pp, micro_batch=micro_batch)
    found = estimate(model, recipe, layout)
    most, stage = hungriest_by_trying(model, recipe, layout)

    assert found.required.item() == most
    assert found.stage.item() == stage


def test_where_layers_grow_the_hungriest_stage_is_neither_first_nor_last():
    recipe = Recipe(seq_len=128, global_batch=64, launcher="megatron-te")
    model = replace(late_experts(), vocab_size=1000)

    assert estimate(model, recipe, Layout(pp=8)).stage.item() == 2


def test_a_gpu_that_is_nearly_full_does_not_hide_the_hungriest_stage():
    """The cache shrinks to what is left, so that what the device shows is the same on both."""
    model = small_model(vocab=256_000)
    recipe = Recipe(seq_len=2048, global_batch=64, launcher="megatron-te", recompute=FULL)
    layout = Layout(pp=2, micro_batch=8)
    most, stage = hungriest_by_trying(model, recipe, layout)
    gpu = find_gpu("A100-80GB-SXM")
    tight = replace(gpu, usable_bytes=round(most) + 1)
    found = estimate(model, recipe, layout, gpu=tight)

    assert stage == 1
    assert found.stage.item() == 1
    assert found.device.item() <= tight.usable_bytes
    assert found.risk(tight).item() > 0.3


def test_layers_that_differ_only_in_their_window_are_one_kind():
    terms = memory_terms(find_model("gemma-2-9b"), Recipe(seq_len=128, global_batch=1))

    assert len(terms.layers) == 1
    assert terms.changes == ()


def test_stages_can_be_asked_for_one_by_one():
    recipe = Recipe(seq_len=512, global_batch=64)
    layouts = Layouts.build(pp=[4, 4, 4, 4])
    found = estimate_memory(small_model(), recipe, layouts, stage=[0, 1, 2, 3])

    assert found.stage.tolist() == [0, 1, 2, 3]
    for stage in range(4):
        alone = estimate(small_model(), recipe, Layout(pp=4), stage=[stage])
        assert alone.device.item() == found.device[stage]


def test_a_stage_can_have_layers_of_its_own():
    recipe = Recipe(seq_len=512, global_batch=64, launcher="megatron-te")
    equal = estimate(small_model(), recipe, Layout(pp=4), stage=[1])
    stated = estimate(small_model(), recipe, Layout(pp=4), stage=[1], layers=([2], [4]))
    longer = estimate(small_model(), recipe, Layout(pp=4), stage=[1], layers=([1], [5]))

    assert stated.device.item() == equal.device.item()
    assert longer.weights.item() == 2 * equal.weights.item()


# --- gathered layers -------------------------------------------------------------------------


def gathered(recipe: Recipe, layout: Layout, *, layers: int = 8) -> float:
    model = small_model(layers=layers, vocab=1000)
    return estimate(model, recipe, layout).items()["gathered"].item()


FSDP = Recipe(seq_len=2048, global_batch=64, launcher="torchtitan", loss=Loss.CHUNKED)


def test_sharded_layers_are_gathered_two_at_a_time():
    model = small_model(vocab=1000)
    counted = count_model(model)
    layer = counted.blocks / 8
    found = gathered(FSDP, Layout(dp=8, micro_batch=8, sharding=Sharding.ZERO3))

    around = 2 * counted.around_blocks  # the root unit
    assert found in (2 * 2 * layer + around, 3 * 2 * layer + around)  # and a gradient in backward


def test_layers_that_stay_gathered_are_all_there():
    layout = Layout(dp=8, micro_batch=8, sharding=Sharding.ZERO3)
    layer = count_model(small_model(vocab=1000)).blocks / 8
    kept = gathered(FSDP, replace(layout, keep_gathered=True))

    assert kept - gathered(FSDP, layout) == 6 * 2 * layer


def test_no_more_layers_are_gathered_than_there_are():
    layout = Layout(dp=8, micro_batch=8, sharding=Sharding.ZERO3)
    kept = gathered(FSDP, replace(layout, keep_gathered=True), layers=1)

    assert gathered(FSDP, layout, layers=1) == kept


def test_state_in_host_memory_comes_layer_by_layer_also_to_one_gpu():
    recipe = replace(FSDP, offload=Offload.STATE)
    found = estimate(small_model(), recipe, Layout(micro_batch=8))

    assert found.weights.item() == found.optimizer.item() == 0
    assert found.items()["gathered"].item() > 0


# --- around the allocator --------------------------------------------------------------------


def test_each_kind_of_parallelism_has_buffers_of_its_own():
    recipe = Recipe(seq_len=128, global_batch=64)
    alone = estimate(small_model(), recipe, Layout()).context.item()
    many = estimate(small_model(), recipe, Layout(dp=2, tp=2, pp=2)).context.item()

    assert alone == 1113 * MiB
    assert many - alone == 3 * 256 * MiB


def test_workspaces_grew_with_hopper():
    recipe = Recipe(seq_len=128, global_batch=64)
    ampere, hopper = (
        estimate(small_model(), recipe, Layout(), gpu=find_gpu(name)).workspace.item()
        for name in ("A100-80GB-SXM", "H100-80GB-SXM")
    )

    assert hopper - ampere == 72 * MiB


def test_a_run_is_refused_where_the_estimate_is_more_than_there_is_and_else_has_a_risk():
    recipe = Recipe(seq_len=2048, global_batch=64)
    gpu = find_gpu("A100-80GB-SXM")
    found = estimate(small_model(), recipe, Layout(micro_batch=4), gpu=gpu)
    (low, high), (_, margin) = found.likely_range(), found.required_range()

    assert low < found.required < margin < high
    tight = replace(gpu, usable_bytes=int(found.required.item()) + 1)
    assert found.fits(tight).item()
    assert not found.fits(replace(gpu, usable_bytes=int(found.required.item()) - 1)).item()
    ample = replace(gpu, usable_bytes=int(high.item()) + 1)
    assert found.risk(ample).item() <= 0.12
    assert found.risk(tight).item() > 0.3
