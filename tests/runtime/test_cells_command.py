"""Plans of the planner with tensor parallelism and pipelines, executed from their files."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent))
from command_cases import a_plan, events, fork, join, run_forked, wait_for_events
from engine_cases import a_spec

from drystone.describe.layout import Schedule, parse_layout
from drystone.describe.pool import parse_pool
from drystone.describe.recipe import Lora, Precision, Recipe, Tuning
from drystone.plan.cells.search import cell_plan, search_cells
from drystone.plan.cells.unlike import plan_unlike_stages
from drystone.plan.groups.pipelines import plan_groups
from drystone.plan.plan import Plan, Way, save_plan
from drystone.plan.rivals import plan_words
from drystone.plan.search import plan_job
from drystone.run.train.__main__ import main
from drystone.run.train.cells.layout import cell_layout, is_cell
from drystone.run.train.data import rank_works

pytestmark = pytest.mark.torch

MODEL = a_spec("llama", tied=True, num_layers=4)
RECIPE = Recipe(seq_len=12, global_batch=6, precision=Precision.FP32)


def planned_cell(text: str, recipe: Recipe = RECIPE) -> Plan:
    """What the planner makes of that layout for its own GPUs."""
    wanted = parse_layout(text)
    group = parse_pool(f"{wanted.num_gpus}xA100-80G").groups[0]
    cells = search_cells(MODEL, recipe, group.machine, (wanted.num_gpus,))
    layouts = cells.layouts
    keys = ("dp", "tp", "pp", "micro_batch", "virtual_stages", "sharding")
    is_wanted = [getattr(layouts, key) == getattr(wanted, key) for key in keys]
    (index, *_) = np.flatnonzero(np.logical_and.reduce(is_wanted))
    return cell_plan(MODEL, cells, int(index), group)


def losses_of(found: list[dict]) -> list[float]:
    return [one["loss"] for one in found if one["event"] == "step"]


@pytest.mark.slow
def test_plans_of_unlike_kinds_go_on_for_each_other(tmp_path: Path, capsys):
    """dp 1 x tp 2 x pp 2, then a pipeline over one T4 and three A100, then dp 2 x pp 2."""
    plans = [
        planned_cell("tp=2,pp=2,micro=2"),
        plan_groups(MODEL, RECIPE, parse_pool("3xA100-80G,1xT4")),
        planned_cell("dp=2,pp=2,micro=3,zero=3"),
    ]
    assert {stage.dp for stage in plans[1].stages} == {1, 3}
    alone = replace(a_plan([(6, 2, 1.0)]), model=MODEL, recipe=RECIPE)
    save_plan(alone, tmp_path / "alone.json")
    assert main([str(tmp_path / "alone.json"), "--steps", "6", "--lr", "0.003"]) == 0
    expected = losses_of(events(capsys.readouterr().out))

    losses = []
    for number, plan in enumerate(plans):
        save_plan(plan, tmp_path / "plan.json")
        given = ["--steps", str(2 * number + 2), "--lr", "0.003", "--checkpoints", str(tmp_path)]
        found = run_forked([str(tmp_path / "plan.json"), *given], 4, tmp_path)
        assert found[0] == {"event": "started", "step": 2 * number, "ranks": 4}
        assert [one["event"] for one in found[-2:]] == ["checkpoint", "finished"]
        losses += losses_of(found)

    assert losses == pytest.approx(expected, abs=1e-5)
    step = next(one for one in found if one["event"] == "step")
    assert step["tokens"] == 72
    assert len(step["compute_seconds"]) == len(step["peak_memory_bytes"]) == 4
    assert 0 < sum(step["seconds"].values()) <= step["step_seconds"]


@pytest.mark.slow
def test_sigterm_to_the_last_stage_makes_all_save_and_leave(tmp_path: Path):
    recipe = Recipe(seq_len=12, global_batch=6, precision=Precision.FP32, tuning=Tuning.LORA,
                    lora=Lora(rank=2))  # fmt: skip
    save_plan(planned_cell("pp=2,micro=1", recipe), tmp_path / "plan.json")
    given = [str(tmp_path / "plan.json"), "--checkpoints", str(tmp_path), "--lr", "0.01"]

    ranks = fork([*given, "--steps", "100000"], 2, tmp_path)
    wait_for_events(ranks, tmp_path, lambda found: len(found) >= 5)
    ranks[1].terminate()
    assert join(ranks) == [0, 0]
    found = events((tmp_path / "0.out").read_text())
    left_at = found[-1]["step"]
    resumed = run_forked([*given, "--steps", str(left_at + 1)], 2, tmp_path)

    assert [one["event"] for one in found[-2:]] == ["checkpoint", "left"]
    assert resumed[0]["step"] == left_at < 100000
    assert len(losses_of(resumed)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp=2,micro=2", "pp=2,micro=1"])
def test_when_a_rank_is_killed_the_other_leaves_and_a_restart_goes_on(tmp_path: Path, layout: str):
    save_plan(planned_cell(layout), tmp_path / "plan.json")
    given = [str(tmp_path / "plan.json"), "--checkpoints", str(tmp_path), "--timeout", "60"]

    ranks = fork([*given, "--checkpoint-every", "2", "--steps", "100000"], 2, tmp_path)
    wait_for_events(ranks, tmp_path, lambda some: any(x["event"] == "checkpoint" for x in some))
    ranks[1].kill()
    assert 0 not in join(ranks)
    found = events((tmp_path / "0.out").read_text())
    resumed = run_forked([*given, "--steps", str(found[-1]["step"])], 2, tmp_path)

    before = {one["step"]: one["loss"] for one in found if one["event"] == "step"}
    after = {one["step"]: one["loss"] for one in resumed if one["event"] == "step"}
    assert resumed[0]["step"] >= 2
    assert all(loss == pytest.approx(before[step], abs=1e-5) for step, loss in after.items())


def test_the_planner_marks_no_layout_that_the_runtime_executes():
    found = plan_job(MODEL, RECIPE, parse_pool("2xA100-80G,2xV100-32G"))

    ways = {plan.way for plan in found.plans}
    assert ways == {Way.CELL, Way.UNEVEN, Way.GROUPS}
    assert {plan.not_executable for plan in found.plans} == {""}
    assert [cell_layout(plan).num_ranks for plan in found.plans if is_cell(plan)] == [4]


def test_interleaved_stages_have_several_runs_of_layers():
    plan = planned_cell("pp=2,micro=3,vpp=2")

    layout = cell_layout(plan)

    assert layout.schedule is Schedule.INTERLEAVED
    assert [(one.stage, one.first_layer) for one in layout.chunks] == [
        (0, 0), (1, 1), (0, 2), (1, 3),
    ]  # fmt: skip


def test_equal_ranks_whose_batches_do_not_divide_have_less_at_the_end():
    assert [work.batch for work in rank_works(planned_cell("dp=4,micro=1"))] == [2, 2, 2, 0]
    layout = cell_layout(planned_cell("dp=4,pp=2,micro=1"))
    assert [len(run) for seat in range(4) for run in layout.samples(layout.seat(seat), 0)] == [
        1, 1, 1, 1, 1, 1, 0, 0,
    ]  # fmt: skip


@pytest.mark.slow
def test_a_cell_with_unlike_stages_learns_what_one_device_learns(tmp_path: Path, capsys):
    """Three equal GPUs as the planner divides them: one of them, then two."""
    plan = plan_unlike_stages(MODEL, RECIPE, parse_pool("3xT4").groups[0])
    assert [(stage.dp, stage.tp) for stage in plan.stages] == [(1, 1), (2, 1)]
    alone = replace(a_plan([(6, 2, 1.0)]), model=MODEL, recipe=RECIPE)
    save_plan(alone, tmp_path / "alone.json")
    save_plan(plan, tmp_path / "plan.json")
    given = ["--steps", "4", "--lr", "0.003"]

    found = run_forked([str(tmp_path / "plan.json"), *given], 3, tmp_path)
    assert main([str(tmp_path / "alone.json"), *given]) == 0

    expected = losses_of(events(capsys.readouterr().out))
    assert losses_of(found) == pytest.approx(expected, abs=1e-5)


def paced(plan: Plan, seconds: float) -> str:
    """What devices are told that take so long for a section of a sample."""
    devices = {gpu: {"speed": 1.0} for gpu in plan.gpus}
    sections = dict.fromkeys(("forward", "backward", "head"), seconds)
    return json.dumps({"gpus": devices, "seconds": sections})


@pytest.mark.slow
@pytest.mark.parametrize("is_rival_faster", [True, False])
def test_the_launch_tries_rivals_and_trains_the_fastest_as_if_nothing_had_been(
    tmp_path: Path, is_rival_faster
):
    """The estimate prefers the first plan; the devices that are there may not."""
    first, rival = planned_cell("dp=2,micro=1,zero=1"), planned_cell("pp=2,micro=1")
    slow, fast = paced(first, 0.02), paced(first, 0.001)
    rivals = tmp_path / "rivals"
    rivals.mkdir()
    save_plan(first, tmp_path / "plan.json")
    save_plan(rival, rivals / "1.json")
    (rivals / "1.emulate").write_text(fast if is_rival_faster else slow, encoding="utf-8")
    given = [str(tmp_path / "plan.json"), "--steps", "3", "--lr", "0.003"]

    more = ["--rivals", str(rivals), "--checkpoints", str(tmp_path / "saved")]
    pace = slow if is_rival_faster else fast
    assert join(fork([*given, *more], 2, tmp_path, DRYSTONE_EMULATE=pace)) == [0, 0]
    tried, *found = events((tmp_path / "0.out").read_text())
    expected = run_forked(given, 2, tmp_path)

    kept = rival if is_rival_faster else first
    assert (tried["event"], tried["kept"]) == ("tried", plan_words(kept))
    assert [words for words, _, _ in tried["trials"]] == [plan_words(first), plan_words(rival)]
    times = {words: (estimated, taken) for words, estimated, taken in tried["trials"]}
    assert times[plan_words(first)][0] == first.step_seconds
    assert min(times.values(), key=lambda pair: pair[1]) == times[plan_words(kept)]
    assert found[0] == {"event": "started", "step": 0, "ranks": 2}
    assert losses_of(found) == pytest.approx(losses_of(expected), abs=1e-5)
    assert [one["step"] for one in found if one["event"] == "checkpoint"] == [3]
