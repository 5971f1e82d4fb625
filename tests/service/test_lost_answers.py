"""A commit whose answer was lost: the log is read again before anything else is written."""

import contextlib
import select
import socket
import sqlite3
import threading
import time

import pytest
import sqlalchemy as sa
from systems import CLUSTER, running

from drystone.describe.files.cluster import parse_cluster
from drystone.describe.files.job import make_job
from drystone.run.control.controller import Controller, ControllerSettings
from drystone.run.control.notes import Drained, render
from drystone.run.control.store import CommitUnclear, LeaseLost, LogConflict, StoreBusy
from drystone.run.events import Submitted

pytestmark = pytest.mark.slow


class LossyProxy:
    """Passes on what is said to PostgreSQL and back, until it is told to lose something.

    `lose(text)`: the next COMMIT of a transaction with this text is passed on, its answer is not.
    With `is_sent=False` the COMMIT itself is lost. With `stays_away` nobody gets through for a
    while afterwards.
    """

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._text, self._is_sent, self._stays_away = b"", True, False
        self.is_away, self.num_lost = False, 0
        threading.Thread(target=self._accept, daemon=True).start()

    def lose(self, text: str, *, is_sent: bool = True, stays_away: bool = False) -> None:
        self._text, self._is_sent, self._stays_away = text.encode(), is_sent, stays_away

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.is_away:
                client.close()
            else:
                threading.Thread(target=self._pass_on, args=(client,), daemon=True).start()

    def _pass_on(self, client: socket.socket) -> None:
        server = socket.create_connection(self._target)
        said = b""
        with contextlib.suppress(OSError), client, server:
            while True:
                ready, _, _ = select.select([client, server], [], [])
                if client in ready:
                    data = client.recv(65536)
                    said += data
                    is_commit = b"COMMIT" in data
                    is_lost = is_commit and self._text and self._text in said
                    if not data or (is_lost and not self._is_sent):
                        self._lost(is_lost)
                        return
                    server.sendall(data)
                    if is_lost:
                        server.recv(65536)  # so it is committed
                        self._lost(is_lost)
                        return
                    if is_commit:
                        said = b""
                if server in ready:
                    data = server.recv(65536)
                    if not data:
                        return
                    client.sendall(data)

    def _lost(self, is_lost: bool) -> None:
        if is_lost:
            self._text, self.is_away = b"", self._stays_away
            self.num_lost += 1


@pytest.fixture
def lossy(postgres):
    """A proxy before a database of its own, and the address through it."""
    url = sa.make_url(postgres())
    proxy = LossyProxy(url.port)
    yield proxy, url.set(port=proxy.port).render_as_string(hide_password=False)
    proxy.close()


def make_controller(folder, database: str = "") -> Controller:
    return Controller(
        ControllerSettings(folder=folder, cluster=parse_cluster(CLUSTER), database=database)
    )


def submit(controller: Controller, name: str, key: str = "") -> tuple[str, bool]:
    table = {"name": name, "command": "true", "train": {"steps": 1}}
    job = make_job(table, folder=controller.settings.folder)
    return controller.submit(job, client_key=key)


def names_in(controller: Controller) -> dict[str, str]:
    """Jobs as memory has them, after checking that the log says the same."""
    jobs = {job_id: job.job.name for job_id, job in controller.journal.live.jobs.items()}
    log = [event for _, event in controller.store.read()]
    assert [one.job.id for one in log if isinstance(one, Submitted)] == list(jobs)
    assert controller.journal.sequence == controller.store.last_sequence() == len(log)
    return jobs


def check_next_controller(folder, database: str, jobs: dict[str, str]) -> None:
    controller = make_controller(folder, database)
    assert names_in(controller) == jobs
    controller.close()


def test_a_commit_whose_answer_is_lost_is_known_to_be_there(lossy, tmp_path):
    proxy, url = lossy
    controller = make_controller(tmp_path, url)
    submit(controller, "first")
    proxy.lose("ghostly")

    assert submit(controller, "ghostly", "k") == ("2", True)
    assert proxy.num_lost == 1
    assert submit(controller, "ghostly", "k") == ("2", False)
    assert submit(controller, "third") == ("3", True)
    jobs = names_in(controller)
    assert jobs == {"1": "first", "2": "ghostly", "3": "third"}
    controller.close()
    check_next_controller(tmp_path, url, jobs)


