"""Which launcher keeps what? Conventions of training frameworks that change bytes.

The same model, recipe and layout takes different memory under different launchers: one keeps fp32
master weights beside 16-bit ones, another keeps only fp32 weights and casts on the fly; one holds
gradients in a buffer for good, another frees them after each step. Most fields are facts about the
code of that launcher; a few were inferred from published readings. `docs/launchers.md` says which.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from drystone.errors import UnknownName


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """What one framework keeps in memory, beyond what the recipe says."""

    name: str
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
    # Plain data parallelism copies gradients into buckets instead of viewing them.
    copies_buckets: bool = True
    # Every rank loads the whole model onto its GPU before sharding it.
    loads_whole: bool = False
    # Where matrices or layers are split, fp32 weights and optimizer state lie in pieces over the
    # data-parallel ranks under every ZeRO stage, and whole gradients are fp32: a layer's beside
    # the one that is being reduced.
    keeps_pieces: bool = False


_TORCH = Launcher(
    name="pytorch", keeps_master=False, norm_is_fused=False, keeps_gathered_inputs=True
)
_MEGATRON = Launcher(
    name="megatron-te",
    keeps_master=True,
    gradients_persist=True,
    copies_buckets=False,
    gated_tensors=3.0,
    logits_bytes=6.0,
    fused_logits_bytes=10.0,
    selective_by_operator=False,
    norm_is_fused=True,
)

LAUNCHERS = {
    one.name: one
    for one in (
        _TORCH,
        replace(
            _TORCH,
            name="drystone",
            repeats_kv=True,
            logits_bytes=12.0,
            fused_logits_bytes=12.0,
            keeps_pieces=True,
        ),
        replace(_TORCH, name="torch-fsdp"),
        replace(_TORCH, name="torchtitan"),
        replace(
            _TORCH, name="accelerate", step_copies=1.0, logits_bytes=14.0, frozen_inputs_linger=True
        ),
        replace(_TORCH, name="hf-trainer", step_copies=1.0, logits_bytes=14.0),
        replace(_TORCH, name="litgpt", step_copies=1.0, norm_output_is_fp32=True, loads_whole=True),
        replace(_TORCH, name="composer", logits_bytes=4.0, fused_logits_bytes=4.0),
        replace(
            _TORCH, name="fsdp-qlora", step_copies=1.0, logits_bytes=14.0, frozen_inputs_linger=True
        ),
        replace(_TORCH, name="nvidia-examples"),
        replace(_TORCH, name="maxtext"),
        _MEGATRON,
        replace(_MEGATRON, name="megatron-local"),
        replace(_MEGATRON, name="nemo"),
        replace(
            _MEGATRON,
            name="megatron-deepspeed",
            bf16_gradient_bytes=6,
            logits_bytes=12.0,
            bucket_elements=1e9,
            pipeline_buffers=2.0,
        ),
        replace(
            _MEGATRON,
            name="nanotron",
            bf16_gradient_bytes=6,
            gated_tensors=4.0,
            logits_bytes=10.0,
        ),
        replace(
            _MEGATRON,
            name="galvatron",
            keeps_master=False,
            gathered_layers=1.0,
            root_stays_gathered=False,
        ),
        replace(
            _TORCH, name="deepspeed", keeps_master=True, gradients_persist=True, logits_bytes=14.0
        ),
        replace(
            _TORCH,
            name="alpa",
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
}


def find_launcher(name: str) -> Launcher:
    """The conventions of a launcher by its name."""
    if name not in LAUNCHERS:
        raise UnknownName("launcher", name, LAUNCHERS)
    return LAUNCHERS[name]
