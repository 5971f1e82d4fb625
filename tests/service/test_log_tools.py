"""The log can be checked, repaired, made shorter, backed up and restored, on both databases."""

import json

import pytest
import sqlalchemy as sa

from drystone.cli.main import run
from drystone.errors import DrystoneError, InvalidSpec, UnreadableFile
from drystone.run.control.controller import Controller, ControllerSettings
from drystone.run.control.log_tools import LogTools
from drystone.run.control.notes import Decided
from drystone.run.events import Finished, Progressed, Started
from drystone.run.store_tables import EVENTS, JOBS

pytestmark = pytest.mark.slow


@pytest.fixture(params=["sqlite", "postgresql"])
def address(request, tmp_path):
    if request.param == "sqlite":
        (tmp_path / "s").mkdir(mode=0o700)
        return f"sqlite:///{tmp_path / 's' / 'log.db'}"
    return request.getfixturevalue("postgres")()


@pytest.fixture
def cluster():
    from systems import CLUSTER

    from drystone.describe.files.cluster import parse_cluster

    return parse_cluster(CLUSTER)


@pytest.fixture
def open_controller(address, tmp_path, cluster):
    def make() -> Controller:
        return Controller(
            ControllerSettings(folder=tmp_path / "s", cluster=cluster, database=address)
        )

    return make


def fill(
    controller: Controller, num_jobs: int = 3, num_reports: int = 20, key: str = "key"
) -> None:
    """Jobs that ran and ended, with much progress."""
    from drystone.describe.files.job import make_job

    journal = controller.journal
    for number in range(num_jobs):
        table = {"command": "true", "train": {"steps": 100, "batch": 4}, "name": f"job {number}"}
        job, _ = controller.submit(
            make_job(table, folder=controller.settings.folder), client_key=f"{key}-{number}"
        )
        now = journal.now()
        journal.commit(
            [
                Decided(time_seconds=now, job_id=job, decision="Start", reason="first", numbers={}),
                Decided(time_seconds=now, job_id=job, decision="Start", reason="next", numbers={}),
                Started(
                    time_seconds=now, job_id=job, option=0, placement=((0, 1),),
                    samples_per_second=4.0, productive_seconds=now,
                ),
            ]
        )  # fmt: skip
        journal.commit(
            [
                Progressed(time_seconds=now + step, job_id=job, done_samples=4.0 * step)
                for step in range(1, num_reports + 1)
            ]
        )
        journal.commit([Finished(time_seconds=now + num_reports + 1, job_id=job)])


@pytest.fixture
def tools(address):
    made = LogTools(address)
    yield made
    made.close()


def spoil(address: str, sequence: int, body: str, kind: str = "") -> None:
    engine = sa.create_engine(address)
    values = {"body": body, **({"kind": kind} if kind else {})}
    with engine.begin() as connection:
        connection.execute(EVENTS.update().where(EVENTS.c.sequence == sequence).values(**values))
    engine.dispose()


def test_a_log_with_damaged_and_impossible_events_is_named_repaired_and_served_again(
    open_controller, address, tools, tmp_path
):
    controller = open_controller()
    fill(controller)
    controller.close()
    assert not tools.check().bad
    lines = list(tools.lines())
    finished = [line for line in lines if line.kind == "Finished"]
    reports = [line for line in lines if line.kind == "Progressed"]
    spoil(address, reports[3].sequence, '{"event": "Progr')  # half a line
    body = json.loads(reports[9].body) | {"event": "Finished"}
    spoil(address, reports[9].sequence, json.dumps(
        {key: body[key] for key in ("event", "time_seconds", "job_id")}), "Finished")  # fmt: skip

    with pytest.raises(UnreadableFile, match=r"event \d+ .*log repair"):
        open_controller()
    bad = {found.line.sequence for found in tools.check().bad}
    # What follows an end that never was cannot be either: it is named, each by itself.
    first = next(line for line in finished if line.job_id == reports[9].job_id)
    after = {line.sequence for line in reports[10:] if line.job_id == reports[9].job_id}
    assert bad == {reports[3].sequence, first.sequence} | after

    repaired = tools.repair(tmp_path / "aside.jsonl")
    assert {found.line.sequence for found in repaired.bad} == bad
    aside = [json.loads(line) for line in (tmp_path / "aside.jsonl").read_text().splitlines()]
    assert {line["sequence"] for line in aside} == bad
    assert all(line["reason"] for line in aside)
    assert not tools.check().bad
    again = open_controller()
    jobs = again.journal.live.state.jobs
    assert {job.state.value for job in jobs.values()} == {"done"}
    assert [row.state for row in again.store.list_jobs()] == ["done"] * 3
    again.close()


