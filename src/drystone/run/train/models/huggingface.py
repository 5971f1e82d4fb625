"""What is the reference transformer called in `transformers`? Names, shapes and configuration.

Every decoder that a class of `transformers` computes in the same way has a translation: Llama, with
biases on queries, keys and values Qwen2, with norms on heads Qwen3, with a window Mistral, and
GPT-2. Others are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from drystone.describe.model import Block, Mlp, ModelSpec, Norm, QkNorm
from drystone.errors import InvalidSpec
from drystone.run.train.models.transformer import default_eps


@dataclass(frozen=True, slots=True)
class Exported:
    """A model of `transformers`: its configuration, and where each of its weights comes from."""

    config: dict[str, Any]
    sources: dict[str, tuple[str, ...]]  # new name to old ones, which are joined along dimension 0
    transposed: frozenset[str] = frozenset()  # new names of matrices that stand the other way

    def convert(self, name: str, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """One weight of the exported model."""
        whole = torch.cat(list(values)) if len(values) > 1 else values[0]
        return whole.t() if name in self.transposed else whole

    def shape_of(self, name: str, stored: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
        """Its shape."""
        shapes = [tuple(stored[source]) for source in self.sources[name]]
        whole = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        return whole[::-1] if name in self.transposed else whole


def exported_model(spec: ModelSpec) -> Exported:
    """The translation of a model, or an error that says what `transformers` has no class for."""
    kinds = {block for block, _ in spec.stack}
    if len(kinds) != 1:
        raise InvalidSpec(f"{spec.name}: blocks of several kinds cannot be exported")
    (block,) = kinds
    if _is_gpt2(spec, block):
        return _gpt2(spec, block)
    if _is_llama(spec, block):
        return _llama(spec, block)
    raise InvalidSpec(
        f"{spec.name}: no class of transformers computes such a model",
        hint="Exported are models as Llama, Qwen2, Qwen3, Mistral and GPT-2",
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


def _llama(spec: ModelSpec, block: Block) -> Exported:
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
    sources: dict[str, tuple[str, ...]] = {"model.embed_tokens.weight": ("tokens.weight",)}
    parts = {
        "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj",
        "attention.value": "self_attn.v_proj",
        "attention.out": "self_attn.o_proj",
        "attention.query_norm": "self_attn.q_norm",
        "attention.key_norm": "self_attn.k_norm",
        "feed_forward.gate": "mlp.gate_proj",
        "feed_forward.up": "mlp.up_proj",
        "feed_forward.down": "mlp.down_proj",
        "norms.0": "input_layernorm",
        "norms.1": "post_attention_layernorm",
    }
    biased = (
        {"attention.query", "attention.key", "attention.value"} if attention.qkv_bias else set()
    )
    biased |= {"attention.out"} if attention.out_bias else set()
    has_norms = attention.qk_norm is QkNorm.HEAD
    for layer in range(spec.num_layers):
        for old, new in parts.items():
            if "_norm" in old and not has_norms:
                continue
            for end in ("weight", "bias") if old in biased else ("weight",):
                sources[f"model.layers.{layer}.{new}.{end}"] = (f"blocks.{layer}.{old}.{end}",)
    sources["model.norm.weight"] = ("final_norm.weight",)
    if not spec.tied_embeddings:
        sources["lm_head.weight"] = ("head.weight",)
    return Exported(config, sources)


def _gpt2(spec: ModelSpec, block: Block) -> Exported:
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
    sources: dict[str, tuple[str, ...]] = {
        "transformer.wte.weight": ("tokens.weight",),
        "transformer.wpe.weight": ("positions.weight",),
    }
    parts = {
        "attn.c_attn": ("attention.query", "attention.key", "attention.value"),
        "attn.c_proj": ("attention.out",),
        "mlp.c_fc": ("feed_forward.up",),
        "mlp.c_proj": ("feed_forward.down",),
        "ln_1": ("norms.0",),
        "ln_2": ("norms.1",),
    }
    transposed = set()
    for layer in range(spec.num_layers):
        for new, old in parts.items():
            name = f"transformer.h.{layer}.{new}"
            for end in ("weight", "bias"):
                sources[f"{name}.{end}"] = tuple(f"blocks.{layer}.{one}.{end}" for one in old)
            if not new.startswith("ln"):
                transposed.add(f"{name}.weight")
    for end in ("weight", "bias"):
        sources[f"transformer.ln_f.{end}"] = (f"final_norm.{end}",)
    if not spec.tied_embeddings:
        sources["lm_head.weight"] = ("head.weight",)
    return Exported(config, sources, frozenset(transposed))
