"""What a MODEL on the command line means."""

import json
from pathlib import Path

import pytest

from drystone.describe.model_source import MODELS_FILE, ModuleReference, find_model, resolve_model
from drystone.errors import InvalidSpec, RequestError, UnknownName, UnreadableFile

GPT2 = json.loads(MODELS_FILE.read_text())["gpt2"]["config"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a small GPT-2 of our own, which is also the current one."""
    monkeypatch.chdir(tmp_path)
    inner = tmp_path / "models" / "gpt2"
    inner.mkdir(parents=True)
    (inner / "config.json").write_text(json.dumps({**GPT2, "n_layer": 3}))
    return tmp_path


def test_a_name_means_the_zoo():
    assert resolve_model("gpt2") == find_model("gpt2")
    assert resolve_model(" meta-llama/Llama-2-7b-hf ") == find_model("llama-2-7b")


@pytest.mark.parametrize(
    "text", ["models/gpt2/config.json", "./models/gpt2", "models/gpt2", "models/gpt2/"]
)
def test_a_path_means_the_file(folder, text):
    assert resolve_model(text).num_layers == 3
    assert resolve_model(text).name == "gpt2"


def test_a_bare_name_means_the_zoo_even_beside_a_folder_of_that_name(folder, monkeypatch):
    monkeypatch.chdir(folder / "models")
    assert resolve_model("gpt2").num_layers == 12
    assert resolve_model("./gpt2").num_layers == 3


def test_a_json_file_may_have_any_name(folder):
    (folder / "mine.json").write_text(json.dumps({**GPT2, "n_layer": 5}))
    assert resolve_model("mine.json").num_layers == 5
    assert resolve_model("mine.json").name == "mine"


def test_a_function_in_a_file_is_handed_on(folder):
    (folder / "net.py").write_text("def build(): ...\n")
    expected = ModuleReference(path=Path("net.py"), function="build")
    assert resolve_model("net.py:build") == expected


@pytest.mark.parametrize("text", ["net.py", "net.py:", "net.py:not a name", "net.py:1"])
def test_a_file_without_a_function_says_how_to_name_one(folder, text):
    (folder / "net.py").write_text("")
    with pytest.raises(InvalidSpec, match="build_model"):
        resolve_model(text)


@pytest.mark.parametrize(
    "text",
    ["nowhere.py:build", "./nowhere", "nowhere.json", "/", "~nobody-has-this-name/config.json"],
)
def test_a_missing_file_is_said_to_be_missing(folder, text):
    with pytest.raises(UnreadableFile) as caught:
        resolve_model(text)
    assert caught.value.exit_code == 2
    assert caught.value.hint


def test_an_unknown_name_also_mentions_files():
    with pytest.raises(UnknownName, match=r"config\.json"):
        resolve_model("lama-3-8b")


@pytest.mark.parametrize(
    "text",
    ["", "  ", "\0", "\0.json", "/\0", "./" + "x" * 5000, "x" * 10**5, "a/" * 3000, "\ud800/x",
     "\0.py:f", "~", ":", "::", ".py:f", "http://example.org/config.json"],
)  # fmt: skip
def test_hostile_text_is_refused_in_words(folder, text):
    with pytest.raises(RequestError) as caught:
        resolve_model(text)
    assert len(str(caught.value)) < 1500
