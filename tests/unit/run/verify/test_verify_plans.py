import pytest

from drystone.describe.pool import parse_pool
from drystone.plan.plan import Way
from drystone.run.verify.plans import (
    ON_GPU,
    ON_PROCESSOR,
    every_kind_of_plan,
    plan_alone,
    recipe_for,
    small_model,
)
from drystone.run.verify.ranks import Devices, rank_gpus


@pytest.mark.parametrize("is_tied", [False, True])
def test_four_equal_gpus_are_tried_by_every_kind_of_split(is_tied):
    pool = parse_pool("4xA100-80G")
    model = small_model(ON_GPU, is_tied=is_tied)
    plans = every_kind_of_plan(model, recipe_for(ON_GPU, pool, is_emulated=False), pool)

    splits = {(plan.stages[0].tp, len(plan.stages)) for plan in plans.values()}
    assert splits >= {(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2)}
    assert any(plan.virtual_stages > 1 for plan in plans.values())
    assert all(plan.num_gpus == 4 for plan in plans.values())
    assert not any(plan.not_executable for plan in plans.values())


def test_shares_are_made_uneven_and_still_sum_up():
    pool = parse_pool("4xT4")
    model = small_model(ON_PROCESSOR, is_tied=False)
    plans = every_kind_of_plan(model, recipe_for(ON_PROCESSOR, pool, is_emulated=True), pool)
    uneven = plans["uneven shares"]

    shares = uneven.stages[0].ranks
    assert uneven.way is Way.UNEVEN
    assert len({share.batch for share in shares}) > 1
    assert sum(share.count * share.batch for share in shares) == uneven.recipe.global_batch
    assert sum(share.count * share.state_share for share in shares) == pytest.approx(1)


def test_unlike_gpus_are_tried_both_ways_and_each_rank_gets_its_own_kind():
    pool = parse_pool("2xA100-80G,2xT4")
    model = small_model(ON_PROCESSOR, is_tied=False)
    recipe = recipe_for(ON_PROCESSOR, pool, is_emulated=True)
    plans = every_kind_of_plan(model, recipe, pool)

    assert {plan.way for plan in plans.values()} == {Way.UNEVEN, Way.GROUPS}
    assert plan_alone(model, recipe, pool).num_gpus == 1
    devices = Devices(numbers={"A100-80GB-SXM": [0, 3], "T4-16GB": [1, 2]}, is_emulated=False)
    for plan in plans.values():
        gpus = rank_gpus(plan)
        visible = devices.of_ranks(gpus)
        assert sorted(visible) == ["0", "1", "2", "3"]
        for gpu, number in zip(gpus, visible, strict=True):
            assert int(number) in devices.numbers[gpu]
