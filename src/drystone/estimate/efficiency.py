"""What share of its peak does a GPU reach, and what does a launcher add around it?

These are the only calibrated numbers of the speed estimate. Each belongs to a GPU generation or to
a launcher, never to a dataset. How it was obtained is written behind it: *published* (the source
is named), *counted* (what a launcher's layers read and write), *calibrated* (fitted on published
training runs, with each dataset held out once to see that the rest predicts it; docs/speed.md), or
*assumed* (like the nearest kin that was measured).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Final

from drystone.describe.gpu import GpuSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuEfficiency:
    """How a GPU generation behaves in training, relative to its data sheet."""

    ceiling_share: float  # best matrix multiplication over peak, where the catalogue has none
    sustained_share: float  # of that ceiling, inside a long training step: clocks, power, caches
    flops_per_tile_slot: float  # peak 16-bit rate of one multiprocessor: how much runs at once
    attention_forward_share: float  # fused attention over the 16-bit peak, long sequences
    attention_backward_share: float
    host_slowness: float  # time its usual hosts take to enqueue work; an H100 host is 1
    reference_watts: float  # the power limit that the shares were measured at
    cudnn_attention_gain: float = 1.0  # rate of cuDNN's attention over FlashAttention 2
    bandwidth_share: float = 0.88  # published: STREAM-like copies reach 85 to 92 % on HBM
    wave_share: float = 0.15  # calibrated: empty part of the last wave of tiles
    ramp_depth: float = 120.0  # calibrated: inner depth that filling and draining a tile costs


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherEfficiency:
    """What a launcher's code adds around the arithmetic."""

    hidden_passes: float  # reads and writes of a hidden-size row per token and layer, forward
    ffn_passes: float  # the same of a feed-forward row, gated
    loss_bytes: float  # bytes moved per logit by a plain loss, forward and backward together
    layer_host_seconds: float  # host time to enqueue one layer, forward, on an H100 host
    step_host_seconds: float  # host time per optimizer step: data, clipping, logging
    overlap_share: float  # of compute time that data-parallel communication hides behind
    reduce_bytes: float  # per gradient when the precision is bf16-mixed
    optimizer_bytes: float  # moved per parameter by the Adam step, fp32 states
    selective_share: float  # of a forward pass that "selective" recomputation repeats; 0: attention
    attention_share: float = 1.0  # of the rate of FlashAttention 2, by older kernels
    uses_cudnn_attention: bool = False
    fp8_passes: float = 5.0  # passes over a row that casts to fp8 add; 2.5 when compiled
    won_back_share: float = 0.0  # of what long steps lose of the ceiling, by tuned layers
    tensor_hidden_share: float = 0.0  # share of tensor-parallel communication that compute hides
    send_hidden_share: float = 0.0  # share of an interleaved pipeline's sends that compute hides
    gather_share: float = 1.0  # of the bandwidth, by the gathers and scatters of ZeRO-3
    network_gather_share: float = 1.0  # the same between nodes
    tensor_host_share: float = 0.065  # of a layer's host time that tensor parallelism adds
    context_host_share: float = 0.2  # the same for context parallelism
    shard_host_share: float = 0.1  # the same for the hooks of ZeRO-3
    send_host_seconds: float = 860e-6  # host time of one exchange with the next pipeline stage
    mean_sequence_tokens: float = float("inf")  # where padding is not computed: the mean length
    masked_head_share: float = 1.0  # of positions for which a masked-language head is computed


