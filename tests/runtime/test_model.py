"""The reference transformer: as many parameters as the estimate counts, causal, and refusals."""

from dataclasses import replace

import pytest

pytest.importorskip("torch")

import torch

from drystone.describe.model import (
    Attention,
    Block,
    Experts,
    Mlp,
    ModelSpec,
    Norm,
    QkNorm,
)
from drystone.describe.model_source import find_model, model_names
from drystone.describe.trainable import ACTIVATIONS, check_buildable
from drystone.errors import InvalidSpec
from drystone.estimate.parameters import count_model
from drystone.run.train.models.feed_forward import FeedForward
from drystone.run.train.models.transformer import Transformer, build_model
from drystone.run.train.samples import Places

pytestmark = pytest.mark.torch


def a_spec(*, tied=False, learned=0, head_bias=False, embedding_norm=False, **block) -> ModelSpec:
    given = {
        "attention": Attention(num_heads=4, num_kv_heads=2, head_dim=4),
        "feed_forward": Mlp(ffn_size=24, gated=True, activation="silu"),
        **block,
    }
    return ModelSpec(
        name="small",
        hidden_size=16,
        stack=((Block(**given), 2),),
        vocab_size=31,
        tied_embeddings=tied,
        learned_positions=learned,
        head_bias=head_bias,
        has_embedding_norm=embedding_norm,
    )


SPECS = {
    "llama": a_spec(),
    "gpt": a_spec(
        tied=True,
        learned=20,
        norm=Norm.LAYER,
        attention=Attention(num_heads=2, num_kv_heads=2, head_dim=8, qkv_bias=True, out_bias=True),
        feed_forward=Mlp(ffn_size=40, gated=False, bias=True),
    ),
    "parallel, one norm": a_spec(parallel_residual=True, num_norms=1, norm=Norm.LAYER_NO_BIAS),
    "four norms, window": a_spec(
        num_norms=4,
        attention=Attention(num_heads=2, num_kv_heads=1, head_dim=6, window=5, qk_norm=QkNorm.HEAD),
    ),
    "full query-key norm, wide values": a_spec(
        embedding_norm=True,
        head_bias=True,
        attention=Attention(
            num_heads=2, num_kv_heads=1, head_dim=6, value_head_dim=10, qk_norm=QkNorm.FULL
        ),
    ),
    "norms without weights": a_spec(norm=Norm.NO_WEIGHT),
}


def num_parameters(model: torch.nn.Module) -> int:
    return sum(one.numel() for one in model.parameters())


@pytest.mark.parametrize("name", SPECS)
def test_it_has_the_parameters_that_the_estimate_counts(name: str):
    assert num_parameters(build_model(SPECS[name])) == count_model(SPECS[name]).total


def test_every_decoder_of_the_zoo_has_its_parameters():
    built = []
    for name in model_names():
        whole = find_model(name)
        spec = replace(whole, stack=tuple((block, 1) for block in whole.blocks))
        if not check_buildable(spec):
            with torch.device("meta"):
                model = Transformer(spec)
            assert num_parameters(model) == count_model(spec).total, name
            built.append(name)
    assert {"gpt2", "gpt2-xl"} <= set(built)
    assert len(built) >= 30


@pytest.mark.parametrize("name", SPECS)
def test_no_position_sees_what_comes_after_it(name: str):
    model = build_model(SPECS[name], seed=1)
    tokens = torch.randint(31, (1, 13), generator=torch.Generator().manual_seed(0))
    later = tokens.clone()
    later[0, 8:] = (later[0, 8:] + 1) % 31

    def hidden(batch: torch.Tensor) -> torch.Tensor:
        x, rotary = model.embed(batch)
        for index in range(2):
            x = model.run_block(index, x, rotary)
        return x

    assert torch.equal(hidden(tokens)[:, :8], hidden(later)[:, :8])
    assert not torch.equal(hidden(tokens)[:, 8:], hidden(later)[:, 8:])


def test_a_window_hides_what_lies_before_it():
    model = build_model(SPECS["four norms, window"], seed=1)
    x = torch.randn(1, 12, 16)
    other = x.clone()
    other[0, 0] += 1.0
    attention = model.blocks[0].attention
    places = Places(rotary={})

    assert torch.equal(attention(x, places)[:, 5:], attention(other, places)[:, 5:])
    assert not torch.equal(attention(x, places)[:, :5], attention(other, places)[:, :5])


def test_the_same_seed_gives_the_same_weights_and_leaves_chance_alone():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)

    first, second = (build_model(SPECS["llama"], seed=2) for _ in range(2))

    assert torch.equal(torch.rand(3), expected)
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )


def test_every_activation_that_is_promised_is_there():
    for name in ACTIVATIONS:
        FeedForward(Mlp(ffn_size=4, gated=False, activation=name), 4)(torch.ones(1, 4))


def test_what_it_cannot_be_is_refused_by_name():
    experts = a_spec(feed_forward=Experts(num_experts=4, top_k=2, ffn_size=8, shared_ffn_size=8))

    with pytest.raises(InvalidSpec, match="experts"):
        build_model(experts)
    with pytest.raises(InvalidSpec, match="embedding narrower"):
        build_model(replace(SPECS["llama"], embedding_size=8))
