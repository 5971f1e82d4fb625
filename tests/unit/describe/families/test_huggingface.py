"""Configs are read as `transformers` reads them, and broken ones are refused in words."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drystone.describe.families.huggingface import (
    FAMILIES,
    LARGEST_FILE_BYTES,
    load_config,
    parse_config,
)
from drystone.describe.model import Head, ModelSpec, QkNorm
from drystone.errors import DrystoneError, InvalidSpec, RequestError, UnknownName, UnreadableFile
from drystone.estimate.parameters import count_model

GOLDEN = Path(__file__).parents[3] / "data" / "transformers_parameter_counts.json"
VARIANTS = [variant["config"] for variant in json.loads(GOLDEN.read_text())["variants"]]
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "vocab_size": 100,
}


def read(**changes) -> ModelSpec:
    return parse_config({**LLAMA, **changes}, where="config.json")


# What is read


def test_an_absent_key_means_what_the_class_assumes_and_null_may_mean_another_thing():
    mistral = {"model_type": "mistral", "num_attention_heads": 16}
    assert read(**mistral).blocks[0].attention.num_kv_heads == 8
    assert read(**mistral).blocks[0].attention.window == 4096
    null = read(**mistral, num_key_value_heads=None, sliding_window=None).blocks[0].attention
    assert null.num_kv_heads == 16
    assert null.window == 0

    assert read().blocks[0].attention.head_dim == 8
    assert read(model_type="gemma", num_key_value_heads=1).blocks[0].attention.head_dim == 256
    assert read(model_type="qwen3", num_key_value_heads=1).blocks[0].attention.head_dim == 128
    assert not read().tied_embeddings
    assert read(model_type="gemma", num_key_value_heads=1).tied_embeddings


def test_layer_types_decide_the_windows():
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    model = read(model_type="qwen2", num_key_value_heads=2, layer_types=kinds, sliding_window=16)
    assert [(block.attention.window, count) for block, count in model.stack] == [(0, 1), (16, 2)]


def test_qwen_states_a_window_that_it_does_not_use():
    stated = {"model_type": "qwen2", "num_key_value_heads": 2, "sliding_window": 16}
    assert read(**stated).stack[0][0].attention.window == 0
    used = read(**stated, use_sliding_window=True, max_window_layers=2)
    assert [block.attention.window for block in used.layers()] == [0, 0, 16]


def test_gemma_3_with_a_vision_tower_is_read_as_its_text_part():
    config = {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152},
    }
    model = parse_config(config, where="config.json")
    assert count_model(model).total == 3_880_263_168
    assert model.family == "gemma3"
    assert model.blocks[0].attention.qk_norm is QkNorm.HEAD


def test_bert_is_what_its_architecture_says():
    bert = {"model_type": "bert"}
    assert read(**bert).head is Head.MASKED
    assert read(**bert, architectures=["BertModel"]).head is Head.NONE
    labels = {"0": "a", "1": "b", "2": "c"}
    classifier = read(**bert, architectures=["BertForSequenceClassification"], id2label=labels)
    assert classifier.head is Head.CLASSIFY
    assert classifier.num_classes == 3


def test_the_name_comes_from_the_config_or_else_from_the_path(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    file = folder / "config.json"
    file.write_text(json.dumps(LLAMA))
    assert load_config(folder).name == "my-model"
    assert load_config(folder).source == str(file)
    file.write_text(json.dumps({**LLAMA, "_name_or_path": "org/named\n"}))
    assert load_config(file).name == "named"


def test_a_byte_order_mark_and_constants_in_unused_keys_do_not_hurt(tmp_path):
    file = tmp_path / "config.json"
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps({**LLAMA, "limit": float("inf")}).encode())
    assert load_config(file).num_layers == 3


@pytest.mark.parametrize("config", VARIANTS, ids=lambda config: config["model_type"])
def test_what_is_read_survives_json(config, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    assert load_config(file).stack == parse_config(config, where="here").stack


# What is refused


@pytest.mark.parametrize(
    "value",
    ["64", "", -1, 0, True, False, 1.5, float("nan"), float("inf"), 1e400, 10**9 + 1, 10**4000,
     [], [64], {}, {"a": 1}],
    ids=lambda value: repr(value)[:20],
)  # fmt: skip
@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "head_dim", "vocab_size"])
def test_a_wrong_number_is_named_with_its_key_and_file(key, value):
    with pytest.raises(InvalidSpec) as caught:
        read(**{key: value})
    message = str(caught.value)
    assert key in message
    assert message.startswith("config.json: ")
    assert caught.value.hint
    assert caught.value.exit_code == 2
    assert len(message) < 400


def test_a_whole_number_written_with_a_point_is_one():
    assert read(hidden_size=64.0).hidden_size == 64


@pytest.mark.parametrize("key", [key for key in LLAMA if key != "model_type"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma2", "olmo2", "starcoder2"])
def test_a_missing_key_is_named_with_its_file(family, key):
    config = {**LLAMA, "model_type": family, "num_key_value_heads": 8}
    del config[key]
    with pytest.raises(InvalidSpec, match=f"config.json: key '{key}' is missing"):
        parse_config(config, where="config.json")


@pytest.mark.parametrize("family", FAMILIES)
def test_an_empty_config_of_any_family_names_what_is_missing(family):
    with pytest.raises(InvalidSpec, match="is missing"):
        parse_config({"model_type": family}, where="config.json")


def test_values_that_contradict_each_other_are_refused_with_the_file():
    for changes in (
        {"num_attention_heads": 7},
        {"num_attention_heads": 8, "num_key_value_heads": 3},
        {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3},
        {"model_type": "vit", "image_size": 100, "patch_size": 16},
        {"layer_types": ["full_attention"]},
        {"model_type": "deepseek_v2", "moe_intermediate_size": 8, "n_routed_experts": 4,
         "num_experts_per_tok": 2, "mlp_bias": True},
        {"num_hidden_layers": 10_001},
    ):  # fmt: skip
        with pytest.raises(InvalidSpec, match=r"^config\.json: "):
            read(**changes)


def test_an_unknown_architecture_is_never_taken_for_another_one_but_gets_a_way_out():
    with pytest.raises(UnknownName, match="'mamba9'") as caught:
        read(model_type="mamba9")
    assert "never taken for another" in caught.value.hint
    assert "module.py:function" in caught.value.hint
    assert "llama" not in caught.value.hint.lower()
    with pytest.raises(UnknownName, match="'llama'"):
        parse_config({"model_type": "lama"}, where="config.json")
    with pytest.raises(InvalidSpec, match="model_type"):
        parse_config({"hidden_size": 4}, where="config.json")
    with pytest.raises(InvalidSpec, match="model_type"):
        read(model_type=7)


HOSTILE_FILES = {
    "empty": b"",
    "truncated": b'{"model_type": "llama", "hidden_size": 40',
    "not an object": b"[1, 2, 3]",
    "a string": b'"config"',
    "null": b"null",
    "binary": bytes(range(256)) * 10,
    "deep lists": b"[" * 200_000,
    "deep objects": b'{"a":' * 200_000,
    "deep and closed": b'{"model_type": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a long number": b'{"model_type": "llama", "hidden_size": ' + b"9" * 10_000 + b"}",
    "huge": b" " * (LARGEST_FILE_BYTES + 1),
}


@pytest.mark.parametrize("content", HOSTILE_FILES.values(), ids=HOSTILE_FILES)
def test_a_hostile_file_is_refused_in_words(tmp_path, content):
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(UnreadableFile) as caught:
        load_config(file)
    assert str(file) in str(caught.value)
    assert caught.value.hint
    assert caught.value.exit_code == 2


def test_a_path_that_is_no_file_is_refused_in_words(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "loop.json").symlink_to(tmp_path / "loop.json")
    (tmp_path / "inner").mkdir()
    for name in ("nothing.json", "pipe.json", "loop.json", "inner", "a\0b", "x" * 300, ""):
        with pytest.raises(UnreadableFile):
            load_config(tmp_path / name)


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, -1, 8, 10**9, 10**12, 10**400])
    | st.floats()
    | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
KNOWN_KEYS = sorted(
    {key for config in VARIANTS for key in config}
    | {"layer_types", "text_config", "attn_config", "id2label", "architectures", "_name_or_path"}
)


@settings(max_examples=300, deadline=None)
@given(
    base=st.sampled_from([*VARIANTS, {"model_type": "qwen", **LLAMA}, {"model_type": "gemma3"}]),
    changes=st.dictionaries(st.sampled_from(KNOWN_KEYS), JSON_VALUES, max_size=4),
    family=st.sampled_from([None, *FAMILIES]),
)
def test_no_config_raises_anything_but_our_own_errors(base, changes, family):
    config = {**base, **({"model_type": family} if family else {}), **changes}
    try:
        model = parse_config(config, where="config.json")
    except RequestError as error:
        message = str(error)
    else:
        message = ""
        assert count_model(model).total > 0
    assert len(message) < 1000


@settings(max_examples=200, deadline=None)
@given(content=st.binary(max_size=200) | JSON_VALUES.map(lambda value: json.dumps(value).encode()))
def test_no_file_raises_anything_but_our_own_errors(tmp_path_factory, content):
    file = tmp_path_factory.getbasetemp() / "config.json"
    file.write_bytes(content)
    with pytest.raises(DrystoneError):
        load_config(file)
