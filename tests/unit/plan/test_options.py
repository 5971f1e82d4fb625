"""Options: what is worth having, and that pairs are estimated as the plans they stand for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drystone.describe.model_source import find_model
from drystone.describe.pool import GpuGroup, make_pool, parse_pool
from drystone.describe.recipe import Precision, Recipe
from drystone.plan.options import concave_hull, count_grid, enumerate_options, pair_grid
from drystone.plan.plan import Plan
from drystone.plan.uneven.data_parallel import plan_uneven
from drystone.plan.uneven.pairs import pair_speeds

MODEL = find_model("llama-3.2-1b")
RECIPE = Recipe(seq_len=2048, global_batch=64)
POOL = parse_pool("16xA100-80G,24xL40S,8xA10G")


@pytest.fixture(scope="module")
def options():
    prices = {"A100-80GB-SXM": 2.0, "L40S-48GB": 1.0}
    return enumerate_options(MODEL, RECIPE, POOL, dollars_per_gpu_hour=prices)


def test_counts_are_within_the_pool(options):
    assert options.gpus == tuple(group.gpu.name for group in POOL.groups)
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


def test_mixed_options_are_worth_having(options):
    mixed = options.cell == -1

    assert mixed.any()
    assert ((options.counts > 0).sum(axis=1)[mixed] == 2).all()
    assert np.allclose(options.batch_shares.sum(axis=1), 1)


def test_a_cell_can_be_looked_up(options):
    for row in np.flatnonzero(options.cell >= 0):
        column = int(options.counts[row].argmax())
        cells = options.cells[column]
        at = int(options.cell[row])
        assert cells.layouts.num_gpus[at] == options.counts[row, column]
        assert RECIPE.global_batch / cells.step_seconds[at] == options.samples_per_second[row]


def test_prices(options):
    priced = options.counts[:, 2] == 0

    expected = options.counts[:, 0] * 2.0 + options.counts[:, 1] * 1.0
    assert np.allclose(options.dollars_per_hour[priced], expected[priced])
    assert np.isnan(options.dollars_per_hour[~priced]).all()


@pytest.mark.parametrize("gpu", ["A100-80GB-SXM", "L40S-48GB"])
def test_hulls(options, gpu):
    column = options.gpus.index(gpu)
    hull = options.hull(gpu)
    speeds = options.monotone(gpu, 16)
    counts = np.append(0, hull.counts[:, column])
    slopes = np.diff(np.append(0.0, hull.samples_per_second)) / np.diff(counts)

    assert speeds[0] == 0
    assert (np.diff(speeds) >= 0).all()
    assert (np.diff(slopes) < 0).all()
    alone = options.alone(gpu)
    on_hull = np.interp(alone.counts[:, column], counts, np.append(0.0, hull.samples_per_second))
    assert (alone.samples_per_second <= on_hull * (1 + 1e-9)).all()


def test_a_measurement_rescales(options):
    corrected = options.corrected({"L40S-48GB": 0.5})
    column = options.gpus.index("L40S-48GB")
    alone = options.counts[:, column] == options.counts.sum(axis=1)
    without = options.counts[:, column] == 0

    ratio = corrected.samples_per_second / options.samples_per_second
    assert np.allclose(ratio[alone], 0.5)
    assert np.allclose(ratio[without], 1.0)
    mixed = ~alone & ~without
    assert ((ratio[mixed] >= 0.5) & (ratio[mixed] <= 1.0)).all()
    assert len(corrected.undominated()) <= len(options)


def test_the_second_time_is_from_memory(options):
    again = enumerate_options(MODEL, RECIPE, POOL)

    assert (again.counts == options.counts).all()
    assert again.cells[0] is options.cells[0]


def test_nothing_fits():
    found = enumerate_options(find_model("llama-2-70b"), RECIPE, parse_pool("1xT4,2xL4"))

    assert len(found) == 0
    assert len(found.hull("T4-16GB")) == 0
    assert found.monotone("T4-16GB", 3).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("most", [1, 3, 64, 65, 100, 1000])
def test_grids_hold_the_ends(most):
    for grid in (count_grid(most), pair_grid(most)):
        assert grid[0] == 1
        assert grid[-1] == most
        assert list(grid) == sorted(set(grid))
    assert set(range(1, min(most, 64) + 1)) <= set(count_grid(most))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12))
def test_the_concave_hull_is_the_least_concave_cover(speeds):
    counts = np.arange(1, len(speeds) + 1)
    speeds = np.array(speeds, dtype=float)

    kept = concave_hull(counts, speeds)

    xs, ys = np.append(0, counts[kept]), np.append(0.0, speeds[kept])
    assert (np.diff(np.diff(ys) / np.diff(xs)) < 0).all() or len(kept) < 2
    cover = np.interp(counts, xs, ys)
    assert (speeds <= cover + 1e-9).all()


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
