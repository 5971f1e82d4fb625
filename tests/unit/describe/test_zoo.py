"""The zoo is found by any sensible spelling, and never by a wrong one."""

import json
import subprocess
import sys

import pytest

from drystone.describe.families.huggingface import load_config
from drystone.describe.model import ModelSpec
from drystone.describe.model_source import MODELS_FILE, find_model, model_names
from drystone.errors import InvalidSpec, UnknownName

ENTRIES = json.loads(MODELS_FILE.read_text())
ALIASES = [(alias, name) for name, entry in ENTRIES.items() for alias in entry.get("aliases", [])]


def test_the_zoo_is_large():
    assert len(model_names()) >= 70
    assert model_names() == tuple(ENTRIES)


@pytest.mark.parametrize("name", model_names())
def test_every_entry_can_be_read_and_says_where_it_comes_from(name):
    model = find_model(name)

    assert isinstance(model, ModelSpec)
    assert model.name == name
    assert model.source
    assert model.family == ENTRIES[name]["config"]["model_type"]
    assert model.context_length > 0
    assert set(ENTRIES[name]) <= {"aliases", "source", "stated_params", "config"}


@pytest.mark.parametrize("name", model_names())
def test_case_and_spacing_do_not_matter(name):
    assert find_model(name.upper()).name == name
    assert find_model(f"  some-org/{name}/ ").name == name


@pytest.mark.parametrize(("alias", "name"), ALIASES)
def test_an_alias_means_its_own_entry(alias, name):
    assert find_model(alias).name == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("Llama 3 8B", "llama-3-8b"),
        ("llama38b", "llama-3-8b"),
        ("meta-llama/Llama-2-70b-chat-hf", "llama-2-70b"),
        ("meta-llama/Llama-3.1-405B-Instruct", "llama-3.1-405b"),
        ("google/gemma-2-9b-it", "gemma-2-9b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("qwen2-5-7b", "qwen2.5-7b"),
        ("qwen2-57b", "qwen2-57b-a14b"),
        ("Qwen3_30B_a3B", "qwen3-30b-a3b"),
        ("microsoft/phi-1_5", "phi-1.5"),
        ("google/t5-v1_1-xl", "t5-v1.1-xl"),
        ("bigscience/bloom", "bloom-176b"),
        ("GPT-3 175B", "gpt3-175b"),
        ("opt 1.3b", "opt-1.3b"),
        ("opt-1-3b", "opt-1.3b"),
        ("opt 13b", "opt-13b"),
        ("opt13b", "opt-13b"),
    ],
)
def test_people_write_names_in_many_ways(text, name):
    assert find_model(text).name == name


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("llama-3-9b", "llama-3-8b"),
        ("gpt2-huge", "gpt2"),
        ("qwen-25-7b", "qwen2.5-7b"),  # the letters of qwen2.5-7b, but not its numbers
        ("mistral-7b-v0.2", "mistral-7b-v0.3"),
    ],
)
def test_an_unknown_name_gets_close_ones(text, near):
    with pytest.raises(UnknownName) as caught:
        find_model(text)
    assert text in str(caught.value)
    assert repr(near) in caught.value.hint
    assert caught.value.exit_code == 2


def test_an_ambiguous_name_gets_both():
    with pytest.raises(InvalidSpec, match=r"gpt3-1\.3b or gpt3-13b"):
        find_model("gpt313b")


@pytest.mark.parametrize("text", ["", "-", "/", "...", "\0", "\ud800", "x" * 10**6, "ß" * 500])
def test_hostile_names_are_only_unknown(text):
    with pytest.raises(UnknownName) as caught:
        find_model(text)
    assert len(str(caught.value)) < 1000


def test_a_zoo_entry_is_read_like_a_file_of_the_user(tmp_path):
    file = tmp_path / "config.json"
    for name in ("llama-3.2-1b", "deepseek-v2-lite", "t5-v1.1-small", "vit-e-14"):
        file.write_text(json.dumps(ENTRIES[name]["config"]))
        assert load_config(file).stack == find_model(name).stack


def test_importing_the_zoo_reads_no_file():
    code = (
        "from drystone.describe import model_source as zoo; "
        "assert zoo._load_zoo.cache_info().currsize == 0"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_shapes_that_matter_for_cost_are_there():
    gemma = find_model("gemma-2-9b")
    windows = [block.attention.window for block in gemma.layers()]
    assert windows == [4096, 0] * 21

    gemma3 = find_model("gemma-3-1b")
    windows = [block.attention.window for block in gemma3.layers()]
    assert windows[:6] == [512] * 5 + [0]
    assert windows.count(0) == 4

    deepseek = find_model("deepseek-v3")
    assert [block.is_moe for block in deepseek.layers()] == [False] * 3 + [True] * 58

    assert all(block.attention.window == 4096 for block in find_model("mistral-7b").blocks)
    assert all(block.attention.window == 0 for block in find_model("qwen2.5-7b").blocks)
    assert find_model("t5-11b").is_encoder_decoder
    assert find_model("falcon-7b").blocks[0].parallel_residual
    assert find_model("gpt-oss-20b").blocks[0].attention.has_sinks
