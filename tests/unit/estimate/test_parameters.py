"""The counts equal those of the `transformers` classes, and what was published, to the last one."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from drystone.describe.families.huggingface import FAMILIES, parse_config
from drystone.describe.model import (
    Attention,
    Block,
    Experts,
    Head,
    Mlp,
    ModelSpec,
    Norm,
    QkNorm,
    Vision,
)
from drystone.describe.model_source import MODELS_FILE, find_model, model_names
from drystone.estimate.parameters import count_block, count_model

# Counted by the classes of `transformers` on the meta device; the slow test counts again.
GOLDEN = json.loads(
    (Path(__file__).parents[2] / "data" / "transformers_parameter_counts.json").read_text()
)
STATED = [name for name in model_names() if find_model(name).stated_params]

# What was published, from model cards and papers, kept here apart from the zoo's own file.
PUBLISHED = {
    "gpt2": 124439808,
    "gpt2-medium": 354823168,
    "gpt2-large": 774030080,
    "gpt2-xl": 1557611200,
    "llama-2-7b": 6738415616,
    "llama-2-13b": 13015864320,
    "llama-2-70b": 68976648192,
    "llama-3-8b": 8030261248,
    "llama-3-70b": 70553706496,
    "llama-3.1-405b": 405853388800,
    "llama-3.2-1b": 1235814400,
    "llama-3.2-3b": 3212749824,
    "tinyllama-1.1b": 1100048384,
    "mistral-7b": 7241732096,
    "mixtral-8x7b": 46702792704,
    "qwen2.5-7b": 7615616512,
    "qwen3-8b": 8190735360,
    "qwen3-30b-a3b": 30532122624,
    "gemma-2-9b": 9241705984,
    "gemma-3-1b": 999885952,
    "phi-2": 2779683840,
    "deepseek-v2-lite": 15706484224,
    "bloom": 176247271424,
    "opt-125m": 125239296,
    "t5-11b": 11307321344,
    "pythia-12b": 11846072320,
}


@pytest.mark.parametrize(("name", "published"), PUBLISHED.items())
def test_published_counts_are_met_to_the_last_parameter(name, published):
    assert count_model(find_model(name)).total == published


@pytest.mark.parametrize("name", STATED)
def test_the_count_is_what_the_source_states(name):
    model = find_model(name)
    assert count_model(model).total == model.stated_params


@pytest.mark.parametrize("name", GOLDEN["zoo"])
def test_the_count_is_that_of_the_transformers_class(name):
    model = find_model(name)
    if name.startswith("t5-v1.1"):
        # transformers 5 ties T5's head whatever the config says; as published, 1.1 has its own.
        model = replace(model, tied_embeddings=True)
    assert count_model(model).total == GOLDEN["zoo"][name]


@pytest.mark.parametrize(
    "variant", GOLDEN["variants"], ids=lambda variant: variant["config"]["model_type"]
)
def test_every_option_of_every_family_counts_as_in_transformers(variant):
    model = parse_config(variant["config"], where="variant")
    assert count_model(model).total == variant["count"]


def test_every_model_of_the_zoo_is_checked_against_something():
    # Qwen 1 is no class of transformers, and its MPT has neither biases nor learned positions:
    # these are held to the count that their publisher states.
    assert set(model_names()) == set(GOLDEN["zoo"]) | set(STATED)
    in_variants = {variant["config"]["model_type"] for variant in GOLDEN["variants"]}
    assert set(FAMILIES) - in_variants == {"qwen", "gemma3", "kimi_k2"}  # DeepSeek's V3, renamed
    assert FAMILIES["kimi_k2"] is FAMILIES["deepseek_v3"]


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
def test_transformers_still_counts_the_same():
    pytest.importorskip("transformers")
    configs = {name: entry["config"] for name, entry in json.loads(MODELS_FILE.read_text()).items()}
    for name in _smallest_of_each_kind(configs):
        assert _count_by_transformers(configs[name]) == GOLDEN["zoo"][name], name
    for variant in GOLDEN["variants"]:
        assert _count_by_transformers(variant["config"]) == variant["count"], variant["config"]


def _smallest_of_each_kind(configs):
    """One model a class of `transformers`: others differ in sizes only. DRYSTONE_COUNT_ALL=1: all.

    Building one takes as long as it has layers, on the meta device too.
    """
    names = sorted(GOLDEN["zoo"], key=lambda name: (GOLDEN["zoo"][name], name))
    if os.environ.get("DRYSTONE_COUNT_ALL"):
        return names
    kinds = {}
    for name in names:
        kind = configs[name]["model_type"], tuple(configs[name].get("architectures", ()))
        kinds.setdefault(kind, name)
    return list(kinds.values())


def _count_by_transformers(config):
    import torch
    import transformers

    config = dict(config)
    (architecture,) = config.pop("architectures", [""])
    classes = {
        "bert": transformers.AutoModelForMaskedLM,
        "roberta": transformers.AutoModelForMaskedLM,
        "vit": transformers.AutoModelForImageClassification,
        "t5": transformers.AutoModelForSeq2SeqLM,
    }
    classes |= dict.fromkeys(
        ("llama4", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
        transformers.AutoModelForImageTextToText,
    )
    if pattern := config.pop("hybrid_override_pattern", ""):
        kinds = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
        config["layers_block_type"] = [kinds[letter] for letter in pattern]
    if config["model_type"] == "glm4_moe":
        config["num_mtp_layers"] = 0  # of the class, not of published files
    parsed = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    chosen = classes.get(parsed.model_type, transformers.AutoModelForCausalLM)
    if architecture:
        is_classifier = architecture.endswith("ForSequenceClassification")
        chosen = (
            transformers.AutoModelForSequenceClassification
            if is_classifier
            else transformers.AutoModel
        )
    with torch.device("meta"):
        module = chosen.from_config(parsed)
        module.tie_weights()
    return sum(parameter.numel() for parameter in module.parameters())


def test_a_block_by_hand():
    block = Block(
        attention=Attention(
            num_heads=4, num_kv_heads=2, head_dim=3, qkv_bias=True, out_bias=True, qk_norm="head"
        ),
        feed_forward=Mlp(ffn_size=20, gated=False, bias=True),
        norm=Norm.LAYER,
    )
    count = count_block(block, 8)

    qkv = (12 + 6 + 6) * (8 + 1)
    out = 12 * 8 + 8
    qk_norm = 2 * 2 * 3
    assert count.attention == qkv + out + qk_norm
    assert count.dense == 8 * 20 + 20 + 20 * 8 + 8
    assert count.norms == 2 * 2 * 8
    assert count.total == count.attention + count.dense + count.norms
    assert count.active == count.total


def test_tensor_parallelism_repeats_norms_and_the_biases_added_after_the_sum():
    attention = Attention(
        num_heads=4, num_kv_heads=4, head_dim=2, qkv_bias=True, out_bias=True, has_sinks=True
    )
    block = Block(
        attention=attention, feed_forward=Mlp(ffn_size=16, gated=True, bias=True), norm=Norm.LAYER
    )
    count = count_block(block, 8)

    assert count.tp_replicated == 2 * 2 * 8 + 8 + 8  # two layer norms, two output biases
    assert count.tp_divided == count.total - count.tp_replicated
    with_qk_norm = replace(block, attention=replace(attention, qk_norm=QkNorm.FULL))
    assert count_block(with_qk_norm, 8).tp_divided == count.tp_divided


def test_tensor_parallelism_repeats_the_bottleneck_of_latent_attention():
    attention = Attention(
        num_heads=4, num_kv_heads=4, head_dim=6, value_head_dim=5,
        q_lora_rank=7, kv_lora_rank=9, rope_head_dim=2,
    )  # fmt: skip
    block = Block(attention=attention, feed_forward=Mlp(ffn_size=16, gated=True), num_norms=0)
    count = count_block(block, 8)

    assert count.tp_replicated == 8 * 7 + 7 + 8 * (9 + 2) + 9
    assert count.attention - count.tp_replicated == 7 * 24 + 9 * 4 * (4 + 5) + 4 * 5 * 8


def test_experts_stand_apart_and_only_the_chosen_ones_are_active():
    experts = Experts(
        num_experts=6,
        top_k=2,
        ffn_size=5,
        shared_ffn_size=9,
        has_shared_gate=True,
        router_bias=True,
    )
    block = Block(
        attention=Attention(num_heads=2, num_kv_heads=1, head_dim=4), feed_forward=experts
    )
    count = count_block(block, 8)

    assert count.expert == 6 * 3 * 8 * 5
    assert count.active_expert == 2 * 3 * 8 * 5
    assert count.shared_expert == 3 * 8 * 9
    assert count.router == 8 * 6 + 6 + 8
    assert count.feed_forward == count.expert + count.shared_expert + count.router
    assert count.tp_replicated == count.router + 2 * 8
    assert count.tp_divided + count.tp_replicated + count.expert == count.total
    assert count.total - count.active == count.expert - count.active_expert


@pytest.mark.parametrize("name", model_names())
def test_the_parts_of_a_model_add_up(name):
    model = find_model(name)
    count = count_model(model)

    assert count.total == count.blocks + count.around_blocks
    assert sum(num for _, num in count.runs) == model.num_layers
    assert (count.active < count.total) == model.is_moe
    for block, _ in count.runs:
        assert block.tp_divided + block.tp_replicated + block.expert == block.total
        assert 0 <= block.tp_replicated < block.tp_divided


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("mixtral-8x7b", 12.9),  # model card
        ("mixtral-8x22b", 39.2),  # 39 billion
        ("qwen1.5-moe-a2.7b", 2.7),
        ("qwen3-30b-a3b", 3.3),
        ("qwen3-235b-a22b", 22.2),
        ("gpt-oss-20b", 4.2),
        ("gpt-oss-120b", 5.7),
        ("deepseek-v3", 37.6),
    ],
)
def test_active_parameters_are_as_published(name, billions):
    assert count_model(find_model(name)).active == pytest.approx(billions * 1e9, rel=0.02)


def test_a_tied_head_is_counted_once_and_told_apart():
    tied = find_model("llama-3.2-1b")
    untied = replace(tied, tied_embeddings=False)

    matrix = 128256 * 2048
    assert count_model(tied).tied_head == matrix
    assert count_model(tied).head == 0
    assert count_model(untied).tied_head == 0
    assert count_model(untied).head == matrix


def test_heads_and_embeddings_by_hand():
    block = Block(
        attention=Attention(num_heads=1, num_kv_heads=1, head_dim=4),
        feed_forward=Mlp(ffn_size=4, gated=False),
    )
    bare = ModelSpec(
        name="bare", hidden_size=4, stack=((block, 1),), head=Head.NONE, num_final_norms=0
    )
    assert count_model(bare).around_blocks == 0

    narrow = replace(bare, vocab_size=10, embedding_size=2, head=Head.LANGUAGE)
    assert count_model(narrow).embedding == 10 * 2 + 2 * 4
    assert count_model(narrow).head == 10 * 2 + 4 * 2

    seeing = replace(
        bare,
        vision=Vision(image_size=8, patch_size=4, num_channels=1),
        learned_positions=5,
        head=Head.CLASSIFY,
        num_classes=3,
    )
    assert count_model(seeing).embedding == 4 * 4 * 4 + 4 + 4
    assert count_model(seeing).positions == 5 * 4
    assert count_model(seeing).head == 3 * 4
