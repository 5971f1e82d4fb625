"""Decoders in the line of GPT-2: learned or ALiBi positions, plain feed-forward, layer norms."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from drystone.describe.families.reader import ConfigReader
from drystone.describe.model import Attention, Block, Mlp, ModelSpec, Norm, QkNorm
from drystone.errors import InvalidSpec


def gpt2(reader: ConfigReader) -> ModelSpec:
    """GPT-2 and GPT-3: everything has a bias, positions are learned, the head is tied."""
    hidden_size = reader.size("n_embd", "hidden_size")
    num_heads = reader.size("n_head", "num_attention_heads")
    return _gpt2_like(
        reader,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        activation="gelu_new",
    )


def gpt_bigcode(reader: ConfigReader) -> ModelSpec:
    """SantaCoder, StarCoder: GPT-2 whose heads share one key-value head."""
    hidden_size = reader.size("n_embd", "hidden_size")
    num_heads = reader.size("n_head", "num_attention_heads")
    num_kv_heads = 1 if reader.flag("multi_query", default=True) else num_heads
    return _gpt2_like(
        reader,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        activation="gelu_pytorch_tanh",
    )


def gpt_neo(reader: ConfigReader) -> ModelSpec:
    """GPT-Neo: every second layer looks back 256 tokens only; no bias on queries, keys, values."""
    hidden_size = reader.size("hidden_size")
    num_heads = reader.size("num_heads", "num_attention_heads")
    num_layers = reader.num_layers("num_layers", "num_hidden_layers")
    block = Block(
        attention=Attention(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=reader.head_dim(hidden_size, num_heads),
            out_bias=True,
        ),
        feed_forward=Mlp(
            ffn_size=reader.size("intermediate_size", default=4 * hidden_size),
            gated=False,
            bias=True,
        ),
        norm=Norm.LAYER,
    )
    kinds = reader.each_layer(
        "attention_layers", num_layers, lambda index: "local" if index % 2 else "global"
    )
    window = reader.size("window_size", default=256)
    local = replace(block, attention=replace(block.attention, window=window))
    runs = [(kind, len(list(run))) for kind, run in groupby(kinds)]
    num_positions = reader.size("max_position_embeddings", default=2048)
    return ModelSpec(
        name=reader.name,
        hidden_size=hidden_size,
        stack=tuple((local if kind == "local" else block, count) for kind, count in runs),
        vocab_size=reader.size("vocab_size"),
        tied_embeddings=reader.flag("tie_word_embeddings", default=True),
        learned_positions=num_positions,
        final_norm=Norm.LAYER,
        context_length=num_positions,
    )


def gptj(reader: ConfigReader) -> ModelSpec:
    """GPT-J: one norm feeds attention and feed-forward side by side; the head has a bias."""
    hidden_size = reader.size("n_embd", "hidden_size")
    num_heads = reader.size("n_head", "num_attention_heads")
    block = Block(
        attention=Attention(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=reader.head_dim(hidden_size, num_heads),
        ),
        feed_forward=Mlp(
            ffn_size=reader.size("n_inner", default=4 * hidden_size), gated=False, bias=True
        ),
        norm=Norm.LAYER,
        num_norms=1,
        parallel_residual=True,
    )
    return ModelSpec(
        name=reader.name,
        hidden_size=hidden_size,
        stack=((block, reader.num_layers("n_layer", "num_hidden_layers")),),
        vocab_size=reader.size("vocab_size"),
        tied_embeddings=reader.flag("tie_word_embeddings", default=False),
        final_norm=Norm.LAYER,
        head_bias=True,
        context_length=reader.count("n_positions"),
    )


def gpt_neox(reader: ConfigReader) -> ModelSpec:
    """GPT-NeoX and Pythia: rotary positions, two norms side by side, an untied head."""
    hidden_size, num_heads = reader.size("hidden_size"), reader.size("num_attention_heads")
    has_bias = reader.flag("attention_bias", default=True)
    block = Block(
        attention=Attention(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=reader.head_dim(hidden_size, num_heads),
            qkv_bias=has_bias,
            out_bias=has_bias,
        ),
        feed_forward=Mlp(ffn_size=reader.size("intermediate_size"), gated=False, bias=True),
        norm=Norm.LAYER,
        parallel_residual=reader.flag("use_parallel_residual", default=True),
    )
    return ModelSpec(
        name=reader.name,
        hidden_size=hidden_size,
        stack=((block, reader.num_layers()),),
        vocab_size=reader.size("vocab_size"),
        tied_embeddings=reader.flag("tie_word_embeddings", default=False),
        final_norm=Norm.LAYER,
        context_length=reader.count("max_position_embeddings"),
    )


def opt(reader: ConfigReader) -> ModelSpec:
    """OPT: two more position rows than positions; the 350m norms after, and embeds in 512."""
    hidden_size, num_heads = reader.size("hidden_size"), reader.size("num_attention_heads")
    has_bias = reader.flag("enable_bias", default=True)
    is_affine = reader.flag("layer_norm_elementwise_affine", default=True)
    norm = Norm.LAYER if is_affine else Norm.NO_WEIGHT
    is_pre_norm = reader.flag("do_layer_norm_before", default=True)
    has_final_norm = is_pre_norm and not reader.flag("_remove_final_layer_norm", default=False)
    block = Block(
        attention=Attention(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=reader.head_dim(hidden_size, num_heads),
            qkv_bias=has_bias,
            out_bias=has_bias,
        ),
        feed_forward=Mlp(
            ffn_size=reader.size("ffn_dim"), gated=False, bias=has_bias, activation="relu"
        ),
        norm=norm,
    )
    embedding_size = reader.size("word_embed_proj_dim", default=hidden_size)
    num_positions = reader.size("max_position_embeddings", default=2048)
    return ModelSpec(
        name=reader.name,
        hidden_size=hidden_size,
        stack=((block, reader.num_layers()),),
        vocab_size=reader.size("vocab_size"),
        tied_embeddings=reader.flag("tie_word_embeddings", default=True),
        embedding_size=0 if embedding_size == hidden_size else embedding_size,
        learned_positions=num_positions + 2,
        num_final_norms=int(has_final_norm),
        final_norm=norm,
        context_length=num_positions,
    )


def bloom(reader: ConfigReader) -> ModelSpec:
    """BLOOM: ALiBi, a norm after the embedding, biases everywhere, a tied head."""
    hidden_size = reader.size("hidden_size", "n_embed")
    num_heads = reader.size("n_head", "num_attention_heads")
    block = Block(
        attention=Attention(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=reader.head_dim(hidden_size, num_heads),
            qkv_bias=True,
            out_bias=True,
        ),
        feed_forward=Mlp(ffn_size=4 * hidden_size, gated=False, bias=True),
        norm=Norm.LAYER,
    )
    return ModelSpec(
        name=reader.name,
        hidden_size=hidden_size,
        stack=((block, reader.num_layers("n_layer", "num_hidden_layers")),),
        vocab_size=reader.size("vocab_size"),
        tied_embeddings=reader.flag("tie_word_embeddings", default=True),
        has_embedding_norm=True,
        final_norm=Norm.LAYER,
        context_length=reader.count("seq_length"),
    )


def mpt(reader: ConfigReader) -> ModelSpec:
    """MPT: no biases at all. Positions are ALiBi, or learned where that is switched off."""
    hidden_size, num_heads = reader.size("d_model"), reader.size("n_heads")
    has_bias = not reader.flag("no_bias", default=True)
    attention = reader.table("attn_config")
    block = Block(
        attention=Attention(
            num_heads=num_heads,
            num_kv_heads=_mpt_kv_heads(attention, num_heads),
            head_dim=reader.head_dim(hidden_size, num_heads),
            qkv_bias=has_bias,
            out_bias=has_bias,
            qk_norm=QkNorm.FULL if attention.flag("qk_ln", default=False) else QkNorm.NONE,
        ),
        feed_forward=Mlp(
            ffn_size=reader.size("expansion_ratio", default=4) * hidden_size,
            gated=False,
            bias=has_bias,
        ),
        norm=Norm.LAYER if has_bias else Norm.LAYER_NO_BIAS,
    )
    num_positions = reader.size("max_seq_len", default=2048)
    has_alibi = attention.flag("alibi", default=True) or attention.flag("rope", default=False)
    has_table = reader.flag("learned_pos_emb", default=True) and not has_alibi
    return ModelSpec(
        name=reader.name,
        hidden_size=hidden_size,
        stack=((block, reader.num_layers("n_layers")),),
        vocab_size=reader.size("vocab_size"),
        tied_embeddings=reader.flag("tie_word_embeddings", default=True),
        learned_positions=num_positions if has_table else 0,
        final_norm=block.norm,
        context_length=num_positions,
    )


def falcon(reader: ConfigReader) -> ModelSpec:
    """Falcon: 7b shares one key-value head and one norm; 40b and 180b have groups and two norms."""
    hidden_size = reader.size("hidden_size", "n_embed")
    num_heads = reader.size("num_attention_heads", "n_head")
    is_new = reader.flag("new_decoder_architecture", default=False)
    is_multi_query = reader.flag("multi_query", default=True) and not is_new
    is_parallel = is_new or reader.flag("parallel_attn", default=True)
    num_norms = reader.size("num_ln_in_parallel_attn", default=2 if is_new else 1)
    has_bias = reader.flag("bias", default=False)
    kv_heads = reader.size("num_kv_heads", "n_head_kv", default=num_heads)
    block = Block(
        attention=Attention(
            num_heads=num_heads,
            num_kv_heads=1 if is_multi_query else kv_heads,
            head_dim=reader.head_dim(hidden_size, num_heads),
            qkv_bias=has_bias,
            out_bias=has_bias,
        ),
        feed_forward=Mlp(
            ffn_size=reader.size("ffn_hidden_size", default=4 * hidden_size),
            gated=False,
            bias=has_bias,
        ),
        norm=Norm.LAYER,
        num_norms=num_norms if is_parallel else 2,
        parallel_residual=is_parallel,
    )
    return ModelSpec(
        name=reader.name,
        hidden_size=hidden_size,
        stack=((block, reader.num_layers("num_hidden_layers", "n_layer")),),
        vocab_size=reader.size("vocab_size"),
        tied_embeddings=reader.flag("tie_word_embeddings", default=True),
        final_norm=Norm.LAYER,
        context_length=reader.count("max_position_embeddings"),
    )


def phi(reader: ConfigReader) -> ModelSpec:
    """Phi-1 to 2: one norm feeds attention and feed-forward side by side; biases everywhere."""
    hidden_size, num_heads = reader.size("hidden_size"), reader.size("num_attention_heads")
    has_qk_norm = reader.flag("qk_layernorm", default=False)
    block = Block(
        attention=Attention(
            num_heads=num_heads,
            num_kv_heads=reader.kv_heads(num_heads),
            head_dim=reader.head_dim(hidden_size, num_heads),
            qkv_bias=True,
            out_bias=True,
            qk_norm=QkNorm.HEAD if has_qk_norm else QkNorm.NONE,
        ),
        feed_forward=Mlp(ffn_size=reader.size("intermediate_size"), gated=False, bias=True),
        norm=Norm.LAYER,
        num_norms=1,
        parallel_residual=True,
    )
    return ModelSpec(
        name=reader.name,
        hidden_size=hidden_size,
        stack=((block, reader.num_layers()),),
        vocab_size=reader.size("vocab_size"),
        tied_embeddings=reader.flag("tie_word_embeddings", default=False),
        final_norm=Norm.LAYER,
        head_bias=True,
        context_length=reader.count("max_position_embeddings"),
    )


def _gpt2_like(
    reader: ConfigReader, *, hidden_size: int, num_heads: int, num_kv_heads: int, activation: str
) -> ModelSpec:
    block = Block(
        attention=Attention(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=reader.head_dim(hidden_size, num_heads),
            qkv_bias=True,
            out_bias=True,
        ),
        feed_forward=Mlp(
            ffn_size=reader.size("n_inner", default=4 * hidden_size),
            gated=False,
            bias=True,
            activation=reader.text("activation_function", default=activation),
        ),
        norm=Norm.LAYER,
    )
    num_positions = reader.size("n_positions", "n_ctx", default=1024)
    return ModelSpec(
        name=reader.name,
        hidden_size=hidden_size,
        stack=((block, reader.num_layers("n_layer", "num_hidden_layers")),),
        vocab_size=reader.size("vocab_size"),
        tied_embeddings=reader.flag("tie_word_embeddings", default=True),
        learned_positions=num_positions,
        final_norm=Norm.LAYER,
        context_length=num_positions,
    )


def _mpt_kv_heads(attention: ConfigReader, num_heads: int) -> int:
    kind = attention.text("attn_type", default="multihead_attention")
    match kind:
        case "multihead_attention":
            return num_heads
        case "multiquery_attention":
            return 1
        case "grouped_query_attention":
            return attention.size("kv_n_heads")
    raise InvalidSpec(
        f"attn_type {kind[:40]!r} is not known",
        where=attention.where,
        hint="Known: multihead_attention, multiquery_attention, grouped_query_attention",
    )
