"""Decoders whose layers mostly keep a state: Qwen3-Next, MiniMax, Jamba, Nemotron-H."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from drystone.describe.families.experts import qwen_experts_at
from drystone.describe.families.llama import Habits, read_attention, read_decoder, runs_of
from drystone.describe.families.reader import ConfigReader
from drystone.describe.model import (
    Attention,
    Block,
    Experts,
    Mlp,
    ModelSpec,
    QkNorm,
    Recurrence,
)
from drystone.errors import InvalidSpec

_LINEAR = "linear_attention"
_MIXERS, _NETWORKS = "M*", "-E"


def qwen3_next(reader: ConfigReader) -> ModelSpec:
    """Qwen3-Next: three gated delta nets, then one gated attention; many small experts."""
    every = reader.size("full_attention_interval", default=4)
    kinds = reader.each_layer(
        "layer_types",
        reader.num_layers(default=48),
        lambda index: "full_attention" if (index + 1) % every == 0 else _LINEAR,
    )
    experts = Experts(
        num_experts=reader.size("num_experts", "num_local_experts", default=512),
        top_k=reader.size("num_experts_per_tok", default=10),
        ffn_size=reader.size("moe_intermediate_size", default=512),
        shared_ffn_size=reader.size("shared_expert_intermediate_size", default=512),
        has_shared_gate=True,
    )
    has_bias = reader.flag("attention_bias", default=False)
    habits = Habits(
        num_kv_heads=2,
        head_dim=256,
        qk_norm=QkNorm.HEAD,
        qkv_bias=has_bias,
        out_bias=has_bias,
        is_sliding=lambda index: False,
    )
    spec = read_decoder(reader, habits, qwen_experts_at(reader, experts))
    delta_net = _delta_net(reader)

    def change(index: int, block: Block) -> Block:
        if kinds[index] == _LINEAR:
            return replace(block, attention=delta_net)
        return replace(block, attention=replace(block.attention, has_output_gate=True))

    return _with_layers(spec, change)


def minimax(reader: ConfigReader) -> ModelSpec:
    """MiniMax-01 and M1: lightning attention in most layers, experts in all."""
    kinds = reader.each_layer(
        "layer_types",
        reader.num_layers(),
        lambda index: _LINEAR if (index + 1) % 2 else "full_attention",
    )
    experts = Experts(
        num_experts=reader.size("num_local_experts", default=8),
        top_k=reader.size("num_experts_per_tok", default=2),
        ffn_size=reader.size("intermediate_size"),
    )
    habits = Habits(num_kv_heads=8, is_sliding=lambda index: False)
    spec = read_decoder(reader, habits, lambda index: experts)
    attention = spec.blocks[0].attention
    width = attention.num_heads * attention.head_dim
    lightning = Attention(
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_heads,
        head_dim=attention.head_dim,
        recurrence=Recurrence(
            in_width=4 * width,  # queries, keys, values, the gate of the output
            inner_width=width,
            state_size=attention.head_dim,
            chunk=reader.size("block_size", default=256),
            small_params=width,  # a norm
        ),
    )
    return _with_layers(
        spec,
        lambda index, block: (
            replace(block, attention=lightning) if kinds[index] == _LINEAR else block
        ),
    )


def jamba(reader: ConfigReader) -> ModelSpec:
    """Jamba: one attention to seven Mambas, experts in every second layer."""
    hidden_size = reader.size("hidden_size", default=4096)
    num_layers = reader.num_layers(default=32)
    period = reader.size("attn_layer_period", default=8)
    offset = reader.count("attn_layer_offset", default=4)
    kinds = reader.each_layer(
        "layers_block_type",
        num_layers,
        lambda index: "attention" if index % period == offset else "mamba",
    )
    num_experts = reader.size("num_experts", default=16)
    expert_period = reader.size("expert_layer_period", default=2)
    expert_offset = reader.count("expert_layer_offset", default=1)
    mlp = Mlp(
        ffn_size=reader.size("intermediate_size", default=14336), gated=True, activation="silu"
    )
    top_k = min(num_experts, reader.size("num_experts_per_tok", default=2))
    experts = Experts(num_experts=num_experts, top_k=top_k, ffn_size=mlp.ffn_size)
    attention = read_attention(reader, hidden_size, Habits(num_kv_heads=8))
    mamba = _mamba(reader, hidden_size)

    def block_at(index: int) -> Block:
        is_sparse = num_experts > 1 and index % expert_period == expert_offset
        return Block(
            attention=attention if kinds[index] == "attention" else mamba,
            feed_forward=experts if is_sparse else mlp,
        )

    return ModelSpec(
        name=reader.name,
        hidden_size=hidden_size,
        stack=runs_of(block_at(index) for index in range(num_layers)),
        vocab_size=reader.size("vocab_size", default=65536),
        tied_embeddings=reader.flag("tie_word_embeddings", default=False),
        context_length=reader.count("max_position_embeddings"),
    )


def nemotron_h(reader: ConfigReader) -> ModelSpec:
    """Nemotron-H and Nemotron 3: Mamba-2, attention and networks apart, one norm each.

    A mixer and the network behind it are one layer here; a mixer alone is a layer without network.
    """
    hidden_size = reader.size("hidden_size")
    habits = Habits(num_kv_heads=8, head_dim=128)
    mixers = {
        "*": read_attention(reader, hidden_size, habits),
        "M": _mamba2(reader, hidden_size),
    }
    networks: dict[str, Callable[[], Mlp | Experts]] = {
        "-": lambda: _plain_mlp(reader),
        "E": lambda: _nemotron_experts(reader),
    }
    pattern = _nemotron_pattern(reader)
    blocks, index = [], 0
    while index < len(pattern):
        if pattern[index] not in _MIXERS:
            raise InvalidSpec(
                f"layer {index} is a feed-forward network behind another one",
                where=reader.where,
                hint="Each network must follow a mixer: M or *, then - or E",
            )
        mixer, network = mixers[pattern[index]], Mlp(ffn_size=0, gated=False)
        index += 1
        is_pair = index < len(pattern) and pattern[index] in _NETWORKS
        feed_forward = networks[pattern[index]]() if is_pair else network
        index += is_pair
        blocks.append(Block(attention=mixer, feed_forward=feed_forward, num_norms=1 + is_pair))
    return ModelSpec(
        name=reader.name,
        hidden_size=hidden_size,
        stack=runs_of(blocks),
        vocab_size=reader.size("vocab_size", default=131072),
        tied_embeddings=reader.flag("tie_word_embeddings", default=False),
        context_length=reader.count("max_position_embeddings"),
    )


def _nemotron_pattern(reader: ConfigReader) -> str:
    letters = {
        "mamba": "M",
        _LINEAR: "M",
        "attention": "*",
        "full_attention": "*",
        "moe": "E",
        "mlp": "-",
    }
    named = reader.config.get("layers_block_type") or reader.config.get("layer_types")
    reader.used.update(("layers_block_type", "layer_types", "num_hidden_layers"))
    if isinstance(named, list):
        pattern = "".join(letters.get(str(name), "?") for name in named)
    else:
        pattern = reader.text("hybrid_override_pattern").replace("|", "")
    if not pattern or set(pattern) - set(_MIXERS + _NETWORKS):
        raise InvalidSpec(
            "which layers are Mamba, attention, experts or networks is not said",
            where=reader.where,
            hint="State hybrid_override_pattern (M, *, E, -) or layers_block_type",
        )
    return pattern


def _plain_mlp(reader: ConfigReader) -> Mlp:
    return Mlp(
        ffn_size=reader.size("intermediate_size", default=21504),
        gated=False,
        bias=reader.flag("mlp_bias", default=False),
        activation=reader.text("mlp_hidden_act", default="relu2"),
    )


def _nemotron_experts(reader: ConfigReader) -> Experts:
    num_shared = reader.count("n_shared_experts", default=1)
    shared = reader.size("moe_shared_expert_intermediate_size", default=7688)
    return Experts(
        num_experts=reader.size("n_routed_experts", default=8),
        top_k=reader.size("num_experts_per_tok", default=2),
        ffn_size=reader.size("moe_intermediate_size", default=7688),
        gated=False,
        activation=reader.text("mlp_hidden_act", default="relu2"),
        shared_ffn_size=shared if num_shared else 0,
        num_groups=reader.size("n_group", default=1),
        top_groups=reader.size("topk_group", default=1),
        latent_size=reader.count("moe_latent_size"),
    )


def _mamba2(reader: ConfigReader, hidden_size: int) -> Attention:
    """arXiv:2405.21060: one projection makes gate, input, state's keys and values, time steps."""
    heads = reader.size("mamba_num_heads", default=128)
    head_dim = reader.size("mamba_head_dim", default=64)
    groups, state = reader.size("n_groups", default=8), reader.size("ssm_state_size", default=128)
    inner, mixed = heads * head_dim, 2 * groups * state
    has_bias = reader.flag("use_bias", default=False)
    return Attention(
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=head_dim,
        recurrence=Recurrence(
            in_width=2 * inner + mixed + heads,
            inner_width=inner,
            state_size=state,
            chunk=reader.size("chunk_size", default=128),
            conv_width=inner + mixed,
            conv_kernel=reader.size("conv_kernel", default=4),
            conv_bias=reader.flag("use_conv_bias", default=True),
            in_bias=has_bias,
            out_bias=has_bias,
            small_params=3 * heads + inner,  # decay, skip and time step of a head; a norm
        ),
    )


