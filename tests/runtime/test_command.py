"""`python -m drystone.run.train plan.json` and the example: real processes, real signals."""

import argparse
import gc
import signal
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent))
from command_cases import a_plan, events, finish, fork, join, start

from drystone.describe.job import TrainConfig
from drystone.describe.layout import Layout, Sharding
from drystone.describe.recipe import Optimizer, Precision, Recompute, Tuning
from drystone.errors import InvalidSpec
from drystone.plan.plan import Way, save_plan
from drystone.run.train.__main__ import main
from drystone.run.train.collectives import Wire
from drystone.run.train.config import RankConfig, add_flags, read_flags
from drystone.run.train.data import rank_works
from drystone.run.train.loop import prepare

pytestmark = pytest.mark.torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_uneven.py"


def test_one_rank_trains_and_writes_a_line_for_each_step(tmp_path: Path, capsys):
    save_plan(a_plan([(4, 2, 1.0)]), tmp_path / "plan.json")

    assert main([str(tmp_path / "plan.json"), "--steps", "3", "--lr", "0.003"]) == 0

    found = events(capsys.readouterr().out)
    assert [one["event"] for one in found] == ["started", "step", "step", "step", "finished"]
    step = found[1]
    assert step["tokens"] == 48
    assert step["seconds"].keys() == {
        "data", "forward", "backward", "gather", "reduce", "optimizer",
    }  # fmt: skip
    assert 0 < sum(step["seconds"].values()) <= step["step_seconds"]
    assert step["peak_memory_bytes"][0] > 0


def test_the_flags_of_a_rank_are_the_fields_of_its_configuration():
    parser = argparse.ArgumentParser()
    add_flags(parser)
    config = TrainConfig(learning_rate=1e-3, weight_decay=0.0, clip=0.5, seed=3, checkpoint_every=7)
    rank = RankConfig(num_steps=5, data="a.bin", checkpoints=Path("saved"), rebalances=True)

    assert read_flags(parser.parse_args([])) == RankConfig()
    from_job = read_flags(parser.parse_args(config.arguments()))
    assert from_job == RankConfig(**asdict(config))
    assert read_flags(parser.parse_args(rank.arguments())) == rank
    named = ["--steps", "2", "--lr", "0.1", "--tokenizer", "t.json", "--keep", "1",
             "--wait-for-saves", "--rebalance", "--timeout", "9"]  # fmt: skip
    assert read_flags(parser.parse_args(named)) == RankConfig(
        num_steps=2, learning_rate=0.1, tokenizer="t.json", keep=1, waits_for_saves=True,
        rebalances=True, timeout_seconds=9.0,
    )  # fmt: skip


def test_checkpoints_come_as_the_job_says_or_else_as_often_as_is_best():
    def saved(config: RankConfig) -> list[int]:
        return [step for step in range(1, 9) if config.saves_after(step, best_interval=3)]

    assert saved(RankConfig()) == [3, 6]
    assert saved(RankConfig(checkpoint_every=4)) == [4, 8]


def test_garbage_is_collected_once_the_start_is_over():
    assert gc.isenabled()  # `main` was imported above


@pytest.mark.slow
def test_sigterm_to_one_rank_makes_all_save_and_leave_and_others_go_on(tmp_path: Path):
    two = a_plan([(1, 1, 0.75), (5, 2, 0.25)])
    save_plan(two, tmp_path / "two.json")
    save_plan(a_plan([(6, 3, 1.0)]), tmp_path / "one.json")
    folder = ["--checkpoints", str(tmp_path / "saved")]
    command = ["-m", "drystone.run.train"]

    ranks = start([*command, str(tmp_path / "two.json"), "--steps", "100000", *folder], 2)
    lines = [ranks[0].stdout.readline() for _ in range(5)]
    ranks[1].send_signal(signal.SIGTERM)
    found = events("".join(lines) + finish(ranks)[0])
    left_at = found[-1]["step"]
    again = start([*command, str(tmp_path / "one.json"), "--steps", str(left_at + 2), *folder], 1)
    resumed = events(finish(again)[0])

    assert [one["event"] for one in found[-2:]] == ["checkpoint", "left"]
    assert left_at == found[-3]["step"] < 100000
    assert resumed[0] == {"event": "started", "step": left_at, "ranks": 1}
    assert [one["step"] for one in resumed if one["event"] == "step"] == [left_at + 1, left_at + 2]


