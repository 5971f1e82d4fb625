"""Blocks are computed twice: what then computes something else is mended, or never accepted."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

sys.path.insert(0, str(Path(__file__).parent))
from test_module import RECIPE, look

from drystone.describe.model_source import ModuleReference
from drystone.errors import InvalidSpec, RequestError
from drystone.run.train.data import RankWork
from drystone.run.train.models.layered import NamedBlocks
from drystone.run.train.models.module import build_user_module
from drystone.run.train.uneven.engine import Engine

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]

# Every setting that is not a size is the default of `transformers`.
STOCK = """
import transformers

SIZES = dict(vocab_size=53, hidden_size=16, intermediate_size=24, num_hidden_layers=3,
             num_attention_heads=4, num_key_value_heads=2)

def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))

def qwen3():
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=4))

def gpt2():
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=53, n_positions=12, n_embd=16, n_layer=3, n_head=2))
"""
OWN = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)
        {made}

    def forward(self, x, *more):
        {computed}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 11)

    def forward(self, tokens, following):
        x = self.tokens(tokens)
        for index, block in enumerate(self.blocks):
            x = block({given})
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), following.flatten())

def build():
    return Model()
"""


def own(folder: Path, *, made: str = "pass", computed: str, given: str = "x") -> ModuleReference:
    path = folder / "own.py"
    path.write_text(OWN.format(made=made, computed=computed, given=given))
    return ModuleReference(path=path, function="build")


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_a_stock_model_is_accepted_and_has_the_gradients_of_plain_training(name, tmp_path):
    path = tmp_path / "stock.py"
    path.write_text(STOCK)
    spec = look(ModuleReference(path=path, function=name))
    model = build_user_module(spec, seed=1)
    plain = build_user_module(spec, seed=1).module.eval()  # without dropout, as is the other
    model.module.eval()
    batch = model.make_batch(torch.randint(53, (3, 13)))

    plain(**batch).loss.backward()
    engine = Engine(model, [RankWork(batch=3, micro_batch=3).state_share])
    engine.compute_gradients([batch])

    expected = {name: one.grad for name, one in plain.named_parameters()}
    for one in engine.owned:
        whole = expected[one.name].flatten()[one.start : one.end]
        torch.testing.assert_close(one.value.grad.flatten(), whole, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (
            {"made": "self.seen = []",
             "computed": "self.seen.append(x.detach()); return x + self.up(sum(self.seen))"},
            "gives another output when it is computed again",
        ),
        (
            {"made": "self.register_buffer('calls', torch.zeros(()))",
             "computed": "self.calls += 1; return x + self.up(x)"},
            "changes its buffer blocks.0.calls",
        ),
        (
            {"computed": "return x + more[0] * self.up(x)", "given": "x, 0.5 + index"},
            "block 1 of Model is given something else",
        ),
    ],
    ids=["memory", "buffer", "extras"],
)  # fmt: skip
def test_what_computes_something_else_the_second_time_is_refused(module, words, tmp_path):
    with pytest.raises(RequestError, match=words) as error:
        look(own(tmp_path, **module))
    assert "script of your own" in error.value.hint


def test_it_is_compared_again_where_it_is_trained(tmp_path):
    spec = look(own(tmp_path, computed="return x + self.up(x)"))
    own(tmp_path, made="self.seen = []",
        computed="self.seen.append(x.detach()); return x + self.up(sum(self.seen))")  # fmt: skip

    with pytest.raises(InvalidSpec, match="gives another output"):
        build_user_module(spec)


def test_dropout_and_one_length_only_are_accepted(tmp_path):
    found = own(
        tmp_path,
        made="self.drop, self.place = nn.Dropout(0.5), nn.Parameter(torch.zeros(200, 8))",
        computed="return x + self.drop(self.up(x + self.place))",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("test_module.RECIPE", replace(RECIPE, seq_len=200))
        spec = look(found)

    assert build_user_module(spec).module.training


def test_a_cache_that_cannot_be_turned_off_is_found(tmp_path):
    """The fault as it was: `use_cache` asked for by the call itself."""
    path = tmp_path / "stock.py"
    path.write_text(
        STOCK
        + "\ndef training_batch(tokens):\n"
        + "    return {'input_ids': tokens, 'labels': tokens, 'use_cache': True}\n"
    )
    with pytest.raises(RequestError, match="gives another gradient of its input when"):
        look(ModuleReference(path=path, function="llama"))


def test_caches_are_off_in_a_loop_of_ones_own():
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=53, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4,
    )  # fmt: skip
    assert config.use_cache
    NamedBlocks(transformers.LlamaForCausalLM(config), "model.layers")
    assert not config.use_cache
