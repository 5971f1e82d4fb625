"""One bad minute: a store, a disk or a clock that fails is not the trouble of what trains."""

import errno
import os
import signal
import sys
import time

import pytest
import sqlalchemy as sa
from services import serving
from systems import running

from drystone.errors import DrystoneError
from drystone.run.control.failures import left_early
from drystone.run.control.health import FAILING_SECONDS, STUCK_SECONDS, Health
from drystone.run.control.progress import RunProgress
from drystone.run.control.steady_clock import SteadyClock
from drystone.run.control.store import Store
from drystone.run.engines.agent import launches
from drystone.run.engines.agent.launches import Launch
from drystone.run.events import Interrupted
from drystone.run.fence import Fenced, check_lease, write_lease


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'log.db'}"
    return request.getfixturevalue("postgres")()


@pytest.mark.slow
def test_a_store_that_cannot_be_written_stops_decisions_and_nothing_that_runs(
    database, tmp_path, monkeypatch
):
    monkeypatch.setitem(Store.__init__.__kwdefaults__, "busy_seconds", 0.4)
    with running(tmp_path / "s", database=database, lease_seconds=2.5) as system:
        job = system.submit(steps=150, seconds=0.05)
        system.wait_step(job, 3)
        with held(database):
            system.until(lambda: "store" in system.controller.troubles(), seconds=10)
            time.sleep(5.0)  # twice as long as a process may run without a word
            assert system.controller.last_error
            assert not system.controller.health.why_dead()
            with pytest.raises(DrystoneError):
                system.submit()
        assert system.wait_over(job) == ["done"], system.live.jobs[job].reason
        system.until(lambda: not system.controller.last_error)
        lines = system.audit(job)
    assert [line for line in lines if "started" in line] == ["1 started 0"]
    assert lines[-1] == "1 saved 150"


def held(database):
    """While inside nobody else can write."""
    engine = sa.create_engine(database)
    connection = engine.connect()
    if engine.dialect.name == "sqlite":
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    else:
        connection.exec_driver_sql("LOCK TABLE leases IN ACCESS EXCLUSIVE MODE")

    class Held:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            connection.rollback()
            connection.close()
            engine.dispose()

    return Held()


@pytest.mark.slow
def test_a_script_that_somebody_else_asks_to_leave_goes_on_where_it_was(tmp_path):
    with running(tmp_path / "s") as system:
        job = system.submit(steps=60, seconds=0.05)
        system.wait_step(job, 8)
        os.kill(trainer_of(system.folder, job), signal.SIGTERM)
        assert system.wait_over(job) == ["done"]
        [fault] = [event for event in system.events(job) if isinstance(event, Interrupted)]
        lines = system.audit(job)
    assert fault.kind == "preempted"
    assert "of 60, with exit code 0" in fault.reason
    assert [line for line in lines if line.endswith("step 60")] == ["2 step 60"]


def trainer_of(folder, job_id: str) -> int:
    [path] = folder.glob(f"agents/*/launches/{job_id}.1/processes.json")
    [[pid, _]] = launches.read_json(path).values()
    return pid


class Spec:
    total_samples, global_batch = 400.0, 4


class Record:
    spec = Spec()


class Live:
    def __init__(self, left_at_step: int | None = None) -> None:
        self.faults = {} if left_at_step is None else {"preempted": 1}
        self.furthest_samples = 4.0 * (left_at_step or 0)


@pytest.mark.parametrize(
    ("reports", "is_early"),
    [
        ("started 0, step 57", True),
        ("started 0, step 100", False),
        ("step 98, step 99", False),  # who counts from 0
        ("started 0, step 40, step 80", False),  # who tells of every 40th
        ("started 57", False),  # it ended there before, and means it
        ("", False),  # it says nothing about steps
    ],
)
def test_a_script_that_ends_well_before_its_last_step_has_not_finished(reports, is_early):
    progress = RunProgress()
    for report in filter(None, reports.split(", ")):
        event, step = report.split()
        progress.read(f'{{"event": "{event}", "step": {step}}}\n', 0.0)
    assert bool(left_early(Record(), progress, Live())) == is_early


