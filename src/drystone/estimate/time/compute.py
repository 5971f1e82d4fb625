"""How long does one GPU compute on a micro-batch: multiplications, attention, memory-bound work?

Theory of operation. A multiplication with an output of A elements and an inner depth of D takes

    2 (A + A0) (D + D0) / rate

seconds: `rate` is what the largest multiplications reach on this GPU, A0 is half of what all
multiprocessors hold at once (the last wave of tiles is half empty on average), D0 the depth that
filling and draining a tile costs. So small shapes are slow, large ones run at the ceiling, and the
time only ever grows with the shape. Every shape of a transformer has A and D proportional to the
tokens M, to 1/tp, or to neither; hence the sum over all layers is

    M (work / tp + rows) + split / tp + fixed

with four numbers (a `Ramp`) that depend only on model, recipe and GPU, and the time of a hundred
thousand layouts is a handful of array operations. Everything else is linear in the same way:
attention in sequences, memory-bound work in tokens times a width, divided by bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from drystone.describe.generations import Generation
from drystone.describe.gpu import GpuSpec
from drystone.describe.model import Attention, Block, Experts, Head, ModelSpec
from drystone.describe.recipe import LOW_PRECISIONS, AttentionKernel, Precision, Recipe
from drystone.errors import InvalidSpec

FloatArray = npt.NDArray[np.float64]

# Tiles of 128 x 256 outputs, the usual choice of cuBLAS for large 16-bit multiplications.
_TILE_AREA = 128 * 256
PADDING_TOKENS = 64  # half a tile: what a group of tokens of one expert is padded by on average
# Sustained rates move with the power limit to this exponent: A100 at 300 and 400 W (252.9 and
# 271.2 TFLOP/s), H200 at 700 and GH200 at 900 W (794.5 and 828.6), both from the catalogue.
_POWER_EXPONENT = 0.2

# Sequence lengths at which fused attention reaches half its rate; arXiv:2307.08691 figures 4 to 6.
_HALF_LENGTH_CAUSAL = 400.0
_HALF_LENGTH = 120.0
# Rate of chunked recurrences over that of FlashAttention 2. Published: arXiv:2405.21060 figure 10
# has the scan of Mamba-2 as fast at 2,000 tokens, where it does a quarter of the FLOPs.
_RECURRENCE_SHARE = 0.25
# Without tensor cores multiplications come closer to the peak: cuBLAS reaches 14.7 of the 15.7
# TFLOP/s of a V100 in fp32.
_FP32_CEILING_SHARE = 0.93
# Tensor cores want rows of 16 bytes. For other widths cuBLAS falls back to kernels that load
# element by element; BLOOM's authors saw it with heads of 150 channels.
UNALIGNED_SLOWDOWN = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What one GPU does, every share applied."""

    matmul_flops: float  # the largest multiplications in the precision of the recipe, per second
    head_flops: float  # the same for what stays in 16 bit under fp8
    wave_area: float  # A0, in output elements
    ramp_depth: float  # D0
    attention_forward_flops: float
    attention_backward_flops: float
    cudnn_attention_gain: float
    bandwidth_bytes_per_second: float
    peak_flops: float  # of the data sheet, in the precision of the recipe
    sustained_share: float = 1.0  # of the ceiling, in the two rates above

    def won_back(self, share: float) -> float:
        """How much faster multiplications are when that share of the loss is won back."""
        return (1.0 - (1.0 - self.sustained_share) * (1.0 - share)) / self.sustained_share


@dataclass(frozen=True, slots=True)
class Matmul:
    """One multiplication of a layer: tokens x k times k x n; tp divides n (by column) or k."""

    n: int
    k: int
    by_column: bool
    count: float = 1.0
    splits: bool = True  # False: repeated whole on every tensor-parallel rank