# Tile slots: the peak of the best known part over its number of multiprocessors (data sheets).
# Attention: published, arXiv:2307.08691 (A100: 190 to 200 TFLOP/s forward of 312, 170 backward;
# H100: 335 TFLOP/s with the same kernels), less what short rows cost; cuDNN on Hopper reaches 1.5
# times that (arXiv:2407.08608 figure 5). On Blackwell the same kernels are assumed to run as on
# Hopper, and cuDNN to gain a little more.
_GPUS: Final = MappingProxyType(
    {
        "Volta": GpuEfficiency(
            ceiling_share=0.80,  # assumed; github issues report 95 to 105 of 125 TFLOP/s
            sustained_share=0.92,  # calibrated
            flops_per_tile_slot=1.56e12,
            attention_forward_share=0.35, attention_backward_share=0.30,  # assumed
            host_slowness=1.6,  # assumed: hosts a little older than the A100's
            reference_watts=300,
        ),
        "Turing": GpuEfficiency(
            ceiling_share=0.75, sustained_share=0.85,  # assumed: as Volta, lower power limits
            flops_per_tile_slot=1.7e12,
            attention_forward_share=0.35, attention_backward_share=0.30,  # assumed
            host_slowness=1.6, reference_watts=260,
        ),
        "Ampere": GpuEfficiency(
            ceiling_share=0.869,  # published: 271.2 of 312 TFLOP/s (catalogue)
            sustained_share=0.96,  # calibrated
            flops_per_tile_slot=2.89e12,
            attention_forward_share=0.60, attention_backward_share=0.52,  # published
            host_slowness=1.48,  # calibrated: EPYC 7002 hosts
            reference_watts=400,
        ),
        "Ada": GpuEfficiency(
            ceiling_share=0.85, sustained_share=0.80,  # assumed: as Ampere, less power for its peak
            flops_per_tile_slot=2.55e12,
            attention_forward_share=0.50, attention_backward_share=0.40,  # assumed
            host_slowness=1.2, reference_watts=350,
        ),
        "Hopper": GpuEfficiency(
            ceiling_share=0.803,  # published: 794.5 of 989 TFLOP/s (catalogue)
            sustained_share=0.835,  # calibrated: clocks sink under long load at 700 W
            flops_per_tile_slot=7.49e12,
            attention_forward_share=0.40, attention_backward_share=0.32,  # published
            cudnn_attention_gain=1.5, host_slowness=1.0,
            reference_watts=700,
        ),
        # Consumer parts; the data-centre generation follows.
        "Blackwell 2.0": GpuEfficiency(
            ceiling_share=0.85, sustained_share=0.80, flops_per_tile_slot=1.23e12,  # as Ada
            attention_forward_share=0.50, attention_backward_share=0.40,
            host_slowness=1.2, reference_watts=575,
        ),
        "Blackwell": GpuEfficiency(
            ceiling_share=0.776,  # published: 1745 of 2250 TFLOP/s (catalogue)
            sustained_share=0.66,  # calibrated on few runs
            flops_per_tile_slot=15.2e12,
            attention_forward_share=0.18, attention_backward_share=0.14,  # assumed
            cudnn_attention_gain=2.4, host_slowness=1.22,  # calibrated: Grace hosts
            reference_watts=1000,
        ),
        "CDNA": GpuEfficiency(
            ceiling_share=0.52,  # published: 668.4 of 1307 TFLOP/s (catalogue)
            sustained_share=0.70,  # calibrated on four runs
            flops_per_tile_slot=4.3e12,
            attention_forward_share=0.18, attention_backward_share=0.13,  # assumed
            host_slowness=1.0, reference_watts=750,
        ),
    }
)  # fmt: skip
# Kepler and Pascal: no tensor cores, so multiplications are closer to what little peak there is.
_OLDER: Final = GpuEfficiency(
    ceiling_share=0.85, sustained_share=0.95, flops_per_tile_slot=0.2e12,
    attention_forward_share=0.3, attention_backward_share=0.25,
    host_slowness=2.0, reference_watts=250,
)  # fmt: skip

# Two norms and two residual additions read and write ten rows; norms in fp32 and rotations by
# single operations another eight (counted).
_TORCH: Final = LauncherEfficiency(
    hidden_passes=18, ffn_passes=3.5,
    loss_bytes=30,  # counted: logits to fp32, log-softmax, its gradient, back to 16 bit
    layer_host_seconds=500e-6,  # assumed: 40 to 50 kernels of 10 us
    step_host_seconds=20e-3,  # calibrated
    overlap_share=0.9,  # published: FSDP and DDP prefetch a layer ahead
    reduce_bytes=2, optimizer_bytes=40,  # counted: read and write weight and two moments, clip
    selective_share=0.5,  # published: torchtitan saves every second multiplication
)  # fmt: skip
# Norms in fp32 by single operations, rotations and masks unfused.
_HUGGING_FACE: Final = replace(
    _TORCH, hidden_passes=46, ffn_passes=6, loss_bytes=40, layer_host_seconds=900e-6,
    step_host_seconds=30e-3, optimizer_bytes=60,
)  # fmt: skip
# ZeRO-3 fetches weights tensor by tensor, and hooks run around every module.
_DEEPSPEED_GATHER_SHARE: Final = 0.27  # calibrated
_DEEPSPEED_NETWORK_SHARE: Final = 0.17  # calibrated
# Megatron's host times are those of its deterministic functional tests, the only runs that are
# bound by them; larger layers hide them.
_MEGATRON: Final = replace(
    _TORCH, hidden_passes=14, ffn_passes=3, loss_bytes=22,  # counted: fused norms, dropouts, loss
    fp8_passes=1.0,  # counted: Transformer Engine casts inside norms and activations
    send_hidden_share=0.7,  # assumed: overlap_p2p_comm is the default of interleaved schedules
    layer_host_seconds=1.68e-3, step_host_seconds=21e-3, shard_host_share=0.87,  # calibrated
    overlap_share=0.0,  # published: gradients are reduced after the backward pass unless asked
    reduce_bytes=4, selective_share=0.0,
)  # fmt: skip

