"""Uneven shares: what a rank computes and holds, and that the estimate is that of a Cell."""

from dataclasses import replace

import numpy as np
import pytest

from drystone.describe.layout import Layouts, Sharding
from drystone.describe.model_source import find_model
from drystone.describe.pool import make_pool, parse_pool
from drystone.describe.recipe import Offload, Precision, Recipe, RecomputeKind, Tuning
from drystone.estimate.memory.peak import estimate_memory
from drystone.estimate.time.overlap import exposed_seconds
from drystone.estimate.time.speed import estimate_speed
from drystone.plan.plan import Plan, Way
from drystone.plan.uneven.assignment import AssignmentShortfall
from drystone.plan.uneven.data_parallel import (
    assignment_spec,
    plan_uneven,
    slowest_ring,
    uneven_recipe,
)

MODEL = find_model("llama-3.1-8b")


def planned(text: str, *, batch: int = 64, model=MODEL, seq_len: int = 2048, **changes) -> Plan:
    recipe = Recipe(seq_len=seq_len, global_batch=batch, **changes)
    plan = plan_uneven(model, recipe, parse_pool(text))
    assert isinstance(plan, Plan), plan
    return plan


@pytest.mark.parametrize("text", ["8xA100-80G", "32xA100-80G", "16xH100-80G", "8xL40S"])
def test_on_equal_gpus_it_is_the_estimate_of_the_cell(text):
    pool = parse_pool(text)
    plan = planned(text, batch=4 * pool.num_gpus)
    ranks = plan.stages[0].ranks

    assert len(ranks) == 1
    recipe = replace(plan.recipe, offload=Offload.NONE)
    layouts = Layouts.build(
        dp=pool.num_gpus, micro_batch=ranks[0].micro_batch, sharding=int(Sharding.ZERO3)
    )
    speed = estimate_speed(MODEL, recipe, layouts, pool.groups[0].machine).row(0)
    if ranks[0].num_micro_batches == 1:
        assert plan.step_seconds == pytest.approx(speed.step_seconds, rel=1e-6)
    else:  # layers are gathered once a step, not once a micro-batch
        gathers = speed.items["data_parallel"] * (1 - 1 / ranks[0].num_micro_batches)
        assert plan.step_seconds <= speed.step_seconds
        assert plan.step_seconds == pytest.approx(speed.step_seconds - gathers, rel=0.02)


def test_memory_on_equal_gpus_is_not_below_that_of_the_cell():
    plan = planned("8xA100-80G")
    share = plan.stages[0].ranks[0]
    layouts = Layouts.build(dp=8, micro_batch=share.micro_batch, sharding=int(Sharding.ZERO3))
    gpu = parse_pool("8xA100-80G").groups[0].gpu
    memory = estimate_memory(MODEL, plan.recipe, layouts, gpu=gpu)

    assert plan.needs[0].high_bytes >= memory.required_range().high[0]
    assert plan.needs[0].high_bytes <= 1.15 * memory.required_range().high[0]


def test_faster_gpus_get_more_of_the_batch():
    plan = planned("4xH100-80G,4xT4", batch=128, model=find_model("llama-3.2-1b"),
                   precision=Precision.FP16_MIXED)  # fmt: skip
    by_gpu = {share.gpu: share.batch for share in plan.stages[0].ranks}

    assert by_gpu["H100-80GB-SXM"] > 4 * by_gpu["T4-16GB"]
    assert plan.way is Way.UNEVEN
    assert plan.recipe.recompute.kind is RecomputeKind.FULL


@pytest.mark.parametrize("text", ["3xA100-80G,5xL4", "2xA10G,6xA100-40G,1xH100-80G", "7xL40S"])
@pytest.mark.parametrize("batch", [17, 64])
def test_every_sample_is_computed_once_and_the_state_is_held_once(text, batch):
    plan = planned(text, batch=batch)
    ranks = plan.stages[0].ranks

    assert sum(share.count * share.batch for share in ranks) == batch
    assert all(share.batch == share.micro_batch * share.num_micro_batches for share in ranks)
    assert sum(share.count * share.state_share for share in ranks) == pytest.approx(1)
    assert plan.fits
    assert plan.gpus == {group.gpu.name: group.count for group in parse_pool(text).groups}


def test_an_idle_rank_still_gathers():
    pool = parse_pool("2xA100-80G")
    recipe = uneven_recipe(Recipe(seq_len=2048, global_batch=8))
    kind = assignment_spec(MODEL, recipe, pool).kinds[0]

    assert kind.compute_memory_bytes[0] > 2 * 8.03e9 / 32  # two layers in 16 bit, and more
    assert kind.compute_memory_bytes[0] < kind.compute_memory_bytes[1]


def test_compute_memory_counts_activations_however_small_the_batch():
    # With little data the optimizer's step is the peak of an equal share; of a small share it is
    # not, so activations must be counted all the same.
    pool = parse_pool("2xA100-80G")
    recipe = uneven_recipe(Recipe(seq_len=512, global_batch=8))
    memory = assignment_spec(MODEL, recipe, pool).kinds[0].compute_memory_bytes

    assert (np.diff(memory) > 0).all()


def test_adapters_have_little_state():
    pool = parse_pool("2xA100-80G")
    full = assignment_spec(MODEL, uneven_recipe(Recipe(seq_len=512, global_batch=8)), pool)
    tuned = assignment_spec(
        MODEL, uneven_recipe(Recipe(seq_len=512, global_batch=8, tuning=Tuning.LORA)), pool
    )

    assert tuned.state_bytes < 0.25 * full.state_bytes
    # 2 + 4 + 4 + 4 + 4: bf16 or fp32 weights, gradients, master and two moments
    assert 14 < full.state_bytes / 8.03e9 < 20


def test_what_does_not_fit_is_a_shortfall():
    recipe = Recipe(seq_len=2048, global_batch=8)
    found = plan_uneven(find_model("llama-2-70b"), recipe, parse_pool("2xA100-80G,1xT4"))

    assert isinstance(found, AssignmentShortfall)
    assert found.short_bytes > 0


def test_the_ring_is_as_slow_as_its_slowest_part():
    a100, l4 = parse_pool("8xA100-80G"), parse_pool("8xL4")
    both = make_pool([*a100.groups, *l4.groups])

    assert slowest_ring(a100).bandwidth_bytes_per_second == (
        a100.groups[0].machine.intra.bandwidth_bytes_per_second
    )
    assert slowest_ring(both).bandwidth_bytes_per_second <= min(
        slowest_ring(a100).bandwidth_bytes_per_second, slowest_ring(l4).bandwidth_bytes_per_second
    )
    assert slowest_ring(parse_pool("1xL4")).bandwidth_bytes_per_second > 1e11


def test_one_gpu_alone():
    plan = planned("1xA100-80G", batch=4, model=find_model("gpt2"), seq_len=512)

    assert plan.time_items["data_parallel"] == 0
    assert plan.time_items["straggler"] == 0


@pytest.mark.parametrize(
    ("transfer", "hiding", "shown"), [(1.0, 0.0, 1.0), (1.0, 0.9, 0.25), (0.0, 1.0, 0.0)]
)
def test_a_part_of_a_transfer_always_shows(transfer, hiding, shown):
    assert exposed_seconds(transfer, hiding, 0.25) == pytest.approx(shown)
