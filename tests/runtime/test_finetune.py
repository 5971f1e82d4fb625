"""A folder as people publish one, trained further, and written back: `transformers` and PEFT."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))
from command_cases import a_plan, events, run_forked
from faithful_cases import saved, their_loss

from drystone.cli.main import run as drystone
from drystone.describe.families.huggingface import load_config
from drystone.describe.recipe import Lora, Tuning
from drystone.errors import InvalidSpec
from drystone.plan.plan import Plan, load_plan, save_plan
from drystone.run.train.__main__ import main
from drystone.run.train.data import DataRequest, open_source

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]

TOKENIZER = {
    "tokenizer.json": "{}",
    "tokenizer_config.json": '{"a": 1}',
    "merges.txt": "a b",
    "generation_config.json": '{"temperature": 0.5}',
}


def a_folder_plan(name: str, folder: Path, **recipe) -> Plan:
    """One rank, four samples of the length of the recipe."""
    saved(name, folder)
    for file, text in TOKENIZER.items():
        (folder / file).write_text(text)
    return replace(a_plan([(4, 2, 1.0)], **recipe), model=load_config(folder))


def first_batch(plan: Plan) -> torch.Tensor:
    request = DataRequest(name="synthetic", seq_len=plan.recipe.seq_len, vocab_size=61, seed=0)
    return open_source(request).read(range(4))


def trained(plan: Plan, folder: Path, capsys, *more: str) -> list[dict]:
    save_plan(plan, folder / "plan.json")
    words = [str(folder / "plan.json"), "--steps", "3", "--lr", "0.02", *more]
    assert main([*words, "--checkpoints", str(folder / "saved")]) == 0
    return events(capsys.readouterr().out)


def loaded(folder: Path) -> transformers.PreTrainedModel:
    model, notes = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not notes["missing_keys"]
    assert not notes["unexpected_keys"]
    return model.eval()


SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("phi3", "gpt2", "gemma2", "olmo2", "mixtral", "qwen3_moe", "olmoe")
]


@pytest.mark.parametrize("name", ["llama, 3.1", *SLOW])
def test_a_fine_tune_begins_where_transformers_is_and_ends_where_it_goes_on(
    name: str, tmp_path: Path, capsys
):
    plan = a_folder_plan(name, tmp_path / "model")
    told = trained(plan, tmp_path, capsys, "--export", "huggingface")

    steps = [one for one in told if one["event"] == "step"]
    batch = first_batch(plan)
    with torch.no_grad():
        begin = their_loss(loaded(tmp_path / "model"), batch).item()
    assert steps[0]["loss"] == pytest.approx(begin, abs=1e-4)
    assert [one["path"] for one in told if one["event"] == "exported"] == [str(tmp_path / "export")]
    # Going on from the export is going on from the checkpoint.
    again = replace(plan, model=load_config(tmp_path / "export"))
    (tmp_path / "again").mkdir()
    first = next(
        one for one in trained(again, tmp_path / "again", capsys) if one["event"] == "step"
    )
    with torch.no_grad():
        assert first["loss"] == pytest.approx(
            their_loss(loaded(tmp_path / "export"), batch).item(), abs=1e-4
        )
    for file, text in TOKENIZER.items():
        assert (tmp_path / "export" / file).read_text() == text
    assert load_config(tmp_path / "export").rope_scaling == plan.model.rope_scaling


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "phi3", "gpt2"])
def test_adapters_are_loaded_by_peft_and_merged_by_us(
    name: str, tmp_path: Path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    peft = pytest.importorskip("peft")
    lora = Lora(rank=3, alpha=6.0, targets=("q", "v", "o", "up", "down"))
    plan = a_folder_plan(name, tmp_path / "model", tuning=Tuning.LORA, lora=lora)
    trained(plan, tmp_path, capsys, "--export", "peft")
    words = ["export", str(tmp_path / "plan.json"), "--to", "huggingface"]
    assert drystone([*words, "--checkpoints", str(tmp_path / "saved"), "-o", "merged"]) == 0

    base, batch = loaded(tmp_path / "model"), first_batch(plan)[:, :-1]
    with torch.no_grad():
        before = base(input_ids=batch).logits
        tuned = peft.PeftModel.from_pretrained(base, tmp_path / "export").eval()
        found = tuned(input_ids=batch).logits
        merged = loaded(Path("merged"))(input_ids=batch).logits
    assert (found - before).abs().max() > 1e-3
    torch.testing.assert_close(found, merged, atol=2e-5, rtol=1e-4)
    config = json.loads((tmp_path / "export" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (3, 6.0)


@pytest.mark.slow
def test_a_job_of_two_ranks_exports_at_its_end(tmp_path: Path):
    """Rank 0 writes alone: nothing of it may wait for the others, nor they for it."""
    plan = a_folder_plan("llama", tmp_path / "model")
    two = a_plan([(1, 1, 0.7), (3, 2, 0.3)])
    save_plan(replace(two, model=plan.model), tmp_path / "plan.json")
    words = [str(tmp_path / "plan.json"), "--steps", "2", "--export", "huggingface"]
    words += ["--checkpoints", str(tmp_path / "saved"), "--timeout", "30"]

    told = run_forked(words, 2, tmp_path)

    assert [one["event"] for one in told][-2:] == ["exported", "finished"]
    loaded(tmp_path / "export")


def test_what_cannot_be_exported_is_refused_before_the_first_step(tmp_path: Path, capsys):
    plan = a_folder_plan("llama", tmp_path / "model")
    save_plan(plan, tmp_path / "plan.json")

    words = [str(tmp_path / "plan.json"), "--steps", "1", "--export", "peft"]
    assert main(words) == 2
    assert "--checkpoints FOLDER" in capsys.readouterr().err
    assert main([*words, "--checkpoints", str(tmp_path / "saved")]) == 2
    assert "no adapters" in capsys.readouterr().err


def test_adapters_of_single_experts_are_exported_merged_only(tmp_path: Path, capsys):
    lora = Lora(rank=2, targets=("q", "up"))
    plan = a_folder_plan("mixtral", tmp_path / "model", tuning=Tuning.LORA, lora=lora)
    save_plan(plan, tmp_path / "plan.json")
    words = [str(tmp_path / "plan.json"), "--steps", "1", "--checkpoints", str(tmp_path / "saved")]

    assert main([*words, "--export", "peft"]) == 2
    assert "matrices of single experts" in capsys.readouterr().err
    assert main([*words, "--export", "huggingface"]) == 0
    loaded(tmp_path / "export")


def test_values_that_are_no_numbers_are_named(tmp_path: Path):
    from safetensors.torch import load_file, save_file

    from drystone.run.train.models.transformer import build_model

    folder = saved("llama", tmp_path, most="1GB")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(Exception, match=r"model\.norm\.weight has values that are no numbers"):
        build_model(load_config(folder))


def test_a_second_head_must_be_the_embedding(tmp_path: Path):
    from safetensors.torch import load_file, save_file

    from drystone.run.train.models.transformer import build_model

    folder = saved("llama, 3.1", tmp_path, most="1GB")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    build_model(load_config(folder))

    tensors["lm_head.weight"] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidSpec, match="head and its embedding differ"):
        build_model(load_config(folder))


def test_a_rank_reads_its_pieces_only(tmp_path: Path, monkeypatch):
    """Of what one of four ranks does not keep, nothing is read."""
    from drystone.run.train.models import pretrained
    from drystone.run.train.models.transformer import build_model

    read = []
    original = pretrained.PretrainedWeights._slice

    def counted(self, tensor, at):
        found = original(self, tensor, at)
        read.append(found.numel())
        return found

    monkeypatch.setattr(pretrained.PretrainedWeights, "_slice", counted)
    model = build_model(load_config(saved("gpt2", tmp_path)), on_meta=True)
    shape = model.blocks[0].feed_forward.up.weight.shape  # stored the other way, too
    half = model.initial_part("blocks.0.feed_forward.up.weight", shape, 0, shape.numel() // 2)
    none = model.initial_part("blocks.0.attention.out.weight", torch.Size((32, 32)), 7, 7)

    assert (half.numel(), none.numel()) == (shape.numel() // 2, 0)
    assert read == [shape.numel() // 2]


def test_a_saved_plan_keeps_the_folder(tmp_path: Path):
    plan = a_folder_plan("gemma3_text", tmp_path / "model")
    save_plan(plan, tmp_path / "plan.json")

    assert load_plan(tmp_path / "plan.json").model == plan.model
