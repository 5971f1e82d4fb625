"""fp16 with a scaled loss: learns as fp32 does, and steps that overflow change nothing."""

import copy
import math
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from command_cases import a_plan, events
from engine_cases import Case, a_model, an_optimizer, tokens

from drystone.describe.recipe import Precision
from drystone.plan.plan import save_plan
from drystone.run.train.__main__ import main
from drystone.run.train.models.layered import NamedBlocks
from drystone.run.train.stepping import PATIENCE_STEPS, LossScale
from drystone.run.train.trainer import Trainer
from drystone.run.train.uneven.engine import Engine
from drystone.run.train.uneven.whole import WholeEngine

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]

CASE = Case(batches=(4,), micros=(2,), shares=(1.0,), style="llama")


def test_the_factor_halves_when_a_gradient_is_not_finite_and_doubles_after_many_that_are():
    scale = LossScale(1024.0, 5)

    assert scale.after(math.inf) == LossScale(512.0, 0)
    assert scale.after(math.nan) == LossScale(512.0, 0)
    assert scale.after(1.0) == LossScale(1024.0, 6)
    assert LossScale(1024.0, PATIENCE_STEPS - 1).after(1.0) == LossScale(2048.0, 0)
    assert LossScale(1.0).after(math.inf).factor == 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_come_out_without_the_factor(dtype):
    exact, rounded = (Engine(a_model(CASE), [1.0], dtype=one) for one in (torch.float32, dtype))
    rounded.loss_scale = 4096.0
    batch = [tokens().read(range(4))]

    found = [engine.compute_gradients(batch) for engine in (exact, rounded)]

    assert found[1].loss == pytest.approx(found[0].loss, rel=1e-2)
    assert found[1].gradient_norm == pytest.approx(found[0].gradient_norm, rel=3e-2)


def test_an_overflow_is_skipped_and_the_factor_is_remembered(tmp_path: Path):
    trainer = Trainer(
        a_model(CASE), CASE.works, optimizer=an_optimizer, dtype=torch.float16, checkpoints=tmp_path
    )
    trainer._scale = LossScale(2.0**40)  # beyond what fp16 can hold
    before = [one.value.clone() for one in trainer.engine.owned]

    reports = [trainer.step(batches) for batches in trainer.iterate(tokens().read, num_steps=1)]
    trainer.save()
    again = Trainer(
        a_model(CASE), CASE.works, optimizer=an_optimizer, dtype=torch.float16, checkpoints=tmp_path
    )

    assert again.resume()
    assert reports[0].is_skipped
    assert all(
        torch.equal(one.value, old) for one, old in zip(trainer.engine.owned, before, strict=True)
    )
    assert again._scale == LossScale(2.0**39, 0)


def test_a_plan_in_fp16_learns(tmp_path: Path, capsys):
    save_plan(a_plan([(4, 2, 1.0)], precision=Precision.FP16_MIXED), tmp_path / "plan.json")

    assert main([str(tmp_path / "plan.json"), "--steps", "25", "--lr", "0.01"]) == 0

    steps = [one for one in events(capsys.readouterr().out) if one["event"] == "step"]
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.2
    assert not steps[-1]["is_skipped"]


class Shifted(nn.Module):
    """Adds a table that is no parameter, and stays in fp32 in any recipe."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.register_buffer("table", torch.linspace(0.0, 1.0, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.norm(x) + self.table)


class Regression(nn.Module):
    """Takes samples that are no tokens: fp32 as well."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Shifted(8) for _ in range(2))
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [Engine, WholeEngine])
def test_buffers_and_inputs_of_a_module_may_be_wider_than_its_weights(make, dtype):
    torch.manual_seed(0)
    module, batch = Regression(), [torch.randn(4, 8)]
    wide, narrow = (
        make(NamedBlocks(copy.deepcopy(module), "blocks"), [1.0], dtype=one)
        for one in (torch.float32, dtype)
    )

    expected, found = wide.compute_gradients(batch), narrow.compute_gradients(batch)

    assert found.loss == pytest.approx(expected.loss, rel=3e-2)
    assert found.gradient_norm == pytest.approx(expected.gradient_norm, rel=5e-2)
