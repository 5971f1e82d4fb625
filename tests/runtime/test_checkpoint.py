"""Checkpoints: saved from one split, loaded into another; half-written and damaged ones."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

sys.path.insert(0, str(Path(__file__).parent))
from checkpoint_cases import (
    a_trainer,
    joined_pieces,
    pieces,
    rebalance_at_every_step,
    refused_resume,
    resume_and_say_what_was_read,
    resume_and_train,
    train_and_save,
)
from engine_cases import Case, tokens
from ranks import run_ranks

from drystone.run.train.checkpoint.checkpoint import (
    RECORD,
    OtherFormat,
    check_checkpoint,
    find_whole,
)
from drystone.run.train.checkpoint.hashes import split_evenly

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]

ALONE = Case(batches=(4,), micros=(2,), shares=(1.0,), style="llama", steps=6)


def take_steps(trainer, num_steps: int) -> list[float]:
    """Train up to that step; save after each."""
    losses = []
    for batches in trainer.iterate(tokens().read, num_steps=num_steps):
        losses.append(trainer.step(batches).loss)
        trainer.save()
    return losses


@pytest.mark.slow
def test_four_uneven_ranks_save_and_three_others_go_on(tmp_path: Path):
    four = Case(batches=(1, 3, 0, 4), micros=(1, 2, 1, 2), shares=(1, 1, 0, 4), steps=25, tied=True)
    three = Case(batches=(5, 0, 3), micros=(2, 1, 3), shares=(2, 5, 1), steps=25, tied=True)

    saving = run_ranks(train_and_save, 4, four, tmp_path, 5)
    loading = run_ranks(resume_and_train, 3, three, tmp_path)

    saved = joined_pieces([one[1] for one in saving])
    loaded = joined_pieces([one[0] for one in loading])
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    assert loading[0][2] == 5
    assert len(loading[0][1]) == 20
    assert loading[0][1] == pytest.approx(saving[0][0][5:], abs=1e-5)


@pytest.mark.slow
def test_every_rank_reads_its_share_back_and_none_waits_in_one_collective(tmp_path: Path):
    case = Case(batches=(1, 3), micros=(1, 2), shares=(1, 3), steps=2)
    run_ranks(train_and_save, 2, case, tmp_path, 2)

    first, second = run_ranks(resume_and_say_what_was_read, 2, case, tmp_path)

    assert first[0] == second[0] == 2
    assert first[1]
    assert second[1]
    whole = sorted(path.name for path in (tmp_path / "step-00000002").iterdir())
    assert sorted(first[1] + second[1] + [RECORD]) == whole
    assert first[2] == second[2] >= 3


def test_files_are_shared_out_by_their_size():
    sizes = {"a": 70, "b": 40, "c": 30, "d": 20, "empty": 0}

    parts = split_evenly(sizes, 2)
    assert sorted(name for part in parts for name in part) == sorted(sizes)
    assert max(sum(sizes[name] for name in part) for part in parts) == 90
    assert split_evenly({}, 3) == [[], [], []]


@pytest.mark.slow
def test_batches_change_between_steps_without_a_trace_in_the_losses():
    many = [(4, 0), (1, 3), (3, 1), (0, 4), (2, 2), (1, 3)]
    case = Case(batches=many[0], micros=(2, 2), shares=(1, 2), style="llama")

    first, second = run_ranks(rebalance_at_every_step, 2, case, many)

    assert first == second
    assert first == pytest.approx(take_steps(a_trainer(ALONE, None), 6), abs=1e-5)


def test_one_process_goes_on_as_if_nothing_had_happened(tmp_path: Path):
    whole = take_steps(a_trainer(ALONE, None), 6)
    take_steps(a_trainer(ALONE, tmp_path), 3)

    again = a_trainer(ALONE, tmp_path)
    assert again.resume()

    assert again.progress.position == 12
    assert take_steps(again, 6) == whole[3:]


def test_the_last_few_are_kept(tmp_path: Path):
    take_steps(a_trainer(ALONE, tmp_path, keep=2), 5)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000005"]


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "record", "no record"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path: Path, damage: str, capfd):
    take_steps(a_trainer(ALONE, tmp_path), 3)
    newest = tmp_path / "step-00000003"
    file = next(newest.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    match damage:
        case "flip":
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
        case "cut":
            file.write_bytes(content[:-10])
        case "remove":
            file.unlink()
        case "record":
            (newest / RECORD).write_text("{", encoding="utf-8")
        case "no record":
            (newest / RECORD).unlink()

    assert check_checkpoint(newest)
    assert find_whole(tmp_path) == tmp_path / "step-00000002"
    assert "step-00000003: passed over" in capfd.readouterr().err


def change_format(checkpoint: Path, **fields: object) -> None:
    """As another version would have written it, which also calls its files otherwise."""
    record = json.loads((checkpoint / RECORD).read_text(encoding="utf-8"))
    del record["files"]
    (checkpoint / RECORD).write_text(json.dumps(record | fields), encoding="utf-8")


@pytest.mark.parametrize("written", [0, 2, "2.1"])
def test_one_of_another_format_is_refused_and_nothing_is_lost(tmp_path: Path, written: object):
    folder = tmp_path / "checkpoints"
    take_steps(a_trainer(ALONE, folder), 3)
    change_format(folder / "step-00000003", format=written)
    before = sorted(folder.rglob("*"))

    with pytest.raises(OtherFormat) as caught:
        a_trainer(ALONE, folder).resume()

    assert "step-00000003" in caught.value.where
    assert f"format {written!r}, this version of Drystone reads 1" in caught.value.message
    assert "the version that wrote it" in caught.value.hint
    assert sorted(folder.rglob("*")) == before

    (folder / "step-00000003").rename(tmp_path / "elsewhere")  # as the hint says
    again = a_trainer(ALONE, folder)
    assert again.resume()
    assert again.progress.step == 2


@pytest.mark.slow
def test_every_rank_hears_of_another_format(tmp_path: Path):
    take_steps(a_trainer(ALONE, tmp_path), 1)
    change_format(tmp_path / "step-00000001", format=2)
    two = Case(batches=(2, 2), micros=(2, 2), shares=(1.0, 1.0), style="llama", steps=6)

    assert run_ranks(refused_resume, 2, two, tmp_path) == ["OtherFormat"] * 2


def test_what_a_new_checkpoint_does_not_replace_is_not_removed(tmp_path: Path):
    """Later steps that turned out damaged stay until they are overtaken; so do other formats."""
    take_steps(a_trainer(ALONE, tmp_path, keep=6), 6)
    change_format(tmp_path / "step-00000001", format=2)
    for step in (4, 5, 6):
        (tmp_path / f"step-0000000{step}" / RECORD).unlink()

    again = a_trainer(ALONE, tmp_path, keep=2)
    assert again.resume()
    assert again.progress.step == 3
    take_steps(again, 4)  # writes step 4

    names = [path.name[-1] for path in sorted(tmp_path.iterdir())]
    assert names == ["1", "3", "4", "5", "6"]
    assert find_whole_step(tmp_path) == 4
    take_steps(again, 6)
    assert [path.name[-1] for path in sorted(tmp_path.iterdir())] == ["1", "5", "6"]
    assert find_whole_step(tmp_path) == 6


def find_whole_step(folder: Path) -> int:
    return int(find_whole(folder).name.removeprefix("step-"))


def test_a_half_written_one_is_never_taken(tmp_path: Path):
    take_steps(a_trainer(ALONE, tmp_path), 2)
    (tmp_path / "step-00000002").rename(tmp_path / ".step-00000002.part")

    again = a_trainer(ALONE, tmp_path)

    assert again.resume()
    assert again.progress.step == 1


def test_without_a_checkpoint_training_begins_at_the_beginning(tmp_path: Path):
    trainer = a_trainer(ALONE, tmp_path / "nowhere")
    before = pieces(trainer)

    assert not trainer.resume()
    assert trainer.progress.step == 0
    assert all(torch.equal(before[n][0][1], p[0][1]) for n, p in pieces(trainer).items())
