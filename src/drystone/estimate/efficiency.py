"""What share of its peak does a GPU reach, and what does a launcher add around it?

These are the only calibrated numbers of the speed estimate. Each belongs to a GPU generation or to
a launcher, never to a dataset, and says how it was obtained: *published* (a paper or a measurement
named beside it), *counted* (from what the launcher's layers read and write), or *calibrated*
(fitted on published training runs, checked with each dataset held out; see docs/speed.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from drystone.describe.gpu import GpuSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuEfficiency:
    """How a GPU generation behaves in training, relative to its data sheet."""

    ceiling_share: float  # best matrix multiplication over peak, where the catalogue has none
    sustained_share: float  # of that ceiling, inside a long training step: clocks, power, caches
    flops_per_tile_slot: float  # peak 16-bit rate of one multiprocessor: how much runs at once
    attention_forward_share: float  # fused attention over the 16-bit peak, long sequences
    attention_backward_share: float
    bandwidth_share: float  # of the memory bandwidth, by element-wise kernels
    host_slowness: float  # time its usual hosts take to enqueue work; an H100 host is 1
    reference_watts: float  # the power limit that the shares were measured at
    wave_share: float = 0.5  # of a wave of tiles is empty at the end of a multiplication
    ramp_depth: float = 200.0  # inner depth that filling and draining a tile costs


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherEfficiency:
    """What a launcher's code adds around the arithmetic."""

    hidden_passes: float  # reads and writes of a hidden-size row per token and layer, forward
    ffn_passes: float  # the same of a feed-forward row
    loss_bytes: float  # bytes moved per logit by a plain loss, forward and backward together
    layer_host_seconds: float  # host time to enqueue one layer, forward, on an H100 host
    step_host_seconds: float  # host time per optimizer step: data, clipping, logging
    overlap_share: float  # of compute time that data-parallel communication can hide behind
    reduce_bytes: float  # per gradient when the precision is bf16-mixed
    optimizer_bytes: float  # moved per parameter by the Adam step, fp32 states
    selective_share: float  # of a forward pass that "selective" recomputation repeats
    matmul_share: float = 1.0  # of the rate, lost to how its layers call the multiplications


_GPUS: dict[str, GpuEfficiency] = {
    "Volta": GpuEfficiency(
        ceiling_share=0.80, sustained_share=0.9, flops_per_tile_slot=1.56e12,
        attention_forward_share=0.35, attention_backward_share=0.30,
        bandwidth_share=0.80, host_slowness=1.7, reference_watts=300,
    ),
    "Turing": GpuEfficiency(
        ceiling_share=0.75, sustained_share=0.85, flops_per_tile_slot=1.7e12,
        attention_forward_share=0.35, attention_backward_share=0.30,
        bandwidth_share=0.80, host_slowness=1.7, reference_watts=260,
    ),
    "Ampere": GpuEfficiency(
        ceiling_share=0.869, sustained_share=0.9, flops_per_tile_slot=2.89e12,
        attention_forward_share=0.55, attention_backward_share=0.48,
        bandwidth_share=0.85, host_slowness=1.6, reference_watts=400,
    ),
    "Ada": GpuEfficiency(
        ceiling_share=0.85, sustained_share=0.85, flops_per_tile_slot=2.55e12,
        attention_forward_share=0.50, attention_backward_share=0.45,
        bandwidth_share=0.85, host_slowness=1.2, reference_watts=350,
    ),
    "Hopper": GpuEfficiency(
        ceiling_share=0.803, sustained_share=0.85, flops_per_tile_slot=7.49e12,
        attention_forward_share=0.38, attention_backward_share=0.30,
        bandwidth_share=0.85, host_slowness=1.0, reference_watts=700,
    ),
    "Blackwell": GpuEfficiency(
        ceiling_share=0.776, sustained_share=0.85, flops_per_tile_slot=15.2e12,
        attention_forward_share=0.35, attention_backward_share=0.28,
        bandwidth_share=0.85, host_slowness=1.25, reference_watts=1000,
    ),
    "CDNA": GpuEfficiency(
        ceiling_share=0.52, sustained_share=0.9, flops_per_tile_slot=4.3e12,
        attention_forward_share=0.25, attention_backward_share=0.20,
        bandwidth_share=0.80, host_slowness=1.0, reference_watts=750,
    ),
}  # fmt: skip
_OLDER = GpuEfficiency(
    ceiling_share=0.75, sustained_share=0.9, flops_per_tile_slot=0.2e12,
    attention_forward_share=0.3, attention_backward_share=0.25,
    bandwidth_share=0.75, host_slowness=2.0, reference_watts=250,
)  # fmt: skip

