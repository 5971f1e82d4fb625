"""`torch.compile` and tf32: done where they are accepted, refused where they are not done."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from command_cases import a_plan, events

from drystone.describe.files.job import make_job
from drystone.describe.job import recipe_of
from drystone.describe.layout import Sharding
from drystone.describe.model_source import find_model
from drystone.describe.pool import parse_pool
from drystone.describe.recipe import Precision, Recipe, Recompute
from drystone.errors import InvalidSpec
from drystone.plan.plan import save_plan
from drystone.plan.search import plan_executable
from drystone.run.train.__main__ import main

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]


def trained(folder: Path, capsys, *, sharding: Sharding = Sharding.NONE, **recipe) -> list[float]:
    plan = replace(a_plan([(4, 2, 1.0)], **recipe), sharding=sharding)
    save_plan(plan, folder / "plan.json")
    assert main([str(folder / "plan.json"), "--steps", "3", "--lr", "0.01"]) == 0
    return [one["loss"] for one in events(capsys.readouterr().out) if one["event"] == "step"]


@pytest.mark.slow
def test_compiled_blocks_learn_the_same(tmp_path: Path, capsys, monkeypatch):
    compiled = []
    compiles = nn.Module.compile

    def without_kernels(self, **how):  # dynamo and autograd as always; kernels take minutes here
        compiled.append(self)
        compiles(self, backend="aot_eager", **how)

    monkeypatch.setattr(nn.Module, "compile", without_kernels)
    for recompute in ("none", "full"):
        how = {"recompute": Recompute.parse(recompute)}
        expected = trained(tmp_path, capsys, **how)
        assert not compiled
        assert trained(tmp_path, capsys, compiled=True, **how) == pytest.approx(expected, rel=1e-5)
        assert len(compiled) == 3
        assert all(block._compiled_call_impl is not None for block in compiled)
        compiled.clear()


def test_divided_weights_are_not_compiled(tmp_path: Path, capsys):
    how = {"recompute": Recompute.parse("full"), "compiled": True}
    plan = replace(a_plan([(2, 2, 0.5), (2, 2, 0.5)], **how), sharding=Sharding.ZERO3)
    save_plan(plan, tmp_path / "plan.json")

    assert main([str(tmp_path / "plan.json"), "--steps", "1"]) == 2
    assert "all weights on each device" in capsys.readouterr().err


def test_plans_for_compiled_blocks_keep_weights_whole():
    recipe = Recipe(seq_len=512, global_batch=16, precision=Precision.FP16_MIXED, compiled=True)
    for gpus in ("4xV100-32G", "2xA100-80G,2xT4"):
        plan = plan_executable(find_model("gpt2"), recipe, parse_pool(gpus))
        assert plan.sharding <= Sharding.ZERO1
        assert not plan.not_executable


def test_a_job_file_asks_for_it(tmp_path: Path):
    train = {"steps": 1, "compile": True}
    job = make_job({"model": "gpt2", "train": train}, folder=tmp_path)
    assert recipe_of(job, find_model("gpt2"), []).compiled
    with pytest.raises(InvalidSpec, match="not for a module of your own"):
        make_job({"model": "mine.py:build", "train": train}, folder=tmp_path)


def test_tf32_sets_what_torch_multiplies_with(tmp_path: Path, capsys):
    before = torch.get_float32_matmul_precision()
    try:
        trained(tmp_path, capsys, precision=Precision.TF32)
        assert torch.get_float32_matmul_precision() == "high"
        trained(tmp_path, capsys, precision=Precision.FP32)
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision(before)
