"""Files of jobs that are somewhere else, or gone: nothing begins anew without a word."""

import shutil
from pathlib import Path

import pytest
from systems import running

from drystone.describe.files.cluster import parse_cluster
from drystone.errors import InvalidSpec
from drystone.run.control.controller import Controller, ControllerSettings
from drystone.run.control.folder import name_of
from drystone.run.lifecycle import JobState

CLUSTER = parse_cluster("nodes: [{gpu: T4, gpus_per_node: 2}]")


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'log.db'}"
    return request.getfixturevalue("postgres")()


@pytest.mark.slow
def test_a_log_is_taken_over_with_the_folder_of_its_jobs_only(database, tmp_path):
    with running(tmp_path / "s", database=database) as system:
        job = system.submit(steps=100_000)
        system.wait_step(job, 3)
    with pytest.raises(InvalidSpec, match="is not the folder in which jobs 1 of this log"):
        Controller(settings(tmp_path / "elsewhere", database))
    # The folder may be mounted under another name, and goes on where it was.
    shutil.move(tmp_path / "s", tmp_path / "moved")
    with running(tmp_path / "moved", database=database) as system:
        system.controller.cancel(job)
        system.wait_over(job)
    # Nothing is left that could begin anew: another folder will do.
    Controller(settings(tmp_path / "elsewhere", database)).close()


def settings(folder: Path, database: str = "") -> ControllerSettings:
    return ControllerSettings(folder=folder, cluster=CLUSTER, database=database)


def test_a_new_log_does_not_take_files_of_other_jobs_for_its_own(tmp_path):
    (tmp_path / "s" / "jobs" / "1" / "checkpoints").mkdir(parents=True)
    (tmp_path / "s" / "jobs" / "1" / "epoch").write_text("3")
    with pytest.raises(InvalidSpec, match="holds files of jobs, and the log is empty"):
        Controller(settings(tmp_path / "s"))


def test_a_folder_keeps_its_name(tmp_path):
    name = name_of(tmp_path)
    assert len(name) == 32
    assert name_of(tmp_path) == name


@pytest.mark.slow
def test_a_job_whose_checkpoints_are_gone_does_not_begin_anew(tmp_path):
    with running(tmp_path / "s") as system:
        job = system.submit(steps=100_000)
        pause_at(system, job, 12)
        shutil.rmtree(system.folder / "jobs" / job / "checkpoints")
        system.controller.resume(job)
        assert system.wait_over(job) == ["failed"]
        assert "the folder of its checkpoints is gone, and with it" in system.live.jobs[job].reason
        assert system.kinds(job).count("Launched") == 1


@pytest.mark.slow
def test_a_job_that_begins_anew_says_so(tmp_path):
    with running(tmp_path / "s") as system:
        job = system.submit(steps=100_000)
        pause_at(system, job, 12)
        for path in (system.folder / "jobs" / job / "checkpoints").iterdir():
            path.unlink()
        system.controller.resume(job)
        system.until(lambda: "it began again at step 0" in system.live.jobs[job].reason)


def pause_at(system, job: str, step: int) -> None:
    system.wait_step(job, step)
    system.controller.pause(job)
    system.until(lambda: not system.controller.reconciler.runs and left(system, job))
    assert system.state(job) is JobState.PAUSED


def left(system, job: str) -> bool:
    return not system.controller.reconciler._stale and bool(system.audit(job))
