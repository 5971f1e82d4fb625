"""Modules of somebody's own: batch and state follow speed and memory, as for known models."""

from dataclasses import replace
from pathlib import Path

import pytest

from drystone.describe.files.cluster import parse_cluster
from drystone.describe.files.job import make_job
from drystone.describe.model import ModuleSpec
from drystone.describe.model_source import ModuleReference, find_model
from drystone.describe.pool import make_pool
from drystone.describe.recipe import Precision, Recipe
from drystone.errors import InvalidSpec
from drystone.plan.plan import Plan, Way, load_plan, save_plan
from drystone.plan.search import plan_executable, plan_job
from drystone.plan.uneven.assignment import AssignmentShortfall
from drystone.plan.uneven.data_parallel import plan_uneven
from drystone.plan.uneven.modules import plan_module, section_flops
from drystone.run.control.options import OptionBook, work_of

MODULE = ModuleSpec(
    name="m.py:f", path="/m.py", function="f", block_list="blocks", num_layers=48, vocab_size=512,
    seq_len=2048, block_params=50_000_000, outer_params=2_000_000, num_params=2_402_000_000,
    block_forward_flops=2e11, block_backward_flops=4e11, outer_flops=2e10,
    first_hidden_bytes=3e7, further_hidden_bytes=3e7, first_block_bytes=4e8,
    further_block_bytes=3e8, first_outer_bytes=3e7, further_outer_bytes=3e7,
)  # fmt: skip
RECIPE = Recipe(seq_len=2048, global_batch=64, precision=Precision.BF16_MIXED)
CLUSTER = parse_cluster("nodes: [{gpu: A100, gpus_per_node: 8}, {gpu: L4, gpus_per_node: 8}]")
FAST, SLOW = CLUSTER.gpu_types


def pool(**counts: int):
    named = {"fast": FAST, "slow": SLOW}
    return make_pool([CLUSTER.group(named[name], count) for name, count in counts.items()])


def test_batches_follow_speed_and_add_up():
    plan = plan_module(MODULE, RECIPE, pool(fast=2, slow=2))

    assert isinstance(plan, Plan)
    shares = plan.stages[0].ranks
    by_gpu = {gpu: [one.batch for one in shares if one.gpu == gpu] for gpu in (FAST, SLOW)}
    assert min(by_gpu[FAST]) > max(by_gpu[SLOW])
    assert sum(one.batch * one.count for one in shares) == 64
    assert sum(one.state_share * one.count for one in shares) == pytest.approx(1.0)
    assert plan.fits


def test_a_plan_of_a_module_reads_back(tmp_path):
    plan = plan_module(MODULE, RECIPE, pool(fast=2))
    save_plan(plan, tmp_path / "plan.json")

    assert load_plan(tmp_path / "plan.json") == plan


def test_more_state_than_memory_does_not_fit():
    huge = replace(MODULE, num_params=10**12)

    assert isinstance(plan_module(huge, RECIPE, pool(fast=2)), AssignmentShortfall)
    assert plan_module(MODULE, RECIPE, pool(fast=4)).step_seconds < (
        plan_module(MODULE, RECIPE, pool(fast=2)).step_seconds
    )


def test_a_step_takes_at_least_its_operations():
    plan = plan_module(MODULE, RECIPE, pool(fast=1))
    flops = section_flops(MODULE)
    total = 64 * (48 * (flops["forward"] + flops["backward"]) + flops["head"])

    assert plan.step_seconds >= total / CLUSTER.gpu(FAST).bf16_flops


def test_options_of_a_module_are_single_types_and_pairs_that_are_faster():
    table = {"model": "/m.py:f", "train": {"steps": 1, "batch": 64, "sequence": 2048}}
    job = replace(make_job(table, folder=Path("/")), module=MODULE)
    book = OptionBook(CLUSTER)
    options = book.options(job)

    found = {
        tuple(counts): speed
        for counts, speed in zip(options.counts.tolist(), options.samples_per_second, strict=True)
    }
    assert (8, 0) in found
    for (fast, slow), speed in found.items():
        if fast and slow:
            assert speed > max(found.get((fast, 0), 0.0), found.get((0, slow), 0.0))
        plan = book.plan(job, (fast, slow))
        assert 64 / plan.step_seconds == pytest.approx(speed)
    assert work_of(job) != work_of(replace(job, module=replace(MODULE, num_params=7)))


def test_a_function_that_nobody_looked_at_has_no_options(tmp_path):
    (tmp_path / "m.py").write_text("def f(): ...\n")
    table = {"model": "m.py:f", "train": {"steps": 1}}

    with pytest.raises(InvalidSpec, match="nobody has looked"):
        OptionBook(CLUSTER).options(make_job(table, folder=tmp_path))
    assert ModuleReference(path=tmp_path / "m.py", function="f").path.exists()


def test_equal_gpus_run_the_best_cell_that_can_be_executed():
    model = find_model("llama-3-8b")
    recipe = replace(RECIPE, seq_len=4096)

    plan = plan_executable(model, recipe, pool(fast=8))
    assert plan.way is Way.CELL
    assert plan.layout.tp * plan.layout.pp > 1
    assert plan.step_seconds < plan_uneven(model, recipe, pool(fast=8)).step_seconds
    best = plan_job(model, recipe, pool(fast=8)).plans[0]
    assert plan.step_seconds >= best.step_seconds
    assert plan_executable(model, recipe, pool(fast=2, slow=2)).way is Way.UNEVEN
