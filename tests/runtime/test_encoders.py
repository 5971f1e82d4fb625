"""Encoders of `transformers` as modules: BERT with hidden words, ViT with images of one's own."""

import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

sys.path.insert(0, str(Path(__file__).parent))
from command_cases import a_plan, events, fork, join
from test_module import look

from drystone.describe.layout import Sharding
from drystone.describe.model_source import ModuleReference
from drystone.describe.recipe import Precision, Recipe, Recompute
from drystone.errors import RequestError
from drystone.plan.plan import save_plan
from drystone.run.train.__main__ import main
from drystone.run.train.data.own import OwnSamples

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]

BERT = """
import torch
from transformers import BertConfig, BertForMaskedLM

def build():
    return BertForMaskedLM(BertConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=3,
        num_attention_heads=2, max_position_embeddings=16, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0))

class Hidden(torch.utils.data.Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        chance = torch.Generator().manual_seed(index)
        words = torch.randint(2, 31, (12,), generator=chance)
        length = 4 + index % 8
        is_hidden = torch.rand(12, generator=chance) < 0.4
        is_hidden[0] = True
        is_hidden[length:] = False
        return {
            "input_ids": words.masked_fill(is_hidden, 1),
            "attention_mask": (torch.arange(12) < length).long(),
            "labels": words.masked_fill(~is_hidden, -100),
        }

def training_data():
    return Hidden()
"""
WEIGHT = """
def training_weight(batch):
    return (batch["labels"] != -100).sum()
"""
VIT = """
import torch
from transformers import ViTConfig, ViTForImageClassification

def build():
    return ViTForImageClassification(ViTConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
        image_size=16, patch_size=8, num_labels=5))

class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        chance = torch.Generator().manual_seed(index)
        pixels = torch.randn(3, 16, 16, generator=chance)
        return {"pixel_values": pixels, "labels": index % 5}

def training_data():
    return Images()
"""
STEPS, BATCH, RATE = 10, 6, 0.01
RECIPE = Recipe(seq_len=12, global_batch=BATCH, precision=Precision.FP32)
LAYOUTS = {
    "uneven": ([(4, 3, 0.25), (2, 1, 0.75)], Sharding.ZERO3, "full"),
    "uneven, whole": ([(4, 3, 0.25), (2, 1, 0.75)], Sharding.ZERO1, "none"),
    "even": ([(3, 3, 0.5), (3, 3, 0.5)], Sharding.NONE, "none"),
}


def plain_losses(path: Path) -> list[float]:
    """A loop of `transformers` and torch alone, with the whole batch."""
    table = runpy.run_path(str(path))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = table["build"]().train()
    samples = OwnSamples(table["training_data"](), seed=0)  # their order alone
    matrices = [one for one in model.parameters() if one.dim() > 1]
    vectors = [one for one in model.parameters() if one.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE)
    losses = []
    for step in range(STEPS):
        loss = model(**samples.read(range(step * BATCH, (step + 1) * BATCH))).loss
        loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("text", [BERT + WEIGHT, VIT], ids=["bert", "vit"])
def test_an_encoder_is_trained_as_a_plain_loop_does(text: str, layout: str, tmp_path: Path):
    path = tmp_path / "encoder.py"
    path.write_text(text)
    spec = look(ModuleReference(path=path, function="build"))
    works, sharding, recompute = LAYOUTS[layout]
    recipe = replace(RECIPE, recompute=Recompute.parse(recompute))
    plan = replace(a_plan(works), model=spec, recipe=recipe, sharding=sharding)
    save_plan(plan, tmp_path / "plan.json")

    words = [str(tmp_path / "plan.json"), "--steps", str(STEPS), "--lr", str(RATE)]
    assert join(fork(words, 2, tmp_path)) == [0, 0]
    told = events((tmp_path / "0.out").read_text())
    losses = [one["loss"] for one in told if one["event"] == "step"]
    assert losses == pytest.approx(plain_losses(path), rel=1e-5)
    assert losses[-1] < losses[0]


def test_labels_that_do_not_count_must_be_weighed(tmp_path: Path):
    path = tmp_path / "encoder.py"
    found = ModuleReference(path=path, function="build")
    path.write_text(BERT)

    with pytest.raises(RequestError, match="is not the mean of theirs") as error:
        look(found)
    assert "training_weight" in error.value.hint
    path.write_text(BERT + WEIGHT)
    assert look(found).num_layers == 3


def test_tokens_beside_samples_of_its_own_are_refused(tmp_path: Path, capsys):
    path = tmp_path / "encoder.py"
    path.write_text(VIT)
    spec = look(ModuleReference(path=path, function="build"))
    save_plan(replace(a_plan([(6, 3, 1.0)]), model=spec, recipe=RECIPE), tmp_path / "plan.json")
    (tmp_path / "words.txt").write_text("words " * 100)

    words = [str(tmp_path / "plan.json"), "--steps", "1", "--data", str(tmp_path / "words.txt")]
    assert main(words) == 2
    assert "reads its own samples" in capsys.readouterr().err


def test_a_stream_is_no_data_set(tmp_path: Path):
    path = tmp_path / "encoder.py"
    path.write_text(VIT.replace("return Images()", "return iter(())"))

    with pytest.raises(RequestError, match="no samples by number"):
        look(ModuleReference(path=path, function="build"))


def test_every_sample_comes_once_in_an_epoch_whatever_the_batches():
    numbers = list(range(10, 17))
    samples = OwnSamples(numbers, seed=3)

    one = samples.read(range(14)).tolist()
    apart = [number for at in range(0, 14, 2) for number in samples.read([at, at + 1]).tolist()]
    assert apart == one
    assert sorted(one[:7]) == sorted(one[7:]) == numbers
    assert one[:7] != one[7:]