def test_a_shorter_log_says_the_same(open_controller, tools):
    controller = open_controller()
    fill(controller)
    controller.close()
    before = tools.check()
    assert tools.compact() == (before.num_events, before.num_events - 3 * (19 + 1))
    after = tools.check()
    assert {job.done_samples for job in after.live.state.jobs.values()} == {400.0}
    again = open_controller()
    fill(again, num_jobs=1, key="later")
    again.close()
    assert not tools.check().bad


def test_a_backup_is_restored_into_either_database(open_controller, tools, tmp_path, postgres):
    controller = open_controller()
    fill(controller)
    number = tools.backup(tmp_path / "backup.gz")  # while it is open
    controller.close()
    assert (tmp_path / "backup.gz").stat().st_mode & 0o077 == 0
    with pytest.raises(InvalidSpec, match="there is a log already"):
        tools.restore(tmp_path / "backup.gz")
    for target in (f"sqlite:///{tmp_path / 'other.db'}", postgres()):
        other = LogTools(target)
        assert other.restore(tmp_path / "backup.gz").num_events == number
        assert [line.body for line in other.lines()] == [line.body for line in tools.lines()]
        assert other.find_key("key-1") == "2"
        assert [row.name for row in other.list_jobs()] == ["job 0", "job 1", "job 2"]
        other.close()


def test_a_backup_that_was_cut_or_changed_is_refused(open_controller, tools, tmp_path):
    controller = open_controller()
    fill(controller, num_jobs=1)
    controller.close()
    tools.backup(tmp_path / "backup.gz")
    whole = (tmp_path / "backup.gz").read_bytes()
    (tmp_path / "cut.gz").write_bytes(whole[: len(whole) // 2])
    other = LogTools(f"sqlite:///{tmp_path / 'other.db'}")
    with pytest.raises(UnreadableFile, match="is no whole backup"):
        other.restore(tmp_path / "cut.gz")
    assert not list(other.lines())
    other.close()


def test_no_tool_writes_while_a_controller_does(open_controller, tools, monkeypatch, tmp_path):
    controller = open_controller()
    fill(controller, num_jobs=1)
    monkeypatch.setattr("drystone.run.control.log_tools._WAIT_SECONDS", 0.3)
    for tool in (tools.compact, lambda: tools.repair(tmp_path / "aside")):
        with pytest.raises(DrystoneError, match="a controller writes to this log"):
            tool()
    controller.close()


def test_the_command_line(open_controller, address, tmp_path, capsys):
    controller = open_controller()
    fill(controller)
    controller.close()
    given = ["--folder", str(tmp_path / "s"), "--database", address]
    assert run(["log", "check", "--json", *given]) == 0
    assert json.loads(capsys.readouterr().out)["bad"] == []
    engine = sa.create_engine(address)
    with engine.begin() as connection:
        connection.execute(JOBS.delete())
        last = connection.execute(sa.select(sa.func.max(EVENTS.c.sequence))).scalar()
    engine.dispose()
    spoil(address, last, "{")
    assert run(["log", "check", *given]) == 1
    assert str(last) in capsys.readouterr().out
    assert run(["log", "backup", str(tmp_path / "b.gz"), *given]) == 0
    assert run(["log", "repair", *given]) == 0
    assert (tmp_path / "s" / "log-removed.jsonl").exists()
    assert run(["log", "compact", *given]) == 0
    assert run(["log", "check", *given]) == 0
    assert run(["log", "check", "--folder", str(tmp_path / "nowhere")]) == 2
