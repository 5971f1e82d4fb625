"""`drystone run`: a job file trained here, left with Ctrl-C, gone on with, exported."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from drystone.cli import main as cli

pytestmark = pytest.mark.torch

JOB = """
model: mini-llama
data: text.txt
train: {steps: 6, batch: 4, sequence: 32, learning_rate: 0.01, checkpoint_every: 2}
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("dry stone walls have no mortar. " * 60, encoding="utf-8")
    path = tmp_path / "small.yaml"
    path.write_text(JOB, encoding="utf-8")
    return path


def test_a_dry_run_shows_the_plan_and_starts_nothing(job: Path, capfd):
    assert cli.run(["run", str(job), "--cpu", "1", "--dry-run"]) == 0

    assert "6 steps on 1 CPU" in capfd.readouterr().err
    assert not (job.parent / "runs").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--devices", "2xT4", "--cpu", "1"], "contradict"),
        (["--devices", "2xT5"], "T5"),
        (["--devices", "0xT4"], "count"),
    ],
)
def test_wrong_devices_are_said(job: Path, words: list[str], says: str, capfd):
    assert cli.run(["run", str(job), *words]) == 2
    assert says in capfd.readouterr().err


@pytest.mark.slow
def test_it_trains_exports_and_is_done_when_asked_again(job: Path, capfd):
    assert cli.run(["run", str(job), "--cpu", "1", "--json"]) == 0

    out, err = capfd.readouterr()
    told = json.loads(out)
    assert told["steps"] == 6
    assert told["loss"] < 5
    assert (Path(told["export"]) / "config.json").is_file()
    assert "tokens/s" in err
    job.write_text(JOB.replace("batch: 4", "batch: 8"), encoding="utf-8")
    assert cli.run(["run", str(job), "--cpu", "1"]) == 2
    assert "another job: global_batch differ" in capfd.readouterr().err


@pytest.mark.slow
def test_ctrl_c_saves_and_the_same_command_goes_on(job: Path):
    job.write_text(JOB.replace("steps: 6", "steps: 100000"), encoding="utf-8")
    command = [sys.executable, "-m", "drystone", "run", str(job), "--devices", "1xA100,1xT4"]
    started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    output = job.parent / "runs" / "small" / "epoch-1" / "rank-0.out"
    _wait_for(output, '"event": "step", "step": 3')

    os.kill(started.pid, signal.SIGINT)
    _, err = started.communicate(timeout=60)

    assert started.returncode == 130
    assert "The same command goes on" in err
    left_at = json.loads(output.read_text().splitlines()[-1])
    assert left_at["event"] == "left"
    job.write_text(JOB.replace("steps: 6", f"steps: {left_at['step'] + 2}"), encoding="utf-8")
    assert cli.run(["run", str(job), "--devices", "1xT4"]) == 0
    resumed = (output.parents[1] / "epoch-2" / "rank-0.out").read_text().splitlines()
    assert json.loads(resumed[0])["step"] == left_at["step"]


@pytest.mark.slow
def test_a_rank_that_was_killed_goes_on_from_the_checkpoint(job: Path):
    job.write_text(JOB.replace("steps: 6", "steps: 40"), encoding="utf-8")
    command = [sys.executable, "-m", "drystone", "run", str(job), "--devices", "1xT4"]
    started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    home = job.parent / "runs" / "small"
    _wait_for(home / "epoch-1" / "rank-0.out", '"event": "checkpoint"')
    children = f"/proc/{started.pid}/task/{started.pid}/children"
    if not Path(children).exists():
        pytest.skip("left out: this system does not name the children of a process")
    for child in Path(children).read_text().split():
        os.kill(int(child), signal.SIGKILL)

    _, err = started.communicate(timeout=120)

    assert started.returncode == 0, err
    first = json.loads((home / "epoch-2" / "rank-0.out").read_text().splitlines()[0])
    assert first["step"] >= 2


def _wait_for(path: Path, text: str) -> None:
    for _ in range(600):
        if path.exists() and text in path.read_text():
            return
        time.sleep(0.1)
    raise AssertionError(f"{text} did not come")