def test_the_example_is_short():  # that it trains alike on one and two ranks: test_examples.py
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 40


@pytest.mark.slow
def test_a_cell_of_data_parallel_ranks_trains_as_one_device_does(tmp_path: Path):
    ranks = [(2, 1, 0.5), (2, 1, 0.5)]
    layout = Layout(dp=2, micro_batch=1, sharding=Sharding.ZERO3)
    cell = replace(a_plan(ranks), way=Way.CELL, layout=layout, sharding=Sharding.ZERO3)
    save_plan(cell, tmp_path / "two.json")
    save_plan(a_plan([(4, 2, 1.0)]), tmp_path / "one.json")
    losses = {}

    for name, num_ranks in (("two", 2), ("one", 1)):
        command = [str(tmp_path / f"{name}.json"), "--steps", "5", "--lr", "0.003"]
        assert join(fork(command, num_ranks, tmp_path)) == [0] * num_ranks
        found = events((tmp_path / "0.out").read_text())
        losses[name] = [one["loss"] for one in found if one["event"] == "step"]

    assert losses["two"] == pytest.approx(losses["one"], abs=1e-5)
    assert losses["two"][-1] < losses["two"][0]


def test_a_plan_for_other_ranks_or_beyond_the_runtime_is_refused(tmp_path: Path, capsys):
    with pytest.raises(InvalidSpec, match="for 2 ranks, 1 were started"):
        prepare(a_plan([(1, 1, 0.5), (1, 1, 0.5)]), RankConfig(), Wire())
    for wrong in (
        {"precision": Precision.FP8_MIXED},
        {"tuning": Tuning.QLORA, "weight_bits": 8.0},
        {"optimizer": Optimizer.LAMB},
        {"recompute": Recompute.parse("selective[mlp]")},
        {"dropout": 0.1},
    ):
        with pytest.raises(InvalidSpec):
            prepare(a_plan([(1, 1, 1.0)], **wrong), RankConfig(), Wire())

    assert main([str(tmp_path / "nowhere.json")]) == 2
    assert "is no plan" in capsys.readouterr().err


def test_a_plan_whose_weights_are_not_here_says_what_is_needed(tmp_path, capsys):
    plan = a_plan([(1, 1, 1.0)])
    gone = tmp_path / "gone"
    save_plan(replace(plan, model=replace(plan.model, weights=str(gone))), tmp_path / "plan.json")

    assert main([str(tmp_path / "plan.json"), "--steps", "1"]) == 2
    told = capsys.readouterr().err
    assert f"{gone}: the folder with the weights is not here" in told
    assert "Every node" in told


def test_batches_must_sum_to_the_global_batch_and_pipelines_are_refused():
    plan = a_plan([(1, 1, 0.5), (2, 1, 0.5)], global_batch=4)
    with pytest.raises(InvalidSpec, match="sum to 3, the global batch is 4"):
        rank_works(plan)

    whole = a_plan([(2, 1, 0.5), (2, 1, 0.5)])
    tensor = replace(whole, stages=(replace(whole.stages[0], tp=2),))
    with pytest.raises(InvalidSpec, match="tensor, context or pipeline"):
        rank_works(tensor)


def test_a_plan_that_says_so_is_not_executed():
    with pytest.raises(InvalidSpec, match="cannot be executed: no such kernel"):
        rank_works(replace(a_plan([(2, 1, 1.0)]), not_executable="no such kernel"))


def test_idle_ranks_and_ranks_without_state_are_read_from_a_plan():
    works = rank_works(a_plan([(0, 0, 0.25), (3, 2, 0.0), (1, 1, 0.75)]))

    assert [work.batch for work in works] == [0, 3, 1]
    assert [work.state_share for work in works] == [0.25, 0.0, 0.75]
