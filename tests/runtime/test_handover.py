"""A launch hands its state to the next one, whatever the two splits are."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

sys.path.insert(0, str(Path(__file__).parent))
from checkpoint_cases import joined_pieces
from engine_cases import Case
from handover_cases import take_half, take_over_and_train, train_and_hand_over
from ranks import run_ranks

from drystone.run.fence import raise_fence
from drystone.run.succession import Successor, let_begin, name_successor, offer_folder

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]

ALONE = Case(batches=(4,), micros=(2,), shares=(1.0,), style="llama", steps=6)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """The folder of a job whose first launch was told of the second."""
    for name in ("checkpoints", "epoch-1", "epoch-2"):
        (tmp_path / name).mkdir()
    raise_fence(tmp_path / "fence", 1)
    name_successor(tmp_path, 1, Successor(2, "127.0.0.1"))
    return tmp_path


def both(first, second):
    """Two launches at the same time."""
    with ThreadPoolExecutor(2) as pool:
        before, after = pool.submit(run_ranks, *first), pool.submit(run_ranks, *second)
        return before.result(), after.result()


@pytest.mark.slow
def test_four_uneven_ranks_hand_over_to_three_others_and_no_file_is_written(job: Path):
    four = Case(batches=(1, 3, 0, 4), micros=(1, 2, 1, 2), shares=(1, 1, 0, 4), steps=9, tied=True)
    three = Case(batches=(5, 0, 3), micros=(2, 1, 3), shares=(2, 5, 1), steps=9, tied=True)

    given, taken = both(
        (train_and_hand_over, 4, four, job, 5), (take_over_and_train, 3, three, job)
    )

    assert all(is_taken for _, _, is_taken in given)
    offered = joined_pieces([one[1] for one in given])
    adopted = joined_pieces([one[1] for one in taken])
    assert offered.keys() == adopted.keys()
    assert all(torch.equal(offered[name], adopted[name]) for name in offered)
    assert [begun for *_, begun in taken] == [5, 5, 5]
    assert list((job / "checkpoints").iterdir()) == []
    assert (job / "fence").read_text() == "2\n"
    [straight] = run_ranks(take_straight, 1, three)
    assert given[0][0] + taken[0][2] == pytest.approx(straight, rel=1e-4)


def take_straight(case: Case) -> list[float]:
    from checkpoint_cases import a_trainer
    from engine_cases import tokens

    whole = Case(batches=(8,), micros=(2,), shares=(1.0,), steps=case.steps, tied=True)
    trainer = a_trainer(whole, None)
    return [
        trainer.step(batches).loss
        for batches in trainer.iterate(tokens().read, num_steps=whole.steps)
    ]


def test_a_standby_begins_by_itself_where_nothing_is_left_of_the_launch_before(job: Path):
    let_begin(job, 2)
    [(is_taken, _, losses, begun)] = run_ranks(take_over_and_train, 1, ALONE, job)
    assert (is_taken, begun, len(losses)) == (False, 0, 6)
    assert (job / "fence").read_text() == "2\n"
    (job / "checkpoints" / "fresh").mkdir()
    [(_, _, fresh, _)] = run_ranks(take_over_and_train, 1, ALONE, job)
    assert losses == fresh


def test_an_offer_of_a_launch_that_is_gone_is_not_believed(job: Path):
    offered = offer_folder(job / "checkpoints", 2)
    offered.mkdir()
    (offered / "offer.json").write_text("{}")
    let_begin(job, 2)
    [(is_taken, _, losses, _)] = run_ranks(take_over_and_train, 1, ALONE, job)
    assert (is_taken, len(losses)) == (False, 6)


@pytest.mark.slow
def test_a_next_launch_that_dies_while_it_takes_over_costs_nothing(job: Path):
    given, told = both((train_and_hand_over, 1, ALONE, job, 4), (take_half, 1, ALONE, job))
    assert [is_taken for *_, is_taken in given] == [False]
    assert "killed" in told[0]
    assert (job / "fence").read_text() == "1\n"  # who offered may still write its checkpoint


@pytest.mark.slow
def test_an_offer_that_nobody_takes_is_withdrawn(job: Path):
    [(_, _, is_taken)] = run_ranks(train_and_hand_over, 1, ALONE, job, 3)
    assert not is_taken


def test_who_was_told_of_nobody_offers_nothing(job: Path):
    (job / "epoch-1" / "successor.json").unlink()
    [(_, _, is_taken)] = run_ranks(train_and_hand_over, 1, ALONE, job, 3)
    assert not is_taken
    assert not offer_folder(job / "checkpoints", 2).exists()