@pytest.mark.parametrize(("left_at_step", "is_early"), [(57, False), (60, True), (None, True)])
def test_a_script_that_ends_where_it_ended_before_has_finished(left_at_step, is_early):
    progress = RunProgress()
    for report in ('{"event": "started", "step": 0}\n', '{"event": "step", "step": 57}\n'):
        progress.read(report, 0.0)
    assert bool(left_early(Record(), progress, Live(left_at_step))) == is_early


def test_a_full_disk_is_no_reason_for_an_agent_to_die(tmp_path, monkeypatch):
    ranks = [{"rank": 0, "device": 0}]
    request = {"job_id": "j", "epoch": 1, "ranks": ranks, "arguments": [sys.executable, "-c", ""]}
    launch = Launch(tmp_path / "j.1", {**request, "lease_seconds": 60})
    launch.start()

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(launches, "write_whole", full)
    monkeypatch.setattr(os, "pwrite", full)
    launch.renew(60.0)
    deadline = time.monotonic() + 20
    while not launch.is_over and time.monotonic() < deadline:
        launch.watch()
        time.sleep(0.02)
    assert launch.exits == {0: 0}


def test_a_lease_does_not_go_by_a_clock_that_people_set(tmp_path, monkeypatch):
    write_lease(tmp_path / "lease", 3, 60.0)
    monkeypatch.setenv("DRYSTONE_LEASE", str(tmp_path / "lease"))
    monkeypatch.setenv("DRYSTONE_EPOCH", "3")
    ahead = time.time() + 600
    monkeypatch.setattr(time, "time", lambda: ahead)
    check_lease()
    write_lease(tmp_path / "lease", 3, -1.0)
    with pytest.raises(Fenced, match="ran out"):
        check_lease()


def test_the_clock_of_the_log_passes_as_time_passes_however_the_machines_is_set():
    now = {"wall": 1000.0, "steady": 50.0}

    def passes(seconds: float) -> float:
        before = clock()
        now["wall"] += seconds
        now["steady"] += seconds
        return clock() - before

    clock = SteadyClock(lambda: now["wall"], lambda: now["steady"])
    assert passes(10.0) == pytest.approx(10.0)
    now["wall"] += 600
    assert passes(10.0) == pytest.approx(11.0)  # a tenth faster, until it is right again
    now["wall"] -= 600
    assert passes(2.0) == pytest.approx(1.8)
    for _ in range(100):
        passes(1.0)
    assert clock() == pytest.approx(now["wall"])
    clock.start_after(now["wall"] + 300)  # the log is ahead: the clock was put back while it slept
    assert passes(10.0) == pytest.approx(9.0)


def test_health_tells_a_loop_that_fails_and_one_that_is_stuck_from_one_that_waits(tmp_path):
    now = [0.0]
    health = Health(tmp_path, lambda: now[0])
    health.is_watched = True
    health.round_failed("boom")
    assert not health.why_dead()  # one bad round is not the end
    now[0] = FAILING_SECONDS + 1
    assert "boom" in health.why_dead()
    health.round_held("the database cannot be written")
    health.round_done()
    assert not health.why_dead()
    assert not health.error
    now[0] += STUCK_SECONDS + 1
    assert "no round was completed" in health.why_dead()
    health.round_held("the database cannot be written")
    assert not health.why_dead()
    assert health.troubles() == {"store": "the database cannot be written"}


def test_an_outage_turns_probes_metrics_and_the_page_red_with_the_reason(tmp_path):
    with serving(tmp_path / "s") as service:
        health = service.controller.health
        health.is_watched = True
        assert service.ask("GET", "/healthz").status == 200
        assert service.ask("GET", "/readyz").json() == {"status": "ok"}
        health.round_held("the database cannot be written: connection to 10.0.0.3 refused")
        ready = service.ask("GET", "/readyz")
        assert (ready.status, ready.json()) == (
            503, {"status": "store: the database cannot be written"},
        )  # fmt: skip
        metrics = service.ask("GET", "/metrics").body.decode()
        assert 'drystone_ready{part="store"} 0' in metrics
        assert 'drystone_ready{part="engine"} 1' in metrics
        told = service.ask("GET", "/v1/health").json()
        assert told["status"] == "troubled"
        assert "10.0.0.3" in told["troubles"]["store"]
        health._turned_at -= STUCK_SECONDS + 1
        dead = service.ask("GET", "/healthz")
        assert (dead.status, "no round" in dead.json()["status"]) == (503, True)