def test_a_commit_that_never_arrived_is_not_believed(lossy, tmp_path):
    proxy, url = lossy
    controller = make_controller(tmp_path, url)
    proxy.lose("ghostly", is_sent=False)

    with pytest.raises(StoreBusy, match="nothing was written"):
        submit(controller, "ghostly", "k")
    assert names_in(controller) == {}
    assert submit(controller, "ghostly", "k") == ("1", True)
    jobs = names_in(controller)
    controller.close()
    check_next_controller(tmp_path, url, jobs)


@pytest.mark.parametrize("is_sent", [True, False])
def test_while_the_database_is_away_nothing_is_claimed_and_later_the_truth_is_read(
    lossy, tmp_path, is_sent
):
    proxy, url = lossy
    controller = make_controller(tmp_path, url)
    submit(controller, "first")
    proxy.lose("ghostly", is_sent=is_sent, stays_away=True)

    with pytest.raises(CommitUnclear):
        submit(controller, "ghostly", "k")
    with pytest.raises(StoreBusy):
        submit(controller, "second")
    proxy.is_away = False
    assert submit(controller, "second") == ("3" if is_sent else "2", True)
    assert submit(controller, "ghostly", "k") == ("2" if is_sent else "3", not is_sent)
    jobs = names_in(controller)
    assert sorted(jobs.values()) == ["first", "ghostly", "second"]
    controller.close()
    check_next_controller(tmp_path, url, jobs)


@pytest.mark.parametrize("kind", ["Started", "Launched", "Progressed", "Finished"])
def test_a_running_system_goes_on_after_a_lost_answer(lossy, tmp_path, kind):
    proxy, url = lossy
    with running(tmp_path / "s", database=url, hang_seconds=60.0) as system:
        proxy.lose(f'"event": "{kind}"')
        jobs = [system.submit(), system.submit()]

        assert system.wait_over(*jobs) == ["done", "done"]
        assert proxy.num_lost == 1
        for job in jobs:
            assert system.controller.find(job).num_starts == 1
            assert system.kinds(job).count("Launched") == 1
        names = names_in(system.controller)
    check_next_controller(tmp_path / "s", url, names)


def test_a_lost_answer_of_sqlite_is_looked_up_too(tmp_path, monkeypatch):
    controller = make_controller(tmp_path)
    submit(controller, "first")
    dialect = controller.store._engine.dialect
    commit = dialect.do_commit

    def lose(connection) -> None:
        monkeypatch.undo()
        commit(connection)
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(dialect, "do_commit", lose)
    assert submit(controller, "ghostly", "k") == ("2", True)
    assert submit(controller, "ghostly", "k") == ("2", False)
    jobs = names_in(controller)
    assert jobs == {"1": "first", "2": "ghostly"}
    controller.close()
    check_next_controller(tmp_path, "", jobs)


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request):
    return "" if request.param == "sqlite" else request.getfixturevalue("postgres")()


def write_behind_its_back(controller: Controller, body: str, kind: str) -> None:
    """A line of the log that its writer does not know of."""
    with controller.store._engine.begin() as connection:
        connection.execute(
            sa.text(
                "INSERT INTO events (sequence, time_seconds, kind, job_id, actor, body) "
                "VALUES (:sequence, :now, :kind, '', '', :body)"
            ),
            {
                "sequence": controller.journal.sequence + 1, "now": time.time(), "kind": kind,
                "body": body,
            },
        )  # fmt: skip


def test_a_log_that_has_moved_on_is_read_again_before_it_is_written(database, tmp_path):
    controller = make_controller(tmp_path, database)
    node = controller.journal.live.state.nodes[0].id
    write_behind_its_back(
        controller, render(Drained(time_seconds=time.time(), node=node)), "Drained"
    )

    with pytest.raises(StoreBusy, match="nothing was written"):
        submit(controller, "first")
    assert set(controller.journal.live.drained) == {node}
    assert submit(controller, "first") == ("1", True)
    jobs = names_in(controller)
    controller.close()
    check_next_controller(tmp_path, database, jobs)


def test_a_log_that_cannot_follow_ends_the_controller(database, tmp_path):
    controller = make_controller(tmp_path, database)
    line = '{"event": "Finished", "time_seconds": 1.0, "job_id": "17"}'
    write_behind_its_back(controller, line, "Finished")

    for _ in range(2):
        with pytest.raises(LogConflict):
            submit(controller, "first")
    with pytest.raises(LeaseLost):  # the loop stops
        controller.world.tick()
    assert controller.world.is_leaving
    controller.close()
