"""A module of the user's own: what is looked at before it is trained, and that it trains."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent))
from command_cases import a_plan, events, fork, join

from drystone.describe.model import ModuleSpec
from drystone.describe.model_source import ModuleReference
from drystone.describe.recipe import Precision, Recipe
from drystone.errors import RequestError
from drystone.estimate.module import tracer as module_probe
from drystone.plan.plan import save_plan
from drystone.run.train.__main__ import main
from drystone.run.train.tracing import probe

pytestmark = pytest.mark.torch

FILE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x, scale):
        return (x + scale * self.up(self.norm(x))){shape}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.{first}
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        {more}
        self.head = nn.Linear(8, 11)

    def forward(self, {arguments}):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, 0.5)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), {targets}.flatten())

def build():
    return Model()
"""
PLAIN = {
    "shape": "", "first": "Embedding(11, 8)", "more": "",
    "arguments": "tokens, following", "targets": "following",
}  # fmt: skip
RECIPE = Recipe(seq_len=12, global_batch=6, precision=Precision.FP32)


def write(folder: Path, *, also: str = "", **other: str) -> ModuleReference:
    path = folder / "mine.py"
    path.write_text(FILE.format(**(PLAIN | other)) + also)
    return ModuleReference(path=path, function="build")


def look(found: ModuleReference) -> ModuleSpec:
    """As `probe_module`, without another process."""

    def here(_, request, **__):
        answer = probe._answer(request)
        if "error" in answer:
            raise RequestError(**answer["error"])
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module_probe, "recalled_answer", here)
        return module_probe.probe_module(found, RECIPE)


def test_a_look_tells_what_a_planner_must_know(tmp_path):
    spec = look(write(tmp_path))

    assert (spec.block_list, spec.num_layers, spec.vocab_size) == ("blocks", 4, 11)
    assert spec.block_params == 8 * 8 + 8 + 2 * 8
    assert spec.outer_params == 11 * 8 + 11 * 8 + 11
    assert spec.num_params == 4 * spec.block_params + spec.outer_params
    assert spec.block_forward_flops == 2 * 12 * 8 * 8
    # What is computed again for the backward pass stops where nothing more is needed.
    assert 1 <= spec.block_backward_flops / spec.block_forward_flops <= 2
    assert spec.further_hidden_bytes == 512  # 12 * 8 numbers of 4 bytes, in blocks of 512
    assert spec.seq_len == spec.context_length == 12


def test_a_file_may_say_what_its_module_is_fed(tmp_path):
    also = "\ndef training_batch(tokens):\n    return tokens\n"
    body = {"arguments": "tokens", "targets": "tokens"}

    assert look(write(tmp_path, also=also, **body)).num_layers == 4
    with pytest.raises(RequestError, match="cannot tell what to feed") as error:
        look(write(tmp_path, **body))
    assert "training_batch" in error.value.hint


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"first": "Linear(8, 8)"}, "has no embedding"),
        (
            {"more": "self.others = nn.ModuleList(Block() for _ in range(4))"},
            "has its blocks in blocks, others",
        ),
        ({"shape": "[:, 1:]"}, "block 0 does not return what the next one takes"),
    ],
)
def test_what_the_engine_cannot_go_through_is_refused_with_the_reason(tmp_path, other, words):
    with pytest.raises(RequestError, match=words):
        look(write(tmp_path, **other))


@pytest.mark.slow
def test_a_module_is_looked_at_in_a_process_of_its_own_and_the_answer_is_kept(tmp_path):
    found = write(tmp_path)
    cache = tmp_path / "cache"

    first = module_probe.probe_module(found, RECIPE, cache_folder=cache)
    assert [one.name.partition("-")[0] for one in cache.iterdir()] == ["probe"]
    assert module_probe.probe_module(found, RECIPE, cache_folder=cache, timeout_seconds=0) == first


@pytest.mark.slow
def test_it_learns_the_same_on_unequal_ranks_as_on_one(tmp_path, capsys):
    spec = look(write(tmp_path))
    one = replace(a_plan([(6, 2, 1.0)]), model=spec, recipe=RECIPE)
    two = replace(a_plan([(4, 2, 0.25), (2, 1, 0.75)]), model=spec, recipe=RECIPE)
    save_plan(one, tmp_path / "one.json")
    save_plan(two, tmp_path / "two.json")

    assert main([str(tmp_path / "one.json"), "--steps", "5", "--lr", "0.01"]) == 0
    alone = events(capsys.readouterr().out)
    arguments = [str(tmp_path / "two.json"), "--steps", "5", "--lr", "0.01"]
    assert join(fork(arguments, 2, tmp_path)) == [0, 0]
    shared = events((tmp_path / "0.out").read_text())
    losses = [[e["loss"] for e in some if e["event"] == "step"] for some in (alone, shared)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0][-1] < losses[0][0]
    assert alone[1]["tokens"] == 72


ENCODER = """
from transformers import BertConfig, BertForMaskedLM

def build():
    return BertForMaskedLM(BertConfig(
        vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=16))
"""
HIDING = """
def training_batch(tokens):
    return {"input_ids": tokens[:, :-1] * 0, "labels": tokens[:, :-1].contiguous()}
"""


def test_an_encoder_must_say_what_it_is_not_shown(tmp_path):
    pytest.importorskip("transformers")
    path = tmp_path / "encoder.py"
    found = ModuleReference(path=path, function="build")
    path.write_text(ENCODER)

    with pytest.raises(RequestError, match="would be shown what it is to predict") as error:
        look(found)
    assert "training_batch" in error.value.hint
    path.write_text(ENCODER + HIDING)
    assert look(found).num_layers == 2
