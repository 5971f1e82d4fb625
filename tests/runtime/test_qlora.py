"""QLoRA: matrices in four bits as the paper has them, the same numbers on every split."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

sys.path.insert(0, str(Path(__file__).parent))
from command_cases import events
from faithful_cases import saved, their_loss
from qlora_cases import (
    LORA,
    adapted,
    normal_floats,
    rounded,
    their_adapted,
    train_alone,
    train_on_two,
    train_theirs,
)
from ranks import run_ranks
from test_finetune import a_folder_plan, first_batch, loaded, trained

from drystone.cli.main import run as drystone
from drystone.describe.recipe import Tuning
from drystone.plan.plan import save_plan
from drystone.run.train.__main__ import main
from drystone.run.train.models.quantised import _NUMBERS, number_pairs, pack, unpack
from drystone.run.train.uneven.engine import Engine

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]
CPU = torch.device("cpu")


def test_the_numbers_are_quantiles_of_the_normal_distribution():
    assert torch.tensor(_NUMBERS).tolist() == pytest.approx(normal_floats().tolist(), abs=1e-6)


@pytest.mark.parametrize("shape", [(8, 32), (3, 64), (5, 7)])
def test_a_matrix_comes_back_as_the_nearest_numbers(shape: tuple[int, int]):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    weight[0, 0] = 0.0

    found = unpack(pack(weight.view(-1)), number_pairs(CPU), shape, dtype=torch.float32)

    torch.testing.assert_close(found, rounded(weight), atol=1e-6, rtol=1e-6)
    nothing = unpack(pack(torch.zeros(70)), number_pairs(CPU), (70,), dtype=torch.bfloat16)
    assert torch.equal(nothing, torch.zeros(70, dtype=torch.bfloat16))


def test_every_piece_holds_the_bytes_of_the_whole(tmp_path: Path):
    model = adapted(saved("llama", tmp_path))
    name = "blocks.1.feed_forward.down.packed"
    shape = model.get_parameter(name).shape
    whole = model.initial_part(name, shape, 0, shape.numel())

    for first, last in [(0, 1), (35, 37), (36, 72), (100, shape.numel()), (7, 7)]:
        part = model.initial_part(name, shape, first, last)
        assert torch.equal(part, whole[first:last].to(part.dtype))


def test_frozen_matrices_take_four_and_a_half_bits_a_weight(tmp_path: Path):
    model = adapted(saved("llama", tmp_path))
    engine = Engine(model, [1.0], dtype=torch.bfloat16)

    packed = {one.name: one.value for one in engine.owned if one.value.dtype == torch.uint8}
    assert len(packed) == 4 * 7
    assert packed["blocks.0.attention.query.packed"].nbytes * 8 == 4.5 * 32 * 32
    others = {one.name for one in engine.owned if one.value.dtype == torch.bfloat16}
    assert "tokens.weight" in others
    assert not any(name.endswith(("query.weight", "down.weight")) for name in others)


def test_one_rank_trains_as_transformers_and_peft_do(tmp_path: Path):
    pytest.importorskip("peft")
    folder = saved("llama", tmp_path)

    assert train_alone(folder, 5) == pytest.approx(train_theirs("llama", folder, 5), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_every_split_trains_as_transformers_and_peft_do(name: str, tmp_path: Path):
    pytest.importorskip("peft")
    folder = saved(name, tmp_path)
    expected = train_theirs(name, folder, 20)

    for rank in run_ranks(train_on_two, 2, folder, 20):
        for losses in rank:
            assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_job_begins_at_the_rounded_model_and_exports_what_it_trained(
    tmp_path: Path, capsys, monkeypatch
):
    """The adapter alone, and all of it in one folder: the same model, for PEFT and for others."""
    peft = pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    plan = a_folder_plan("llama", tmp_path / "model", tuning=Tuning.QLORA, lora=LORA)
    told = trained(plan, tmp_path, capsys, "--export", "peft")
    words = ["export", str(tmp_path / "plan.json"), "--to", "huggingface"]
    assert drystone([*words, "--checkpoints", str(tmp_path / "saved"), "-o", "merged"]) == 0

    batch = first_batch(plan)
    rounded_model = their_adapted("llama", tmp_path / "model")
    with torch.no_grad():
        begin = their_loss(rounded_model, batch).item()
    steps = [one for one in told if one["event"] == "step"]
    assert steps[0]["loss"] == pytest.approx(begin, abs=1e-4)
    with torch.no_grad():
        tuned = peft.PeftModel.from_pretrained(rounded_model.unload(), tmp_path / "export").eval()
        found = tuned(input_ids=batch[:, :-1]).logits
        merged = loaded(Path("merged"))(input_ids=batch[:, :-1]).logits
    assert steps[-1]["loss"] < steps[0]["loss"]
    torch.testing.assert_close(found, merged, atol=2e-5, rtol=1e-4)
    # The same command goes on from the packed checkpoint.
    main([str(tmp_path / "plan.json"), "--steps", "5", "--checkpoints", str(tmp_path / "saved")])
    again = [one for one in events(capsys.readouterr().out) if one["event"] == "step"]
    assert [one["step"] for one in again] == [4, 5]
    assert again[0]["loss"] < steps[0]["loss"]


def test_other_widths_are_refused_before_the_first_step(tmp_path: Path, capsys):
    plan = a_folder_plan("llama", tmp_path / "model", tuning=Tuning.QLORA)
    plan = replace(plan, recipe=replace(plan.recipe, weight_bits=8.0))
    save_plan(plan, tmp_path / "plan.json")

    assert main([str(tmp_path / "plan.json"), "--steps", "1"]) == 2
    assert "weights of 8 bits" in capsys.readouterr().err
