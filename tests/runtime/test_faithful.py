"""A `config.json` is trained as `transformers` computes it, to the last number, or not at all."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers

from drystone.describe.families.function import COMPARED
from drystone.describe.families.huggingface import load_config
from drystone.describe.trainable import check_trainable
from drystone.errors import InvalidSpec
from drystone.run.train.models.huggingface import Exported, exported_model
from drystone.run.train.models.transformer import Transformer, build_model

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
# Epsilons so large that a wrong one shows.
CONFIGS = {
    "llama": ("LlamaConfig", SIZES | ROPE | {"rms_norm_eps": 1e-2}),
    "llama, biases": ("LlamaConfig", SIZES | {"attention_bias": True, "head_dim": 16}),
    "mistral": ("MistralConfig", SIZES | ROPE | {"sliding_window": 5, "rms_norm_eps": 1e-3}),
    "qwen2": ("Qwen2Config", SIZES | ROPE | {"rms_norm_eps": 1e-3}),
    "qwen3": ("Qwen3Config", SIZES | ROPE | {"head_dim": 16, "rms_norm_eps": 1e-2}),
    "phi3": ("Phi3Config", SIZES | ROPE | {"rms_norm_eps": 1e-3}),
    "starcoder2": ("Starcoder2Config", SIZES | ROPE | {"norm_epsilon": 1e-2}),
    "gpt2": (
        "GPT2Config",
        {"vocab_size": 61, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64,
         "bos_token_id": 1, "eos_token_id": 2, "layer_norm_epsilon": 1e-2,
         "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
}  # fmt: skip


def config_of(name: str, **other: object) -> transformers.PretrainedConfig:
    kind, values = CONFIGS[name]
    return getattr(transformers, kind)(**values | other)


def saved(config: transformers.PretrainedConfig, folder: Path) -> Path:
    config.save_pretrained(folder)
    return folder / "config.json"


def shaken(model: Transformer) -> Transformer:
    """Weights that are nowhere what they began with: norms and biases show."""
    chance = torch.Generator().manual_seed(1)
    for one in model.parameters():
        noise = torch.randn(one.shape, generator=chance)
        one.data += noise * (0.1 if one.dim() < 2 else 0.02)
    return model


def translated(spec, family: str) -> Exported:
    """Names of `transformers`: those of an export, or of families that are not exported."""
    if family not in ("phi3", "starcoder2"):
        return exported_model(spec)
    sources = {"model.embed_tokens.weight": ("tokens.weight",)}
    attention = ("query", "key", "value")
    if family == "phi3":
        parts = {
            "self_attn.qkv_proj": tuple(f"attention.{one}" for one in attention),
            "mlp.gate_up_proj": ("feed_forward.gate", "feed_forward.up"),
            "mlp.down_proj": ("feed_forward.down",),
        }
    else:
        parts = {f"self_attn.{one[0]}_proj": (f"attention.{one}",) for one in attention}
        parts |= {"mlp.c_fc": ("feed_forward.up",), "mlp.c_proj": ("feed_forward.down",)}
    parts |= {
        "self_attn.o_proj": ("attention.out",),
        "input_layernorm": ("norms.0",),
        "post_attention_layernorm": ("norms.1",),
    }
    ends = ("weight", "bias") if family == "starcoder2" else ("weight",)
    for layer in range(spec.num_layers):
        for new, old in parts.items():
            for end in ends:
                names = tuple(f"blocks.{layer}.{one}.{end}" for one in old)
                sources[f"model.layers.{layer}.{new}.{end}"] = names
    sources |= {f"model.norm.{end}": (f"final_norm.{end}",) for end in ends}
    return Exported({}, sources | {"lm_head.weight": ("head.weight",)})


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path):
    config = config_of(name)
    spec = load_config(saved(config, tmp_path))
    ours = shaken(build_model(spec, seed=3))
    names = translated(spec, spec.family)
    values = ours.state_dict()
    weights = {
        new: names.convert(new, [values[one] for one in old]) for new, old in names.sources.items()
    }
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}  # shared with the embedding
    batch = torch.randint(61, (2, 25), generator=torch.Generator().manual_seed(0))

    with torch.no_grad():
        hidden, rotary = ours.embed(batch)
        for index in range(spec.num_layers):
            hidden = ours.run_block(index, hidden, rotary)
        found = ours.head(ours.final_norm(hidden))
        expected = theirs(input_ids=batch[:, :-1]).logits

    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_every_family_that_is_trained_is_compared():
    assert {name.partition(",")[0] for name in CONFIGS} == set(COMPARED)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "gpt2"])
def test_the_defaults_of_transformers_are_trained(name: str, tmp_path: Path):
    kind, _ = CONFIGS[name]
    spec = load_config(saved(getattr(transformers, kind)(), tmp_path))

    assert check_trainable(spec) == []


@pytest.mark.parametrize(
    ("name", "other", "words"),
    [
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
         'rope_parameters is {"factor": 2.0'),
        ("phi3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5,
                                      "rope_theta": 1e4}}, "partial_rotary_factor"),
        ("llama", {"hidden_act": "quick_gelu"}, "no activation quick_gelu"),
        ("gpt2", {"resid_pdrop": 0.1}, "resid_pdrop is 0.1"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx is true"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights is false"),
        ("llama", {"logits_scaling": 8.0}, "logits_scaling is 8.0"),
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
    ],
)  # fmt: skip
def test_what_the_config_says_and_is_not_done_is_refused_by_key_and_value(
    name: str, other: dict, words: str, tmp_path: Path
):
    spec = load_config(saved(config_of(name, **other), tmp_path))

    with pytest.raises(InvalidSpec) as error:
        build_model(spec, on_meta=True)
    assert words in error.value.message
    assert "script of your own" in error.value.hint


@pytest.mark.parametrize(
    "kind", ["GemmaConfig", "Gemma2Config", "Gemma3TextConfig", "Olmo2Config", "GraniteConfig"]
)
def test_other_families_are_never_trained_as_something_else(kind: str, tmp_path: Path):
    spec = load_config(saved(getattr(transformers, kind)(**SIZES), tmp_path))

    with pytest.raises(InvalidSpec, match="cannot be trained as what it is"):
        build_model(spec, on_meta=True)


def test_published_files_are_understood(tmp_path: Path):
    """As Llama 3.1 and Qwen 2.5 were published, by earlier versions of `transformers`."""
    shared = {"hidden_act": "silu", "initializer_range": 0.02, "torch_dtype": "bfloat16",
              "attention_dropout": 0.0, "use_cache": True, "transformers_version": "4.43.1",
              "bos_token_id": 1, "eos_token_id": [2, 3], "rms_norm_eps": 1e-5}  # fmt: skip
    qwen = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rope_theta": 1e6,
            "sliding_window": 32768, "use_sliding_window": False, "max_window_layers": 28,
            "tie_word_embeddings": False}  # fmt: skip
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 5e5,
             "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1,
             "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                              "original_max_position_embeddings": 64,
                              "rope_type": "llama3"}}  # fmt: skip
    file = tmp_path / "config.json"

    file.write_text(json.dumps(SIZES | shared | qwen))
    spec = load_config(file)
    assert check_trainable(spec) == []
    assert (spec.rope_theta, spec.norm_eps) == (1e6, 1e-5)
    file.write_text(json.dumps(SIZES | shared | llama))
    assert [one.partition(" is ")[0] for one in check_trainable(load_config(file))] == [
        "rope_scaling"
    ]
