"""Pipelines over groups: their plans, and that the estimate is that of a Cell."""

from dataclasses import replace

import numpy as np
import pytest

from drystone.describe.layout import Layouts
from drystone.describe.model import ModelSpec
from drystone.describe.model_source import find_model
from drystone.describe.pool import Pool, make_pool, parse_pool
from drystone.describe.recipe import Precision, Recipe
from drystone.estimate.time.speed import estimate_speed
from drystone.plan.cells.search import RECOMPUTES
from drystone.plan.groups.bounds import layer_bound_seconds, make_candidates, order_bound_seconds
from drystone.plan.groups.pipelines import pipeline_search, plan_groups
from drystone.plan.groups.search import work_out
from drystone.plan.plan import Plan, Way

MODEL = find_model("llama-3.1-8b")
MIXED = "8xA100-80G,16xL40S,8xA10G"


def planned(text: str, *, model: ModelSpec = MODEL, batch: int = 64, **changes) -> Plan:
    recipe = Recipe(seq_len=2048, global_batch=batch, **changes)
    plan = plan_groups(model, recipe, parse_pool(text))
    assert plan is not None
    return plan


@pytest.mark.parametrize("text", [MIXED, "6xA100-80G,3xL40S", "4xH100-80G,4xA100-40G,4xL4,4xA10G"])
def test_layers_are_a_partition_and_everything_fits(text):
    plan = planned(text)
    ends = [stage.end_layer for stage in plan.stages]

    assert plan.way is Way.GROUPS
    assert [stage.first_layer for stage in plan.stages] == [0, *ends[:-1]]
    assert ends[-1] == MODEL.num_layers
    assert plan.fits
    assert plan.step_seconds == pytest.approx(sum(plan.time_items.values()))


@pytest.mark.parametrize("text", [MIXED, "5xA100-80G,3xL40S"])
def test_gpus_are_those_used_and_every_sample_is_computed(text):
    plan = planned(text)
    there = {group.gpu.name: group.count for group in parse_pool(text).groups}

    assert {need.gpu: need.count for need in plan.needs} == plan.gpus
    assert all(plan.gpus[name] <= count for name, count in there.items())
    for stage in plan.stages:
        share = stage.ranks[0]
        assert stage.dp * share.batch >= plan.recipe.global_batch
        assert (stage.dp - 1) * share.micro_batch * share.num_micro_batches < (
            plan.recipe.global_batch
        )
        assert stage.num_gpus * share.state_share == pytest.approx(1)


def test_tensor_parallelism_stays_in_a_node():
    for stage in planned("6xA100-80G,12xL40S").stages:
        assert 8 % stage.tp == 0 or stage.num_gpus <= 8


def setting_of(pool: Pool, recipe: Recipe, model: ModelSpec, recompute: int, size: int):
    question = pipeline_search(model, recipe, pool)
    num_micro = recipe.global_batch // size
    (setting,) = (
        one
        for one in question.settings
        if one.recompute_index == recompute and one.num_micro == num_micro
    )
    return question, setting


@pytest.mark.parametrize(
    ("stages", "tp"), [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (4, 2), (8, 2), (2, 4), (4, 4)]
)
@pytest.mark.parametrize("recompute", [0, 2])
def test_one_group_is_estimated_as_a_cell(stages, tp, recompute):
    block = find_model("llama-3.2-1b").blocks[0]
    # No head to speak of, so that equal layers are balanced and both divide them equally.
    model = ModelSpec(name="headless", hidden_size=2048, stack=((block, 32),), vocab_size=8)
    pool, recipe = parse_pool("16xA100-80G"), Recipe(seq_len=1024, global_batch=64)
    question, setting = setting_of(pool, recipe, model, recompute, 16)
    splits = setting.splits
    rows = setting.choices[0]
    row = rows[(splits.num_stages[rows] == stages) & (splits.tp[rows] == tp)]
    found = work_out(setting, row[:, None], num_layers=32, host_seconds=question.host_seconds)

    layouts = Layouts.build(
        dp=splits.dp[row], tp=tp, pp=stages, micro_batch=splits.local_micro[row],
        sharding=np.where(splits.dp[row] > 1, 1, 0), sequence_parallel=tp > 1,
    )  # fmt: skip
    own = replace(recipe, recompute=RECOMPUTES[recompute])
    speed = estimate_speed(model, own, layouts, pool.groups[0].machine)
    assert found.layers[0].tolist() == [32 // stages] * stages
    assert found.step_seconds[0] == pytest.approx(speed.step_seconds[0], rel=0.02)


def test_bounds_are_below_what_pipelines_take():
    pool = parse_pool("8xA100-80G,8xL40S,4xT4")
    recipe = Recipe(seq_len=1024, global_batch=16, precision=Precision.FP16_MIXED)
    model = find_model("llama-3.2-1b")
    question = pipeline_search(model, recipe, pool)
    generator = np.random.default_rng(0)
    num_finite = 0
    for setting in question.settings:
        if not all(len(one) for one in setting.choices):
            continue
        loose = layer_bound_seconds(setting, setting.choices) * model.num_layers
        picks = [generator.integers(len(one), size=40) for one in setting.choices]
        rows = np.stack([one[at] for one, at in zip(setting.choices, picks, strict=True)], axis=1)
        for order in question.orders:
            pipelines = rows[:, order]
            exact = work_out(
                setting, pipelines, num_layers=model.num_layers, host_seconds=0.0
            ).step_seconds
            finite = np.isfinite(exact)
            num_finite += finite.sum()
            assert (loose[tuple(picks)][finite] <= exact[finite] * (1 + 1e-9)).all()
            found = make_candidates(setting, pipelines[finite], model.num_layers)
            assert len(found.pipelines) == finite.sum()  # none that fits is given up for memory
            bounds = order_bound_seconds(found, model.num_layers)
            assert (bounds <= exact[finite] * (1 + 1e-9)).all()
    assert num_finite > 500


def test_the_order_of_the_groups_does_not_matter():
    groups = parse_pool(MIXED).groups
    recipe = Recipe(seq_len=2048, global_batch=64)

    first = plan_groups(MODEL, recipe, make_pool(groups))
    second = plan_groups(MODEL, recipe, make_pool(groups[::-1]))

    assert first == second


def test_more_groups_than_layers_is_no_pipeline():
    block = MODEL.blocks[0]
    model = ModelSpec(name="flat", hidden_size=4096, stack=((block, 1),), vocab_size=1000)

    assert plan_groups(model, Recipe(seq_len=512, global_batch=4), parse_pool("1xL4,1xT4")) is None


def test_what_does_not_fit_is_none():
    recipe = Recipe(seq_len=2048, global_batch=4)

    assert plan_groups(find_model("llama-2-70b"), recipe, parse_pool("2xT4,2xL4")) is None


@pytest.mark.parametrize("name", ["gemma-2-9b", "deepseek-v2-lite", "t5-large"])
def test_layers_that_differ_fit_where_they_lie(name):
    plan = planned("8xA100-80G,8xL40S", model=find_model(name))

    assert plan.fits
    assert plan.stages[-1].end_layer == find_model(name).num_layers
