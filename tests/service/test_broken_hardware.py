"""A GPU that breaks under a job: its node is drained, and the job goes on elsewhere."""

import pytest
from systems import running

from drystone.describe.files.job import make_job
from drystone.run.control.notes import Drained

pytestmark = pytest.mark.slow

FOUR_NODES = """
nodes:
  - {gpu: T4, gpus_per_node: 1, count: 4, emulate: {speed: 0.0003, memory: 4GiB}}
"""
BROKEN = """
import os, sys
from pathlib import Path
told = Path({told!r})
if len(told.read_text().split()) < {times}:
    told.open("a").write("x ")
    sys.exit("RuntimeError: CUDA error: uncorrectable ECC error encountered")
"""


def submit(system, folder, name: str, *, times: int) -> str:
    told, script = folder / f"{name}.told", folder / f"{name}.py"
    told.write_text("")
    script.write_text(BROKEN.format(told=str(told), times=times))
    table = {"command": f"python {script}", "train": {"steps": 1, "batch": 1}, "gpus": {"max": 1}}
    return system.controller.submit(make_job(table | {"name": name}, folder=folder))[0]


def drained(system) -> list[Drained]:
    return [event for event in system.events() if isinstance(event, Drained)]


def test_a_node_with_a_broken_gpu_is_drained_and_its_job_goes_on_elsewhere(tmp_path):
    with running(tmp_path / "s", FOUR_NODES) as system:
        job = submit(system, tmp_path, "unlucky", times=1)
        assert system.wait_over(job) == ["done"]

        [note] = drained(system)
        assert "uncorrectable memory error of the GPU" in note.reason
        assert note.blamed_by == job
        assert system.live.drained == {note.node: note.reason}
        other = submit(system, tmp_path, "next", times=0)
        assert system.wait_over(other) == ["done"]
        assert system.live.jobs[other].devices[0][0] != note.node
    with running(tmp_path / "s", FOUR_NODES) as system:
        assert list(system.live.drained) == [note.node]  # also after a restart
        system.controller.undrain(note.node)
        assert system.live.drained == {}


def test_a_job_that_finds_every_node_broken_is_itself_given_up(tmp_path):
    with running(tmp_path / "s", FOUR_NODES) as system:
        job = submit(system, tmp_path, "liar", times=99)
        assert system.wait_over(job) == ["failed"]

        assert len(drained(system)) == 2
        assert "so it is not the nodes" in system.live.jobs[job].reason