@dataclass(frozen=True, slots=True)
class Ramp:
    """Seconds of a set of multiplications: M (work / tp + rows) + split / tp + fixed."""

    work: float = 0.0
    rows: float = 0.0
    split: float = 0.0
    fixed: float = 0.0

    def seconds(self, tokens: FloatArray, inverse_tp: FloatArray) -> FloatArray:
        """The time for `tokens` on each rank."""
        return tokens * (self.work * inverse_tp + self.rows) + (
            self.split * inverse_tp + self.fixed
        )


def make_device(gpu: GpuSpec, precision: Precision, efficiency: Generation) -> Device:
    """What the GPU does in that precision; fp32 stands in where it lacks one other than fp8."""
    peak, ceiling = _peak(gpu, precision, efficiency)
    half_peak, half_ceiling = _peak(gpu, _plain_precision(precision), efficiency)
    slots = max(1.0, half_peak / efficiency.flops_per_tile_slot)
    return Device(
        matmul_flops=ceiling * efficiency.sustained_share,
        head_flops=half_ceiling * efficiency.sustained_share,
        wave_area=efficiency.wave_share * slots * _TILE_AREA,
        ramp_depth=efficiency.ramp_depth,
        attention_forward_flops=half_peak * efficiency.attention_forward_share,
        attention_backward_flops=half_peak * efficiency.attention_backward_share,
        cudnn_attention_gain=efficiency.cudnn_attention_gain,
        bandwidth_bytes_per_second=gpu.memory_bandwidth_bytes_per_second
        * efficiency.bandwidth_share,
        peak_flops=peak,
        sustained_share=efficiency.sustained_share,
    )


def _plain_precision(precision: Precision) -> Precision:
    return Precision.BF16_MIXED if precision in LOW_PRECISIONS else precision


def _peak(gpu: GpuSpec, precision: Precision, efficiency: Generation) -> tuple[float, float]:
    """Data-sheet peak and the ceiling of real multiplications."""
    measured = 0.0
    match precision:
        case Precision.FP32:
            peak = gpu.fp32_flops
        case Precision.TF32:
            peak = gpu.tf32_flops
        case Precision.FP16 | Precision.FP16_MIXED | Precision.AMP_FP16:
            peak, measured = gpu.fp16_flops, gpu.measured_bf16_flops
        case Precision.FP8_MIXED | Precision.MXFP8_MIXED:
            _refuse_without(gpu, precision, gpu.fp8_flops, can_scale=bool(gpu.fp4_flops))
            peak, measured = gpu.fp8_flops, gpu.measured_fp8_flops
        case Precision.NVFP4_MIXED:
            _refuse_without(gpu, precision, gpu.fp4_flops, can_scale=bool(gpu.fp4_flops))
            peak = gpu.fp4_flops
            # As near to its peak as fp8: nobody has published more.
            measured = gpu.measured_fp8_flops * peak / gpu.fp8_flops
        case _:
            peak, measured = gpu.bf16_flops, gpu.measured_bf16_flops
    peak = peak or gpu.fp32_flops
    if measured:
        return peak, measured
    if precision is Precision.FP32:
        return peak, peak * _FP32_CEILING_SHARE
    power = min(1.0, gpu.power_watts / efficiency.reference_watts) if gpu.power_watts else 1.0
    return peak, peak * efficiency.ceiling_share * power**_POWER_EXPONENT


def _refuse_without(gpu: GpuSpec, precision: Precision, flops: float, *, can_scale: bool) -> None:
    """Scales for blocks of numbers came with the multipliers for 4 bit."""
    if flops and (can_scale or precision is Precision.FP8_MIXED):
        return
    raise InvalidSpec(
        f"{gpu.name} cannot multiply in {precision.removesuffix('-mixed')}",
        hint="Use bf16-mixed"
        + (" or fp8-mixed" if gpu.fp8_flops and precision is not Precision.FP8_MIXED else "")
        + ", or another GPU",
    )


def forward_ramp(matmuls: Iterable[Matmul], device: Device, *, flops: float) -> Ramp:
    """The forward pass: tokens x n outputs of depth k."""
    return _sum(
        (matmul.count, matmul.n, matmul.k, matmul.by_column, matmul.splits, flops, device)
        for matmul in matmuls
    )


