"""What does one layer keep for its backward pass? Bytes per token, tensor by tensor.

The account follows Korthikanti et al. (arXiv:2205.05198, section 4), extended to grouped-query and
latent attention, gated MLPs, experts, adapters and kernels that keep less (or more) than
Megatron's. Everything is linear in tokens, apart from the scores of eager attention, which are
linear in tokens x keys. Splitting is linear too: a part is repeated on every tensor-parallel rank
(unless sequence parallelism splits it), the other part is divided.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from drystone.describe.model import Attention, Block, Experts, Mlp, Norm, QkNorm
from drystone.describe.recipe import (
    AttentionKernel,
    Precision,
    Recipe,
    Recompute,
    RecomputeKind,
    Tuning,
)
from drystone.estimate.launchers import Launcher


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBytes:
    """Bytes kept per token of the micro-batch."""

    whole: float = 0.0  # on every tensor-parallel rank; sequence parallelism divides it
    gathered: float = 0.0  # on every tensor-parallel rank, whatever sequence parallelism does
    divided: float = 0.0  # by tensor parallelism
    routed: float = 0.0  # copies at experts; by tensor parallelism, except for that inside experts
    inner: float = 0.0  # inside experts; by tensor parallelism
    scores: float = 0.0  # per token and key; by tensor parallelism

    def __add__(self, other: SavedBytes) -> SavedBytes:
        return SavedBytes(
            whole=self.whole + other.whole,
            gathered=self.gathered + other.gathered,
            divided=self.divided + other.divided,
            routed=self.routed + other.routed,
            inner=self.inner + other.inner,
            scores=self.scores + other.scores,
        )

    def at_most(self, other: SavedBytes) -> SavedBytes:
        """The same, nowhere more than another."""
        return SavedBytes(
            whole=min(self.whole, other.whole + other.gathered),
            gathered=min(self.gathered, other.gathered),
            divided=min(self.divided, other.divided),
            routed=min(self.routed, other.routed),
            inner=min(self.inner, other.inner),
            scores=min(self.scores, other.scores),
        )

    def scaled(self, factor: float) -> SavedBytes:
        """The same, times a factor."""
        return SavedBytes(
            whole=self.whole * factor,
            gathered=self.gathered * factor,
            divided=self.divided * factor,
            routed=self.routed * factor,
            inner=self.inner * factor,
            scores=self.scores * factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockActivations:
    """What a layer keeps: between forward and backward, and while it runs backward."""

    kept: SavedBytes  # for every micro-batch in flight
    rebuilt: SavedBytes  # for the one layer that is being recomputed; zero without recomputation


def decoder_share(recipe: Recipe) -> float:
    """Tokens on the decoder side of an encoder-decoder, as a share of `seq_len`."""
    return (recipe.decoder_seq_len or recipe.seq_len) / recipe.seq_len


def activation_width(precision: Precision) -> int:
    """Bytes of one activation element."""
    return 4 if precision in (Precision.FP32, Precision.TF32) else 2


def input_width(recipe: Recipe, launcher: Launcher) -> float:
    """Bytes of one element of a matrix product's input, as its backward pass keeps it.

    Transformer Engine keeps the narrow copy that it multiplied (`module/linear.py`), with a scale
    for 32 or 16 numbers where the format has one; others keep the wide input and cast again.
    """
    if launcher.keeps_narrow_inputs and recipe.precision in _NARROW_BYTES:
        return _NARROW_BYTES[recipe.precision]
    return float(activation_width(recipe.precision))


_NARROW_BYTES = {
    Precision.FP8_MIXED: 1.0,
    Precision.MXFP8_MIXED: 1 + 1 / 32,
    Precision.NVFP4_MIXED: 0.5 + 1 / 16,
}


@lru_cache(maxsize=4096)
def block_activations(
    block: Block, hidden_size: int, recipe: Recipe, launcher: Launcher
) -> BlockActivations:
    """One layer under the recipe's recomputation."""
    everything = saved_by_block(block, hidden_size, recipe, launcher)
    width = activation_width(recipe.precision)
    boundary = SavedBytes(whole=width * hidden_size)
    kind, every = recipe.recompute.kind, recipe.recompute.every
    if kind is RecomputeKind.NONE:
        return BlockActivations(kept=everything, rebuilt=SavedBytes())
    kept, rebuilt = boundary, everything
    if recipe.recompute.modules:
        kept, rebuilt = _kept_by_module(block, hidden_size, recipe, launcher)
    elif kind is RecomputeKind.SELECTIVE and launcher.selective_by_operator:
        kept = boundary + _kept_by_operator(block, hidden_size, recipe)
    elif kind is RecomputeKind.SELECTIVE:
        kept, rebuilt = replace(everything, scores=0.0), SavedBytes(scores=everything.scores)
    kept = kept.scaled(1 / every) + everything.scaled(1 - 1 / every)
    return BlockActivations(kept=kept, rebuilt=rebuilt)


