"""A script's side of the contract: progress, checkpoints that are whole, and leaving."""

import json
import os
import signal
import subprocess
import sys

import pytest

from drystone import contract
from drystone.run.fence import Fenced


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setenv("DRYSTONE_STEPS", "7")
    monkeypatch.setenv("DRYSTONE_CHECKPOINTS", str(tmp_path / "saved"))
    monkeypatch.setenv("DRYSTONE_PROGRESS", str(tmp_path / "progress.jsonl"))
    before = signal.getsignal(signal.SIGTERM)
    yield contract.join(num_steps=1, folder="elsewhere")
    signal.signal(signal.SIGTERM, before)


def told(tmp_path) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / "progress.jsonl").read_text().splitlines()]


def test_what_drystone_says_goes_before_the_arguments(job, tmp_path):
    assert (job.num_steps, job.folder) == (7, tmp_path / "saved")


def test_steps_are_told_and_a_signal_is_heard_once_a_step_is_done(job, tmp_path):
    assert not job.tell(4, loss=2.5)
    os.kill(os.getpid(), signal.SIGTERM)
    assert job.tell(5)

    reports = told(tmp_path)
    assert [(report["event"], report["step"]) for report in reports] == [
        ("started", 3),
        ("step", 4),
        ("step", 5),
    ]
    assert reports[1]["loss"] == 2.5
    assert reports[2]["step_seconds"] >= 0


def test_training_may_end_before_its_last_step(job, tmp_path):
    job.tell(2, is_last=True)

    assert told(tmp_path)[-1] == {"event": "finished", "step": 2}


def test_only_whole_checkpoints_are_resumed_from_and_two_are_kept(job, tmp_path):
    assert job.newest() is None
    for step in (2, 4, 6):
        with job.saving(step) as folder:
            (folder / "weights").write_text(str(step))
    with pytest.raises(OSError, match="disk full"), job.saving(7) as folder:
        raise OSError("disk full")

    newest = job.newest()
    assert newest is not None
    assert (newest.step, (newest.path / "weights").read_text()) == (6, "6")
    assert sorted(path.name for path in job.folder.glob("*/drystone.json")) == ["drystone.json"] * 2
    assert not (job.folder / "step-00000002").exists()
    assert told(tmp_path)[-1] == {"event": "checkpoint", "step": 6}


def test_another_rank_says_nothing(tmp_path, job, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    other = contract.join()
    other.tell(1)
    other.mark(tmp_path, 1)

    assert not (tmp_path / "progress.jsonl").exists()
    assert not (tmp_path / "drystone.json").exists()


def test_a_process_that_was_given_up_marks_no_checkpoint(job, tmp_path, monkeypatch):
    fence = tmp_path / "epoch"
    fence.write_text("2\n")
    monkeypatch.setenv("DRYSTONE_FENCE", str(fence))
    monkeypatch.setenv("DRYSTONE_EPOCH", "1")

    with pytest.raises(Fenced), job.saving(3):
        pass
    assert job.newest() is None


def test_it_imports_the_standard_library_alone():
    code = "import sys; from drystone import contract; contract.join; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert not {"torch", "numpy", "pydantic", "yaml"} & set(run.stdout.split())
