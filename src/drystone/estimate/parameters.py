"""How many parameters does a model have, to the last one, and which part of it holds them?

The counts are those of the `transformers` classes: tied matrices count once, buffers do not count.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from drystone.describe.model import (
    Attention,
    Block,
    Experts,
    Head,
    Mlp,
    ModelSpec,
    Norm,
    QkNorm,
    Recurrence,
)

_NORM_VECTORS = {Norm.LAYER: 2, Norm.LAYER_NO_BIAS: 1, Norm.RMS: 1, Norm.NO_WEIGHT: 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockParameters:
    """One layer's parameters by part. Biases stand with the matrix they belong to."""

    attention: int  # projections, their norms, sinks
    cross_attention: int = 0
    dense: int = 0  # a feed-forward network that every token passes
    expert: int = 0  # all experts of the layer together
    active_expert: int = 0  # the experts that one token passes
    shared_expert: int = 0  # experts that every token passes
    router: int = 0  # with the gate of the shared expert
    norms: int = 0
    tp_replicated: int = 0  # what every tensor-parallel rank holds whole; never experts

    @property
    def feed_forward(self) -> int:
        """The dense network, or experts, shared experts and router together."""
        return self.dense + self.expert + self.shared_expert + self.router

    @property
    def total(self) -> int:
        """All parameters of the layer."""
        return self.attention + self.cross_attention + self.feed_forward + self.norms

    @property
    def active(self) -> int:
        """The parameters that one token passes."""
        return self.total - self.expert + self.active_expert

    @property
    def tp_divided(self) -> int:
        """What tensor parallelism divides. Experts stand apart: expert parallelism divides them."""
        return self.total - self.expert - self.tp_replicated


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParameters:
    """A model's parameters by part; `runs` has one entry for each run of equal layers."""

    embedding: int  # tokens or patches, token types, a projection to hidden_size, its norm
    positions: int
    runs: tuple[tuple[BlockParameters, int], ...]
    final_norms: int
    head: int  # without what it shares with the embedding
    other: int
    tied_head: int = 0  # the matrix that the head shares; a last stage apart holds a copy of it

    @property
    def blocks(self) -> int:
        """All layers together."""
        return sum(block.total * count for block, count in self.runs)

    @property
    def around_blocks(self) -> int:
        """All that is not in a layer."""
        return self.embedding + self.positions + self.final_norms + self.head + self.other

    @property
    def total(self) -> int:
        """Every trainable parameter, tied ones once."""
        return self.blocks + self.around_blocks

    @property
    def active(self) -> int:
        """The parameters used for one token: all but the experts that it does not pass."""
        return self.around_blocks + sum(block.active * count for block, count in self.runs)


@lru_cache(maxsize=4096)
def count_block(block: Block, hidden_size: int) -> BlockParameters:
    """Count one layer."""
    attention, attention_whole = _attention(block.attention, hidden_size, block.norm)
    cross, cross_whole = 0, 0
    if block.cross_attention is not None:
        cross, cross_whole = _attention(block.cross_attention, hidden_size, block.norm)
    norms = block.num_norms * norm_parameters(block.norm, hidden_size)
    whole = attention_whole + cross_whole + norms
    feed_forward = block.feed_forward
    if isinstance(feed_forward, Mlp):
        return BlockParameters(
            attention=attention,
            cross_attention=cross,
            dense=_mlp(feed_forward, feed_forward.ffn_size, hidden_size),
            norms=norms,
            tp_replicated=whole + hidden_size * feed_forward.bias,
        )
    expert_width = feed_forward.latent_size or hidden_size
    one_expert = _mlp(feed_forward, feed_forward.ffn_size, expert_width)
    shared = 2 * hidden_size * feed_forward.latent_size  # to the width of the experts and back
    if feed_forward.shared_ffn_size:
        shared += _mlp(feed_forward, feed_forward.shared_ffn_size, hidden_size)
        whole += hidden_size * feed_forward.bias
    router = _router(feed_forward, hidden_size)
    return BlockParameters(
        attention=attention,
        cross_attention=cross,
        expert=one_expert * feed_forward.num_experts,
        active_expert=one_expert * feed_forward.top_k,
        shared_expert=shared,
        router=router,
        norms=norms,
        tp_replicated=whole + router,
    )


@lru_cache(maxsize=1024)
def count_model(model: ModelSpec) -> ModelParameters:
    """Count a whole model."""
    head, tied_head = _head(model)
    return ModelParameters(
        embedding=_embedding(model),
        positions=model.learned_positions * model.hidden_size,
        runs=tuple((count_block(block, model.hidden_size), num) for block, num in model.stack),
        final_norms=model.num_final_norms * norm_parameters(model.final_norm, model.hidden_size),
        head=head,
        other=sum(num_params for _, num_params in model.other_params),
        tied_head=tied_head,
    )


