"""Checkpoints of split jobs: saved from any layout, loaded into any other."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

sys.path.insert(0, str(Path(__file__).parent))
from cells_cases import CellCase, resume_and_train, train_and_save, whole_state
from engine_cases import Case
from ranks import run_ranks

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default"), pytest.mark.slow]

JOB = {"batch": 8, "style": "llama", "tied": True, "steps": 12}
SAVED = CellCase(stages=((3, 2, (2, 2)),), num_micro=2, **JOB)  # dp 2 x tp 2
OTHERS = (
    CellCase(stages=((1, 1, (2, 2)), (2, 1, (2, 2))), num_micro=2, zero=3, **JOB),  # dp 2 x pp 2
    CellCase(stages=((2, 1, (4,)), (1, 1, (2, 1, 1))), num_micro=2, **JOB),  # unlike groups
    Case(batches=(5, 0, 3), micros=(2, 1, 3), shares=(2, 5, 1), style="llama", tied=True, steps=12),
)


def test_a_checkpoint_of_one_layout_is_that_of_every_other(tmp_path: Path):
    saving = run_ranks(train_and_save, 4, SAVED, tmp_path, 4)
    saved = whole_state([one[1] for one in saving])
    assert saved["tokens.weight exp_avg"].shape == saved["tokens.weight"].shape == (61, 16)

    for other in OTHERS:
        num_ranks = len(other.batches) if isinstance(other, Case) else other.num_ranks
        loading = run_ranks(resume_and_train, num_ranks, other, tmp_path)

        loaded = whole_state([one[0] for one in loading])
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)
        for _, losses, begun in loading:
            assert begun == 4
            assert losses == pytest.approx(saving[0][0][4:], abs=1e-5)


def test_uneven_ranks_save_and_stages_of_split_matrices_go_on(tmp_path: Path):
    uneven = Case(batches=(6, 2), micros=(4, 2), shares=(1, 3), style="llama", tied=True, steps=12)
    pipeline = CellCase(stages=((1, 2, (4,)), (2, 2, (4,))), num_micro=2, **JOB)

    saving = run_ranks(train_and_save, 2, uneven, tmp_path, 4)
    loading = run_ranks(resume_and_train, 4, pipeline, tmp_path)

    saved, loaded = whole_state([one[1] for one in saving]), whole_state([x[0] for x in loading])
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    assert loading[0][1] == pytest.approx(saving[0][0][4:], abs=1e-5)
