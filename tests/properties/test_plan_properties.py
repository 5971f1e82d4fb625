"""What holds of plans for every model, pool and batch."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from drystone.describe.model import Attention, Block, Experts, Mlp, ModelSpec
from drystone.describe.pool import GpuGroup, Pool, make_pool, parse_pool
from drystone.describe.recipe import Precision, Recipe
from drystone.plan.cells.search import search_cells
from drystone.plan.groups.pipelines import plan_groups
from drystone.plan.options import count_grid, enumerate_options
from drystone.plan.plan import Plan, Way, load_plan, save_plan
from drystone.plan.search import plan_job
from drystone.plan.uneven.data_parallel import plan_uneven

NAMES = ("A100-80G", "H100-80G", "L40S", "A10G", "L4")
few = settings(max_examples=25)


@st.composite
def models(draw) -> ModelSpec:
    heads = draw(st.sampled_from([8, 12, 16]))
    attention = Attention(
        num_heads=heads, num_kv_heads=draw(st.sampled_from([2, 4, heads])), head_dim=128
    )
    width = 128 * heads
    if draw(st.integers(0, 3)) == 0:
        feed_forward = Experts(num_experts=4, top_k=2, ffn_size=width)
    else:
        feed_forward = Mlp(ffn_size=draw(st.sampled_from([3, 4])) * width, gated=True)
    block = Block(attention=attention, feed_forward=feed_forward)
    return ModelSpec(
        name="drawn",
        hidden_size=width,
        stack=((block, draw(st.integers(3, 24))),),
        vocab_size=draw(st.sampled_from([1000, 32000])),
    )


@st.composite
def pools(draw, least: int = 2, most: int = 3) -> Pool:
    names = draw(st.lists(st.sampled_from(NAMES), min_size=least, max_size=most, unique=True))
    counts = [draw(st.integers(1, 9)) for _ in names]
    text = ",".join(f"{count}x{name}" for count, name in zip(counts, names, strict=True))
    return parse_pool(text, gpus_per_node=draw(st.sampled_from([2, 4, 8])))


recipes = st.builds(
    Recipe,
    seq_len=st.sampled_from([512, 2048, 8192]),
    global_batch=st.integers(1, 24),
    precision=st.sampled_from([Precision.BF16_MIXED, Precision.BF16]),
)


def all_plans(model: ModelSpec, recipe: Recipe, pool: Pool) -> list[Plan]:
    return list(plan_job(model, recipe, pool).plans)


def best_seconds(model: ModelSpec, recipe: Recipe, pool: Pool) -> float:
    return min((plan.step_seconds for plan in all_plans(model, recipe, pool)), default=np.inf)


@few
@given(model=models(), recipe=recipes, pool=pools())
def test_no_plan_exceeds_memory_or_the_pool(model, recipe, pool):
    there = {group.gpu.name: group.count for group in pool.groups}
    for plan in all_plans(model, recipe, pool):
        assert plan.fits
        assert plan.gpus == {need.gpu: need.count for need in plan.needs}
        assert all(count <= there[name] for name, count in plan.gpus.items())
        assert plan.step_seconds == pytest.approx(sum(plan.time_items.values()))
        assert all(seconds >= 0 for seconds in plan.time_items.values())


@few
@given(model=models(), recipe=recipes, pool=pools())
def test_layers_are_a_partition(model, recipe, pool):
    for plan in all_plans(model, recipe, pool):
        starts = [stage.first_layer for stage in plan.stages]
        ends = [stage.end_layer for stage in plan.stages]
        assert starts == [0, *ends[:-1]]
        assert ends[-1] == model.num_layers


@few
@given(model=models(), recipe=recipes, pool=pools())
def test_every_sample_is_computed_and_the_state_is_held(model, recipe, pool):
    for plan in all_plans(model, recipe, pool):
        for stage in plan.stages:
            per_rank = stage.tp * stage.cp
            samples = sum(share.count * share.batch for share in stage.ranks) / per_rank
            if plan.way is Way.UNEVEN:
                assert samples == recipe.global_batch
                held = sum(share.count * share.state_share for share in stage.ranks)
                copies = 1 if plan.sharding else stage.num_gpus  # all of it on each, or in shares
                assert held == pytest.approx(copies)
            else:  # the last micro-batch need not be full
                assert samples >= recipe.global_batch
                held = sum(share.count * share.state_share for share in stage.ranks)
                assert held >= 1 - 1e-9
            for share in stage.ranks:
                assert share.batch == share.micro_batch * share.num_micro_batches


@few
@given(model=models(), recipe=recipes, pool=pools(least=1), more=st.floats(1.01, 3.0))
def test_more_memory_never_makes_the_best_plan_worse(model, recipe, pool, more):
    larger = []
    for group in pool.groups:
        gpu = replace(group.gpu, memory_bytes=int(group.gpu.memory_bytes * more))
        larger.append(replace(group, machine=replace(group.machine, gpu=gpu)))

    before = best_seconds(model, recipe, pool)
    after = best_seconds(model, recipe, make_pool(larger, between=pool.between))

    assert after <= before * (1 + 1e-9)


@given(model=models(), recipe=recipes, pool=pools(least=1, most=1), most=st.integers(1, 20))
@few
def test_a_gpu_added_never_makes_the_best_cell_worse(model, recipe, pool, most):
    machine = pool.groups[0].machine
    before, after = (
        search_cells(model, recipe, machine, count_grid(count)).step_seconds.min(initial=np.inf)
        for count in (most, most + 1)
    )

    assert after <= before


@pytest.mark.slow
@few
@given(model=models(), recipe=recipes, pool=pools(), at=st.integers(0, 2))
def test_a_gpu_added_costs_at_most_the_wait_for_one_more(model, recipe, pool, at):
    groups = list(pool.groups)
    at %= len(groups)
    groups[at] = GpuGroup(machine=groups[at].machine, count=groups[at].count + 1)

    before = best_seconds(model, recipe, pool)
    after = best_seconds(model, recipe, make_pool(groups, between=pool.between))

    # Uneven shares have all ranks in their collectives, so one of no use is one more to wait for.
    assert after <= before * 1.005


@pytest.mark.slow
@few
@given(model=models(), recipe=recipes, pool=pools(), data=st.data())
def test_the_order_of_groups_changes_nothing(model, recipe, pool, data):
    shuffled = make_pool(data.draw(st.permutations(pool.groups)), between=pool.between)

    first, second = (plan_uneven(model, recipe, one) for one in (pool, shuffled))
    assert isinstance(first, Plan) == isinstance(second, Plan)
    if isinstance(first, Plan):
        assert first.step_seconds == pytest.approx(second.step_seconds, rel=1e-12)
        assert set(first.stages[0].ranks) == set(second.stages[0].ranks)
    assert plan_groups(model, recipe, pool) == plan_groups(model, recipe, shuffled)
    assert best_seconds(model, recipe, pool) == pytest.approx(
        best_seconds(model, recipe, shuffled), rel=1e-12
    )


@few
@given(model=models(), recipe=recipes, pool=pools())
def test_options_are_within_the_pool_and_none_is_beaten(model, recipe, pool):
    options = enumerate_options(model, recipe, pool).table
    counts, speed = options.counts, options.samples_per_second

    assert (counts <= [group.count for group in pool.groups]).all()
    fewer = (counts[:, None] <= counts[None]).all(axis=2)
    beats = fewer & (speed[:, None] >= speed[None])
    np.fill_diagonal(beats, False)
    assert not beats.any()


@settings(max_examples=10)
@given(model=models(), recipe=recipes, pool=pools())
def test_a_plan_file_comes_back_as_it_was(model, recipe, pool, tmp_path_factory):
    plans = all_plans(model, recipe, pool)
    assume(plans)
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    for plan in plans:
        save_plan(plan, path)
        assert load_plan(path) == plan
