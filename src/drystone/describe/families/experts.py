"""Decoders with a mixture of experts: Mixtral, Qwen, Granite, GPT-OSS, DeepSeek, GLM, Llama 4."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from drystone.describe.families.llama import (
    Habits,
    qwen_habits,
    read_decoder,
    runs_of,
)
from drystone.describe.families.reader import ConfigReader
from drystone.describe.model import Attention, Block, Experts, Mlp, ModelSpec, QkNorm
from drystone.errors import InvalidSpec


def mixtral(reader: ConfigReader) -> ModelSpec:
    """Mixtral: Mistral with eight experts in every layer."""
    experts = Experts(
        num_experts=reader.size("num_local_experts", default=8),
        top_k=reader.size("num_experts_per_tok", default=2),
        ffn_size=reader.size("intermediate_size"),
        activation=reader.text("hidden_act", default="silu"),
        normalises_shares=True,
    )
    return read_decoder(reader, Habits(num_kv_heads=8), lambda index: experts)


def olmoe(reader: ConfigReader) -> ModelSpec:
    """OLMoE: experts in every layer; queries and keys are normed whole."""
    experts = Experts(
        num_experts=reader.size("num_experts", "num_local_experts", default=64),
        top_k=reader.size("num_experts_per_tok", default=8),
        ffn_size=reader.size("intermediate_size", default=2048),
        activation=reader.text("hidden_act", default="silu"),
        normalises_shares=reader.flag("norm_topk_prob", default=False),
    )
    has_bias = reader.flag("attention_bias", default=False)
    habits = Habits(qk_norm=QkNorm.FULL, qkv_bias=has_bias, out_bias=has_bias)
    return read_decoder(reader, habits, lambda index: experts)


def qwen2_moe(reader: ConfigReader) -> ModelSpec:
    """Qwen 1.5 and 2 with experts: one large shared expert behind a gate of its own."""
    experts = Experts(
        num_experts=reader.size("num_experts", "num_local_experts", default=60),
        top_k=reader.size("num_experts_per_tok", default=4),
        ffn_size=reader.size("moe_intermediate_size"),
        shared_ffn_size=reader.size("shared_expert_intermediate_size"),
        has_shared_gate=True,
    )
    habits = Habits(num_kv_heads=16, qkv_bias=reader.flag("qkv_bias", default=True))
    return _qwen_moe(reader, habits, experts)


def qwen3_moe(reader: ConfigReader) -> ModelSpec:
    """Qwen 3 with experts: none is shared."""
    experts = Experts(
        num_experts=reader.size("num_experts", "num_local_experts", default=128),
        top_k=reader.size("num_experts_per_tok", default=8),
        ffn_size=reader.size("moe_intermediate_size"),
        activation=reader.text("hidden_act", default="silu"),
        normalises_shares=reader.flag("norm_topk_prob", default=False),
    )
    has_bias = reader.flag("attention_bias", default=False)
    habits = Habits(num_kv_heads=4, qk_norm=QkNorm.HEAD, qkv_bias=has_bias, out_bias=has_bias)
    return _qwen_moe(reader, habits, experts)


def granitemoe(reader: ConfigReader) -> ModelSpec:
    """Granite 3 with experts."""
    experts = Experts(
        num_experts=reader.size("num_local_experts", default=8),
        top_k=reader.size("num_experts_per_tok", default=2),
        ffn_size=reader.size("intermediate_size"),
    )
    has_bias = reader.flag("attention_bias", default=False)
    habits = Habits(qkv_bias=has_bias, out_bias=has_bias)
    return read_decoder(reader, habits, lambda index: experts)


def gpt_oss(reader: ConfigReader) -> ModelSpec:
    """GPT-OSS: biases everywhere, a learned sink per head, every other layer with a window."""
    experts = Experts(
        num_experts=reader.size("num_local_experts", "num_experts", default=128),
        top_k=reader.size("num_experts_per_tok", "experts_per_token", default=4),
        ffn_size=reader.size("intermediate_size"),
        bias=True,
        router_bias=True,
    )
    has_bias = reader.flag("attention_bias", default=True)
    habits = Habits(
        num_kv_heads=8,
        head_dim=64,
        qkv_bias=has_bias,
        out_bias=has_bias,
        has_sinks=True,
        window=128,
        is_sliding=lambda index: index % 2 == 0,
    )
    return read_decoder(reader, habits, lambda index: experts)


def glm4_moe(reader: ConfigReader) -> ModelSpec:
    """GLM-4.5 to 4.7 without the extra layer that predicts a second token."""
    expert_size = reader.size("moe_intermediate_size", default=1408)
    experts = Experts(
        num_experts=reader.size("n_routed_experts", "num_local_experts", default=128),
        top_k=reader.size("num_experts_per_tok", default=8),
        ffn_size=expert_size,
        shared_ffn_size=reader.count("n_shared_experts", default=1) * expert_size,
        num_groups=reader.size("n_group", default=1),
        top_groups=reader.size("topk_group", default=1),
    )
    first_sparse = reader.count("first_k_dense_replace", default=1)
    habits = Habits(
        num_kv_heads=8,
        qkv_bias=reader.flag("attention_bias", default=False),
        qk_norm=QkNorm.HEAD if reader.flag("use_qk_norm", default=False) else QkNorm.NONE,
    )
    return read_decoder(reader, habits, lambda index: experts if index >= first_sparse else None)


def minimax_m2(reader: ConfigReader) -> ModelSpec:
    """MiniMax-M2: attention in every layer, queries and keys normed whole."""
    experts = Experts(
        num_experts=reader.size("num_local_experts", default=256),
        top_k=reader.size("num_experts_per_tok", default=8),
        ffn_size=reader.size("intermediate_size", default=1536),
    )
    habits = Habits(num_kv_heads=8, head_dim=128, qk_norm=QkNorm.FULL)
    return read_decoder(reader, habits, lambda index: experts)


def llama4_text(reader: ConfigReader) -> ModelSpec:
    """Llama 4: one expert and a shared one for each token; three of four layers see 8192 tokens."""
    ffn_size = reader.size("intermediate_size", default=8192)
    experts = Experts(
        num_experts=reader.size("num_local_experts", default=16),
        top_k=reader.size("num_experts_per_tok", default=1),
        ffn_size=ffn_size,
        shared_ffn_size=ffn_size,
    )
    num_layers = reader.num_layers(default=48)
    step = reader.size("interleave_moe_layer_step", default=1)
    sparse = reader.indices("moe_layers") or frozenset(range(step - 1, num_layers, step))
    every = reader.size("no_rope_layer_interval", default=4)
    has_bias = reader.flag("attention_bias", default=False)
    habits = Habits(num_kv_heads=8, head_dim=128, qkv_bias=has_bias, out_bias=has_bias)
    chunk = 0 if reader.is_null("attention_chunk_size") else reader.count(
        "attention_chunk_size", default=8192
    )  # fmt: skip
    dense = {"intermediate_size": reader.size("intermediate_size_mlp", default=16384)}
    plain = replace(reader, config={**reader.config, **dense, "layer_types": None})
    habits = replace(habits, window=chunk, is_sliding=lambda index: (index + 1) % every != 0)
    return read_decoder(plain, habits, lambda index: experts if index in sparse else None)


def deepseek_v32(reader: ConfigReader) -> ModelSpec:
    """DeepSeek V3.2: V3, and in each layer an indexer that picks what attention looks at."""
    spec = deepseek_v3(reader)
    heads, head_dim = (
        reader.size("index_n_heads", default=64),
        reader.size("index_head_dim", default=128),
    )
    queries = reader.size("q_lora_rank", default=1536) * heads * head_dim
    each = queries + spec.hidden_size * (head_dim + heads) + 2 * head_dim
    spec = replace(spec, other_params=(("indexers", each * spec.num_layers),))
    window = reader.size("index_topk", default=2048)
    return replace(
        spec,
        stack=tuple(
            (replace(block, attention=replace(block.attention, window=window)), count)
            for block, count in spec.stack
        ),
    )


def deepseek_v2(reader: ConfigReader) -> ModelSpec:
    """DeepSeek V2: latent attention; the first layers are dense if the config says so."""
    return _deepseek(reader, first_dense=0, num_shared=2, groups=(1, 1))


def deepseek_v3(reader: ConfigReader) -> ModelSpec:
    """DeepSeek V3 without its extra layer that predicts a second token."""
    return _deepseek(reader, first_dense=3, num_shared=1, groups=(8, 4))


def _qwen_moe(reader: ConfigReader, habits: Habits, experts: Experts) -> ModelSpec:
    return read_decoder(reader, qwen_habits(reader, habits), qwen_experts_at(reader, experts))


def qwen_experts_at(reader: ConfigReader, experts: Experts) -> Callable[[int], Experts | None]:
    """In which layers Qwen has experts."""
    step = reader.size("decoder_sparse_step", default=1)
    dense_layers = reader.indices("mlp_only_layers")

    def experts_at(index: int) -> Experts | None:
        is_sparse = index not in dense_layers and (index + 1) % step == 0
        return experts if is_sparse else None

    return experts_at


def _deepseek(
    reader: ConfigReader, *, first_dense: int, num_shared: int, groups: tuple[int, int]
) -> ModelSpec:
    attention = _latent_attention(reader)
    if reader.flag("mlp_bias", default=False):
        raise InvalidSpec(
            "mlp_bias is true, which would give biases to some networks of a layer only",
            where=reader.where,
            hint="No published DeepSeek has it: set it to false",
        )
    mlp = Mlp(ffn_size=reader.size("intermediate_size"), gated=True, activation="silu")
    expert_size = reader.size("moe_intermediate_size")
    if reader.is_null("n_shared_experts"):
        num_shared = 0
    num_groups = reader.size("n_group", default=groups[0])
    experts = Experts(
        num_experts=reader.size("n_routed_experts", "num_local_experts"),
        top_k=reader.size("num_experts_per_tok"),
        ffn_size=expert_size,
        shared_ffn_size=reader.count("n_shared_experts", default=num_shared) * expert_size,
        num_groups=num_groups,
        top_groups=min(num_groups, reader.size("topk_group", default=groups[1])),
    )
    first_sparse = reader.count("first_k_dense_replace", default=first_dense)
    every = reader.size("moe_layer_freq", default=1)

    def block_at(index: int) -> Block:
        is_sparse = index >= first_sparse and index % every == 0
        return Block(attention=attention, feed_forward=experts if is_sparse else mlp)

    return ModelSpec(
        name=reader.name,
        hidden_size=reader.size("hidden_size"),
        stack=runs_of(block_at(index) for index in range(reader.num_layers())),
        vocab_size=reader.size("vocab_size"),
        tied_embeddings=reader.flag("tie_word_embeddings", default=False),
        context_length=reader.count("max_position_embeddings"),
    )


def _latent_attention(reader: ConfigReader) -> Attention:
    has_bias = reader.flag("attention_bias", default=False)
    num_heads = reader.size("num_attention_heads")
    rope_head_dim = reader.size("qk_rope_head_dim", default=64)
    q_lora_rank = 0 if reader.is_null("q_lora_rank") else reader.size("q_lora_rank", default=1536)
    return Attention(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=reader.size("qk_nope_head_dim", default=128) + rope_head_dim,
        value_head_dim=reader.size("v_head_dim", default=128),
        qkv_bias=has_bias,
        out_bias=has_bias,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=reader.size("kv_lora_rank", default=512),
        rope_head_dim=rope_head_dim,
    )