_EAGER = LauncherEfficiency(
    hidden_passes=24, ffn_passes=5, loss_bytes=34, layer_host_seconds=500e-6,
    step_host_seconds=20e-3, overlap_share=0.8, reduce_bytes=2, optimizer_bytes=40,
    selective_share=0.5,
)  # fmt: skip
_LAUNCHERS: dict[str, LauncherEfficiency] = {
    "pytorch": _EAGER,
    "composer": _EAGER,
    "torchtitan": _EAGER,
    "torch-fsdp": _EAGER,
    "litgpt": _EAGER,
    "megatron-te": LauncherEfficiency(
        hidden_passes=16, ffn_passes=3, loss_bytes=22, layer_host_seconds=1500e-6,
        step_host_seconds=10e-3, overlap_share=0.0, reduce_bytes=4, optimizer_bytes=40,
        selective_share=0.0,
    ),
    "megatron-local": LauncherEfficiency(
        hidden_passes=20, ffn_passes=4, loss_bytes=22, layer_host_seconds=1500e-6,
        step_host_seconds=10e-3, overlap_share=0.0, reduce_bytes=4, optimizer_bytes=40,
        selective_share=0.0,
    ),
    "megatron-deepspeed": LauncherEfficiency(
        hidden_passes=24, ffn_passes=4, loss_bytes=30, layer_host_seconds=1000e-6,
        step_host_seconds=50e-3, overlap_share=0.3, reduce_bytes=4, optimizer_bytes=60,
        selective_share=0.0,
    ),
    "hf-trainer": LauncherEfficiency(
        hidden_passes=60, ffn_passes=6, loss_bytes=40, layer_host_seconds=900e-6,
        step_host_seconds=30e-3, overlap_share=0.7, reduce_bytes=2, optimizer_bytes=60,
        selective_share=0.5,
    ),
    "accelerate": LauncherEfficiency(
        hidden_passes=60, ffn_passes=6, loss_bytes=40, layer_host_seconds=900e-6,
        step_host_seconds=30e-3, overlap_share=0.7, reduce_bytes=2, optimizer_bytes=60,
        selective_share=0.5,
    ),
    "deepspeed": LauncherEfficiency(
        hidden_passes=60, ffn_passes=6, loss_bytes=40, layer_host_seconds=900e-6,
        step_host_seconds=30e-3, overlap_share=0.5, reduce_bytes=2, optimizer_bytes=60,
        selective_share=0.5,
    ),
    "nvidia-examples": LauncherEfficiency(
        hidden_passes=24, ffn_passes=4, loss_bytes=30, layer_host_seconds=500e-6,
        step_host_seconds=20e-3, overlap_share=0.5, reduce_bytes=2, optimizer_bytes=60,
        selective_share=0.5,
    ),
}  # fmt: skip


@cache
def gpu_efficiency(gpu: GpuSpec) -> GpuEfficiency:
    """The shares of the generation that the GPU's architecture belongs to."""
    for name, efficiency in _GPUS.items():
        if gpu.architecture.startswith(name):
            return efficiency
    return _OLDER


def launcher_efficiency(launcher: str) -> LauncherEfficiency:
    """The launcher's numbers; those of plain PyTorch for one that nobody has measured."""
    return _LAUNCHERS.get(launcher, _EAGER)