def _mamba(reader: ConfigReader, hidden_size: int) -> Attention:
    """arXiv:2312.00752 with Jamba's norms of time step, keys and values of the state."""
    inner = reader.size("mamba_expand", default=2) * hidden_size
    state = reader.size("mamba_d_state", default=16)
    rank = reader.config.get("mamba_dt_rank", "auto")
    reader.used.add("mamba_dt_rank")
    rank = rank if isinstance(rank, int) else -(-hidden_size // 16)
    has_bias = reader.flag("mamba_proj_bias", default=False)
    small = inner * (rank + 2 * state) + (rank + 1) * inner + inner * state + inner
    return Attention(
        num_heads=reader.size("num_attention_heads", default=32),
        num_kv_heads=reader.size("num_attention_heads", default=32),
        head_dim=inner // reader.size("num_attention_heads", default=32),
        recurrence=Recurrence(
            in_width=2 * inner,
            inner_width=inner,
            state_size=state,
            conv_width=inner,
            conv_kernel=reader.size("mamba_d_conv", default=4),
            conv_bias=reader.flag("mamba_conv_bias", default=True),
            in_bias=has_bias,
            out_bias=has_bias,
            small_params=small + rank + 2 * state,
        ),
    )


def _delta_net(reader: ConfigReader) -> Attention:
    """Gated delta net, arXiv:2412.06464."""
    key_dim = reader.size("linear_key_head_dim", default=128)
    value_dim = reader.size("linear_value_head_dim", default=128)
    key_heads = reader.size("linear_num_key_heads", default=16)
    value_heads = reader.size("linear_num_value_heads", default=32)
    keys, values = key_heads * key_dim, value_heads * value_dim
    return Attention(
        num_heads=value_heads,
        num_kv_heads=key_heads,
        head_dim=value_dim,
        recurrence=Recurrence(
            in_width=2 * keys + 2 * values + 2 * value_heads,
            inner_width=values,
            state_size=key_dim,
            chunk=64,
            conv_width=2 * keys + values,
            conv_kernel=reader.size("linear_conv_kernel_dim", default=4),
            small_params=2 * value_heads + value_dim,
        ),
    )


def _with_layers(spec: ModelSpec, change: Callable[[int, Block], Block]) -> ModelSpec:
    return replace(
        spec, stack=runs_of(change(index, block) for index, block in enumerate(spec.layers()))
    )
