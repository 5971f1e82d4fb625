"""What does a launcher add around the arithmetic of a GPU?

These and the facts about GPU generations (`describe/generations.py`) are the only calibrated
numbers of the speed estimate. Each belongs to a launcher or to a generation, never to a dataset.
How it was obtained is written behind it: *published* (the source is named), *counted* (what a
launcher's layers read and write), *calibrated* (fitted on published training runs, with each
dataset held out once to see that the rest predicts it; docs/speed.md), or *assumed* (like the
nearest kin that was measured).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final


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


def launcher_efficiency(launcher: str) -> LauncherEfficiency:
    """The launcher's numbers; those of plain PyTorch for one that nobody has measured."""
    return _LAUNCHERS.get(launcher, _TORCH)
