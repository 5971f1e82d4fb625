"""Launchers: what each training framework keeps in memory, and what it adds to the arithmetic.

The same model, recipe and layout takes different memory under different launchers: one keeps fp32
master weights beside 16-bit ones, another keeps only fp32 weights and casts on the fly; one holds
gradients in a buffer for good, another frees them after each step. Most of these are facts about
the code of that launcher; a few were inferred from published readings (docs/launchers.md).

`LauncherEfficiency` and the facts about GPU generations (`describe/generations.py`) are the only
calibrated numbers of the speed estimate. Each belongs to a launcher or to a generation, never to a
dataset. How it was obtained is written beside it: *published* (the source is named), *counted*
(what a launcher's layers read and write), *calibrated* (fitted on published training runs, with
each dataset held out once to see that the rest predicts it; docs/speed.md), or *assumed* (like the
nearest kin that was measured).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from drystone.describe.chosen import split_name, values_without
from drystone.errors import UnknownName
from drystone.units import MiB


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
    # Mixtures of experts, where the recipe leaves it to the launcher.
    expert_dispatch: str = "alltoall"
    cuda_graphs: str = "none"
    # Host time to route, dispatch and combine in one layer and direction, on an H100 host.
    dispatch_host_seconds: float = 3e-3  # all-to-all: counts to the host, which waits for them
    fused_host_seconds: float = 2e-3
    expert_hidden_share: float = 0.7  # of the dispatch, where it runs beside compute
    routed_passes: float = 6.0  # reads and writes of a routed row: permuted, sent, weighed, added
    fused_row_share: float = 0.5  # of those, where a graph over the step fuses them


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """What one framework keeps in memory, beyond what the recipe says, and how fast its code is."""

    name: str
    speed: LauncherEfficiency
    # Mixed precision: True keeps 16-bit weights and an fp32 master copy (Megatron, DeepSpeed);
    # False keeps fp32 weights and casts them when a layer runs (FSDP, accelerate).
    keeps_master: bool
    # Bytes of one gradient element under bf16-mixed and fp16-mixed.
    bf16_gradient_bytes: int = 4
    fp16_gradient_bytes: int = 2
    # Gradients live in a buffer for the whole run, not only between backward and step.
    gradients_persist: bool = False
    # fp32 copies of 16-bit gradients made for the step (and kept until the next one).
    casts_gradients_for_step: bool = True
    # The optimizer's temporaries in the step, in units of one parameter-sized tensor.
    step_copies: float = 0.0
    # RMS norms written out in plain PyTorch keep an fp32 copy of their input.
    norm_is_fused: bool = True
    norm_output_is_fp32: bool = False  # the normalised value is kept in fp32 too
    # A gated MLP keeps gate, up, activated gate and product (4), or without the third (3).
    gated_tensors: float = 4.0
    # Plain PyTorch attention repeats grouped keys and values up to the number of heads.
    repeats_kv: bool = False
    # Bytes per element of logits at the peak around the loss: see docs/launchers.md.
    logits_bytes: float = 10.0
    fused_logits_bytes: float = 8.0  # with a loss kernel that writes its gradient in place
    # What 'selective' recomputation means: the attention core (Megatron) or by operator (torch).
    selective_by_operator: bool = True
    # Under sequence parallelism, the gathered input of a product is kept, not gathered again.
    keeps_gathered_inputs: bool = False
    # Layers whose weights are gathered at once under ZeRO-3, and whether embedding and head are
    # one unit with the root, which stays gathered from forward to backward.
    gathered_layers: float = 2.0
    root_stays_gathered: bool = True
    # A bucket through which gradients are reduced, in elements (0: none beside the gradients).
    bucket_elements: float = 0.0
    # Copies of a stage's input and output kept per micro-batch in flight (DeepSpeed's pipeline).
    pipeline_buffers: float = 0.0
    # FSDP1 hooks on the inputs of frozen layers hold inputs and their gradients until the end.
    frozen_inputs_linger: bool = False
    # In fp8 or fp4, the inputs of products are kept as narrow as they were multiplied.
    keeps_narrow_inputs: bool = False
    # QLoRA: embeddings, head and norms become fp32, and with them all that runs between layers.
    upcasts_quantised: bool = False
    # Plain data parallelism copies gradients into buckets instead of viewing them.
    copies_buckets: bool = True
    # Every rank loads the whole model onto its GPU before sharding it.
    loads_whole: bool = False
    # Where matrices or layers are split, fp32 weights and optimizer state lie in pieces over the
    # data-parallel ranks under every ZeRO stage, and whole gradients are fp32: a layer's beside
    # the one that is being reduced.
    keeps_pieces: bool = False
    # The caching allocator: the share of memory freed by one moment that the next cannot use again,
    # on one stream and where collectives allocate on their own; what rounding and splitting of
    # blocks costs, of the peak; and the buffers of one communicator, outside the allocator.
    cache_share_alone: float = 0.3
    cache_share_sharded: float = 0.8
    cache_share_of_peak: float = 0.10
    communicator_bytes: float = 256 * MiB


# Two norms and two residual additions read and write ten rows; norms in fp32 and rotations by
# single operations another eight (counted).
_TORCH_SPEED = LauncherEfficiency(
    hidden_passes=18,
    ffn_passes=3.5,
    loss_bytes=30,  # counted: logits to fp32, log-softmax, its gradient, back to 16 bit
    layer_host_seconds=500e-6,  # assumed: 40 to 50 kernels of 10 us
    step_host_seconds=20e-3,  # calibrated
    overlap_share=0.9,  # published: FSDP and DDP prefetch a layer ahead
    reduce_bytes=2,
    optimizer_bytes=40,  # counted: read and write weight and two moments, clip
    selective_share=0.5,  # published: torchtitan saves every second multiplication
    # Counted: gathered, weighed in fp32, permuted for alignment, added back in fp32.
    routed_passes=20,
)
# Norms in fp32 by single operations, rotations and masks unfused.
_HUGGING_FACE_SPEED = replace(
    _TORCH_SPEED,
    hidden_passes=46,
    ffn_passes=6,
    loss_bytes=40,
    layer_host_seconds=900e-6,
    step_host_seconds=30e-3,
    optimizer_bytes=60,
)
# DeepSpeed's ZeRO-3 fetches weights tensor by tensor, and hooks run around every module.
_DEEPSPEED_GATHER_SHARE = 0.27  # calibrated
_DEEPSPEED_NETWORK_SHARE = 0.17  # calibrated
# Megatron's host times are those of its deterministic functional tests, the only runs that are
# bound by them; larger layers hide them.
_MEGATRON_SPEED = replace(
    _TORCH_SPEED,
    hidden_passes=14,  # counted, as the next two: fused norms, dropouts, loss
    ffn_passes=3,
    loss_bytes=22,
    fp8_passes=1.0,  # counted: Transformer Engine casts inside norms and activations
    routed_passes=6,  # counted: permuted and weighed in one kernel each way
    send_hidden_share=0.7,  # assumed: overlap_p2p_comm is the default of interleaved schedules
    layer_host_seconds=1.68e-3,  # calibrated, as the next three
    dispatch_host_seconds=1.68e-3,
    step_host_seconds=21e-3,
    shard_host_share=0.87,
    overlap_share=0.0,  # published: gradients are reduced after the backward pass unless asked
    reduce_bytes=4,
    selective_share=0.0,
)

_TORCH = Launcher(
    name="pytorch",
    speed=_TORCH_SPEED,
    keeps_master=False,
    norm_is_fused=False,
    keeps_gathered_inputs=True,
)
_HUGGING_FACE = replace(
    _TORCH, name="hf-trainer", speed=_HUGGING_FACE_SPEED, step_copies=1.0, logits_bytes=14.0
)
_MEGATRON = Launcher(
    name="megatron-te",
    speed=replace(_MEGATRON_SPEED, uses_cudnn_attention=True),
    keeps_master=True,
    gradients_persist=True,
    copies_buckets=False,
    gated_tensors=3.0,
    logits_bytes=6.0,
    fused_logits_bytes=10.0,
    selective_by_operator=False,
    norm_is_fused=True,
    keeps_narrow_inputs=True,
)

_ROWS = (
    _TORCH,
    replace(
        _TORCH,
        name="drystone",
        repeats_kv=True,
        logits_bytes=12.0,
        fused_logits_bytes=12.0,
        copies_buckets=False,
        keeps_pieces=True,
    ),
    replace(_TORCH, name="torch-fsdp"),
    replace(_TORCH, name="torchtitan", speed=replace(_TORCH_SPEED, reduce_bytes=4)),
    replace(
        _TORCH,
        name="automodel",
        # NeMo AutoModel: FSDP2 around layers of Transformer Engine, DeepEP between experts.
        speed=replace(
            _TORCH_SPEED,
            hidden_passes=14,  # counted: as Megatron's, which has the same layers
            ffn_passes=3,
            uses_cudnn_attention=True,
            expert_dispatch="fused",
            routed_passes=6,
            won_back_share=0.7,  # assumed: as nemo, which has the same layers
        ),
        norm_is_fused=True,
        gated_tensors=3.0,
    ),
    replace(_HUGGING_FACE, name="accelerate", frozen_inputs_linger=True),
    replace(_HUGGING_FACE, upcasts_quantised=True),
    replace(_TORCH, name="litgpt", step_copies=1.0, norm_output_is_fp32=True, loads_whole=True),
    replace(
        _TORCH,
        name="composer",
        # Layer norms in 16 bit and no rotations. Its FlashAttention is the one before the second
        # version, in Triton (calibrated).
        speed=replace(_TORCH_SPEED, hidden_passes=10, attention_share=0.69),
        logits_bytes=4.0,
        fused_logits_bytes=4.0,
    ),
    replace(_HUGGING_FACE, name="fsdp-qlora", frozen_inputs_linger=True),
    replace(
        _TORCH,
        name="nvidia-examples",
        # BERT with fused kernels; batches hold sequences of like length, so padding is not
        # computed (github:NVIDIA/LDDL), and half of Wikipedia padded to 512 is padding
        # (arXiv:2107.02027), hence 256 tokens and half a bin of 64. Logits are computed for the
        # masked positions only: 20 of 128, 80 of 512.
        speed=replace(
            _TORCH_SPEED,
            hidden_passes=10,
            step_host_seconds=12e-3,
            mean_sequence_tokens=290,
            masked_head_share=0.156,
        ),
    ),
    replace(
        _TORCH,
        name="maxtext",
        # XLA compiles whole layers. Assumed.
        speed=replace(
            _TORCH_SPEED,
            hidden_passes=8,
            ffn_passes=3,
            layer_host_seconds=20e-6,
            dispatch_host_seconds=20e-6,
            uses_cudnn_attention=True,
            won_back_share=0.3,
        ),
    ),
    _MEGATRON,
    replace(_MEGATRON, name="megatron-local", speed=replace(_MEGATRON_SPEED, ffn_passes=4)),
    replace(
        _MEGATRON,
        name="nemo",
        # The same layers as production runs use them: no deterministic kernels, communication
        # overlapped, graphs. Calibrated on NVIDIA's performance tables (fp8 on H100 and GB200).
        speed=replace(
            _MEGATRON.speed,
            hidden_passes=12,
            layer_host_seconds=400e-6,
            overlap_share=0.9,
            won_back_share=0.7,
            tensor_hidden_share=0.6,
            send_hidden_share=0.9,
            expert_dispatch="fused",  # published: the recipes of 2026 (HybridEP)
            cuda_graphs="layers",
            # Calibrated on Megatron-Bridge's tables, releases 25.11 to 26.04, at one sequence a
            # micro-batch (Qwen3-30B on B200: 8.8 ms a layer), and its cards of GPT-OSS.
            dispatch_host_seconds=5.5e-3,
            fused_host_seconds=3e-3,
        ),
        # Its performance recipes (`perf_recipes/_common.py`, 2026-08): gradients are reduced in
        # 16 bit, and Transformer Engine's loss writes the gradient in place of 16-bit logits.
        bf16_gradient_bytes=2,
        logits_bytes=2.0,
        fused_logits_bytes=2.0,
    ),
    replace(
        _MEGATRON,
        name="megatron-deepspeed",
        speed=replace(
            _MEGATRON_SPEED,
            hidden_passes=33,
            ffn_passes=4,
            loss_bytes=30,
            optimizer_bytes=60,
            layer_host_seconds=1e-3,
            step_host_seconds=50e-3,
            gather_share=_DEEPSPEED_GATHER_SHARE,
            network_gather_share=_DEEPSPEED_NETWORK_SHARE,
        ),
        bf16_gradient_bytes=6,
        logits_bytes=12.0,
        bucket_elements=1e9,
        pipeline_buffers=2.0,
    ),
    replace(
        _MEGATRON,
        name="nanotron",
        speed=replace(_TORCH_SPEED, reduce_bytes=4),
        bf16_gradient_bytes=6,
        gated_tensors=4.0,
        logits_bytes=10.0,
    ),
    replace(
        _MEGATRON,
        name="galvatron",
        speed=replace(_MEGATRON_SPEED, layer_host_seconds=800e-6),
        keeps_master=False,
        gathered_layers=1.0,
        root_stays_gathered=False,
    ),
    replace(
        _TORCH,
        name="deepspeed",
        speed=replace(
            _HUGGING_FACE_SPEED,
            layer_host_seconds=2.4e-3,
            overlap_share=0.0,
            gather_share=_DEEPSPEED_GATHER_SHARE,
            network_gather_share=_DEEPSPEED_NETWORK_SHARE,
        ),
        keeps_master=True,
        gradients_persist=True,
        logits_bytes=14.0,
        upcasts_quantised=True,
    ),
    replace(
        _TORCH,
        name="alpa",
        # XLA too: each stage is one executable, and gradients are reduced after the last
        # micro-batch, in order with the compute.
        speed=replace(
            _TORCH_SPEED,
            hidden_passes=30,  # calibrated on BERT on A40 and A100; docs/speed.md
            ffn_passes=3,  # assumed: as maxtext
            loss_bytes=14,  # counted: 16-bit logits, biased, read three times; their gradient
            layer_host_seconds=20e-6,  # assumed: as maxtext, as the next
            dispatch_host_seconds=20e-6,
            routed_passes=6,  # assumed: fused
            send_host_seconds=0.0,  # assumed: none shows
            overlap_share=0.0,  # assumed
        ),
        keeps_master=True,
        gradients_persist=True,
        casts_gradients_for_step=False,
        norm_is_fused=True,
        keeps_gathered_inputs=False,
        logits_bytes=4.0,
        fused_logits_bytes=4.0,
        copies_buckets=False,
    ),
)
LAUNCHERS = {launcher.name: launcher for launcher in _ROWS}


@cache
def find_launcher(name: str) -> Launcher:
    """The conventions of a launcher by its name; also `NAME without SOURCE` (`describe/chosen`)."""
    plain, source = split_name(name)
    if plain not in LAUNCHERS:
        raise UnknownName("launcher", name, LAUNCHERS)
    launcher = LAUNCHERS[plain]
    if not source:
        return launcher
    speed = values_without(source, kind="speed", owner=plain)
    habits = values_without(source, kind="launcher", owner=plain)
    return replace(launcher, speed=replace(launcher.speed, **speed), **habits)
