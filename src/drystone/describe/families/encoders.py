"""Models with an encoder: BERT, RoBERTa, ViT, T5."""

from __future__ import annotations

from dataclasses import replace

from drystone.describe.families.reader import ConfigReader
from drystone.describe.model import Attention, Block, Head, Mlp, ModelSpec, Norm, Side, Vision


def bert(reader: ConfigReader) -> ModelSpec:
    """BERT and RoBERTa, as trained on masked words unless `architectures` says otherwise.

    The bare model and the classifier have a pooler, the masked-word model has none, as in
    `transformers`.
    """
    hidden_size, num_heads = reader.size("hidden_size"), reader.size("num_attention_heads")
    num_positions = reader.size("max_position_embeddings", default=512)
    spec = ModelSpec(
        name=reader.name,
        hidden_size=hidden_size,
        stack=((_encoder_block(reader, hidden_size, num_heads), reader.num_layers()),),
        vocab_size=reader.size("vocab_size"),
        tied_embeddings=reader.flag("tie_word_embeddings", default=True),
        learned_positions=num_positions,
        token_types=reader.count("type_vocab_size", default=2),
        has_embedding_norm=True,
        num_final_norms=0,
        final_norm=Norm.LAYER,
        head=Head.MASKED,
        head_bias=True,
        context_length=num_positions,
    )
    names = reader.config.get("architectures")
    architecture = names[0] if isinstance(names, list) and names else ""
    dense = hidden_size * (hidden_size + 1)
    if architecture in ("BertModel", "RobertaModel"):
        return replace(spec, head=Head.NONE, head_bias=False, other_params=(("pooler", dense),))
    if isinstance(architecture, str) and architecture.endswith("ForSequenceClassification"):
        # BERT pools, then classifies; RoBERTa calls the same matrix the first of its classifier.
        num_classes = reader.num_classes()
        return replace(
            spec, head=Head.CLASSIFY, num_classes=num_classes, other_params=(("pooler", dense),)
        )
    return spec


def vit(reader: ConfigReader) -> ModelSpec:
    """ViT as an image classifier: a class token, learned positions, a projection onto classes."""
    hidden_size, num_heads = reader.size("hidden_size"), reader.size("num_attention_heads")
    vision = Vision(
        image_size=reader.size("image_size", default=224),
        patch_size=reader.size("patch_size", default=16),
        num_channels=reader.size("num_channels", default=3),
    )
    block = _encoder_block(reader, hidden_size, num_heads)
    has_bias = reader.flag("qkv_bias", default=True)
    return ModelSpec(
        name=reader.name,
        hidden_size=hidden_size,
        stack=(
            (
                replace(block, attention=replace(block.attention, qkv_bias=has_bias)),
                reader.num_layers(),
            ),
        ),
        learned_positions=vision.num_tokens,
        final_norm=Norm.LAYER,
        head=Head.CLASSIFY,
        head_bias=True,
        num_classes=reader.num_classes(),
        vision=vision,
        context_length=vision.num_tokens,
    )


def t5(reader: ConfigReader) -> ModelSpec:
    """T5: an encoder and a decoder, relative positions in the first layer of each.

    1.0 has ReLU and a tied head, 1.1 gated GELU and an untied one.
    """
    hidden_size, num_heads = reader.size("d_model"), reader.size("num_heads")
    activation = reader.text("feed_forward_proj", default="relu")
    attention = Attention(
        num_heads=num_heads, num_kv_heads=num_heads, head_dim=reader.size("d_kv"), causal=False
    )
    encoder = Block(
        attention=attention,
        feed_forward=Mlp(
            ffn_size=reader.size("d_ff"),
            gated=activation.startswith("gated-"),
            activation=activation.removeprefix("gated-"),
        ),
        side=Side.ENCODER,
    )
    decoder = replace(
        encoder,
        attention=replace(attention, causal=True),
        num_norms=3,
        cross_attention=attention,
        side=Side.DECODER,
    )
    num_layers = reader.num_layers("num_layers")
    num_decoder_layers = reader.num_layers("num_decoder_layers", default=num_layers)
    bias = reader.size("relative_attention_num_buckets", default=32) * num_heads
    return ModelSpec(
        name=reader.name,
        hidden_size=hidden_size,
        stack=((encoder, num_layers), (decoder, num_decoder_layers)),
        vocab_size=reader.size("vocab_size"),
        tied_embeddings=reader.flag("tie_word_embeddings", default=True),
        num_final_norms=2,
        other_params=(
            ("relative positions of the encoder", bias),
            ("relative positions of the decoder", bias),
        ),
        context_length=reader.count("n_positions"),
    )


def _encoder_block(reader: ConfigReader, hidden_size: int, num_heads: int) -> Block:
    return Block(
        attention=Attention(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=reader.head_dim(hidden_size, num_heads),
            qkv_bias=True,
            out_bias=True,
            causal=False,
        ),
        feed_forward=Mlp(ffn_size=reader.size("intermediate_size"), gated=False, bias=True),
        norm=Norm.LAYER,
        side=Side.ENCODER,
    )
