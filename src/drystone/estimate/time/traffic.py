"""Bytes that memory-bound work of a layer moves per token: norms, activations, casts, adapters."""

from __future__ import annotations

from drystone.describe.model import Attention, Block, Mlp
from drystone.describe.recipe import LOW_PRECISIONS, Loss, Precision, Recipe, Tuning
from drystone.estimate.launchers import LauncherEfficiency
from drystone.estimate.time.experts import expert_habits

# Passes over a row that quantising adds, over those of one scale a tensor. Counted: blocks are
# quantised once along rows and once along columns, with their scales; in 4 bit after a rotation.
_QUANTISE_SHARE = {Precision.MXFP8_MIXED: 1.5, Precision.NVFP4_MIXED: 2.0}
# Passes over a routed row where experts have biases (GPT-OSS). Counted in Megatron's `_apply_bias`:
# expert by expert, multiplied by the routing weight and added in fp32, joined, cast back; the same
# for the wider row inside.
_BIASED_ROW_PASSES = 20.0


def kv_width(attention: Attention) -> int:
    """Channels of the keys and values of one token; a state is handed on once a chunk only."""
    if attention.recurrence is not None:
        return 0
    return attention.num_kv_heads * (attention.head_dim + attention.v_dim)


def layer_traffic(
    block: Block, hidden_size: int, recipe: Recipe, launcher: LauncherEfficiency
) -> tuple[float, float, float]:
    """Bytes that norms, rotations and activations of a layer move per token.

    What a hidden row moves, what tensor parallelism divides, and what its copies at experts move.
    """
    element = 4.0 if recipe.precision in (Precision.FP32, Precision.TF32) else 2.0
    shape = block.feed_forward
    hidden_passes, ffn_passes = launcher.hidden_passes, launcher.ffn_passes
    if recipe.compiled:
        # One kernel reads the residual stream, adds, normalises and writes; rotations fuse too.
        hidden_passes, ffn_passes = min(hidden_passes, 8.0), min(ffn_passes, 3.0)
    elif recipe.loss is not Loss.PLAIN:
        # Kernel collections that bring a fused loss (Liger, foak) fuse norms and rotations as well.
        hidden_passes, ffn_passes = min(hidden_passes, 18.0), min(ffn_passes, 4.0)
    if recipe.dropout:
        hidden_passes += 2.0
    ffn_passes *= 1.0 if shape.gated else 0.6  # no product with a gate
    extra = 0.0
    if recipe.precision in LOW_PRECISIONS:
        extra = min(launcher.fp8_passes, 2.5) if recipe.compiled else launcher.fp8_passes
        extra *= _QUANTISE_SHARE.get(recipe.precision, 1.0)
        hidden_passes += 2.0 * extra
        ffn_passes += extra
    norms = max(1, block.num_norms) / 2
    attention = block.attention
    heads_width = attention.num_heads * attention.head_dim + kv_width(attention)
    if mixer := attention.recurrence:
        # The convolution and the gate read and write what the projections made; the state of each
        # chunk is written in fp32, passed on, and read.
        heads_width = mixer.in_width + 2 * mixer.conv_width + 2 * mixer.inner_width
        heads_width += 4 * mixer.inner_width * mixer.state_size // mixer.chunk
    hidden = element * hidden_passes * hidden_size * (0.6 + 0.4 * norms)
    if isinstance(shape, Mlp):
        return hidden, element * (ffn_passes * shape.ffn_size + 2.0 * heads_width), 0.0
    # Each token is copied to its experts and gathered back, besides the activations.
    habits = expert_habits(recipe, launcher)
    row_passes = launcher.routed_passes + 2.0 * extra + _BIASED_ROW_PASSES * shape.bias
    rows = habits.row_share * row_passes * (shape.latent_size or hidden_size)
    routed = element * shape.top_k * (ffn_passes * shape.ffn_size + rows)
    split = element * (ffn_passes * shape.shared_ffn_size + 2.0 * heads_width)
    return hidden, split, routed


def adapter_bytes(block: Block, hidden_size: int, recipe: Recipe) -> float:
    """Bytes that low-rank adapters move per token: read the input, add to the output."""
    if recipe.tuning is Tuning.FULL:
        return 0.0
    return sum(2.0 * (3.0 * k + 3.0 * n) for n, k in lora_shapes(block, hidden_size, recipe))


def lora_shapes(block: Block, hidden_size: int, recipe: Recipe) -> list[tuple[int, int]]:
    """Outputs and inputs of each matrix of a layer that has an adapter."""
    attention, shape = block.attention, block.feed_forward
    queries = attention.num_heads * attention.head_dim
    values = attention.num_heads * attention.v_dim
    keys = attention.num_kv_heads * attention.head_dim
    known = {
        "q": (queries, hidden_size),
        "k": (keys, hidden_size),
        "v": (attention.num_kv_heads * attention.v_dim, hidden_size),
        "o": (hidden_size, values),
        "up": (shape.ffn_size, hidden_size),
        "down": (hidden_size, shape.ffn_size),
    }
    if shape.gated:
        known["gate"] = known["up"]
    return [known[name] for name in recipe.lora.targets if name in known]
