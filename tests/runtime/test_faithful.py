"""A model is trained as `transformers` computes it, to the last number, or not at all."""

import json
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))
from cells_cases import put_together
from faithful_cases import (
    CONFIGS,
    FAMILIES,
    MIXTURES,
    SIZES,
    config_of,
    in_our_names,
    layout,
    saved,
    their_loss,
    their_model,
    train_folders,
    train_resized,
    train_theirs,
)
from ranks import run_ranks

from drystone.describe.families.function import COMPARED
from drystone.describe.families.huggingface import load_config
from drystone.describe.families.names import STYLES, weight_shapes
from drystone.describe.trainable import check_trainable
from drystone.errors import InvalidSpec
from drystone.run.train.models.transformer import build_model

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]


def written(config: transformers.PretrainedConfig, folder: Path) -> Path:
    config.save_pretrained(folder)
    return folder / "config.json"


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients_are_those_of_transformers(name: str, tmp_path: Path):
    theirs = their_model(name).train()
    spec = load_config(saved(name, tmp_path))
    ours = build_model(spec)
    batch = torch.randint(61, (2, 25), generator=torch.Generator().manual_seed(0))

    hidden, rotary = ours.embed(batch)
    for index in range(spec.num_layers):
        hidden = ours.run_block(index, hidden, rotary)
    found, expected = ours.logits(hidden), theirs(input_ids=batch[:, :-1]).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)

    loss, their_mean = ours(batch), their_loss(theirs, batch)
    assert loss.item() == pytest.approx(their_mean.item(), rel=1e-6)
    loss.backward()
    their_mean.backward()
    wanted = in_our_names(spec, {part: one.grad for part, one in theirs.named_parameters()})
    for part, one in ours.named_parameters():
        torch.testing.assert_close(one.grad, wanted.pop(part), atol=1e-5, rtol=1e-5)
    assert not wanted


def check_training(cases: list, names: list[str], num_ranks: int, *, steps: int) -> None:
    by_rank = run_ranks(train_folders, num_ranks, cases, steps)
    expected = {}
    for index, (case, name) in enumerate(zip(cases, names, strict=True)):
        spec = load_config(case) if isinstance(case, Path) else case.spec
        if name not in expected:
            expected[name] = train_theirs(name, spec, steps)
        losses, gradients = expected[name]
        for rank in by_rank:
            assert rank[index][0] == pytest.approx(losses, rel=1e-5), (name, case)
        found = put_together([rank[index][1] for rank in by_rank], gradients)
        for part, gradient in gradients.items():
            torch.testing.assert_close(found[part], gradient, atol=1e-5, rtol=1e-5)


# 50 of them were compared for every family and layout: DRYSTONE_FAITHFUL_STEPS=50, six minutes.
STEPS = int(os.environ.get("DRYSTONE_FAITHFUL_STEPS", "2"))


@pytest.mark.slow
def test_training_on_two_ranks_is_that_of_a_plain_loop(tmp_path: Path):
    cases, names = [], []
    for name in FAMILIES:
        folder = saved(name, tmp_path / name)
        splits = [folder, layout(folder, tp=1, pp=2)]
        if name not in MIXTURES:
            splits.append(layout(folder, tp=2, pp=1))
        cases += splits
        names += [name] * len(splits)

    check_training(cases, names, 2, steps=STEPS)


@pytest.mark.slow
def test_training_with_matrices_and_layers_split_is_that_of_a_plain_loop(tmp_path: Path):
    names = [name for name in FAMILIES if name not in MIXTURES]
    cases = [layout(saved(name, tmp_path / name), tp=2, pp=2) for name in names]

    check_training(cases, names, 4, steps=STEPS)


@pytest.mark.slow
def test_training_that_is_resized_twice_is_that_of_a_plain_loop(tmp_path: Path):
    """On uneven ranks, then with layers split, then with matrices split, or uneven ones again."""
    each = -(-STEPS // 3)
    jobs = []
    for name in FAMILIES:
        folder = saved(name, tmp_path / name)
        last = folder if name in MIXTURES else layout(folder, tp=2, pp=1)
        jobs.append([folder, layout(folder, tp=1, pp=2), last])

    for rank in run_ranks(train_resized, 2, jobs, tmp_path / "checkpoints", each):
        for name, job, losses in zip(FAMILIES, jobs, rank, strict=True):
            expected, _ = train_theirs(name, load_config(job[0]), 3 * each)
            assert losses == pytest.approx(expected, rel=1e-5), name


@pytest.mark.slow
def test_fifty_steps_of_a_fine_tune_are_those_of_a_plain_loop(tmp_path: Path):
    folder = saved("gemma3_text", tmp_path)

    check_training([folder], ["gemma3_text"], 2, steps=50)


def test_names_and_shapes_are_known_without_torch(tmp_path: Path):
    for name in CONFIGS:
        spec = load_config(written(config_of(name), tmp_path))
        model = build_model(spec, on_meta=True)
        assert dict(weight_shapes(spec)) == {
            part: tuple(one.shape) for part, one in model.named_parameters()
        }


def test_every_family_that_is_trained_is_compared():
    assert set(FAMILIES) == set(COMPARED) == set(STYLES)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "gpt2"])
def test_the_defaults_of_transformers_are_trained(name: str, tmp_path: Path):
    kind, _ = CONFIGS[name]
    spec = load_config(written(getattr(transformers, kind)(), tmp_path))

    assert check_trainable(spec) == []


@pytest.mark.parametrize(
    ("name", "other", "words"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
         'rope_parameters is {"factor": 2.0'),
        ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5,
                                      "rope_theta": 1e4}}, "partial_rotary_factor"),
        ("llama", {"hidden_act": "quick_gelu"}, "no activation quick_gelu"),
        ("gpt2", {"resid_pdrop": 0.1}, "resid_pdrop is 0.1"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx is true"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights is false"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
        ("mixtral", {"output_router_logits": True}, "output_router_logits is true"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ("llama", {"logits_scaling": 8.0}, "logits_scaling is 8.0"),
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
    ],
)  # fmt: skip
def test_what_the_config_says_and_is_not_done_is_refused_by_key_and_value(
    name: str, other: dict, words: str, tmp_path: Path
):
    spec = load_config(written(config_of(name, **other), tmp_path))

    with pytest.raises(InvalidSpec) as error:
        build_model(spec, on_meta=True)
    assert words in error.value.message
    assert "script of your own" in error.value.hint


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
    spec = load_config(file)
    assert check_trainable(spec) == []
    assert (spec.rope_scaling.kind, spec.rope_scaling.original_context) == ("llama3", 64)
