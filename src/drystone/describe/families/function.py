"""What does a `config.json` say of the function of a model, beyond its shape?

Two models of the same shape may compute different things. The runtime's own transformer does much
of what configs say; the spec gets these numbers. Whatever else a config says and does not go
without saying is listed in `not_done`, by key and value, so that such a model is planned but never
trained as something else. Families that are not trained at all are left as they are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from drystone.describe.families.reader import ConfigReader
from drystone.describe.model import Attention, Block, ModelSpec, RopeScaling

# Families whose function was compared with that of `transformers`
# (tests/runtime/test_faithful.py): where the epsilon of their norms stands, and its default.
COMPARED: Final[Mapping[str, tuple[str, float]]] = MappingProxyType(
    {
        "gemma": ("rms_norm_eps", 1e-6),
        "gemma2": ("rms_norm_eps", 1e-6),
        "gemma3_text": ("rms_norm_eps", 1e-6),
        "gpt2": ("layer_norm_epsilon", 1e-5),
        "granite": ("rms_norm_eps", 1e-6),
        "llama": ("rms_norm_eps", 1e-6),
        "mistral": ("rms_norm_eps", 1e-6),
        "mixtral": ("rms_norm_eps", 1e-5),
        "olmo2": ("rms_norm_eps", 1e-5),
        "olmoe": ("rms_norm_eps", 1e-5),
        "phi3": ("rms_norm_eps", 1e-5),
        "qwen2": ("rms_norm_eps", 1e-6),
        "qwen3": ("rms_norm_eps", 1e-6),
        "qwen3_moe": ("rms_norm_eps", 1e-6),
        "starcoder2": ("norm_epsilon", 1e-5),
    }
)
# Keys that are done, or do not matter, with this value alone.
_ONLY_WITH: Final[Mapping[str, object]] = MappingProxyType(
    {"scale_attn_weights": True, "mlp_type": "default", "router_jitter_noise": 0.0}
)
# Keys that change nothing of what is computed in training: names, tokens, storage, generation.
_WITHOUT_EFFECT: Final = frozenset({
    "architectures", "attn_implementation", "begin_suppress_tokens", "bos_token_id",
    "cache_implementation",
    "chunk_size_feed_forward", "decoder_start_token_id", "dtype", "eos_token_id",
    "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "gradient_checkpointing",
    "router_aux_loss_coef",
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
    eps_key, eps = COMPARED[spec.family]
    spec = _with_rope(reader, spec)
    spec = replace(
        spec,
        norm_eps=reader.number(eps_key, default=eps),
        initial_std=reader.number("initializer_range", default=spec.initial_std),
        padding_token=_padding_token(reader, spec),
    )
    spec = _OF_FAMILY.get(spec.family, _as_it_is)(reader, spec)
    not_done = [
        _told(key, value)
        for key, value in reader.config.items()
        if key not in reader.used and not _goes_without_saying(key, value)
    ]
    return replace(spec, not_done=(*spec.not_done, *not_done))


def _with_rope(reader: ConfigReader, spec: ModelSpec) -> ModelSpec:
    """Rotary angles: as transformers 5 writes them, and as earlier versions did."""
    has_local = spec.family == "gemma3_text"  # layers with a window have angles of their own
    theta = 1e6 if has_local or spec.family == "mixtral" else 1e4
    local, share = 1e4, 1.0
    tables = {key: reader.table(key) for key in ("rope_parameters", "rope_scaling")}
    if has_local:
        local = reader.number("rope_local_base_freq", default=local)
        both = tables["rope_parameters"]
        sliding, full = both.table("sliding_attention"), both.table("full_attention")
        if sliding.config or full.config:
            tables |= {"rope_parameters": full, "rope_parameters, sliding": sliding}
    theta = reader.number("rope_theta", default=theta)
    share = reader.number("partial_rotary_factor", default=share)
    scaling, not_done = None, []
    for key, table in tables.items():
        if key.endswith("sliding"):
            local = table.number("rope_theta", default=local)
        else:
            theta = table.number("rope_theta", default=theta)
        share = table.number("partial_rotary_factor", default=share)
        found = _rope_scaling(table, reader)
        is_done = found is None or (_is_scaled(found, spec, share) and not key.endswith("sliding"))
        scaling = found if found is not None and is_done else scaling
        if not is_done or set(table.config) - table.used:
            not_done.append(_told(key, dict(table.config)))
    if share != 1.0 and spec.family != "phi3":
        not_done.append(_told("partial_rotary_factor", share))
    spec = replace(
        spec, rope_theta=theta, rotary_share=share, rope_scaling=scaling, not_done=tuple(not_done)
    )
    if not has_local:
        return spec
    return _each_attention(spec, lambda one: replace(one, rope_theta=local) if one.window else one)


def _is_scaled(scaling: RopeScaling, spec: ModelSpec, share: float) -> bool:
    """Whether such a scaling is done, and is all there."""
    if scaling.kind != "longrope":
        return scaling.kind in SCALINGS
    number = int(spec.blocks[0].attention.head_dim * share) // 2
    return len(scaling.short_factors) == len(scaling.long_factors) == number


def _rope_scaling(table: ConfigReader, reader: ConfigReader) -> RopeScaling | None:
    kind = table.text("rope_type", "type", default="default")
    if kind == "default":
        return None
    context = reader.count("max_position_embeddings")
    original = reader.count("original_max_position_embeddings", default=context)
    original = table.count("original_max_position_embeddings", default=original)
    kind = "longrope" if kind == "su" else kind
    scaling = RopeScaling(kind=kind, original_context=original)
    match kind:
        case "linear":
            return replace(scaling, factor=table.number("factor", default=1.0))
        case "llama3":
            return replace(
                scaling,
                factor=table.number("factor", default=1.0),
                low_frequency_factor=table.number("low_freq_factor", default=1.0),
                high_frequency_factor=table.number("high_freq_factor", default=1.0),
            )
        case "longrope":
            factor = table.number("factor", default=max(1.0, context / max(original, 1)))
            scale = math.sqrt(1 + math.log(factor) / math.log(max(original, 2)))
            return replace(
                scaling,
                short_factors=table.numbers("short_factor"),
                long_factors=table.numbers("long_factor"),
                table_scale=table.number("attention_factor", default=scale),
            )
    return scaling


def _gemma(reader: ConfigReader, spec: ModelSpec) -> ModelSpec:
    return replace(spec, norm_adds_one=True, embedding_scale=math.sqrt(spec.hidden_size))


def _gemma2(reader: ConfigReader, spec: ModelSpec) -> ModelSpec:
    """Soft-caps are there unless the config says null; Gemma 3 has none unless it says one."""
    caps = (50.0, 30.0) if spec.family == "gemma2" else (0.0, 0.0)
    keys = ("attn_logit_softcapping", "final_logit_softcapping")
    of_scores, of_logits = (
        0.0 if reader.is_null(key) else reader.number(key, default=cap)
        for key, cap in zip(keys, caps, strict=True)
    )
    scale = reader.number("query_pre_attn_scalar", default=256.0) ** -0.5
    spec = replace(_gemma(reader, spec), logit_softcap=of_logits)
    return _each_attention(spec, lambda one: replace(one, scale=scale, softcap=of_scores))


def _granite(reader: ConfigReader, spec: ModelSpec) -> ModelSpec:
    scale = reader.number("attention_multiplier", default=1.0)
    spec = replace(
        spec,
        embedding_scale=reader.number("embedding_multiplier", default=1.0),
        residual_scale=reader.number("residual_multiplier", default=1.0),
        logit_scale=1.0 / reader.number("logits_scaling", default=1.0),
    )
    return _each_attention(spec, lambda one: replace(one, scale=scale))


def _olmo2(reader: ConfigReader, spec: ModelSpec) -> ModelSpec:
    return _each_block(spec, lambda block: replace(block, norms_after=True))


def _qwen3_moe(reader: ConfigReader, spec: ModelSpec) -> ModelSpec:
    """The size of dense layers says nothing where there are none."""
    reader.count("intermediate_size")
    return spec


def _padding_token(reader: ConfigReader, spec: ModelSpec) -> int:
    """The token whose embedding has no gradient; negative ones count from the end, as in torch."""
    token = reader.config.get("pad_token_id")
    if spec.family == "gpt2" or not isinstance(token, int) or isinstance(token, bool):
        return -1
    return token % spec.vocab_size if -spec.vocab_size <= token < spec.vocab_size else -1


def _as_it_is(reader: ConfigReader, spec: ModelSpec) -> ModelSpec:
    return spec


def _each_block(spec: ModelSpec, change: Callable[[Block], Block]) -> ModelSpec:
    return replace(spec, stack=tuple((change(block), count) for block, count in spec.stack))


def _each_attention(spec: ModelSpec, change: Callable[[Attention], Attention]) -> ModelSpec:
    return _each_block(spec, lambda block: replace(block, attention=change(block.attention)))


SCALINGS: Final = frozenset({"linear", "llama3", "longrope"})  # of rotary angles, that are done
_OF_FAMILY: Final[Mapping[str, Callable[[ConfigReader, ModelSpec], ModelSpec]]] = MappingProxyType(
    {
        "gemma": _gemma,
        "gemma2": _gemma2,
        "gemma3_text": _gemma2,
        "granite": _granite,
        "olmo2": _olmo2,
        "qwen3_moe": _qwen3_moe,
    }
)


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
