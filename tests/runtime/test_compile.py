"""Recipes that say how kernels are made: torch.compile, TF32."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

sys.path.insert(0, str(Path(__file__).parent))
from command_cases import a_plan, events

from drystone.describe.files.job import make_job
from drystone.describe.job import recipe_of
from drystone.describe.model_source import find_model
from drystone.describe.recipe import Precision
from drystone.errors import InvalidSpec
from drystone.plan.plan import save_plan
from drystone.run.train.__main__ import main
from drystone.run.train.models import layered

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]


def losses(folder: Path, capsys, **recipe) -> list[float]:
    save_plan(a_plan([(4, 2, 1.0)], **recipe), folder / "plan.json")
    assert main([str(folder / "plan.json"), "--steps", "2"]) == 0
    return [one["loss"] for one in events(capsys.readouterr().out) if one["event"] == "step"]


@pytest.mark.slow
def test_blocks_are_compiled_where_the_recipe_says_so(tmp_path: Path, capsys, monkeypatch):
    graphs = []

    def compiler(graph, _):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(layered, "COMPILER", compiler)
    torch._dynamo.reset()

    plain = losses(tmp_path, capsys)
    assert not graphs
    compiled = losses(tmp_path, capsys, compiled=True)

    assert graphs
    assert compiled == pytest.approx(plain, rel=1e-5)


def test_tensor_cores_multiply_fp32_only_where_the_recipe_says_so(tmp_path: Path, capsys):
    before = torch.backends.cuda.matmul.allow_tf32
    losses(tmp_path, capsys, precision=Precision.TF32)
    assert torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cudnn.allow_tf32
    losses(tmp_path, capsys, precision=Precision.FP32)
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = before


def test_a_job_file_asks_for_it(tmp_path: Path):
    train = {"steps": 1, "compile": True}
    job = make_job({"model": "gpt2", "train": train}, folder=tmp_path)
    assert recipe_of(job, find_model("gpt2"), []).compiled
    with pytest.raises(InvalidSpec, match="not for a module of your own"):
        make_job({"model": "mine.py:build", "train": train}, folder=tmp_path)
