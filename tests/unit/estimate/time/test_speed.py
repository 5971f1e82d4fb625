"""One training step: sums, limits, and what more hardware may and may not do."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drystone.describe.catalogue import find_gpu
from drystone.describe.layout import Layout, Layouts, Schedule, Sharding
from drystone.describe.machine import Link, Machine, default_machine
from drystone.describe.model import Attention, Block, Experts, Mlp, ModelSpec
from drystone.describe.recipe import (
    Offload,
    Precision,
    Recipe,
    Recompute,
    RecomputeKind,
    Tuning,
)
from drystone.estimate.time.speed import SOURCES, SpeedEstimate, estimate_speed
from drystone.estimate.whole import dollars_per_billion_tokens


def make_model(*, hidden: int = 4096, layers: int = 32, experts: int = 0) -> ModelSpec:
    attention = Attention(num_heads=hidden // 128, num_kv_heads=hidden // 128, head_dim=128)
    feed_forward: Mlp | Experts = Mlp(ffn_size=4 * hidden, gated=False)
    if experts:
        feed_forward = Experts(num_experts=experts, top_k=2, ffn_size=2 * hidden)
    block = Block(attention=attention, feed_forward=feed_forward)
    return ModelSpec(name="m", hidden_size=hidden, stack=((block, layers),), vocab_size=50304)


MODEL = make_model()
RECIPE = Recipe(seq_len=2048, global_batch=512)
A100 = default_machine(find_gpu("A100-80G"))


def one(
    layout: Layout, *, model: ModelSpec = MODEL, recipe: Recipe = RECIPE, machine: Machine = A100
) -> SpeedEstimate:
    return estimate_speed(model, recipe, Layouts.of([layout]), machine).row(0)


layouts = st.builds(
    Layout,
    dp=st.sampled_from([1, 2, 8, 16]),
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4, 5]),
    cp=st.sampled_from([1, 2]),
    micro_batch=st.sampled_from([1, 2, 4]),
    sharding=st.sampled_from(list(Sharding)),
    sequence_parallel=st.booleans(),
    keep_gathered=st.booleans(),
)


def test_every_item_names_its_source_and_the_step_is_their_sum():
    layout = Layout(dp=4, tp=2, pp=4, micro_batch=2)
    estimates = estimate_speed(MODEL, RECIPE, Layouts.of([layout]), A100)
    row = estimates.row(0)

    assert set(row.items) == set(row.sources) == set(SOURCES)
    assert row.step_seconds == pytest.approx(float(estimates.step_seconds[0]))
    assert row.tokens_per_second_per_gpu == pytest.approx(
        512 * 2048 / row.step_seconds / layout.num_gpus
    )


@settings(max_examples=40)
@given(st.lists(layouts, min_size=2, max_size=6))
def test_many_layouts_at_once_are_the_same_as_one_by_one(chosen: list[Layout]):
    together = estimate_speed(MODEL, RECIPE, Layouts.of(chosen), A100)

    for index, layout in enumerate(chosen):
        assert together.row(index).items == pytest.approx(one(layout).items, rel=1e-9)


@given(layouts)
def test_everything_is_finite_and_nothing_is_negative(layout: Layout):
    assert all(np.isfinite(value) and value >= 0 for value in one(layout).items.values())


@settings(max_examples=60)
@given(
    layouts,
    st.sampled_from(["V100-32G", "A100-80G", "H100-80G", "B200", "MI300X", "RTX 4090", "T4"]),
    st.sampled_from([Precision.BF16_MIXED, Precision.FP16_MIXED, Precision.FP32]),
    st.sampled_from([512, 4096, 65536]),
)
def test_no_layout_uses_a_gpu_beyond_its_peak(
    layout: Layout, gpu: str, precision: Precision, seq_len: int
):
    recipe = replace(RECIPE, precision=precision, seq_len=seq_len)
    estimate = one(layout, recipe=recipe, machine=default_machine(find_gpu(gpu)))

    assert 0 < estimate.model_flops_utilisation < 0.95


@settings(max_examples=40)
@given(layouts, st.floats(1.01, 20))
def test_more_bandwidth_is_never_slower(layout: Layout, factor: float):
    def faster(link: Link) -> Link:
        return replace(link, bandwidth_bytes_per_second=factor * link.bandwidth_bytes_per_second)

    gpu = A100.gpu
    bandwidth = factor * gpu.memory_bandwidth_bytes_per_second
    base = one(layout).step_seconds
    machines = [
        replace(A100, gpu=replace(gpu, memory_bandwidth_bytes_per_second=bandwidth)),
        replace(A100, intra=faster(A100.intra)),
        replace(A100, inter=faster(A100.inter)),
        replace(A100, inter=replace(A100.inter, latency_seconds=0.0)),
    ]

    for machine in machines:
        assert one(layout, machine=machine).step_seconds <= base * (1 + 1e-12)


@settings(max_examples=40)
@given(layouts, st.floats(1.01, 5))
def test_a_faster_gpu_is_never_slower(layout: Layout, factor: float):
    gpu = A100.gpu
    fast = replace(gpu, bf16_flops=gpu.bf16_flops * factor,
                   measured_bf16_flops=gpu.measured_bf16_flops * factor)  # fmt: skip
    # The same number of multiprocessors, each faster, as a generation brings it.
    wide = one(layout, machine=replace(A100, gpu=fast)).step_seconds

    assert wide <= one(layout).step_seconds * 1.05


@given(
    micro_batch=st.sampled_from([1, 2, 8]),
    tp=st.sampled_from([1, 2, 4]),
    dp=st.integers(1, 64),
    more=st.integers(2, 8),
)
def test_more_data_parallel_ranks_never_raise_the_pace_of_each(
    micro_batch: int, tp: int, dp: int, more: int
):
    def pace(ranks: int) -> float:
        recipe = replace(RECIPE, global_batch=ranks * micro_batch * 4)
        layout = Layout(dp=ranks, tp=tp, micro_batch=micro_batch)
        return one(layout, recipe=recipe).tokens_per_second_per_gpu

    assert pace(dp * more) <= pace(dp) * (1 + 1e-12)


def test_larger_micro_batches_fill_the_gpu_better():
    paces = [one(Layout(dp=8, micro_batch=m)).tokens_per_second_per_gpu for m in (1, 2, 4, 8)]

    assert paces == sorted(paces)


def test_full_recomputation_costs_a_forward_pass():
    full = replace(RECIPE, recompute=Recompute(kind=RecomputeKind.FULL))
    half = replace(RECIPE, recompute=Recompute(kind=RecomputeKind.FULL, every=2))
    layout = Layout(dp=8, micro_batch=4)
    plain, again = one(layout), one(layout, recipe=full)

    share = again.items["recompute"] / sum(
        plain.items[name] for name in ("matmul", "attention", "memory_bound")
    )
    assert 0.27 < share < 0.36
    assert one(layout, recipe=half).items["recompute"] == pytest.approx(
        again.items["recompute"] / 2
    )
    assert again.model_flops_utilisation < plain.model_flops_utilisation


def test_the_bubble_shrinks_with_micro_batches_and_virtual_stages():
    def bubble_share(**layout: object) -> float:
        estimate = one(Layout(pp=8, tp=4, micro_batch=1, **layout))  # type: ignore[arg-type]
        return estimate.items["pipeline_bubble"] / estimate.step_seconds

    few, many = bubble_share(dp=64), bubble_share(dp=2)
    chunks = bubble_share(dp=64, virtual_stages=4, schedule=Schedule.INTERLEAVED)

    assert many < 0.05 < few
    assert chunks < few


def test_the_fullest_stage_decides():
    even, uneven = make_model(layers=32), make_model(layers=33)
    layout = Layout(dp=2, pp=4, micro_batch=1)

    extra = one(layout, model=uneven).step_seconds / one(layout, model=even).step_seconds

    assert 1.08 < extra < 9 / 8


def test_a_vocabulary_spread_over_stages_takes_the_head_off_the_last_one():
    layout = Layout(pp=8, micro_batch=1)
    wide = replace(make_model(hidden=2048), vocab_size=256_000)

    last = one(layout, model=wide).step_seconds
    spread = one(replace(layout, vocab_barriers=1), model=wide).step_seconds

    assert spread < 0.7 * last


def test_tensor_parallelism_across_nodes_is_dear():
    inside = one(Layout(tp=8, micro_batch=1))
    across = one(Layout(tp=16, micro_batch=1))

    assert across.tokens_per_second_per_gpu < 0.65 * inside.tokens_per_second_per_gpu


def test_sharded_weights_are_gathered_for_every_micro_batch():
    plain = one(Layout(dp=8, micro_batch=1, sharding=Sharding.ZERO1))
    sharded = one(Layout(dp=8, micro_batch=1, sharding=Sharding.ZERO3))
    kept = one(Layout(dp=8, micro_batch=1, sharding=Sharding.ZERO3, keep_gathered=True))

    assert plain.items["data_parallel"] < kept.items["data_parallel"]
    assert kept.items["data_parallel"] < sharded.items["data_parallel"]
    assert sharded.items["optimizer"] == pytest.approx(plain.items["optimizer"])


def test_hybrid_sharding_keeps_gathers_inside_a_node():
    machine = replace(A100, inter=replace(A100.inter, bandwidth_bytes_per_second=2e9))
    layout = Layout(dp=32, micro_batch=1, sharding=Sharding.ZERO3)

    everywhere = one(layout, machine=machine)
    hybrid = one(replace(layout, shard_size=8), machine=machine)

    assert hybrid.items["data_parallel"] < everywhere.items["data_parallel"]
    assert hybrid.items["data_parallel"] > one(replace(layout, dp=8)).items["data_parallel"]


def test_a_tiny_model_waits_for_its_host():
    tiny = make_model(hidden=512, layers=12)
    recipe = replace(RECIPE, seq_len=1024, launcher="megatron-te", global_batch=32)

    estimate = one(Layout(dp=8, micro_batch=4), model=tiny, recipe=recipe)

    assert estimate.items["launch_bound"] > 0.4 * estimate.step_seconds


def test_adapters_skip_the_gradients_of_frozen_weights():
    lora = replace(RECIPE, tuning=Tuning.LORA)
    layout = Layout(dp=8, micro_batch=2)

    full, tuned = one(layout), one(layout, recipe=lora)
    quantised = one(layout, recipe=replace(lora, tuning=Tuning.QLORA))

    assert 0.6 < tuned.items["matmul"] / full.items["matmul"] < 0.72
    assert tuned.items["optimizer"] < 0.05 * full.items["optimizer"]
    assert quantised.step_seconds > tuned.step_seconds


def test_experts_compute_only_what_is_routed_to_them():
    moe, dense = make_model(hidden=2048, experts=16), make_model(hidden=2048)
    layout = Layout(dp=8, micro_batch=4)

    alone = one(layout, model=moe)
    spread = one(replace(layout, ep=8), model=moe)

    assert alone.items["matmul"] < 1.6 * one(layout, model=dense).items["matmul"]
    assert alone.items["expert_parallel"] == 0 < spread.items["expert_parallel"]


def test_context_parallelism_shares_attention_and_sends_keys():
    recipe = replace(RECIPE, seq_len=65536, global_batch=8)
    alone = one(Layout(dp=1, micro_batch=1), recipe=recipe)
    shared = one(Layout(dp=1, cp=8, micro_batch=1), recipe=recipe)

    assert shared.items["attention"] == pytest.approx(alone.items["attention"] / 8)
    assert shared.items["context_parallel"] > 0 == alone.items["context_parallel"]


def test_an_optimizer_on_the_host_is_slower_than_on_the_gpu():
    recipe = replace(RECIPE, offload=Offload.OPTIMIZER)
    layout = Layout(dp=8, micro_batch=4, sharding=Sharding.ZERO3)

    assert one(layout, recipe=recipe).items["optimizer"] > 3 * one(layout).items["optimizer"]


def test_an_8b_model_on_8_h100_is_as_fast_as_others_report():
    """github:pytorch/torchtitan benchmarks, Llama 3.1 8B, compiled: 6,667 tokens/s a GPU."""
    attention = Attention(num_heads=32, num_kv_heads=8, head_dim=128)
    block = Block(attention=attention, feed_forward=Mlp(ffn_size=14336, gated=True))
    llama = ModelSpec(name="8b", hidden_size=4096, stack=((block, 32),), vocab_size=128256)
    recipe = Recipe(
        seq_len=8192, global_batch=16, launcher="torchtitan", compiled=True,
        recompute=Recompute(kind=RecomputeKind.SELECTIVE),
    )  # fmt: skip
    layout = Layout(dp=8, micro_batch=2, sharding=Sharding.ZERO3)
    machine = default_machine(find_gpu("H100-96GB-HBM2e"))

    estimate = one(layout, model=llama, recipe=recipe, machine=machine)

    assert estimate.tokens_per_second_per_gpu == pytest.approx(6667, rel=0.1)


def test_the_array_view_has_an_entry_for_every_layout():
    estimates = estimate_speed(MODEL, RECIPE, Layouts.build(dp=[1, 2, 4]), A100)

    assert len(estimates) == 3
    arrays = [getattr(estimates, one.name) for one in fields(estimates)]
    assert all(len(array) == 3 for array in arrays if isinstance(array, np.ndarray))
    assert estimates.model_flops_utilisation.shape == (3,)


def test_tokens_cost_what_the_gpu_costs_while_it_makes_them():
    assert dollars_per_billion_tokens(1000.0, gpu_dollars_per_hour=3.6) == pytest.approx(1000.0)
    many = dollars_per_billion_tokens(np.array([1000.0, 2000.0]), gpu_dollars_per_hour=3.6)
    assert many.tolist() == pytest.approx([1000.0, 500.0])
