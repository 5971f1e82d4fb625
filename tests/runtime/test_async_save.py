"""Checkpoints in the background: those of the moment they were asked for, whole or not at all."""

import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

sys.path.insert(0, str(Path(__file__).parent))
from checkpoint_cases import a_trainer, pieces
from engine_cases import Case, tokens

from drystone.run.train.checkpoint import background as async_save
from drystone.run.train.checkpoint.checkpoint import find_whole

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]

CASE = Case(batches=(4,), micros=(2,), shares=(1.0,), style="llama", steps=6)


def train(trainer, num_steps: int) -> list[float]:
    return [
        trainer.step(batches).loss
        for batches in trainer.iterate(tokens().read, num_steps=num_steps)
    ]


def held_back(monkeypatch) -> threading.Event:
    """Writing begins only when the event is set."""
    gate, write = threading.Event(), async_save.write_checkpoint

    def wait_and_write(*args, **kwargs):
        assert gate.wait(60)
        return write(*args, **kwargs)

    monkeypatch.setattr(async_save, "write_checkpoint", wait_and_write)
    return gate


def test_training_goes_on_and_the_checkpoint_is_of_when_it_was_asked_for(tmp_path, monkeypatch):
    gate = held_back(monkeypatch)
    trainer = a_trainer(CASE, tmp_path)
    train(trainer, 3)
    then = pieces(trainer)

    trainer.start_save()
    after = train(trainer, 6)
    assert trainer.take_saved() == []
    assert find_whole(tmp_path) is None
    gate.set()
    ((step, path),) = trainer.take_saved(wait=True)
    again = a_trainer(CASE, tmp_path)
    assert again.resume()

    assert (step, path) == (3, tmp_path / "step-00000003")
    found = pieces(again)
    assert found.keys() == then.keys()
    for name, some in then.items():
        for (_, before), (_, loaded) in zip(some, found[name], strict=True):
            assert torch.equal(before, loaded), name
    assert train(again, 6) == pytest.approx(after, abs=1e-5)


def test_the_next_one_waits_for_the_one_before(tmp_path, monkeypatch):
    gate = held_back(monkeypatch)
    trainer = a_trainer(CASE, tmp_path)
    train(trainer, 1)
    trainer.start_save()
    train(trainer, 2)
    threading.Timer(0.2, gate.set).start()
    trainer.start_save()

    assert [step for step, _ in trainer.take_saved(wait=True)] == [1, 2]


def test_what_goes_wrong_while_writing_is_raised_in_training(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError("no space left")

    trainer = a_trainer(CASE, tmp_path)
    train(trainer, 1)
    monkeypatch.setattr(async_save, "write_checkpoint", fail)
    trainer.start_save()

    with pytest.raises(OSError, match="no space"):
        trainer.take_saved(wait=True)
    assert find_whole(tmp_path) is None
