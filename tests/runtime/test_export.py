"""Checkpoints as `transformers` loads them: the same logits."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))
from engine_cases import SEQ_LEN, a_spec, an_optimizer, tokens

from drystone.describe.model import Attention, Block, Mlp, ModelSpec, Norm, QkNorm
from drystone.describe.recipe import Lora
from drystone.errors import InvalidSpec, UnreadableFile
from drystone.run.train.data import RankWork
from drystone.run.train.export import export_checkpoint
from drystone.run.train.models.huggingface import exported_model
from drystone.run.train.models.lora import add_adapters
from drystone.run.train.models.transformer import build_model
from drystone.run.train.trainer import Trainer

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]


def llama(**attention) -> ModelSpec:
    given = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, **attention}
    spec = a_spec("llama", tied=bool(attention.get("window")))
    block = replace(spec.blocks[0], attention=Attention(**given))
    return replace(spec, stack=((block, 2),))


SPECS = {
    "Llama": llama(),
    "Qwen2": llama(qkv_bias=True),
    "Qwen3": llama(qk_norm=QkNorm.HEAD),
    "Mistral": llama(window=5),
    "GPT2": a_spec("gpt", tied=True),
    "GPT2 apart": a_spec("gpt", tied=False),
}


def trained(spec: ModelSpec, folder: Path, lora: Lora | None = None) -> tuple[Trainer, Path]:
    """A few steps at a high rate, so that biases and norms are no longer what they began with."""
    model = build_model(spec, seed=3)
    if lora:
        add_adapters(model, lora)
    work = [RankWork(batch=4, micro_batch=2)]
    trainer = Trainer(model, work, optimizer=an_optimizer, checkpoints=folder)
    for batches in trainer.iterate(tokens().read, num_steps=3):
        trainer.step(batches)
    return trainer, trainer.save()


def logits(trainer: Trainer, x: torch.Tensor) -> torch.Tensor:
    model = trainer.engine.model
    for layer in (trainer.engine._front, *trainer.engine._blocks, trainer.engine._back):
        layer.gather()
    with torch.no_grad():
        hidden, rotary = model.embed(x)
        for block in model.blocks:
            hidden = block(hidden, rotary)
        return model.head(model.final_norm(hidden))


@pytest.mark.parametrize("name", SPECS)
def test_transformers_computes_the_same(name: str, tmp_path: Path):
    trainer, checkpoint = trained(SPECS[name], tmp_path / "saved")
    x = tokens().read(range(3))

    export_checkpoint(checkpoint, tmp_path / "out", exported_model(SPECS[name]), file_bytes=20_000)
    loaded, notes = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )

    assert type(loaded).__name__.startswith(name.split()[0])
    assert not notes["missing_keys"]
    assert not notes["unexpected_keys"]
    with torch.no_grad():
        found = loaded(input_ids=x[:, :SEQ_LEN]).logits
    torch.testing.assert_close(found, logits(trainer, x), atol=2e-5, rtol=1e-4)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1


def test_adapters_are_added_in(tmp_path: Path):
    spec = SPECS["Llama"]
    trainer, checkpoint = trained(spec, tmp_path / "saved", Lora(rank=2))
    x = tokens().read(range(3))

    export_checkpoint(checkpoint, tmp_path / "out", exported_model(spec))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")

    expected = logits(trainer, x)
    with torch.no_grad():
        found = loaded(input_ids=x[:, :SEQ_LEN]).logits
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    assert any(one.name.endswith("lora_b") and one.value.any() for one in trainer.engine.owned)


def test_what_transformers_has_no_class_for_and_damaged_ones_are_refused(tmp_path: Path):
    block = Block(attention=Attention(num_heads=2, num_kv_heads=2, head_dim=8),
                  feed_forward=Mlp(ffn_size=32, gated=False), parallel_residual=True,
                  norm=Norm.LAYER)  # fmt: skip
    strange = replace(SPECS["Llama"], stack=((block, 2),))
    with pytest.raises(InvalidSpec, match="no class of transformers"):
        exported_model(strange)

    _, checkpoint = trained(SPECS["Llama"], tmp_path / "saved")
    (checkpoint / "checkpoint.json").write_text("{}")
    with pytest.raises(UnreadableFile):
        export_checkpoint(checkpoint, tmp_path / "out", exported_model(SPECS["Llama"]))
    assert not (tmp_path / "out").exists()
