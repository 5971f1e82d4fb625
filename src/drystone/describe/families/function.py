"""What does a `config.json` say of the function of a model, beyond its shape?

Two models of the same shape may compute different things. The runtime's own transformer does some
of what configs say; the spec gets these numbers. Whatever else a config says and does not go
without saying is listed in `not_done`, by key and value, so that such a model is planned but never
trained as something else. Families that are not trained at all are left as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from drystone.describe.families.reader import ConfigReader
from drystone.describe.model import ModelSpec

# Families whose function was compared with that of `transformers`
# (tests/runtime/test_faithful.py): where the epsilon of their norms stands, and its default.
COMPARED: Final[Mapping[str, tuple[str, float]]] = MappingProxyType(
    {
        "gpt2": ("layer_norm_epsilon", 1e-5),
        "llama": ("rms_norm_eps", 1e-6),
        "mistral": ("rms_norm_eps", 1e-6),
        "phi3": ("rms_norm_eps", 1e-5),
        "qwen2": ("rms_norm_eps", 1e-6),
        "qwen3": ("rms_norm_eps", 1e-6),
        "starcoder2": ("norm_epsilon", 1e-5),
    }
)
# Keys that are done, or do not matter, with this value alone.
_ONLY_WITH: Final[Mapping[str, object]] = MappingProxyType(
    {"partial_rotary_factor": 1.0, "scale_attn_weights": True, "mlp_type": "default"}
)
# Keys that change nothing of what is computed in training: names, tokens, storage, generation.
_WITHOUT_EFFECT: Final = frozenset({
    "architectures", "attn_implementation", "begin_suppress_tokens", "bos_token_id",
    "chunk_size_feed_forward", "decoder_start_token_id", "dtype", "eos_token_id",
    "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "gradient_checkpointing",
    "id2label", "is_decoder", "label2id", "max_window_layers", "model_type", "n_ctx",
    "num_labels", "original_max_position_embeddings", "pad_token_id", "prefix", "pretraining_tp",
    "problem_type", "return_dict", "sep_token_id", "suppress_tokens", "task_specific_params",
    "tokenizer_class", "torch_dtype", "transformers_version", "unk_token_id", "use_cache",
    "bad_words_ids", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "length_penalty",
    "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
    "num_return_sequences", "output_attentions", "output_hidden_states", "output_scores",
    "remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "temperature",
    "top_k", "top_p", "typical_p", "reorder_and_upcast_attn", "summary_activation",
    "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
})  # fmt: skip


def with_function(reader: ConfigReader, spec: ModelSpec) -> ModelSpec:
    """The spec with what its config says of the function; its family has read the shape before."""
    if spec.family not in COMPARED:
        return spec
    theta, not_done = _rope(reader)
    eps_key, eps = COMPARED[spec.family]
    norm_eps = reader.number(eps_key, default=eps)
    initial_std = reader.number("initializer_range", default=spec.initial_std)
    for key, value in reader.config.items():
        if key not in reader.used and not _goes_without_saying(key, value):
            not_done.append(_told(key, value))
    return replace(
        spec,
        rope_theta=theta,
        norm_eps=norm_eps,
        initial_std=initial_std,
        not_done=tuple(not_done),
    )


def _rope(reader: ConfigReader) -> tuple[float, list[str]]:
    """The base of rotary angles, and what is said of positions besides."""
    theta, not_done = reader.number("rope_theta", default=10_000.0), []
    for key in ("rope_parameters", "rope_scaling"):  # the one of transformers 5, the one before
        table = reader.table(key)
        kind = table.text("rope_type", "type", default="default")
        theta = table.number("rope_theta", default=theta)
        is_partial = table.number("partial_rotary_factor", default=1.0) != 1.0
        if kind != "default" or is_partial or set(table.config) - table.used:
            not_done.append(_told(key, dict(table.config)))
    return theta, not_done


def _goes_without_saying(key: str, value: Any) -> bool:
    if key in _ONLY_WITH:
        return value is None or bool(value == _ONLY_WITH[key])
    if key in _WITHOUT_EFFECT or key.startswith("_"):
        return True
    is_off = value is None or value is False or value == {} or value == []
    return is_off or ("drop" in key and value == 0)


def _told(key: str, value: Any) -> str:
    text = json.dumps(value, default=str)
    return f"{key} is {text if len(text) <= 120 else text[:120] + '...'}"
