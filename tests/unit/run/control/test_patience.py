"""Patience with a job: what its file says is refused out of range, and kept by the controller."""

import math
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from drystone.describe.files.job import parse_job
from drystone.errors import RequestError
from drystone.run.control.notes import Described, render
from drystone.run.control.notes import parse as parse_note
from drystone.run.control.progress import RunProgress
from drystone.run.control.runs import Patience, silence_fault

SCRIPT = "command: ./train\ntrain: {steps: 10}\n"
MODEL = "model: gpt2\ntrain: {steps: 10}\n"


def patience(text: str) -> Patience:
    return Patience().of_job(parse_job(text, folder=Path("/tmp")))


def test_without_a_word_the_service_waits_as_for_all_and_for_scripts_for_ever():
    assert patience(MODEL) == Patience()
    assert patience(SCRIPT).start_seconds == math.inf


def test_what_the_file_says_counts():
    found = patience(SCRIPT + "patience: {start: 10m, silence: 30m, grace: 2m}")

    assert (found.start_seconds, found.hang_seconds, found.hang_steps) == (600, 1800, 0)
    assert found.grace_seconds == 120


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("{start: 1s}", "start"),
        ("{start: 2d}", "start"),
        ("{silence: 1s}", "silence"),
        ("{grace: 2h}", "grace"),
        ("{grace: soon}", "grace"),
        ("{pause: 5m}", "pause"),
    ],
)
def test_out_of_range_is_refused_with_its_place(text: str, key: str):
    with pytest.raises(RequestError, match=key):
        patience(f"{SCRIPT}patience: {text}")


def silent_run(seconds: float, step: int) -> SimpleNamespace:
    then = time.monotonic() - seconds
    progress = RunProgress(step=step, heard_seconds=then)
    return SimpleNamespace(progress=progress, ordered_at=then)


@pytest.mark.parametrize(("step", "key"), [(-1, "start"), (3, "silence")])
def test_a_script_is_given_up_after_its_own_patience(step: int, key: str):
    run = silent_run(700, step)

    assert silence_fault(run, patience(SCRIPT + f"patience: {{{key}: 10m}}")) is not None
    assert silence_fault(run, patience(SCRIPT + f"patience: {{{key}: 20m}}")) is None


def test_the_log_keeps_it():
    job = parse_job(SCRIPT + "patience: {silence: 30m}", folder=Path("/tmp"))
    note = Described(time_seconds=1.0, job_id="1", job=job)

    assert parse_note(render(note)).job == job