def input_gradient_ramp(matmuls: Iterable[Matmul], device: Device, *, flops: float) -> Ramp:
    """The gradient of the input: tokens x k outputs of depth n."""
    return _sum(
        (matmul.count, matmul.k, matmul.n, not matmul.by_column, matmul.splits, flops, device)
        for matmul in matmuls
    )


def weight_gradient_ramp(matmuls: Iterable[Matmul], device: Device, *, flops: float) -> Ramp:
    """The gradient of the weight: n x k outputs of depth tokens."""
    work = rows = split = fixed = 0.0
    for matmul in matmuls:
        area, scale = matmul.n * matmul.k, 2.0 * matmul.count / flops
        work += scale * area * matmul.splits
        rows += scale * (device.wave_area + area * (not matmul.splits))
        split += scale * area * device.ramp_depth * matmul.splits
        fixed += scale * (device.wave_area + area * (not matmul.splits)) * device.ramp_depth
    return Ramp(work, rows, split, fixed)


def _sum(rows_in: Iterable[tuple[float, int, int, bool, bool, float, Device]]) -> Ramp:
    """Sum 2 (M out + A0) (depth + D0) / rate; tp divides `out` (by column) or `depth`."""
    work = rows = split = fixed = 0.0
    for count, out, depth, by_column, splits, flops, device in rows_in:
        scale, a0, d0 = 2.0 * count / flops, device.wave_area, device.ramp_depth
        if not splits:
            rows += scale * out * (depth + d0)
            fixed += scale * a0 * (depth + d0)
        elif by_column:
            work += scale * out * (depth + d0)
            fixed += scale * a0 * (depth + d0)
        else:
            work += scale * out * depth
            rows += scale * out * d0
            split += scale * a0 * depth
            fixed += scale * a0 * d0
    return Ramp(work, rows, split, fixed)


def block_matmuls(block: Block, hidden_size: int) -> tuple[list[Matmul], list[Matmul]]:
    """The multiplications of one layer: those of every token, and those of its experts."""
    plain = _attention_matmuls(block.attention, hidden_size)
    if block.cross_attention is not None:
        plain += _attention_matmuls(block.cross_attention, hidden_size)
    shape = block.feed_forward
    num_up = 2 if shape.gated else 1
    if not isinstance(shape, Experts):
        return [*plain, *_mlp_matmuls(num_up * shape.ffn_size, shape.ffn_size, hidden_size)], []
    plain.append(Matmul(shape.num_experts, hidden_size, by_column=True, splits=False))
    if shape.latent_size:
        plain.append(Matmul(shape.latent_size, hidden_size, by_column=True, splits=False))
        plain.append(Matmul(hidden_size, shape.latent_size, by_column=True, splits=False))
    if shape.shared_ffn_size:
        shared = shape.shared_ffn_size
        plain += _mlp_matmuls(num_up * shared, shared, hidden_size)
    width = shape.latent_size or hidden_size
    return plain, _mlp_matmuls(num_up * shape.ffn_size, shape.ffn_size, width)


def _mlp_matmuls(up: int, down: int, hidden_size: int) -> list[Matmul]:
    if not down:
        return []
    return [
        Matmul(up, hidden_size, by_column=True),
        Matmul(hidden_size, down, by_column=False),
    ]


def _attention_matmuls(attention: Attention, hidden_size: int) -> list[Matmul]:
    if mixer := attention.recurrence:
        return _mlp_matmuls(mixer.in_width, mixer.inner_width, hidden_size)
    queries = attention.num_heads * attention.head_dim * (1 + attention.has_output_gate)
    out = Matmul(hidden_size, attention.num_heads * attention.v_dim, by_column=False)
    if not attention.is_latent:
        keys_values = attention.num_kv_heads * (attention.head_dim + attention.v_dim)
        return [Matmul(queries + keys_values, hidden_size, by_column=True), out]
    q_rank, kv_rank = attention.q_lora_rank, attention.kv_lora_rank
    plain_dim = attention.head_dim - attention.rope_head_dim
    down = q_rank + kv_rank + attention.rope_head_dim
    up = attention.num_heads * (plain_dim + attention.v_dim)
    return [
        Matmul(down, hidden_size, by_column=True, splits=False),
        Matmul(queries, q_rank or hidden_size, by_column=True),
        Matmul(up, kv_rank, by_column=True),
        out,
    ]


