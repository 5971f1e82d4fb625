"""Options: what is worth having, and that pairs are estimated as the plans they stand for."""

import numpy as np
import pytest

from drystone.describe.model_source import find_model
from drystone.describe.pool import GpuGroup, make_pool, parse_pool
from drystone.describe.recipe import Precision, Recipe, auto_precision
from drystone.plan.options import JobOptions, count_grid, enumerate_options, pair_grid
from drystone.plan.plan import Plan, Way
from drystone.plan.search import plan_job
from drystone.plan.uneven.data_parallel import plan_uneven
from drystone.plan.uneven.pairs import pair_speeds

MODEL = find_model("llama-3.2-1b")
RECIPE = Recipe(seq_len=2048, global_batch=64)
POOL = parse_pool("16xA100-80G,24xL40S,8xA10G")


@pytest.fixture(scope="module")
def planned() -> JobOptions:
    return enumerate_options(MODEL, RECIPE, POOL)


@pytest.fixture(scope="module")
def options(planned):
    return planned.table


def test_counts_are_within_the_pool(options):
    assert (options.counts >= 0).all()
    assert (options.counts <= [group.count for group in POOL.groups]).all()
    assert (options.counts.sum(axis=1) >= 1).all()
    assert np.isfinite(options.samples_per_second).all()


def test_no_option_is_beaten(options):
    for row in range(len(options)):
        fewer = (options.counts <= options.counts[row]).all(axis=1)
        fewer[row] = False
        faster = options.samples_per_second >= options.samples_per_second[row]
        assert not (fewer & faster).any()


def test_mixed_options_are_worth_having(planned, options):
    num_types = (options.counts > 0).sum(axis=1)

    assert (num_types[planned.cell >= 0] == 1).all()
    assert (num_types[(planned.cell == -1) & (planned.piped == -1)] == 2).all()
    assert {2, 3} <= set(num_types[planned.piped >= 0].tolist())


def test_speeds_of_pipelines_over_groups_are_reached_by_their_plans(planned, options):
    rows = np.flatnonzero(planned.piped >= 0)
    for row in rows[:: max(1, len(rows) // 8)].tolist():
        plan = planned.plan(row)

        counts = options.counts[row].tolist()
        wanted = {g.gpu.name: n for g, n in zip(POOL.groups, counts, strict=True) if n}
        assert plan.gpus == wanted
        assert all(need.high_bytes <= need.usable_bytes for need in plan.needs)
        reached = RECIPE.global_batch / plan.step_seconds
        assert reached >= options.samples_per_second[row] * (1 - 1e-9)
        assert reached <= options.samples_per_second[row] * 1.15


@pytest.mark.parametrize(
    ("model", "gpus"),
    [
        ("llama-3-8b", "8xA100-80G,8xV100-32G"),
        ("llama-3-8b", "8xH100,8xA100-80G"),
        ("llama-3-70b", "32xA100-80G,32xV100-32G"),
        ("llama-3-70b", "16xH100,32xA100-80G"),
        ("qwen2.5-14b", "8xA100-80G,8xL40S"),
        ("qwen2.5-32b", "16xA100-80G,16xL40S"),
        ("mistral-7b-v0.1", "8xA100-40G,8xL4"),
        ("llama-3-8b", "8xA100-80G,8xV100-32G,8xL40S"),
    ],
)
def test_the_best_way_of_the_planner_is_an_option(model, gpus):
    pool, shape = parse_pool(gpus), find_model(model)
    precision = auto_precision(group.gpu for group in pool.groups)
    recipe = Recipe(seq_len=4096, global_batch=256, precision=precision)
    best = next(p for p in plan_job(shape, recipe, pool).plans if not p.not_executable)
    assert best.way is Way.GROUPS

    found = enumerate_options(shape, recipe, pool, is_for_runtime=True)
    wanted = [best.gpus.get(group.gpu.name, 0) for group in pool.groups]
    [row] = np.flatnonzero((found.table.counts == wanted).all(axis=1)).tolist()
    assert found.plan(row).step_seconds == pytest.approx(best.step_seconds, rel=1e-9)
    assert recipe.global_batch / found.table.samples_per_second[row] <= best.step_seconds * 1.1


def test_the_plan_of_a_cell_is_the_cell_that_was_found(planned, options, monkeypatch):
    def search(*_: object, **__: object) -> None:
        raise AssertionError("planned again")

    monkeypatch.setattr("drystone.plan.options.search_cells", search)
    monkeypatch.setattr("drystone.plan.options.plan_uneven", search)
    for row in np.flatnonzero(planned.cell >= 0).tolist():
        plan = planned.plan(row)
        column = int(options.counts[row].argmax())

        assert plan.gpus == {POOL.groups[column].gpu.name: options.counts[row, column]}
        assert RECIPE.global_batch / plan.step_seconds == pytest.approx(
            options.samples_per_second[row], rel=1e-9
        )


def test_the_plan_of_two_types_is_made_once(planned, options):
    row = int(np.flatnonzero(planned.cell == -1)[0])
    plan = planned.plan(row)

    assert planned.plan(row) is plan
    assert sorted(plan.gpus.values()) == sorted(options.counts[row][options.counts[row] > 0])
    speed = RECIPE.global_batch / plan.step_seconds
    assert speed == pytest.approx(options.samples_per_second[row], rel=0.1)


def test_the_second_time_is_from_memory(planned):
    again = enumerate_options(MODEL, RECIPE, POOL)

    assert (again.table.counts == planned.table.counts).all()
    assert again.cells[0] is planned.cells[0]


def test_nothing_fits():
    assert not len(enumerate_options(find_model("llama-2-70b"), RECIPE, parse_pool("1xT4,2xL4")))


@pytest.mark.parametrize("most", [1, 3, 64, 65, 100, 1000])
def test_grids_hold_the_ends(most):
    for grid in (count_grid(most), pair_grid(most)):
        assert grid[0] == 1
        assert grid[-1] == most
        assert list(grid) == sorted(set(grid))
    assert set(range(1, min(most, 64) + 1)) <= set(count_grid(most))


SIZES = (1, 2, 4, 6, 8, 16, 32, 64)
PAIRS = [("A100-80G", "L40S"), ("H100-80G", "A10G"), ("V100-32G", "T4")]


@pytest.mark.parametrize("names", PAIRS, ids="+".join)
@pytest.mark.parametrize(("model", "batch"), [("llama-3.1-8b", 256), ("gpt2-xl", 64)])
def test_pairs_are_estimated_as_uneven_plans(names, model, batch):
    first, second = (parse_pool(name).groups[0].machine for name in names)
    precision = Precision.FP16_MIXED if "T4" in names else Precision.BF16_MIXED
    recipe = Recipe(seq_len=1024, global_batch=batch, precision=precision)
    between = parse_pool(",".join(names)).between
    spec = find_model(model)
    speeds = pair_speeds(spec, recipe, (first, second), between, (SIZES, SIZES))
    generator = np.random.default_rng(1)
    num_compared = 0
    for row in generator.choice(len(speeds.step_seconds), 10, replace=False):
        groups = [
            GpuGroup(machine=first, count=int(speeds.first_count[row])),
            GpuGroup(machine=second, count=int(speeds.second_count[row])),
        ]
        plan = plan_uneven(spec, recipe, make_pool(groups, between=between))
        if np.isfinite(speeds.step_seconds[row]):  # never promised what is no plan
            assert isinstance(plan, Plan)
            assert speeds.step_seconds[row] == pytest.approx(plan.step_seconds, rel=0.1)
            num_compared += 1
    assert num_compared >= 3
