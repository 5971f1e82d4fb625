"""Multiplications, attention and memory-bound work on one GPU."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drystone.describe.catalogue import find_gpu
from drystone.describe.generations import generation_of
from drystone.describe.model import Attention, Block, Experts, Head, Mlp, ModelSpec
from drystone.describe.recipe import AttentionKernel, Precision, Recipe
from drystone.errors import InvalidSpec
from drystone.estimate.parameters import count_block
from drystone.estimate.time.compute import (
    UNALIGNED_SLOWDOWN,
    Device,
    Matmul,
    attention_flops,
    attention_seconds,
    block_matmuls,
    forward_ramp,
    head_matmuls,
    input_gradient_ramp,
    make_device,
    weight_gradient_ramp,
)

ATTENTION = Attention(num_heads=32, num_kv_heads=8, head_dim=128)
DEVICE = Device(
    matmul_flops=100e12,
    head_flops=100e12,
    wave_area=1e6,
    ramp_depth=100.0,
    attention_forward_flops=50e12,
    attention_backward_flops=40e12,
    cudnn_attention_gain=1.0,
    bandwidth_bytes_per_second=1e12,
    peak_flops=125e12,
)
ONE = np.array([1.0])


def device_of(name: str, precision: Precision = Precision.BF16_MIXED) -> Device:
    gpu = find_gpu(name)
    return make_device(gpu, precision, generation_of(gpu))


def seconds_of(ramp, tokens: float, tp: float = 1.0) -> float:
    return float(ramp.seconds(np.array([tokens]), np.array([1.0 / tp]))[0])


def by_hand(area: float, depth: float) -> float:
    return 2 * (area + DEVICE.wave_area) * (depth + DEVICE.ramp_depth) / DEVICE.matmul_flops


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("by_column", [True, False])
def test_a_ramp_is_the_sum_of_its_multiplications(tp: int, by_column: bool):
    n, k, tokens = 4096, 1024, 2048
    matmul = [Matmul(n, k, by_column=by_column, count=3)]
    out, depth = (n / tp, k) if by_column else (n, k / tp)
    back, back_depth = (k, n / tp) if by_column else (k / tp, n)

    forward = seconds_of(forward_ramp(matmul, DEVICE, flops=100e12), tokens, tp)
    inputs = seconds_of(input_gradient_ramp(matmul, DEVICE, flops=100e12), tokens, tp)
    weights = seconds_of(weight_gradient_ramp(matmul, DEVICE, flops=100e12), tokens, tp)

    assert forward == pytest.approx(3 * by_hand(tokens * out, depth))
    assert inputs == pytest.approx(3 * by_hand(tokens * back, back_depth))
    assert weights == pytest.approx(3 * by_hand(n * k / tp, tokens))


def test_what_tensor_parallelism_repeats_does_not_get_faster_with_it():
    ramp = forward_ramp([Matmul(512, 512, by_column=True, splits=False)], DEVICE, flops=100e12)

    assert seconds_of(ramp, 1000, tp=8) == seconds_of(ramp, 1000, tp=1)


@given(
    n=st.integers(1, 65536), k=st.integers(1, 65536), tokens=st.integers(1, 10**6),
    tp=st.sampled_from([1, 2, 4, 8]),
)  # fmt: skip
def test_no_multiplication_beats_the_ceiling(n: int, k: int, tokens: int, tp: int):
    for make in (forward_ramp, input_gradient_ramp, weight_gradient_ramp):
        ramp = make([Matmul(n, k, by_column=True)], DEVICE, flops=DEVICE.matmul_flops)
        assert 2.0 * tokens * n * k / tp / seconds_of(ramp, tokens, tp) <= DEVICE.matmul_flops


def test_large_multiplications_on_an_a100_run_where_others_measured_them():
    device = device_of("A100-80G")
    ramp = forward_ramp([Matmul(16384, 16384, by_column=True)], device, flops=device.matmul_flops)

    rate = 2.0 * 16384**3 / seconds_of(ramp, 16384)

    assert 0.85 * 271e12 < rate <= 271.2e12


def test_the_matmuls_of_a_layer_hold_its_weights():
    block = Block(attention=ATTENTION, feed_forward=Mlp(ffn_size=14336, gated=True))
    plain, experts = block_matmuls(block, 4096)

    assert not experts
    norms = count_block(block, 4096).norms
    assert sum(one.n * one.k for one in plain) == count_block(block, 4096).total - norms


def test_latent_attention_and_experts_hold_their_weights_too():
    latent = Attention(num_heads=16, num_kv_heads=16, head_dim=192, value_head_dim=128,
                       q_lora_rank=512, kv_lora_rank=256, rope_head_dim=64)  # fmt: skip
    moe = Experts(num_experts=8, top_k=2, ffn_size=1024, shared_ffn_size=2048)
    block = Block(attention=latent, feed_forward=moe)
    plain, experts = block_matmuls(block, 2048)
    counted = count_block(block, 2048)

    assert 8 * sum(one.n * one.k for one in experts) == counted.expert
    bottleneck_norms = 512 + 256
    rest = counted.total - counted.expert - counted.norms - bottleneck_norms
    assert sum(one.n * one.k for one in plain) == rest


@pytest.mark.parametrize(
    ("head", "outputs"), [(Head.LANGUAGE, [1000]), (Head.MASKED, [64, 1000]), (Head.NONE, [])]
)
def test_a_head_multiplies_onto_the_vocabulary(head: Head, outputs: list[int]):
    block = Block(attention=ATTENTION, feed_forward=Mlp(ffn_size=64, gated=False))
    model = ModelSpec(name="m", hidden_size=64, stack=((block, 1),), vocab_size=1000, head=head)

    assert [one.n for one in head_matmuls(model)] == outputs


def test_a_causal_mask_halves_attention_and_a_window_bounds_it():
    whole = attention_flops(replace(ATTENTION, causal=False), 4096)

    assert whole == 4.0 * 4096 * 4096 * 32 * 128
    assert attention_flops(ATTENTION, 4096) == whole / 2
    assert attention_flops(replace(ATTENTION, window=1024), 4096) < whole / 2
    assert attention_flops(replace(ATTENTION, window=8192), 4096) == whole / 2


def test_writing_scores_out_is_slower_than_a_fused_kernel():
    fused = Recipe(seq_len=4096, global_batch=1)
    eager = replace(fused, attention=AttentionKernel.EAGER)

    fast = attention_seconds(ATTENTION, fused, DEVICE, seq_len=4096)
    slow = attention_seconds(ATTENTION, eager, DEVICE, seq_len=4096)

    assert slow[0] > fast[0]
    assert slow[1] > fast[1]


def test_heads_that_are_no_multiple_of_eight_are_slow_without_a_fused_kernel():
    recipe = Recipe(seq_len=2048, global_batch=1, attention=AttentionKernel.EAGER)
    odd = Attention(num_heads=96, num_kv_heads=96, head_dim=150)
    even = Attention(num_heads=96, num_kv_heads=96, head_dim=152)

    ratio = (
        attention_seconds(odd, recipe, DEVICE, seq_len=2048)[0]
        / attention_seconds(even, recipe, DEVICE, seq_len=2048)[0]
    )

    assert 1.5 < ratio < UNALIGNED_SLOWDOWN


def test_fp8_is_refused_where_no_hardware_has_it():
    with pytest.raises(InvalidSpec, match="cannot multiply in fp8"):
        device_of("A100-80G", Precision.FP8_MIXED)


def test_fp8_multiplies_faster_and_leaves_the_head_in_16_bit():
    plain, fp8 = device_of("H100-80G"), device_of("H100-80G", Precision.FP8_MIXED)

    assert fp8.matmul_flops > 1.5 * plain.matmul_flops
    assert fp8.head_flops == plain.head_flops


def test_a_gpu_without_bf16_falls_back_to_fp32():
    assert device_of("V100-32G").peak_flops == find_gpu("V100-32G").fp32_flops
    assert device_of("V100-32G", Precision.FP16_MIXED).peak_flops == 125e12


def test_a_lower_power_limit_lowers_the_ceiling_that_nobody_measured():
    gpu = replace(find_gpu("H100-80G"), measured_bf16_flops=0.0)
    efficiency = generation_of(gpu)
    full = make_device(gpu, Precision.BF16_MIXED, efficiency)
    half = make_device(replace(gpu, power_watts=350.0), Precision.BF16_MIXED, efficiency)

    assert 0.8 < half.matmul_flops / full.matmul_flops < 1.0
