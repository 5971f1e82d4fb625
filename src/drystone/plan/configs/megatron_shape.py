"""The model that Megatron's flags describe, and the flags that describe a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from drystone.describe.families.huggingface import parse_config
from drystone.describe.model import ModelSpec
from drystone.errors import InvalidSpec
from drystone.plan.configs.keys import Table, names

# Models whose flags say more than `shape_of` reads: their name must be given.
_BEYOND: Final = names(
    """
    multi_latent_attention hybrid_layer_pattern hybrid_override_pattern quick_geglu moe_layer_freq
    mtp_num_layers moe_shared_expert_intermediate_size window_size squared_relu
    experimental_attention_variant heterogeneous_layers_config_path
    """
)


def shape_of(table: Mapping[str, Any]) -> ModelSpec | None:
    """The model that flags describe; None where they do not say all of it, or describe more."""
    program = str(table.get("PROGRAM", "gpt"))
    if "gpt" not in program or any(table.get(name) for name in _BEYOND):
        return None
    vocabulary = table.get("padded_vocab_size") or table.get("vocab_size")
    if vocabulary is None:
        by_tokenizer = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}
        vocabulary = by_tokenizer.get(str(table.get("tokenizer_type", "GPT2BPETokenizer")))
    hidden, heads = table.get("hidden_size"), table.get("num_attention_heads")
    counts = (table.get("num_layers"), hidden, heads, vocabulary)
    if not all(isinstance(count, int) and count > 0 for count in counts):
        return None
    assert isinstance(hidden, int)
    ffn = table.get("ffn_hidden_size") or 4 * hidden
    positions = table.get("max_position_embeddings") or table.get("seq_length") or 2048
    common = {
        "vocab_size": vocabulary,
        "tie_word_embeddings": not table.get("untie_embeddings_and_output_weights", False),
    }
    if not table.get("swiglu") and not table.get("num_experts"):
        config = common | {
            "model_type": "gpt2",
            "n_embd": hidden,
            "n_layer": counts[0],
            "n_head": heads,
            "n_inner": ffn,
            "n_positions": positions,
        }
    else:
        config = common | _gated_config(table, hidden, ffn, positions)
    return parse_config(config, where="flags of Megatron-LM", name="the model of the flags")


def _gated_config(
    table: Mapping[str, Any], hidden: int, ffn: int, positions: int
) -> dict[str, Any]:
    heads = table["num_attention_heads"]
    groups = table.get("num_query_groups") if table.get("group_query_attention") else heads
    config = {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": table["num_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": groups or heads,
        "head_dim": table.get("kv_channels") or hidden // heads,
        "max_position_embeddings": positions,
    }
    if not table.get("num_experts"):
        return config | {"model_type": "qwen3" if table.get("qk_layernorm") else "llama"}
    top_k = table.get("moe_router_topk") or 2
    width = table.get("moe_ffn_hidden_size") or ffn
    if table.get("qk_layernorm"):
        return config | {
            "model_type": "qwen3_moe",
            "num_experts": table["num_experts"],
            "num_experts_per_tok": top_k,
            "moe_intermediate_size": width,
        }
    return config | {
        "model_type": "mixtral",
        "num_local_experts": table["num_experts"],
        "num_experts_per_tok": top_k,
        "intermediate_size": width,
    }


def model_flags(model: ModelSpec) -> Table:
    """The flags that describe a plain decoder; refused where flags do not say all of it."""
    blocks: Sequence[tuple[Any, int]] = model.stack
    block = blocks[0][0]
    mlp, attention = block.feed_forward, block.attention
    if len(blocks) > 1 or attention.kv_lora_rank or attention.recurrence or hasattr(mlp, "top_k"):
        raise InvalidSpec(
            f"{model.name} is not a plain decoder: its flags are not known",
            where="--to megatron",
            hint="Export --to megatron-bridge, whose recipe knows the model",
        )
    table: Table = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": mlp.ffn_size,
        "num_attention_heads": attention.num_heads,
        "kv_channels": attention.head_dim,
        "max_position_embeddings": model.learned_positions or model.context_length or 4096,
        "vocab_size": model.vocab_size,
    }
    if attention.num_kv_heads != attention.num_heads:
        table |= {"group_query_attention": True, "num_query_groups": attention.num_kv_heads}
    if not model.tied_embeddings:
        table["untie_embeddings_and_output_weights"] = True
    if mlp.gated:
        table |= {"swiglu": True, "disable_bias_linear": True, "normalization": "RMSNorm"}
    if not model.learned_positions:
        table["position_embedding_type"] = "rope"
    return table