def norm_parameters(norm: Norm, width: int) -> int:
    """Parameters of one normalisation over `width` channels."""
    return _NORM_VECTORS[norm] * width


def _attention(attention: Attention, hidden_size: int, norm: Norm) -> tuple[int, int]:
    """All parameters of one mixer, and those of them that tensor parallelism repeats."""
    if attention.recurrence is not None:
        return _recurrence(attention.recurrence, hidden_size)
    count = _latent_projections if attention.is_latent else _projections
    projections, repeated = count(attention, hidden_size)
    query_width = attention.num_heads * attention.head_dim
    kv_width = attention.num_kv_heads * attention.head_dim
    out = attention.num_heads * attention.v_dim * hidden_size
    out_bias = hidden_size * attention.out_bias
    qk_norm = {
        QkNorm.NONE: 0,
        QkNorm.HEAD: norm_parameters(norm, 2 * attention.head_dim),
        QkNorm.FULL: norm_parameters(norm, query_width + kv_width),
    }[attention.qk_norm]
    sinks = attention.num_heads * attention.has_sinks
    total = projections + out + out_bias + qk_norm + sinks
    return total, repeated + out_bias + qk_norm


def _recurrence(mixer: Recurrence, hidden_size: int) -> tuple[int, int]:
    projections = mixer.in_width * (hidden_size + mixer.in_bias) + mixer.inner_width * hidden_size
    convolution = mixer.conv_width * (mixer.conv_kernel + mixer.conv_bias)
    out_bias = hidden_size * mixer.out_bias
    return projections + convolution + out_bias + mixer.small_params, out_bias


def _projections(attention: Attention, hidden_size: int) -> tuple[int, int]:
    """Queries, keys and values of ordinary attention; each rank has its own heads of them."""
    kv_width = attention.num_kv_heads * (attention.head_dim + attention.v_dim)
    queries = attention.num_heads * attention.head_dim * (1 + attention.has_output_gate)
    width = queries + kv_width
    return width * (hidden_size + attention.qkv_bias), 0


def _latent_projections(attention: Attention, hidden_size: int) -> tuple[int, int]:
    """Queries, keys and values through a bottleneck, which every rank holds whole.

    arXiv:2405.04434 section 2.1: down-projections, their RMS norms, then up-projections by head.
    """
    rows = hidden_size + attention.qkv_bias
    q_rank, kv_rank = attention.q_lora_rank, attention.kv_lora_rank
    down = rows * (kv_rank + attention.rope_head_dim) + kv_rank
    plain_head_dim = attention.head_dim - attention.rope_head_dim
    up = kv_rank * attention.num_heads * (plain_head_dim + attention.v_dim)
    query_width = attention.num_heads * attention.head_dim
    if q_rank:
        down += rows * q_rank + q_rank
        up += q_rank * query_width
    else:
        up += hidden_size * query_width  # a direct query projection never has a bias
    return down + up, down


def _mlp(shape: Mlp | Experts, ffn_size: int, hidden_size: int) -> int:
    if not ffn_size:
        return 0
    num_up = 2 if shape.gated else 1
    weights = (num_up + 1) * hidden_size * ffn_size
    return weights + (num_up * ffn_size + hidden_size) * shape.bias


def _router(experts: Experts, hidden_size: int) -> int:
    scores = experts.num_experts * (hidden_size + experts.router_bias)
    return scores + hidden_size * experts.has_shared_gate


def _embedding(model: ModelSpec) -> int:
    width = model.embedding_size or model.hidden_size
    total = model.vocab_size * width + model.token_types * model.hidden_size
    if width != model.hidden_size:
        total += width * model.hidden_size
    if model.has_embedding_norm:
        total += norm_parameters(model.final_norm, model.hidden_size)
    if model.vision is not None:
        patch = model.vision.patch_size**2 * model.vision.num_channels
        rows = patch + model.vision.patch_bias + model.vision.has_class_token
        total += rows * model.hidden_size
    return total


def _head(model: ModelSpec) -> tuple[int, int]:
    """Parameters of the head alone, and those that it shares with the embedding."""
    hidden_size = model.hidden_size
    match model.head:
        case Head.NONE:
            return 0, 0
        case Head.CLASSIFY:
            return model.num_classes * (hidden_size + model.head_bias), 0
        case Head.LANGUAGE:
            own = 0
        case Head.MASKED:
            own = hidden_size * (hidden_size + 1) + norm_parameters(model.final_norm, hidden_size)
    width = model.embedding_size or hidden_size
    if width != hidden_size:
        own += hidden_size * width
    own += model.vocab_size * model.head_bias
    matrix = model.vocab_size * width
    return (own, matrix) if model.tied_embeddings else (own + matrix, 0)
