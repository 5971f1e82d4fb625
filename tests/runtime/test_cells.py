"""Data x tensor x pipeline layouts, and pipelines over unlike groups, against one device."""

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent))
from cells_cases import CellCase, a_random_case, cell, check_equal

from drystone.describe.layout import Schedule
from drystone.errors import InvalidSpec
from drystone.run.train.cells.layout import cell_layout
from drystone.run.train.cells.tensor import check_splittable

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]


@pytest.mark.slow
def test_two_tensor_parallel_ranks_equal_one_device():
    check_equal(
        [
            cell(1, 2, 1, style="gpt", steps=25),
            cell(1, 2, 1, style="gpt", tied=True, splits_sequence=False, zero=3),
            cell(1, 2, 1, style="llama", recompute=True, zero=0),
            cell(1, 2, 1, style="llama", tied=True, zero=3),
            cell(1, 2, 1, style="qwen"),  # one head of keys and values on two ranks
            cell(1, 2, 1, style="qwen", splits_sequence=False, zero=2),
        ]
    )


@pytest.mark.slow
def test_two_stages_equal_one_device():
    check_equal(
        [
            cell(1, 1, 2, style="gpt", num_micro=4, batch=8, steps=25),
            cell(1, 1, 2, style="llama", tied=True, schedule=Schedule.GPIPE, zero=3),
            cell(1, 1, 2, style="gpt", tied=True, recompute=True, num_micro=1, batch=2),
            cell(1, 1, 2, num_micro=4, batch=7, virtual=2, schedule=Schedule.INTERLEAVED),
            CellCase(stages=((1, 1, (3,)), (4, 1, (3,))), num_micro=3, batch=9, style="llama"),
            cell(1, 1, 2, style="llama", tied=True, lora=True, zero=3),
            cell(1, 1, 2, style="gpt", lora=True),
        ]
    )


@pytest.mark.slow
def test_all_combinations_on_four_ranks_equal_one_device():
    check_equal(
        [
            cell(2, 2, 1, style="llama", steps=25),
            cell(2, 1, 2, style="gpt", steps=25, num_micro=3, batch=11),
            cell(1, 2, 2, style="llama", tied=True, steps=25),
            cell(1, 1, 4, style="gpt", tied=True, num_micro=5, batch=10),
            cell(1, 4, 1, style="llama", splits_sequence=True),
            cell(1, 4, 1, style="qwen", tied=True),
            cell(4, 1, 1, style="gpt", batch=13, zero=2),
            cell(2, 2, 1, style="gpt", tied=True, zero=3),
            cell(2, 1, 2, style="llama", tied=True, zero=3, schedule=Schedule.GPIPE),
            cell(2, 1, 2, virtual=2, schedule=Schedule.INTERLEAVED, num_micro=4, batch=16),
            cell(1, 2, 2, style="gpt", tied=True, splits_sequence=False, recompute=True),
            cell(1, 2, 2, style="llama", tied=True, is_16_bit=True),
            cell(2, 1, 2, style="gpt", zero=3, is_16_bit=True),
        ]
    )


@pytest.mark.slow
def test_pipelines_over_unlike_groups_equal_one_device():
    many = {"num_micro": 3, "style": "llama"}
    check_equal(
        [
            # Unlike layers, the same ranks.
            CellCase(stages=((1, 1, (2, 2)), (3, 1, (2, 2))), batch=12, steps=25, **many),
            # One device before three, and three before one; a micro-batch of 5 is 2 + 2 + 1.
            CellCase(stages=((1, 1, (5,)), (3, 1, (2, 2, 2))), batch=15, steps=25, **many),
            CellCase(stages=((3, 1, (2, 2, 2)), (1, 1, (5,))), batch=14, tied=True, **many),
            # Tensor parallel before data parallel, and the other way round.
            CellCase(stages=((2, 2, (4,)), (1, 1, (3, 1))), batch=12, tied=True, **many),
            CellCase(stages=((2, 1, (1, 3)), (2, 2, (4,))), batch=11, zero=3, **many),
            CellCase(
                stages=((2, 2, (4,)), (1, 1, (2, 2))), batch=12, splits_sequence=False, **many
            ),
            # Three groups; a rank without a sample.
            CellCase(stages=((1, 1, (4,)), (2, 2, (4,)), (1, 1, (4,))), batch=12, **many),
            CellCase(stages=((1, 1, (2,)), (2, 1, (1, 1, 1))), batch=6, zero=3, **many),
        ]
    )


@pytest.mark.slow
def test_random_layouts_equal_one_device():
    chance = random.Random(5)
    check_equal([a_random_case(chance, 4) for _ in range(12)])


def test_what_cannot_be_split_is_refused():
    fine = cell(1, 2, 2)
    assert cell_layout(fine.plan).num_ranks == 4
    plan = fine.plan
    for wrong, match in (
        (replace(plan, not_executable="no such kernel"), "no such kernel"),
        (replace(plan, stages=plan.stages[:1]), "do not make up 4 layers"),
        (replace(plan, stages=(replace(plan.stages[0], cp=2, tp=1), plan.stages[1])), "context"),
        (cell(1, 1, 2, batch=40).plan, "stage 0 computes 2 samples"),
        (cell(1, 1, 2, virtual=3).plan, "cannot be interleaved"),
    ):
        with pytest.raises(InvalidSpec, match=match):
            cell_layout(wrong)

    assert check_splittable(cell(1, 2, 1, style="llama").spec, 2) == []
    assert "do not divide by 3" in check_splittable(cell(1, 2, 1, style="llama").spec, 3)[0]
