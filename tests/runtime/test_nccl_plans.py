"""Every way to split a job under NCCL's rules (`nccl_rules.py`): none hangs, losses are equal."""

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

sys.path.insert(0, str(Path(__file__).parent))
import engine_cases
from cells_cases import (
    CellCase,
    a_random_case,
    cell,
    check_equal,
    resume_and_train,
    train_and_save,
    whole_state,
)
from checkpoint_cases import rebalance_at_every_step
from engine_cases import Case, train_unevenly
from nccl_rules import NCCL_ONE_STREAM, NCCL_RULES
from ranks import run_ranks

from drystone.describe.layout import Schedule

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default"), pytest.mark.slow]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            cell(1, 1, 2, style="llama", tied=True, num_micro=4, batch=8), id="tied-on-two-stages"
        ),
        pytest.param(
            cell(1, 1, 3, schedule=Schedule.GPIPE, num_micro=4, batch=8), id="gpipe-of-three"
        ),
        pytest.param(cell(1, 1, 3, num_micro=1, batch=2), id="fewer-micro-batches-than-stages"),
        pytest.param(
            cell(1, 1, 2, schedule=Schedule.INTERLEAVED, virtual=2, num_micro=4, batch=8),
            id="interleaved-on-two-stages",
        ),
    ],
)
def test_a_pipeline_that_sent_before_it_received_does_not_hang(case: CellCase):
    check_equal([case], backend=NCCL_RULES)


def test_two_ranks_of_every_kind_equal_one_device():
    check_equal(
        [
            cell(1, 2, 1, style="llama", tied=True, zero=3),
            cell(1, 2, 1, style="qwen", splits_sequence=False, zero=2),
            cell(1, 1, 2, style="gpt", num_micro=4, batch=7),
            cell(1, 1, 2, style="gpt", tied=True, recompute=True, num_micro=1, batch=2),
            cell(1, 1, 2, style="llama", tied=True, lora=True, zero=3),
            CellCase(stages=((1, 1, (3,)), (4, 1, (3,))), num_micro=3, batch=9, style="llama"),
        ],
        backend=NCCL_RULES,
    )


def test_four_ranks_of_every_kind_equal_one_device():
    """All operations of a rank on one stream: the order is the same on all ranks of all groups."""
    chance = random.Random(8)
    check_equal(
        [
            cell(1, 1, 4, style="gpt", tied=True, num_micro=2, batch=4, steps=1),
            cell(2, 1, 2, style="llama", tied=True, zero=3, schedule=Schedule.GPIPE, steps=1),
            cell(
                2, 1, 2, virtual=2, schedule=Schedule.INTERLEAVED, num_micro=4, batch=16,
                tied=True, steps=1,
            ),
            cell(1, 2, 2, style="llama", tied=True, num_micro=3, batch=6, zero=2, steps=1),
            CellCase(
                stages=((3, 1, (2, 2, 2)), (1, 1, (5,))), num_micro=3, batch=14, tied=True, steps=1
            ),
            *(replace(a_random_case(chance, 4), steps=1) for _ in range(4)),
        ],
        backend=NCCL_ONE_STREAM,
    )  # fmt: skip


def test_uneven_shards_and_batches_equal_one_device():
    cases = [
        Case(batches=(2, 6), micros=(1, 3), shares=(3, 1), style="llama", tied=True, clip=0.5),
        Case(batches=(8, 0), micros=(4, 1), shares=(0, 1), style="gpt"),
        Case(batches=(4, 4), micros=(2, 2), shares=(1, 1), style="user"),
    ]

    by_rank = run_ranks(train_unevenly, 2, cases, backend=NCCL_RULES)

    for index, case in enumerate(cases):
        plain = engine_cases.train_plainly(case)
        for rank in by_rank:
            for (loss, norm, *_), (expected_loss, expected_norm, _) in zip(
                rank[index], plain, strict=True
            ):
                assert loss == pytest.approx(expected_loss, abs=1e-5), case
                assert norm == pytest.approx(expected_norm, rel=1e-5), case


def test_batches_that_move_between_ranks_leave_the_losses_alone():
    many = [(4, 0), (1, 3), (3, 1)]
    case = Case(batches=many[0], micros=(2, 2), shares=(1, 2), style="llama")

    first, second = run_ranks(rebalance_at_every_step, 2, case, many, backend=NCCL_RULES)

    assert first == second
    assert first == pytest.approx(run_ranks(rebalance_at_every_step, 2, case, many)[0], abs=1e-5)


def test_a_job_that_is_saved_and_resized_goes_on(tmp_path: Path):
    job = {"batch": 8, "num_micro": 2, "style": "llama", "tied": True, "steps": 4}
    saved = CellCase(stages=((1, 1, (4,)), (2, 1, (4,))), **job)
    larger = CellCase(stages=((2, 1, (4,)), (1, 1, (3, 1))), zero=3, **job)

    saving = run_ranks(train_and_save, 2, saved, tmp_path, 2, backend=NCCL_RULES)
    loading = run_ranks(resume_and_train, 3, larger, tmp_path, backend=NCCL_RULES)

    before, after = (
        whole_state([rank[at] for rank in some]) for some, at in ((saving, 1), (loading, 0))
    )
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert loading[0][1] == pytest.approx(saving[0][0][2:], abs=1e-5)