def saved_by_block(
    block: Block, hidden_size: int, recipe: Recipe, launcher: Launcher
) -> SavedBytes:
    """All tensors that autograd keeps for one layer without recomputation."""
    saved = _norms(block, hidden_size, recipe, launcher)
    # Where there is cross-attention, a block's own tokens and those it looks at differ in number.
    share = decoder_share(recipe) if block.cross_attention is not None else 1.0
    saved += _attention(block.attention, block.norm, recipe, launcher, keys_per_token=1.0)
    saved = replace(saved, scores=saved.scores * share)
    if block.cross_attention is not None:
        cross = block.cross_attention
        saved += _attention(cross, block.norm, recipe, launcher, keys_per_token=1 / share)
    if isinstance(block.feed_forward, Mlp):
        return saved + _mlp(block.feed_forward, recipe, launcher)
    return saved + _experts(block.feed_forward, hidden_size, recipe, launcher)


def norm_bytes(norm: Norm, hidden_size: int, recipe: Recipe, launcher: Launcher) -> float:
    """What one normalisation keeps per token, its output excepted."""
    width = activation_width(recipe.precision)
    if norm is not Norm.RMS or launcher.norm_is_fused or recipe.compiled or width == 4:
        return width * hidden_size
    # Plain PyTorch: an fp32 copy of the input, and the normalised value for the weight's gradient.
    trains_weight = recipe.tuning is Tuning.FULL
    normalised = 4 if launcher.norm_output_is_fp32 else width
    return (4 + normalised * trains_weight) * hidden_size


def _norms(block: Block, hidden_size: int, recipe: Recipe, launcher: Launcher) -> SavedBytes:
    width = activation_width(recipe.precision)
    inputs = block.num_norms * norm_bytes(block.norm, hidden_size, recipe, launcher)
    # The outputs in front of attention and feed-forward network feed matrix multiplications;
    # further norms (Gemma) feed additions.
    num_inputs = 2 + (block.cross_attention is not None)
    outputs = min(block.num_norms, num_inputs) * input_width(recipe, launcher) * hidden_size
    if recipe.tuning is not Tuning.FULL:
        feeds = [
            {"q", "k", "v"} & set(recipe.lora.targets),
            {"gate", "up"} & set(recipe.lora.targets),
        ]
        outputs = sum(bool(feed) for feed in feeds[: block.num_norms]) * width * hidden_size
    masks = 2 * hidden_size if recipe.dropout else 0
    if launcher.keeps_gathered_inputs:
        return SavedBytes(whole=inputs + masks, gathered=outputs)
    return SavedBytes(whole=inputs + outputs + masks)


def _attention(
    attention: Attention,
    norm: Norm,
    recipe: Recipe,
    launcher: Launcher,
    *,
    keys_per_token: float,
) -> SavedBytes:
    width = activation_width(recipe.precision)
    if mixer := attention.recurrence:
        # Projections, the convolution's output, what the scan and the gate give, and the state of
        # each chunk in fp32.
        channels = mixer.in_width + mixer.conv_width + 2 * mixer.inner_width
        states = 4.0 * mixer.inner_width * mixer.state_size / mixer.chunk
        return SavedBytes(divided=width * channels + states)
    heads, kv_heads = attention.num_heads, attention.num_kv_heads
    query = heads * attention.head_dim
    if launcher.repeats_kv or attention.is_latent:
        kv_heads = heads
    key, value = kv_heads * attention.head_dim, kv_heads * attention.v_dim
    context = heads * attention.v_dim
    gate = 2 * query * attention.has_output_gate  # and the context before it is gated
    divided = width * (query + gate + keys_per_token * (key + value) + context)
    if (narrow := input_width(recipe, launcher)) < width:
        divided += narrow * context  # a copy of what attention itself keeps wide
    if attention.qk_norm is not QkNorm.NONE:
        normed = query + attention.num_kv_heads * attention.head_dim
        divided += norm_bytes(norm, normed, recipe, launcher)
    whole = 0.0
    if attention.is_latent:
        # The bottlenecks, which every rank computes: their outputs, and the same after a norm.
        whole = 2.0 * width * (attention.q_lora_rank + attention.kv_lora_rank)
    if recipe.attention is AttentionKernel.FUSED:
        log_sum_exp = 4 * heads  # one for each row of scores
        return SavedBytes(whole=whole, divided=divided + log_sum_exp)
    per_score = width + (1 + width if recipe.dropout else 0)  # softmax; mask and its output
    return SavedBytes(whole=whole, divided=divided, scores=per_score * heads)


