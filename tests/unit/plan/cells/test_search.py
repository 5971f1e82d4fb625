"""Cells: what the list of layouts that fit is good for."""

import math
from dataclasses import replace

import numpy as np
import pytest

from drystone.describe.catalogue import find_gpu
from drystone.describe.layout import Layouts, Schedule
from drystone.describe.machine import default_machine
from drystone.describe.model_source import find_model
from drystone.describe.recipe import Recipe
from drystone.estimate.memory.peak import estimate_memory
from drystone.estimate.time.speed import estimate_speed
from drystone.plan.cells.search import RECOMPUTES, search_cells

MODEL = find_model("llama-3.2-1b")
RECIPE = Recipe(seq_len=4096, global_batch=24)
MACHINE = default_machine(find_gpu("A10G"), 4)


@pytest.fixture(scope="module")
def cells():
    return search_cells(MODEL, RECIPE, MACHINE, (1, 2, 3, 4, 6, 8))


def test_each_entry_is_the_estimate_of_its_layout(cells):
    for index in range(0, len(cells), max(1, len(cells) // 25)):
        recipe, layouts = cells.recipe_of(index), Layouts.of([cells.layout(index)])
        memory = estimate_memory(MODEL, recipe, layouts, gpu=MACHINE.gpu)
        speed = estimate_speed(MODEL, recipe, layouts, MACHINE)

        assert cells.high_bytes[index] == pytest.approx(memory.required_range().high[0], rel=1e-12)
        assert cells.step_seconds[index] == pytest.approx(speed.step_seconds[0], rel=1e-12)


def test_nothing_exceeds_memory(cells):
    assert len(cells)
    assert (cells.high_bytes <= MACHINE.gpu.usable_bytes).all()


def test_the_best_of_each_count(cells):
    best = cells.best()

    assert best.layouts.num_gpus.tolist() == cells.counts().tolist()
    for index, count in enumerate(best.layouts.num_gpus):
        mine = cells.step_seconds[cells.layouts.num_gpus == count]
        assert best.step_seconds[index] == mine.min()


def test_of_equally_fast_ones_the_simplest_wins():
    cells = search_cells(MODEL, RECIPE, MACHINE, (8,), recomputes=RECOMPUTES[2:])
    twice = replace(
        cells.take(np.array([0, 0])), high_bytes=np.array([2.0, 1.0]), recompute=np.array([2, 1])
    )

    assert twice.best().recompute.tolist() == [1]


def test_the_nearest_miss_says_how_much_is_missing():
    cells = search_cells(find_model("llama-2-70b"), RECIPE, MACHINE, (1, 2, 4))

    assert len(cells) == 0
    assert cells.counts().tolist() == []
    assert len(cells.best()) == 0
    miss = cells.nearest
    assert miss is not None
    recipe = replace(RECIPE, recompute=miss.recompute)
    memory = estimate_memory(find_model("llama-2-70b"), recipe, Layouts.of([miss.layout]),
                             gpu=MACHINE.gpu)  # fmt: skip
    missing = memory.required_range().high[0] - MACHINE.gpu.usable_bytes
    assert miss.missing_bytes == pytest.approx(missing)
    assert miss.missing_bytes > 0


def test_no_layout_at_all():
    cells = search_cells(MODEL, replace(RECIPE, global_batch=1), MACHINE, (97,))

    assert len(cells) == 0
    assert cells.nearest is None
    assert len(cells.best()) == 0


def test_an_interleaved_layout_says_so():
    cells = search_cells(MODEL, RECIPE, MACHINE, (8,))
    many = np.flatnonzero(cells.layouts.virtual_stages > 1)

    assert cells.layout(int(many[0])).schedule is Schedule.INTERLEAVED


def test_types_with_equal_nodes_share_memory_but_not_workspaces():
    a100, h100 = (default_machine(find_gpu(name), 8) for name in ("A100-80G", "H100-80G"))

    first = search_cells(MODEL, RECIPE, a100, (8,))
    second = search_cells(MODEL, RECIPE, h100, (8,))

    assert math.isclose(
        second.high_bytes.max() - first.high_bytes.max(), 1.092 * 72 * 2**20, rel_tol=0.01
    )
