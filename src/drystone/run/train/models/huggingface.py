"""What is the reference transformer called in `transformers`? Names, shapes and configuration.

A model that was read from a `config.json` is written with the same one. Of others, those that a
class of `transformers` computes in the same way have a translation: Llama, with biases on queries,
keys and values Qwen2, with norms on heads Qwen3, with a window Mistral, and GPT-2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from drystone.describe.families.names import STYLES, Stored, stored_weights
from drystone.describe.model import Block, Mlp, ModelSpec, Norm, QkNorm
from drystone.describe.model_source import published_config
from drystone.errors import InvalidSpec
from drystone.run.train.models.transformer import default_eps

_CLASSES: Final = {
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3",
    "granite": "Granite",
    "llama": "Llama",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "olmo2": "Olmo2",
    "olmoe": "Olmoe",
    "phi3": "Phi3",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "starcoder2": "Starcoder2",
}


@dataclass(frozen=True, slots=True)
class Exported:
    """A model of `transformers`: its configuration, and where each of its weights comes from."""

    config: dict[str, Any]
    weights: dict[str, Stored]  # by their new name

    def convert(self, name: str, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """One weight of the exported model."""
        whole = torch.cat(list(values)) if len(values) > 1 else values[0]
        return whole.t() if self.weights[name].is_transposed else whole


def exported_model(spec: ModelSpec) -> Exported:
    """The translation of a model, or an error that says what `transformers` has no class for."""
    config = published_config(spec)
    if config is not None and spec.family in STYLES:
        kind = "GPT2LMHeadModel" if spec.family == "gpt2" else f"{_CLASSES[spec.family]}ForCausalLM"
        config = {"architectures": [kind], **config}
        return Exported(config, stored_weights(spec, STYLES[spec.family]))
    if len(spec.blocks) != 1:
        raise InvalidSpec(f"{spec.name}: blocks of several kinds cannot be exported")
    (block,) = spec.blocks
    if _is_gpt2(spec, block):
        return Exported(_gpt2(spec, block), stored_weights(spec, STYLES["gpt2"]))
    if _is_llama(spec, block):
        return Exported(_llama(spec, block), stored_weights(spec, STYLES["llama"]))
    raise InvalidSpec(
        f"{spec.name}: no class of transformers computes such a model",
        hint="Exported are models as Llama, Qwen2, Qwen3, Mistral and GPT-2, and every model that "
        "is trained from a config.json, as long as that is there",
    )


def _is_gpt2(spec: ModelSpec, block: Block) -> bool:
    attention, mlp = block.attention, block.feed_forward
    return (
        isinstance(mlp, Mlp)
        and not mlp.gated
        and mlp.bias
        and attention.qkv_bias
        and attention.out_bias
        and attention.num_kv_heads == attention.num_heads
        and attention.num_heads * attention.head_dim == spec.hidden_size
        and attention.v_dim == attention.head_dim
        and attention.qk_norm is QkNorm.NONE
        and block.norm is spec.final_norm is Norm.LAYER
        and block.num_norms == 2
        and _is_plain(spec, block)
        and spec.num_final_norms == 1
        and bool(spec.learned_positions)
        and not (
            block.parallel_residual or attention.window or spec.has_embedding_norm or spec.head_bias
        )
    )


def _is_llama(spec: ModelSpec, block: Block) -> bool:
    attention, mlp = block.attention, block.feed_forward
    return (
        isinstance(mlp, Mlp)
        and mlp.gated
        and mlp.activation == "silu"
        and not mlp.bias
        and attention.v_dim == attention.head_dim
        and attention.qk_norm is not QkNorm.FULL
        and block.norm is spec.final_norm is Norm.RMS
        and block.num_norms == 2
        and _is_plain(spec, block)
        and spec.num_final_norms == 1
        and _llama_class(block) is not None
        and not (
            block.parallel_residual
            or spec.learned_positions
            or spec.has_embedding_norm
            or spec.head_bias
        )
    )


def _llama_class(block: Block) -> str | None:
    """By (norms on heads, bias of queries, bias of the output, window)."""
    attention = block.attention
    return {
        (False, False, False, False): "Llama",
        (False, True, True, False): "Llama",
        (False, True, False, False): "Qwen2",
        (True, False, False, False): "Qwen3",
        (True, True, True, False): "Qwen3",
        (False, False, False, True): "Mistral",
    }.get(
        (
            attention.qk_norm is QkNorm.HEAD,
            attention.qkv_bias,
            attention.out_bias,
            attention.window > 0,
        )
    )


def _is_plain(spec: ModelSpec, block: Block) -> bool:
    """Whether nothing is scaled, capped or normed otherwise than usual."""
    attention = block.attention
    return not (
        block.norms_after
        or attention.scale
        or attention.softcap
        or attention.rope_theta
        or spec.rope_scaling
        or spec.norm_adds_one
        or spec.logit_softcap
        or {spec.rotary_share, spec.embedding_scale, spec.residual_scale, spec.logit_scale} != {1.0}
    )


def _llama(spec: ModelSpec, block: Block) -> dict[str, Any]:
    attention, mlp = block.attention, block.feed_forward
    assert isinstance(mlp, Mlp)
    kind = _llama_class(block)
    config: dict[str, Any] = {
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": str(kind).lower(),
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": mlp.ffn_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.norm_eps or default_eps(block.norm),
        "rope_theta": spec.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "tie_word_embeddings": spec.tied_embeddings,
        "attention_bias": attention.qkv_bias,
    }
    if kind == "Mistral":
        config["sliding_window"] = attention.window
    return config


def _gpt2(spec: ModelSpec, block: Block) -> dict[str, Any]:
    mlp = block.feed_forward
    assert isinstance(mlp, Mlp)
    config: dict[str, Any] = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": spec.vocab_size,
        "n_embd": spec.hidden_size,
        "n_layer": spec.num_layers,
        "n_head": block.attention.num_heads,
        "n_inner": mlp.ffn_size,
        "n_positions": spec.learned_positions,
        "activation_function": mlp.activation,
        "layer_norm_epsilon": spec.norm_eps or default_eps(block.norm),
        "tie_word_embeddings": spec.tied_embeddings,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }
    return config