def _mlp(mlp: Mlp, recipe: Recipe, launcher: Launcher) -> SavedBytes:
    width = activation_width(recipe.precision)
    tensors = _mlp_tensors(gated=mlp.gated, recipe=recipe, launcher=launcher)
    if recipe.tuning is not Tuning.FULL and "down" not in recipe.lora.targets:
        tensors -= 1  # a frozen matrix does not need its input
    saved = width * tensors
    if recipe.tuning is Tuning.FULL:
        saved -= width - input_width(recipe, launcher)
    return SavedBytes(divided=saved * mlp.ffn_size)


def _mlp_tensors(*, gated: bool, recipe: Recipe, launcher: Launcher) -> float:
    """How many tensors as wide as the feed-forward size are kept."""
    if not gated:
        return 2.0
    return min(launcher.gated_tensors, 3.0) if recipe.compiled else launcher.gated_tensors


def _experts(experts: Experts, hidden_size: int, recipe: Recipe, launcher: Launcher) -> SavedBytes:
    width = activation_width(recipe.precision)
    tensors = _mlp_tensors(gated=experts.gated, recipe=recipe, launcher=launcher)
    # Each routed copy keeps its dispatched input, the network's tensors, and the output that the
    # router's weight multiplies. Rows lie on all `etp` ranks that divide an expert; the others each
    # send their own part of the sequence (`moe/token_dispatcher.py` of Megatron).
    router = 3 * 4.0 * experts.num_experts  # logits, probabilities, routing map
    narrow = input_width(recipe, launcher)
    return SavedBytes(
        whole=router,
        routed=(width + narrow) * experts.top_k * (experts.latent_size or hidden_size),
        inner=(width * (tensors - 1) + narrow) * experts.top_k * experts.ffn_size,
        divided=(width * (tensors - 1) + narrow) * experts.shared_ffn_size,
    )


def _kept_by_module(
    block: Block, hidden_size: int, recipe: Recipe, launcher: Launcher
) -> tuple[SavedBytes, SavedBytes]:
    """Megatron's `recompute_modules`: what is kept, and what the module at work has rebuilt.

    `layernorm` drops the outputs of norms, `mla_up_proj` what is projected up from the
    bottlenecks, `moe_act` the product that enters an expert's second matrix, `mlp` and
    `shared_experts` all inside a dense or shared network, `moe` all behind the router's input
    (github:NVIDIA/Megatron-LM, `transformer_config.py`).
    """
    modules, width = recipe.recompute.modules, activation_width(recipe.precision)
    narrow = input_width(recipe, launcher)
    plain = replace(recipe, recompute=Recompute())
    everything = saved_by_block(block, hidden_size, plain, launcher)
    dropped = SavedBytes(scores=everything.scores if "core_attn" in modules else 0.0)
    ffn, attention = block.feed_forward, block.attention
    if "layernorm" in modules:
        dropped += SavedBytes(whole=2.0 * narrow * hidden_size)
    if "mla_up_proj" in modules and attention.is_latent:
        wide = attention.num_heads * (2 * attention.head_dim + attention.v_dim)
        dropped += SavedBytes(divided=width * wide)
    tensors = _mlp_tensors(recipe=recipe, launcher=launcher, gated=ffn.gated)
    if isinstance(ffn, Mlp):
        if "mlp" in modules:
            dropped += _mlp(ffn, recipe, launcher)
    elif "moe" in modules:
        dropped += _experts(ffn, hidden_size, recipe, launcher)
    else:
        if "moe_act" in modules:
            dropped += SavedBytes(inner=narrow * ffn.top_k * ffn.ffn_size)
        if "shared_experts" in modules:
            dropped += SavedBytes(divided=(width * (tensors - 1) + narrow) * ffn.shared_ffn_size)
    dropped = dropped.at_most(everything)
    return everything + dropped.scaled(-1.0), dropped


def _kept_by_operator(block: Block, hidden_size: int, recipe: Recipe) -> SavedBytes:
    """Selective recomputation in torch: every second matrix product and the attention output."""
    width = activation_width(recipe.precision)
    attention = block.attention
    query = attention.num_heads * attention.head_dim
    value = attention.num_kv_heads * attention.v_dim
    context = attention.num_heads * attention.v_dim
    kept = width * (query + value + context) + 4 * attention.num_heads
    if isinstance(block.feed_forward, Experts):
        routed = block.feed_forward.top_k * width * block.feed_forward.ffn_size
        return SavedBytes(divided=kept, inner=routed, whole=width * hidden_size)
    return SavedBytes(divided=kept + width * block.feed_forward.ffn_size, whole=width * hidden_size)