def head_matmuls(model: ModelSpec) -> list[Matmul]:
    """The multiplications after the last layer."""
    hidden_size = model.hidden_size
    match model.head:
        case Head.NONE:
            return []
        case Head.CLASSIFY:
            return [Matmul(max(1, model.num_classes), hidden_size, by_column=True, splits=False)]
        case Head.LANGUAGE:
            return [Matmul(model.vocab_size, hidden_size, by_column=True)]
    return [
        Matmul(hidden_size, hidden_size, by_column=True, splits=False),
        Matmul(model.vocab_size, hidden_size, by_column=True),
    ]


def attention_flops(attention: Attention, seq_len: int, *, kv_len: int = 0) -> float:
    """Forward FLOPs of attention proper over one sequence; a causal mask leaves half of them."""
    if mixer := attention.recurrence:
        # Inside a chunk as attention does, causal; between chunks into the state and out of it.
        return 2.0 * seq_len * mixer.inner_width * (mixer.chunk + 2.0 * mixer.state_size)
    seen = float(kv_len or seq_len)
    if attention.window and attention.window < seen:
        share = attention.window / seen * (1 - 0.5 * attention.window / seen)
    else:
        share = 0.5
    if not attention.causal:
        share = min(1.0, attention.window / seen) if attention.window else 1.0
    dims = attention.num_heads * (attention.head_dim + attention.v_dim)
    return 2.0 * seq_len * seen * dims * share


def attention_seconds(
    attention: Attention, recipe: Recipe, device: Device, *, seq_len: int, kv_len: int = 0
) -> tuple[float, float]:
    """Forward and backward seconds of attention proper over one sequence, all heads."""
    flops = attention_flops(attention, seq_len, kv_len=kv_len)
    if attention.recurrence is not None:
        forward = flops / (device.attention_forward_flops * _RECURRENCE_SHARE)
        return forward, 2.5 * flops / (device.attention_backward_flops * _RECURRENCE_SHARE)
    if recipe.attention is AttentionKernel.FUSED:
        half = _HALF_LENGTH_CAUSAL if attention.causal else _HALF_LENGTH
        fill = seq_len / (seq_len + half) * attention.head_dim / (attention.head_dim + 24.0)
        forward = flops / (device.attention_forward_flops * fill)
        # The backward pass multiplies five times where the forward pass does twice.
        return forward, 2.5 * flops / (device.attention_backward_flops * fill)
    return _eager_seconds(attention, recipe, device, seq_len=seq_len, kv_len=kv_len or seq_len)


def _eager_seconds(
    attention: Attention, recipe: Recipe, device: Device, *, seq_len: int, kv_len: int
) -> tuple[float, float]:
    """Scores written out: two multiplications over all of them, and passes over memory."""
    scores = float(attention.num_heads) * seq_len * kv_len
    # The scores and their gradient are shallow (depth: one head) and pay the ramp; what is summed
    # over the sequence is deep and does not.
    shallow = 2.0 * (scores + device.wave_area) / device.head_flops
    deep = 2.0 * scores / device.head_flops
    forward = shallow * (attention.head_dim + device.ramp_depth) + deep * attention.v_dim
    backward = shallow * (attention.v_dim + device.ramp_depth) + deep * (
        2.0 * attention.head_dim + attention.v_dim
    )
    if attention.head_dim % 8:
        forward, backward = forward * UNALIGNED_SLOWDOWN, backward * UNALIGNED_SLOWDOWN
    dropout = 5.0 if recipe.dropout else 0.0
    # Written, normalised in one kernel, dropped out, read; the backward pass reads a little more.
    moved = scores * (8.0 + dropout) / device.bandwidth_bytes_per_second
    return forward + moved, backward + 1.3 * moved
