"""Decoders in the line of Llama: rotary positions, gated feed-forward, RMS norms."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import groupby

from drystone.describe.families.reader import ConfigReader
from drystone.describe.model import Attention, Block, Experts, Mlp, ModelSpec, Norm, QkNorm

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """What an architecture does where its config says nothing, as `transformers` has it."""

    num_kv_heads: int = 0  # 0: as many as heads
    head_dim: int = 0  # 0: hidden_size over heads
    tied_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    gated: bool = True
    activation: str = "silu"
    qk_norm: QkNorm = QkNorm.NONE
    norm: Norm = Norm.RMS
    num_norms: int = 2
    has_sinks: bool = False
    window: int = 0  # 0: none
    is_sliding: Callable[[int], bool] = lambda index: True  # by layer, where there is a window


def llama(reader: ConfigReader) -> ModelSpec:
    """Llama 1 to 3, TinyLlama, Yi and whatever else calls itself llama."""
    return read_decoder(reader, _with_llama_biases(reader, Habits()))


def granite(reader: ConfigReader) -> ModelSpec:
    """Granite 3 and PowerLM: Llama with multipliers, which have no parameters."""
    return read_decoder(reader, _with_llama_biases(reader, Habits()))


def mistral(reader: ConfigReader) -> ModelSpec:
    """Mistral: groups of heads; a window of 4096 unless the config says null."""
    return read_decoder(reader, Habits(num_kv_heads=8, window=4096))


def qwen(reader: ConfigReader) -> ModelSpec:
    """The first Qwen: its intermediate_size counts both halves of the gated network."""
    hidden_size, num_heads = reader.size("hidden_size"), reader.size("num_attention_heads")
    has_bias = not reader.flag("no_bias", default=True)
    default_dim = reader.head_dim(hidden_size, num_heads)
    block = Block(
        attention=Attention(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=reader.size("kv_channels", default=default_dim),
            qkv_bias=True,
            out_bias=has_bias,
        ),
        feed_forward=Mlp(
            ffn_size=max(1, reader.size("intermediate_size") // 2),
            gated=True,
            bias=has_bias,
            activation="silu",
        ),
    )
    return ModelSpec(
        name=reader.name,
        hidden_size=hidden_size,
        stack=((block, reader.num_layers()),),
        vocab_size=reader.size("vocab_size"),
        tied_embeddings=reader.flag("tie_word_embeddings", default=False),
        context_length=reader.count("seq_length", "max_position_embeddings"),
    )


def qwen2(reader: ConfigReader) -> ModelSpec:
    """Qwen 1.5, 2 and 2.5: a bias on queries, keys and values only."""
    return read_decoder(reader, qwen_habits(reader, Habits(num_kv_heads=32, qkv_bias=True)))


def qwen3(reader: ConfigReader) -> ModelSpec:
    """Qwen 3: no biases, queries and keys are normed by head."""
    has_bias = reader.flag("attention_bias", default=False)
    habits = Habits(
        num_kv_heads=32, head_dim=128, qk_norm=QkNorm.HEAD, qkv_bias=has_bias, out_bias=has_bias
    )
    return read_decoder(reader, qwen_habits(reader, habits))


def gemma(reader: ConfigReader) -> ModelSpec:
    """Gemma 1: heads of 256 channels, a tied head over a large vocabulary."""
    return read_decoder(reader, _gemma_habits(reader, num_kv_heads=16, num_norms=2))


def gemma2(reader: ConfigReader) -> ModelSpec:
    """Gemma 2: four norms a layer; every other layer looks back 4096 tokens only."""
    habits = _gemma_habits(reader, num_kv_heads=4, num_norms=4)
    habits = replace(habits, window=4096, is_sliding=lambda index: index % 2 == 0)
    return read_decoder(reader, habits)


def gemma3_text(reader: ConfigReader) -> ModelSpec:
    """Gemma 3: Gemma 2 with normed queries and keys; five of six layers have a window.

    Published files leave out whatever equals the class default, the vocabulary included.
    """
    defaults = {"vocab_size": 262_208, "num_attention_heads": 8}
    reader = replace(reader, config={**defaults, **reader.config})
    pattern = reader.size("sliding_window_pattern", "_sliding_window_pattern", default=6)
    habits = _gemma_habits(reader, num_kv_heads=4, num_norms=4)
    habits = replace(
        habits,
        qk_norm=QkNorm.HEAD,
        window=4096,
        is_sliding=lambda index: (index + 1) % pattern != 0,
    )
    return read_decoder(reader, habits)


def gemma3(reader: ConfigReader) -> ModelSpec:
    """Gemma 3 with a vision tower: its text part only."""
    return gemma3_text(reader.table("text_config"))


def phi3(reader: ConfigReader) -> ModelSpec:
    """Phi-3 and Phi-4: Llama with fused matrices; a window where the config states one."""
    return read_decoder(reader, Habits())


def olmo2(reader: ConfigReader) -> ModelSpec:
    """OLMo 2: norms after attention and feed-forward; queries and keys are normed whole."""
    has_bias = reader.flag("attention_bias", default=False)
    return read_decoder(reader, Habits(qk_norm=QkNorm.FULL, qkv_bias=has_bias, out_bias=has_bias))


def stablelm(reader: ConfigReader) -> ModelSpec:
    """StableLM 2 and 3B-4E1T: layer norms, and one of them only where the residual is parallel."""
    is_parallel = reader.flag("use_parallel_residual", default=False)
    habits = Habits(
        qkv_bias=reader.flag("use_qkv_bias", default=False),
        norm=Norm.LAYER,
        num_norms=1 if is_parallel else 2,
    )
    spec = read_decoder(reader, habits)
    block, num_layers = spec.stack[0]
    spec = replace(spec, stack=((replace(block, parallel_residual=is_parallel), num_layers),))
    if not reader.flag("qk_layernorm", default=False):
        return spec
    # A norm of its own for each head, without the bias that the other norms of the layer have.
    heads = block.attention.num_heads + block.attention.num_kv_heads
    qk_norms = num_layers * heads * block.attention.head_dim
    return replace(spec, other_params=(("norms of queries and keys", qk_norms),))


def starcoder2(reader: ConfigReader) -> ModelSpec:
    """StarCoder 2: groups of heads, but a plain feed-forward network, biases and layer norms."""
    has_bias = reader.flag("use_bias", default=True)
    habits = Habits(
        num_kv_heads=2,
        tied_embeddings=True,
        qkv_bias=has_bias,
        out_bias=has_bias,
        mlp_bias=has_bias,
        gated=False,
        activation="gelu_pytorch_tanh",
        norm=Norm.LAYER,
    )
    return read_decoder(reader, habits)


def read_decoder(
    reader: ConfigReader,
    habits: Habits,
    experts_at: Callable[[int], Experts | None] = lambda index: None,
) -> ModelSpec:
    """A Llama-like model: the usual keys, habits where they are silent, experts where there are."""
    hidden_size = reader.size("hidden_size")
    num_layers = reader.num_layers()
    attention = read_attention(reader, hidden_size, habits)
    window = 0 if reader.is_null("sliding_window") else reader.count(
        "sliding_window", default=habits.window
    )  # fmt: skip
    kinds = reader.each_layer(
        "layer_types", num_layers, lambda index: SLIDING if habits.is_sliding(index) else FULL
    )

    def block_at(index: int) -> Block:
        own_window = window if kinds[index] == SLIDING else 0
        return Block(
            attention=replace(attention, window=own_window) if own_window else attention,
            feed_forward=experts_at(index) or mlp(),
            norm=habits.norm,
            num_norms=habits.num_norms,
        )

    def mlp() -> Mlp:
        return Mlp(
            ffn_size=reader.size("intermediate_size"),
            gated=habits.gated,
            bias=habits.mlp_bias,
            activation=reader.text("hidden_activation", "hidden_act", default=habits.activation),
        )

    return ModelSpec(
        name=reader.name,
        hidden_size=hidden_size,
        stack=runs_of(block_at(index) for index in range(num_layers)),
        vocab_size=reader.size("vocab_size"),
        tied_embeddings=reader.flag("tie_word_embeddings", default=habits.tied_embeddings),
        final_norm=habits.norm,
        context_length=reader.count("max_position_embeddings"),
    )


def read_attention(reader: ConfigReader, hidden_size: int, habits: Habits) -> Attention:
    """Grouped-query attention from the usual keys."""
    num_heads = reader.size("num_attention_heads")
    return Attention(
        num_heads=num_heads,
        num_kv_heads=reader.kv_heads(num_heads, default=habits.num_kv_heads),
        head_dim=reader.head_dim(hidden_size, num_heads, default=habits.head_dim),
        qkv_bias=habits.qkv_bias,
        out_bias=habits.out_bias,
        qk_norm=habits.qk_norm,
        has_sinks=habits.has_sinks,
    )


def qwen_habits(reader: ConfigReader, habits: Habits) -> Habits:
    """Qwen states a window in every config, and says apart whether it is used, and from where."""
    if not reader.flag("use_sliding_window", default=False):
        return replace(habits, is_sliding=lambda index: False)
    first = reader.count("max_window_layers", default=28)
    return replace(habits, window=4096, is_sliding=lambda index: index >= first)


def runs_of(blocks: Iterable[Block]) -> tuple[tuple[Block, int], ...]:
    """Equal neighbours together, with their number."""
    return tuple((block, len(list(run))) for block, run in groupby(blocks))


def _with_llama_biases(reader: ConfigReader, habits: Habits) -> Habits:
    has_bias = reader.flag("attention_bias", default=False)
    return replace(
        habits,
        qkv_bias=has_bias,
        out_bias=has_bias,
        mlp_bias=reader.flag("mlp_bias", default=False),
    )


def _gemma_habits(reader: ConfigReader, *, num_kv_heads: int, num_norms: int) -> Habits:
    has_bias = reader.flag("attention_bias", default=False)
    return Habits(
        num_kv_heads=num_kv_heads,
        head_dim=256,
        tied_embeddings=True,
        qkv_bias=has_bias,
        out_bias=has_bias,
        activation="gelu_pytorch_tanh",
        num_norms=num_norms,
    )
