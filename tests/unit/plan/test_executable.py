"""What the runtime would do on equal GPUs: the estimate of all counts at once, and the plans."""

from dataclasses import replace

import numpy as np
import pytest

from drystone.describe.layout import Sharding
from drystone.describe.model_source import find_model
from drystone.describe.pool import GpuGroup, make_pool, parse_pool
from drystone.describe.recipe import Offload, Precision, Recipe, Recompute
from drystone.plan.executable import equal_ways, executable_cells, marked
from drystone.plan.options import enumerate_options
from drystone.plan.plan import Plan, Way
from drystone.plan.search import plan_executable

COUNTS = (1, 2, 3, 5, 8, 12, 16, 32, 64)


@pytest.mark.parametrize("gpu", ["A100-80G", "L40S", "T4"])
@pytest.mark.parametrize(("model", "batch"), [("llama-3.1-8b", 256), ("gpt2-xl", 64)])
def test_all_counts_at_once_are_as_the_plans_one_by_one(gpu, model, batch):
    machine, spec = parse_pool(gpu).groups[0].machine, find_model(model)
    precision = Precision.FP16_MIXED if gpu == "T4" else Precision.BF16_MIXED
    recipe = Recipe(seq_len=1024, global_batch=batch, precision=precision)
    ways = equal_ways(spec, recipe, machine, COUNTS)

    assert len(ways.counts) >= 3
    rows = dict(zip(ways.counts.tolist(), range(len(ways.counts)), strict=True))
    for count in COUNTS:
        plan = plan_executable(spec, recipe, make_pool([GpuGroup(machine=machine, count=count)]))
        if count not in rows:
            continue  # unlike shares may fit where equal ones do not
        assert isinstance(plan, Plan)  # never promised what is no plan
        row = rows[count]
        if plan.way is Way.GROUPS:  # stages of unlike size, which are not of equal shares
            assert plan.step_seconds < ways.step_seconds[row] * 1.001
        else:
            assert ways.step_seconds[row] == pytest.approx(plan.step_seconds, rel=0.08)
        assert ways.high_bytes[row] <= machine.gpu.usable_bytes
        assert (ways.cell[row] >= 0) == (plan.way is Way.CELL) or ways.step_seconds[
            row
        ] >= plan.step_seconds


def test_options_are_as_fast_as_what_is_launched_and_hardly_slower_than_any_cell():
    spec, pool = find_model("llama-3-8b"), parse_pool("8xA100-80G")
    recipe = Recipe(seq_len=2048, global_batch=64, precision=Precision.BF16_MIXED)
    options = enumerate_options(spec, recipe, pool, prunes=False, is_for_runtime=True).table
    cells = enumerate_options(spec, recipe, pool, prunes=False).table

    for row, count in enumerate(options.counts[:, 0].tolist()):
        some = make_pool([GpuGroup(machine=pool.groups[0].machine, count=count)])
        plan = plan_executable(spec, recipe, some)
        seconds = recipe.global_batch / options.samples_per_second[row]
        assert seconds == pytest.approx(plan.step_seconds, rel=0.08)
    fastest = cells.samples_per_second[np.isin(cells.counts[:, 0], options.counts[:, 0])]
    assert (options.samples_per_second > 0.9 * fastest).all()


@pytest.mark.parametrize("gpus", ["1xA100-80G", "2xA100-80G", "1xT4"])
def test_everything_is_kept_where_memory_allows(gpus):
    """Such plans were once recomputed, sharded and offloaded, whatever room there was."""
    recipe = Recipe(seq_len=512, global_batch=16, precision=Precision.FP16_MIXED)
    plan = plan_executable(find_model("gpt2"), recipe, parse_pool(gpus))

    assert str(plan.recipe.recompute) == "none"
    assert plan.sharding <= Sharding.ZERO1
    assert plan.recipe.offload is Offload.NONE


def test_only_what_the_runtime_executes_is_split():
    machine = parse_pool("8xA100-80G").groups[0].machine
    recipe = Recipe(seq_len=2048, global_batch=64)
    dense = executable_cells(find_model("llama-3-8b"), recipe, machine, (2, 4, 8))

    assert dense.layouts.num_gpus.tolist() == [2, 4, 8]
    assert ((dense.layouts.tp * dense.layouts.pp > 1) | (dense.layouts.sharding <= 1)).all()
    assert (dense.layouts.cp * dense.layouts.ep == 1).all()
    offloads = Recipe(seq_len=2048, global_batch=64, offload=Offload.ACTIVATIONS)
    assert not len(executable_cells(find_model("llama-3-8b"), offloads, machine, (2, 4, 8)))
    assert not len(executable_cells(find_model("mixtral-8x7b"), recipe, machine, (8,)))


def test_recomputation_of_single_modules_is_marked():
    recipe = Recipe(seq_len=1024, global_batch=8)
    plan = plan_executable(find_model("gpt2"), recipe, parse_pool("2xA100-80G"))
    assert isinstance(plan, Plan)
    single = replace(recipe, recompute=Recompute.parse("selective[mlp]"))

    assert not marked(plan).not_executable
    assert "single modules" in marked(replace(plan, recipe=single)).not_executable
