"""Losses that go wrong stop a job and keep its checkpoints; evaluations choose best and end."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent))
from command_cases import a_plan, events, fork, join

from drystone.describe.layout import Layout, Sharding
from drystone.plan.plan import Plan, StagePlan, Way, save_plan
from drystone.run.train.__main__ import main
from drystone.run.train.checkpoint.checkpoint import find_whole
from drystone.run.train.judgement import FIRST_STEPS, MOST_SKIPPED, Diverged, LossWatch
from drystone.run.train.step_report import StepReport

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]


def a_report(step: int, loss: float, norm: float = 1.0) -> StepReport:
    return StepReport(
        step=step, loss=loss, gradient_norm=norm, learning_rate=1.0, tokens=1.0, step_seconds=1.0,
        tokens_per_second=1.0, seconds={}, compute_seconds=(), peak_memory_bytes=(),
    )  # fmt: skip


def see(watch: LossWatch, *losses: float) -> None:
    for step, loss in enumerate(losses, start=1):
        watch.see(a_report(step, loss))


def test_a_loss_that_is_no_number_stops_the_job():
    with pytest.raises(Diverged, match="step 2: the loss is nan"):
        see(LossWatch(stops_at_once=True), 2.0, math.nan)
    with pytest.raises(Diverged, match="norm of the gradient is inf"):
        LossWatch(stops_at_once=True).see(a_report(1, 2.0, math.inf))


def test_such_steps_are_passed_over_where_the_recipe_says_so_but_not_for_ever():
    watch = LossWatch(stops_at_once=False)
    see(watch, 2.0, *[math.nan] * (MOST_SKIPPED - 1), 2.0)
    assert watch.is_calm

    with pytest.raises(Diverged, match="10 steps in a row"):
        see(watch, *[math.nan] * MOST_SKIPPED)


def test_an_exploded_loss_stops_the_job_and_nothing_is_saved_meanwhile():
    watch = LossWatch(stops_at_once=False)
    see(watch, *[2.0] * FIRST_STEPS, 5.9, 6.1)
    assert not watch.is_calm
    see(watch, 1.0)
    assert watch.is_calm  # a single spike

    with pytest.raises(Diverged, match="exploded"):
        see(watch, *[7.0] * FIRST_STEPS)


def save_tokens(path: Path, *, seed: int, num_tokens: int = 600, is_learnable: bool = True) -> Path:
    chance = np.random.default_rng(seed)
    tokens = np.arange(num_tokens) % 7 if is_learnable else chance.integers(0, 40, num_tokens)
    tokens.astype(np.uint16).tofile(path)
    return path


def command(tmp_path: Path, plan: Plan, *words: str, steps: int = 12) -> list[str]:
    save_plan(plan, tmp_path / "plan.json")
    data = save_tokens(tmp_path / "train.bin", seed=0)
    return [
        str(tmp_path / "plan.json"), "--steps", str(steps), "--data", str(data),
        "--checkpoints", str(tmp_path / "job" / "checkpoints"), "--checkpoint-every", "2", *words,
    ]  # fmt: skip


def steps_of(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("step-*"))


@pytest.mark.parametrize("choice", ["stop", "skip"])
def test_training_that_blows_up_fails_and_keeps_what_was_good(tmp_path: Path, capsys, choice: str):
    plan = a_plan([(4, 4, 1.0)])
    calm = command(tmp_path, plan, steps=4)
    assert main(calm) == 0
    wild = command(tmp_path, plan, "--lr", "1e12", "--clip", "0", "--on-bad-loss", choice, steps=60)
    capsys.readouterr()

    assert main(wild) == 1

    out, err = capsys.readouterr()
    assert "checkpoints from before stay" in err
    assert not any(one["event"] in ("finished", "checkpoint") for one in events(out)[2:])
    assert 4 in steps_of(tmp_path / "job" / "checkpoints")
    assert find_whole(tmp_path / "job" / "checkpoints") is not None


def test_the_best_is_kept_and_training_ends_when_it_gets_worse(tmp_path: Path, capsys):
    held_out = save_tokens(tmp_path / "eval.bin", seed=1, is_learnable=False, num_tokens=90)
    words = ["--eval-data", str(held_out), "--evaluate-every", "2", "--keep-best"]
    words += ["--stop-after", "3", "--lr", "0.02", "--keep", "1"]

    assert main(command(tmp_path, a_plan([(4, 4, 1.0)]), *words, steps=80)) == 0

    found = events(capsys.readouterr().out)
    losses = {one["step"]: one["loss"] for one in found if one["event"] == "evaluated"}
    best = min(losses, key=losses.__getitem__)
    last = found[-1]
    assert last["event"] == "finished"
    assert f"(step {best}) in 3 tries" in last["reason"]
    assert last["step"] == best + 6 < 80
    folder = tmp_path / "job" / "checkpoints"
    assert steps_of(folder / "best") == [best]
    assert find_whole(folder / "best") is not None
    record = json.loads((folder / f"step-{last['step']:08d}" / "checkpoint.json").read_text())
    assert record["num_worse"] == 3
    # The same command again: it is over, and stays so.
    assert main(command(tmp_path, a_plan([(4, 4, 1.0)]), *words, steps=80)) == 0
    assert [one["event"] for one in events(capsys.readouterr().out)] == ["started", "finished"]


def two_stages() -> Plan:
    plan = a_plan([(4, 2, 1.0)])
    share = plan.stages[0].ranks[0]
    stages = (
        StagePlan(first_layer=0, end_layer=1, ranks=(share,)),
        StagePlan(first_layer=1, end_layer=3, ranks=(share,)),
    )
    layout = Layout(dp=1, pp=2, micro_batch=2, sharding=Sharding.ZERO1)
    return replace(plan, way=Way.CELL, layout=layout, sharding=Sharding.ZERO1, stages=stages)


@pytest.mark.slow
def test_evaluations_are_the_same_however_the_job_is_split(tmp_path: Path):
    held_out = save_tokens(tmp_path / "eval.bin", seed=1, num_tokens=12 * 6 + 1)  # 6: a part round
    words = ["--eval-data", str(held_out), "--evaluate-every", "2"]
    found = {}
    plans = {
        "one": (a_plan([(4, 4, 1.0)]), 1),
        "uneven": (a_plan([(1, 1, 0.8), (3, 2, 0.2)]), 2),
        "stages": (two_stages(), 2),
    }

    for name, (plan, num_ranks) in plans.items():
        home = tmp_path / name
        home.mkdir()
        arguments = command(home, plan, *words, "--lr", "0.003", steps=5)
        assert join(fork(arguments, num_ranks, home)) == [0] * num_ranks
        told = events((home / "0.out").read_text())
        found[name] = [one["loss"] for one in told if one["event"] == "evaluated"]

    assert len(found["one"]) == 3  # and one after the last step
    assert found["uneven"] == pytest.approx(found["one"], abs=1e-5)
    assert found["stages"] == pytest.approx(found["one"], abs=1e-5)
    assert found["one"][-1] < found["one"][0]


@pytest.mark.slow
def test_packed_documents_keep_apart_however_the_job_is_split(tmp_path: Path):
    chance = np.random.default_rng(0)
    lengths = chance.integers(3, 12, 40).tolist()
    records = [{"input_ids": (np.arange(n) % 7 + 1).tolist()} for n in lengths]
    data = tmp_path / "documents.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    found = {}

    for name, (plan, num_ranks) in {
        "one": (a_plan([(4, 4, 1.0)]), 1),
        "uneven": (a_plan([(1, 1, 0.8), (3, 2, 0.2)]), 2),
        "stages": (two_stages(), 2),
    }.items():
        home = tmp_path / name
        home.mkdir()
        arguments = command(home, plan, "--data", str(data), "--pack", "--lr", "0.003", steps=4)
        cache = str(tmp_path / "cache")
        assert join(fork(arguments, num_ranks, home, DRYSTONE_CACHE=cache)) == [0] * num_ranks
        told = events((home / "0.out").read_text())
        found[name] = [one["loss"] for one in told if one["event"] == "step"]

    assert found["uneven"] == pytest.approx(found["one"], abs=1e-5)
    assert found["stages"] == pytest.approx(found["one"], abs=1e-5)


def test_tensorboard_gets_the_curves_and_a_restart_goes_on_with_them(tmp_path: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    held_out = save_tokens(tmp_path / "eval.bin", seed=1)
    words = ["--report", "tensorboard", "--eval-data", str(held_out), "--schedule", "linear"]

    for steps in (3, 5):
        assert main(command(tmp_path, a_plan([(4, 4, 1.0)]), *words, steps=steps)) == 0

    (run,) = (tmp_path / "job" / "tensorboard").iterdir()
    read = accumulator.EventAccumulator(str(run))
    read.Reload()
    assert [one.step for one in read.Scalars("train/loss")] == [1, 2, 3, 4, 5]
    assert [one.step for one in read.Scalars("eval/loss")] == [3, 5]
    names = set(read.Tags()["scalars"])
    assert {"train/learning_rate", "train/gradient_norm", "train/tokens_per_second"} <= names


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_others_that_are_not_installed_are_refused_and_else_written_offline(
    tmp_path: Path, name: str, capsys
):
    from importlib.util import find_spec

    arguments = command(tmp_path, a_plan([(4, 4, 1.0)]), "--report", name, steps=2)

    if find_spec(name) is None:
        assert main(arguments) == 2
        assert f"{name} is not installed here" in capsys.readouterr().err
        pytest.skip(f"left out: {name} is not installed, so its own files are not looked at")
    assert main(arguments) == 0
    written = [path.name for path in (tmp_path / "job").rglob("*")]
    assert any(one.startswith(("offline-run", "mlflow")) for one in written)
