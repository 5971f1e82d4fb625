"""What the runtime trains as what it is, and what is planned only."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from drystone.describe.families.huggingface import load_config
from drystone.describe.files.job import make_job
from drystone.describe.job import find_shape
from drystone.describe.model_source import MODELS_FILE, find_model
from drystone.describe.pool import parse_pool
from drystone.describe.recipe import Recipe
from drystone.describe.trainable import check_trainable, refuse_untrainable
from drystone.errors import InvalidSpec
from drystone.plan.search import plan_job

LLAMA = json.loads(MODELS_FILE.read_text())["mini-llama"]["config"]
WEIGHTS = [
    "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json",
    "pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth", "model.gguf",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "models" / "gpt2"  # also a known name, after an organisation
    made.mkdir(parents=True)
    (made / "config.json").write_text(json.dumps(LLAMA))
    (made / "tokenizer.json").write_text("{}")
    (made / "generation_config.json").write_text("{}")
    return made


@pytest.mark.parametrize("file", WEIGHTS)
def test_a_folder_whose_weights_cannot_be_read_is_refused(folder: Path, file: str):
    assert check_trainable(load_config(folder)) == []
    (folder / file).write_bytes(b"")

    with pytest.raises(InvalidSpec) as error:
        refuse_untrainable(load_config(folder))
    assert file in error.value.message
    assert str(folder / "config.json") in error.value.hint


def test_the_config_itself_means_from_scratch(folder: Path):
    (folder / "model.safetensors").write_bytes(b"")

    spec = load_config(folder / "config.json")
    refuse_untrainable(spec)
    assert not spec.weights


@pytest.mark.parametrize("text", ["models/gpt2", "./models/gpt2", "models/gpt2/config.json"])
def test_a_path_in_a_job_file_means_the_folder_beside_it(folder: Path, text: str):
    job = make_job({"model": text, "train": {"steps": 1}}, folder=folder.parents[1])

    assert find_shape(job).family == "llama"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("qwen1.5-moe-a2.7b", "no shared experts"),
        ("bert-base-uncased", "no head but a language model's"),
        ("vit-b-16", "no head but a language model's"),
        ("t5-small", "encoder"),
        ("deepseek-v2-lite", "no latent attention"),
        ("pythia-14m", "no rotary positions on a part"),
        ("bloom-560m", "no ALiBi"),
        ("falcon-7b", "have not been compared"),
        ("qwen1.5-4b", "rope_theta is not in the list"),
        ("phi-4-mini", "rope_theta is not in the list"),
    ],
)
def test_what_is_not_trained_says_why(name: str, words: str):
    assert words in "; ".join(check_trainable(find_model(name)))


@pytest.mark.parametrize(
    "name", ["mini-gpt", "mini-llama", "gpt2-xl", "llama-3-8b", "qwen2.5-7b", "qwen3-8b",
             "mistral-7b-v0.1", "phi-4", "gemma-2-2b", "gemma-3-1b", "olmo-2-1b",
             "granite-3.0-2b", "llama-3.1-8b", "smollm2-135m"]
)  # fmt: skip
def test_known_names_are_trained(name: str):
    refuse_untrainable(find_model(name))


def test_what_is_not_trained_is_planned_and_the_plan_says_so():
    model, recipe = find_model("mini-llama"), Recipe(seq_len=128, global_batch=8)
    model = replace(model, not_done=("rope_scaling is 2", "no model.safetensors"))

    plans = plan_job(model, recipe, parse_pool("2xA100-80G")).plans

    assert plans
    for plan in plans:
        assert "rope_scaling is 2" in plan.not_executable
        assert "model.safetensors" in plan.not_executable
