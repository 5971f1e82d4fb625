"""The cost of one layer adds up to that of a step, and its memory to that of a rank."""

from dataclasses import replace

import numpy as np
import pytest

from drystone.describe.catalogue import find_gpu
from drystone.describe.layout import Layouts, Sharding
from drystone.describe.machine import default_machine
from drystone.describe.model_source import find_model
from drystone.describe.recipe import Offload, Recipe, Recompute, RecomputeKind, Tuning
from drystone.estimate.layer import compute_memory_bytes, layer_seconds, sharded_state_bytes
from drystone.estimate.learned.residuals import memory_range
from drystone.estimate.memory.peak import estimate_memory
from drystone.estimate.time.speed import estimate_speed

MODEL = find_model("llama-3.1-8b")
MACHINE = default_machine(find_gpu("A100-80G"), 8)


@pytest.mark.parametrize("kind", RecomputeKind)
@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "mixtral-8x7b", "gpt2-xl"])
def test_layers_and_head_are_the_step(kind, tp, name):
    model = find_model(name)
    if model.blocks[0].attention.num_heads % tp:
        pytest.skip("heads do not divide")
    recipe = Recipe(seq_len=1024, global_batch=4, recompute=Recompute(kind=kind))
    cost = layer_seconds(model, recipe, MACHINE, tp=tp, micro_batch=4)
    layouts = Layouts.build(tp=tp, micro_batch=4, sequence_parallel=tp > 1)
    speed = estimate_speed(model, recipe, layouts, MACHINE).row(0)

    layers = model.num_layers * cost.busy[0] + cost.head[0] + cost.embedding[0]
    once = sum(speed.items[name] for name in ("optimizer", "host", "straggler", "launch_bound"))
    assert layers == pytest.approx(speed.step_seconds - once, rel=1e-9)


def test_arrays_are_answered_entry_by_entry():
    recipe = Recipe(seq_len=2048, global_batch=8)
    cost = layer_seconds(MODEL, recipe, MACHINE, tp=np.array([1, 2, 4]), micro_batch=[1, 2, 8])

    for index, (tp, micro) in enumerate([(1, 1), (2, 2), (4, 8)]):
        alone = layer_seconds(MODEL, recipe, MACHINE, tp=tp, micro_batch=micro)
        assert cost.both[index] == alone.both[0]
        assert cost.head[index] == alone.head[0]


def test_the_host_is_the_limit_of_small_work():
    recipe = Recipe(seq_len=16, global_batch=1)
    cost = layer_seconds(find_model("gpt2"), recipe, MACHINE)

    assert cost.both[0] == cost.host[0] > cost.busy[0]


def test_sharded_layers_take_the_host_longer():
    recipe = Recipe(seq_len=2048, global_batch=8)
    plain = layer_seconds(MODEL, recipe, MACHINE)
    sharded = layer_seconds(MODEL, recipe, MACHINE, sharding=Sharding.ZERO3)

    assert sharded.host[0] >= plain.host[0]
    assert sharded.busy[0] == plain.busy[0]


def test_what_hides_a_reduction_is_part_of_the_backward_pass():
    recipe = Recipe(seq_len=2048, global_batch=8, recompute=Recompute(kind=RecomputeKind.FULL))
    cost = layer_seconds(MODEL, recipe, MACHINE, micro_batch=2)

    assert 0 <= cost.hiding[0] <= cost.backward[0] + cost.recompute[0]


@pytest.mark.parametrize("seq_len", [128, 4096])
@pytest.mark.parametrize("num_ranks", [2, 16])
def test_compute_memory_and_an_equal_share_cover_the_estimate(seq_len, num_ranks):
    recipe = Recipe(seq_len=seq_len, global_batch=64)
    compute = compute_memory_bytes(MODEL, recipe, MACHINE, num_ranks=num_ranks, most_micro_batch=8)
    state = sharded_state_bytes(MODEL, recipe, MACHINE)
    own = replace(recipe, recompute=Recompute(kind=RecomputeKind.FULL), offload=Offload.ACTIVATIONS)
    layouts = Layouts.build(dp=num_ranks, micro_batch=np.arange(1, 9), sharding=int(Sharding.ZERO3))
    high = estimate_memory(MODEL, own, layouts, gpu=MACHINE.gpu).required_range().high

    assert compute.shape == (9,)
    assert (np.diff(compute) > 0).all()
    assert (compute[1:] + state / num_ranks >= high * (1 - 1e-9)).all()


def test_the_number_of_ranks_changes_no_compute_memory():
    recipe = Recipe(seq_len=2048, global_batch=64)
    few, many = (
        compute_memory_bytes(MODEL, recipe, MACHINE, num_ranks=ranks, most_micro_batch=4)
        for ranks in (2, 64)
    )

    assert np.allclose(few, many)


def test_one_rank_gathers_nothing():
    recipe = Recipe(seq_len=2048, global_batch=64)
    alone, shared = (
        compute_memory_bytes(MODEL, recipe, MACHINE, num_ranks=ranks, most_micro_batch=4)
        for ranks in (1, 2)
    )

    assert (alone < shared).all()


def test_state_is_weights_gradients_and_optimizer():
    recipe = Recipe(seq_len=2048, global_batch=64)
    per_parameter = sharded_state_bytes(MODEL, recipe, MACHINE) / memory_range()[1] / 8_030_261_248

    assert per_parameter == pytest.approx(16)  # fp32 weights, gradients and two moments
    tuned = replace(recipe, tuning=Tuning.LORA)
    assert sharded_state_bytes(MODEL, tuned, MACHINE) < 3.0 * 8_030_261_248
