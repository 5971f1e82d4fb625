"""What becomes of jobs when things go wrong, and when people change their minds."""

import dataclasses
import os
import shutil
import signal
import sqlite3
import subprocess
import time
from contextlib import suppress

import pytest
from systems import running

from drystone.describe.files.job import make_job
from drystone.errors import DrystoneError, NothingFits, RequestError
from drystone.run.control import failures
from drystone.run.control.failures import FaultKind
from drystone.run.control.notes import Learned
from drystone.run.engines.agent.launches import birth_of
from drystone.run.events import Interrupted
from drystone.run.lifecycle import JobState

pytestmark = pytest.mark.slow


def test_jobs_run_and_end(system):
    one, two = system.submit(), system.submit(gpus={"min": 2, "max": 2})

    assert system.wait_over(one, two) == ["done", "done"]
    assert system.kinds(one)[:3] == ["Described", "Submitted", "Decided"]
    assert system.kinds(one)[-1] == "Finished"
    assert system.audit(one)[0] == "1 started 0"
    assert system.live.jobs[one].dollars > 0
    assert [event.measured_samples_per_second for event in system.events() if
            isinstance(event, Learned)]  # fmt: skip


@pytest.mark.parametrize(("fault", "kind"), [("kill", "crash"), ("hang", "hang"), ("disk", "disk")])
def test_a_fault_costs_what_came_after_the_last_checkpoint(system, fault, kind):
    job, other = system.submit(fault=fault), system.submit(steps=60)

    if fault == "disk":  # it is not tried again at once
        system.until(lambda: system.live.jobs[job].num_faults)
        assert system.live.jobs[job].retry_seconds - time.time() > 5
        assert system.state(job) is JobState.QUEUED
    else:
        assert system.wait_over(job) == ["done"]
        assert "2 started 5" in system.audit(job)
    [interruption] = [one for one in system.events(job) if isinstance(one, Interrupted)]
    assert interruption.kind == kind
    assert interruption.lost_samples == 4 * (6 - 5)
    assert system.live.jobs[other].num_faults == 0


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one megabyte in a folder; only root may have one."""
    path = tmp_path / "s" / "jobs" / "1" / "checkpoints"
    path.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    if shutil.which("mount") is None or subprocess.run(command, check=False).returncode:
        pytest.skip("left out: a file system can only be mounted as root (sudo make test)")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_a_disk_that_is_full_costs_one_job_time_and_nothing_else(small_disk, system, monkeypatch):
    monkeypatch.setitem(failures._FIRST_WAIT_SECONDS, FaultKind.DISK, 0.5)
    bulky = {"STEP_SECONDS": "0.05", "SAVE_BYTES": "200000"}
    job, other = system.submit(steps=40, environment=bulky), system.submit(steps=60)
    system.until(lambda: "1 saved 5" in system.audit(job))
    ballast = small_disk / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass

    system.until(lambda: system.live.jobs[job].num_faults)
    [fault] = [one for one in system.events(job) if isinstance(one, Interrupted)][:1]
    assert fault.kind == "disk"
    assert "No space left on device" in fault.reason
    ballast.unlink()
    assert system.wait_over(job, other) == ["done", "done"]
    assert system.live.jobs[other].num_faults == 0
    starts = [int(line.split()[2]) for line in system.audit(job) if "started" in line]
    assert starts == sorted(starts)
    assert starts[-1] >= 5


def test_a_mistake_of_the_user_is_not_tried_again(system):
    job = system.submit(fault="bug")

    assert system.wait_over(job) == ["failed"]
    reason = system.live.jobs[job].reason
    assert reason.startswith("user-error")
    assert "RuntimeError: my own mistake" in reason
    assert system.controller.find(job).num_starts == 1


def test_memory_that_runs_out_is_tried_a_few_times_only(system):
    job = system.submit(fault="memory")

    assert system.wait_over(job) == ["failed"]
    assert "out-of-memory (tried 4 times)" in system.live.jobs[job].reason


def test_a_command_that_is_not_there_fails_with_the_reason(system):
    job = system.submit(command="/no/such/program")

    assert system.wait_over(job) == ["failed"]
    assert "No such file" in system.live.jobs[job].reason


def test_an_agent_that_dies_takes_its_jobs_with_it_and_they_go_on(system):
    jobs = [system.submit(steps=60) for _ in range(4)]
    for job in jobs:
        system.wait_step(job, 6)
    node = system.live.jobs[jobs[0]].devices[0][0]
    os.kill(system.controller.engine.pid(node), signal.SIGKILL)

    assert system.wait_over(*jobs) == ["done"] * 4
    hit = [job for job in jobs if system.live.jobs[job].num_faults]
    assert jobs[0] in hit
    assert len(hit) == 2
    for job in hit:
        assert not [line for line in system.audit(job) if "twice" in line]
        kinds = {one.kind for one in system.events(job) if isinstance(one, Interrupted)}
        assert kinds == {"node-lost"}


def test_an_agent_that_hangs_is_replaced(system):
    job = system.submit(steps=60, seconds=0.1)
    system.wait_step(job, 6)
    pid = system.controller.engine.pid(system.live.jobs[job].devices[0][0])
    os.kill(pid, signal.SIGSTOP)

    system.until(lambda: system.live.jobs[job].num_faults)
    assert system.wait_over(job) == ["done"]
    assert not birth_of(pid)


def test_a_job_can_be_paused_resumed_and_cancelled(system):
    job = system.submit(steps=200)
    system.wait_step(job, 7)
    system.controller.pause(job)
    system.until(lambda: any("saved 5" not in line for line in system.audit(job)))
    system.until(lambda: not system.launches())
    saved = int([line for line in system.audit(job) if "saved" in line][-1].split()[2])
    assert saved >= 7
    system.until(lambda: system.controller.find(job).done_samples == saved * 4)
    time.sleep(0.3)
    assert system.state(job) is JobState.PAUSED
    with pytest.raises(RequestError, match="paused and cannot be paused"):
        system.controller.pause(job)

    system.controller.resume(job)
    system.until(lambda: f"2 started {saved}" in system.audit(job))
    system.controller.cancel(job)
    system.until(lambda: not system.launches())
    assert system.state(job) is JobState.CANCELLED
    with pytest.raises(RequestError, match="cancelled"):
        system.controller.cancel(job)
    with pytest.raises(RequestError, match="unknown job"):
        system.controller.cancel("99")


def test_the_curve_of_a_job_goes_through_all_its_launches(system):
    job = system.submit(fault="kill")

    assert system.wait_over(job) == ["done"]
    epochs = [one.epoch for one in system.controller.launches_of(job)]
    latest = system.controller.reconciler.progress(job)
    heard = system.controller.curves.curve(job, epochs, latest)
    assert epochs == [1, 2]
    assert [(step, loss) for step, loss, _ in heard] == [(n, 1 / n) for n in range(1, 21)]
    assert system.controller.curves.curve(job, epochs) == heard  # as a later controller reads it


def test_a_drained_node_is_left(system):
    job = system.submit(steps=150)
    system.wait_step(job, 6)
    node = system.live.jobs[job].devices[0][0]
    assert system.controller.drain(node) == [job]

    system.until(lambda: system.live.jobs[job].devices[0][0] != node)
    system.wait_step(job, 20)
    assert system.controller.drain(system.live.jobs[job].devices[0][0]) == [job]
    system.until(lambda: system.state(job) is JobState.QUEUED)
    time.sleep(0.5)
    assert system.state(job) is JobState.QUEUED
    system.controller.undrain(node)
    assert system.wait_over(job) == ["done"]
    with pytest.raises(RequestError, match="unknown node"):
        system.controller.drain("nowhere")


def test_limits_end_a_job_with_a_checkpoint(system):
    job = system.submit(steps=1000, max_duration="5s")
    dear = system.submit(steps=1000, max_cost=1e-4)

    assert system.wait_over(job, dear) == ["failed", "failed"]
    assert "max_duration" in system.live.jobs[job].reason
    assert "max_cost" in system.live.jobs[dear].reason
    system.until(lambda: "saved" in system.audit(job)[-1])
    # Up to the step that it was in when it had to leave.
    steps = [line for line in system.audit(job) if "step" in line]
    assert int(system.audit(job)[-1].split()[2]) == len(steps)


def test_what_cannot_end_within_its_time_is_not_taken_in(system):
    train = {"steps": 10**7, "batch": 4, "sequence": 32}
    table = {"model": "mini-gpt", "train": train, "max_duration": "1m"}
    with pytest.raises(NothingFits, match="max_duration is 1 min"):
        system.controller.submit(make_job(table, folder=system.folder))

    assert not system.live.jobs


def test_new_prices_of_the_same_nodes_reach_the_policy(system):
    journal = system.controller.journal
    before = journal.snapshot().gpu_dollars_per_hour
    dearer = {gpu: 2 * dollars for gpu, dollars in before.items()}
    journal.adopt(
        dataclasses.replace(system.controller.cluster, dollars_per_gpu_hour=dearer),
        reason="new prices",
    )

    assert before
    assert journal.snapshot().gpu_dollars_per_hour == dearer


def test_a_locked_database_delays_and_loses_nothing(system):
    job = system.submit(steps=40)
    blocker = sqlite3.connect(system.folder / "log.db", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    time.sleep(1.0)
    blocker.execute("ROLLBACK")
    blocker.close()

    assert system.wait_over(job) == ["done"]


def test_the_same_key_is_the_same_job(system):
    table = {"command": "true", "train": {"steps": 1}}
    made = make_job(table, folder=system.folder)

    first = system.controller.submit(made, client_key="k")
    assert first == ("1", True)
    assert system.controller.submit(made, client_key="k") == ("1", False)


def test_what_does_not_fit_is_refused_at_once(system):
    for table in ({"model": "llama-3-70b"}, {"command": "true", "gpus": {"min": 3}}):
        with pytest.raises(NothingFits):
            system.controller.submit(
                make_job(table | {"train": {"steps": 1}}, folder=system.folder)
            )


def test_a_second_controller_is_refused(system):
    with pytest.raises(DrystoneError, match="another controller"), running(system.folder):
        raise AssertionError("it may not come to this")


def test_the_next_controller_adopts_what_runs(tmp_path):
    folder = tmp_path / "s"
    with running(folder) as first:
        job = first.submit(steps=120)
        first.wait_step(job, 6)
        # As if killed: no goodbye to the agents.
        first.controller.engine.quit = lambda: None
    with running(folder) as second:
        assert second.wait_over(job) == ["done"]
        assert second.controller.find(job).num_starts == 1
        assert len([line for line in second.audit(job) if "started" in line]) == 1


def test_other_nodes_interrupt_what_ran_on_the_old_ones(tmp_path):
    folder = tmp_path / "s"
    with running(folder) as first:
        job = first.submit(steps=60)
        first.wait_step(job, 6)
    with running(folder, "nodes: [{gpu: L4, emulate: {speed: 0.001, memory: 4GiB}}]") as second:
        assert second.wait_over(job) == ["done"]
        assert second.live.jobs[job].devices == (("l4-0", 0),)