_LAUNCHERS: Final = MappingProxyType(
    {
        # Layer norms in 16 bit and no rotations. Its FlashAttention is the one before the second
        # version, in Triton (calibrated).
        "composer": replace(_TORCH, hidden_passes=10, attention_share=0.69),
        "torchtitan": replace(_TORCH, reduce_bytes=4),
        "litgpt": _TORCH,
        "torch-fsdp": _TORCH,
        "pytorch": _TORCH,
        "drystone": _TORCH,
        "megatron-te": replace(_MEGATRON, uses_cudnn_attention=True),
        # The same layers as production runs use them: no deterministic kernels, communication
        # overlapped, graphs. Calibrated on NVIDIA's performance tables (fp8 on H100 and GB200).
        "nemo": replace(
            _MEGATRON, uses_cudnn_attention=True, hidden_passes=12, layer_host_seconds=400e-6,
            overlap_share=0.9, won_back_share=0.7, tensor_hidden_share=0.6, send_hidden_share=0.9,
        ),
        "megatron-local": replace(_MEGATRON, ffn_passes=4),
        # XLA compiles whole layers. Assumed.
        "maxtext": replace(
            _TORCH, hidden_passes=8, ffn_passes=3, layer_host_seconds=20e-6,
            uses_cudnn_attention=True, won_back_share=0.3,
        ),
        # XLA too, by Alpa: each stage is one executable, and gradients are reduced after the last
        # micro-batch, in order with the compute.
        "alpa": replace(
            _TORCH, hidden_passes=30,  # calibrated on BERT on A40 and A100; docs/speed.md
            ffn_passes=3,  # assumed: as maxtext
            loss_bytes=14,  # counted: 16-bit logits, biased, read three times; their gradient
            layer_host_seconds=20e-6, send_host_seconds=0.0,  # assumed: as maxtext; none shows
            overlap_share=0.0,  # assumed
        ),
        "nanotron": replace(_TORCH, reduce_bytes=4),
        "galvatron": replace(_MEGATRON, layer_host_seconds=800e-6),
        "megatron-deepspeed": replace(
            _MEGATRON, hidden_passes=33, ffn_passes=4, loss_bytes=30, optimizer_bytes=60,
            layer_host_seconds=1e-3, step_host_seconds=50e-3,
            gather_share=_DEEPSPEED_GATHER_SHARE, network_gather_share=_DEEPSPEED_NETWORK_SHARE,
        ),
        "hf-trainer": _HUGGING_FACE,
        "accelerate": _HUGGING_FACE,
        "fsdp-qlora": _HUGGING_FACE,
        "deepspeed": replace(
            _HUGGING_FACE, layer_host_seconds=2.4e-3, overlap_share=0.0,
            gather_share=_DEEPSPEED_GATHER_SHARE, network_gather_share=_DEEPSPEED_NETWORK_SHARE,
        ),
        # BERT with fused kernels; batches hold sequences of like length, so padding is not
        # computed (github:NVIDIA/LDDL), and half of Wikipedia padded to 512 is padding
        # (arXiv:2107.02027), hence 256 tokens and half a bin of 64. Logits are computed for the
        # masked positions only: 20 of 128, 80 of 512.
        "nvidia-examples": replace(
            _TORCH, hidden_passes=10, step_host_seconds=12e-3, mean_sequence_tokens=290,
            masked_head_share=0.156,
        ),
    }
)  # fmt: skip


@cache
def gpu_efficiency(gpu: GpuSpec) -> GpuEfficiency:
    """The shares of the generation that the GPU's architecture belongs to."""
    for name, efficiency in _GPUS.items():
        if gpu.architecture.startswith(name):
            return efficiency
    return _OLDER


def launcher_efficiency(launcher: str) -> LauncherEfficiency:
    """The launcher's numbers; those of plain PyTorch for one that nobody has measured."""
    return _LAUNCHERS.get(launcher, _TORCH)
