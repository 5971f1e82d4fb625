"""Tokens, logins and teams: the commands against a service, and without one."""

import io
import json
import sqlite3
import ssl
import subprocess
import threading
from pathlib import Path

import pytest
import uvicorn
from services import serving, until
from systems import CLUSTER, TRAINER

from drystone.cli.main import run
from drystone.errors import RequestError
from drystone.run.control.access import Access, Role, make_token, period_start
from drystone.run.control.notes import TokenRevoked
from drystone.run.control.store import Store
from drystone.service.app import make_app
from drystone.service.auth.guard import HostRules
from drystone.service.auth.offline import OfflineTokens
from drystone.service.client import Client, load_login, login_path

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Nobody's login but the test's."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("DRYSTONE_URL", "DRYSTONE_TOKEN", "DRYSTONE_FOLDER"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_a_token_is_known_by_its_text_until_it_is_revoked():
    access = Access()
    note, text = make_token(name="ada", role="submitter", team="", now_seconds=1.0)
    access.record(note)

    assert access.find(text) is access.tokens[note.token_id]
    assert text.split("_", 2)[2] not in repr(note)
    for wrong in (text[:-1], text + "x", text.upper(), "", "dry__", text.replace("dry", "wet")):
        assert access.find(wrong) is None
    access.record(TokenRevoked(time_seconds=2.0, token_id=note.token_id))
    assert access.find(text) is None
    assert not access.has_tokens


def test_each_role_covers_those_before_it():
    assert [[one.covers(other) for other in Role] for one in Role] == [
        [True, False, False], [True, True, False], [True, True, True],
    ]  # fmt: skip


def test_periods_begin_by_utc():
    thursday = 1_794_809_232.0  # 2026-11-16 is a Monday, 05:27:12
    assert period_start("day", thursday) == 1_794_787_200.0
    assert period_start("week", thursday) == 1_794_787_200.0
    assert period_start("month", thursday) == 1_793_491_200.0
    assert period_start("ever", thursday) == 0.0


def test_tokens_are_made_while_no_service_runs(home, capsys):
    folder = ["--folder", str(home / "s")]
    assert run(["token", "create", "--role", "submitter", "--name", "ada", *folder]) == 0
    text = capsys.readouterr().out.strip()
    assert run(["token", "list", "--json", *folder]) == 0
    [listed] = json.loads(capsys.readouterr().out)["tokens"]
    assert (listed["name"], listed["role"], listed["id"]) == (
        "ada",
        "submitter",
        text.split("_")[1],
    )
    assert text.split("_", 2)[2].encode() not in (home / "s" / "log.db").read_bytes()
    with serving(home / "s") as service:
        assert service.ask("GET", "/v1/session", token=text).json()["name"] == "ada"
    assert run(["token", "revoke", listed["id"], *folder]) == 0
    assert run(["token", "create", "--role", "king", *folder]) == 2
    assert run(["token", "revoke", "nobody", *folder]) == 2
    with serving(home / "s") as service:
        assert service.ask("GET", "/v1/session").json()["needs_token"] is True  # for good


def test_serve_listens_beyond_loopback_only_once_a_token_exists(home, capsys):
    (home / "c.yaml").write_text(CLUSTER)
    options = ["--cluster", str(home / "c.yaml"), "--folder", str(home / "s"), "--port", "1"]
    assert run(["serve", "--host", "0.0.0.0", *options]) == 2
    told = capsys.readouterr().err
    assert "no token exists" in told
    assert "drystone token create" in told
    assert "loopback only" in told


def test_commands_talk_to_where_one_logged_in(home, capsys, monkeypatch):
    with serving(home / "s") as service:
        service.team("red")
        text = service.token("submitter", "red", "ada")
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{text}\n"))
        assert run(["login", service.url]) == 0
        assert "as ada, submitter of team red" in capsys.readouterr().err
        assert login_path().stat().st_mode & 0o777 == 0o600
        assert load_login() == (service.url, text)
        assert run(["jobs", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["total"] == 0
        (home / "train.py").write_text("print('here')\n")
        (home / "job.yaml").write_text("command: python train.py\ntrain: {steps: 2}\n")
        assert run(["submit", str(home / "job.yaml"), "-y"]) == 0
        [job] = service.ask("GET", "/v1/jobs", token=text).json()["jobs"]
        assert (job["owner"], job["team"]) == ("ada", "red")
        details = service.ask("GET", "/v1/jobs/1", token=text).json()
        folder = details["description"]["folder"]
        assert Path(folder).is_relative_to(service.controller.settings.folder / "uploads")
        assert Path(folder, "train.py").read_text() == "print('here')\n"
        assert run(["team", "create", "green"]) == 2
        assert "may not do this" in capsys.readouterr().err
        assert run(["login", service.url, "--token", "dry_wrong"]) == 2
        assert run(["login", "--forget"]) == 0
        assert load_login() is None
        assert run(["login", "ftp://x"]) == 2


def test_https_works_too(home, monkeypatch):
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj",
         "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout",
         str(home / "key.pem"), "-out", str(home / "cert.pem")],
        capture_output=True, check=False,
    )  # fmt: skip
    if made.returncode:
        pytest.skip("left out: openssl makes no certificate here (apt-get install openssl)")
    with serving(home / "s") as service:
        text = service.token("viewer")
        config = uvicorn.Config(
            make_app(service.controller, HostRules()), port=0, log_level="error", lifespan="off",
            ssl_keyfile=home / "key.pem", ssl_certfile=home / "cert.pem",
        )  # fmt: skip
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            until(lambda: server.started)
            port = server.servers[0].sockets[0].getsockname()[1]
            with Client(url=f"https://localhost:{port}", token=text) as client:
                with pytest.raises(Exception, match=r"(?i)certificate"):
                    client.get("/v1/session")
                monkeypatch.setenv("SSL_CERT_FILE", str(home / "cert.pem"))
                assert ssl.get_default_verify_paths().cafile == str(home / "cert.pem")
                assert client.get("/v1/session")["role"] == "viewer"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def deciding(tmp_path_factory):
    """A service whose loop runs: jobs start."""
    with serving(tmp_path_factory.mktemp("teams") / "s", is_deciding=True) as made:
        yield made


def script(steps: int = 400) -> dict:
    job = {"command": f"python {TRAINER}", "train": {"steps": steps, "batch": 4}}
    return job | {"gpus": {"max": 1, "allow": ["T4"]}, "environment": {"STEP_SECONDS": "0.05"}}


def states(client: Client, team: str) -> list[tuple[str, str]]:
    jobs = client.get("/v1/jobs", team=team)["jobs"]
    return [(one["state"], one["phase"]) for one in jobs]


def test_a_quota_in_value_holds_jobs_back_with_the_reason(deciding):
    deciding.team("quota", quota=0.2)  # a T4 counts about 0.1 of an A100
    token = deciding.token("submitter", "quota", "ada")
    admin = deciding.token("admin")
    with deciding.client(token) as client, deciding.client(admin) as boss:
        values = {one["gpu"]: one["value"] for one in client.get("/v1/cluster")["gpus"]}
        assert values["A100-80GB-SXM"] == 1.0
        one_t4 = values["T4-16GB"]
        assert 0.02 < one_t4 < 0.5
        boss.patch("/v1/teams/quota", {"quota": 1.5 * one_t4})
        ids = [client.post("/v1/jobs", {"job": script()})["id"] for _ in range(2)]
        until(lambda: states(client, "quota")[0][0] == "running")
        until(lambda: states(client, "quota")[1] == ("queued", "held"))
        why = client.get(f"/v1/jobs/{ids[1]}/why")["sentence"]
        assert "held back: team quota holds" in why
        [team] = [one for one in client.get("/v1/teams")["teams"] if one["name"] == "quota"]
        assert team["used_value"] == pytest.approx(one_t4)
        with pytest.raises(RequestError, match="the quota of team quota is"):
            client.post("/v1/jobs", {"job": script() | {"gpus": {"min": 2, "max": 2}}})
        boss.patch("/v1/teams/quota", {"quota": None})
        until(lambda: states(client, "quota")[1][0] == "running")
        boss.patch("/v1/teams/quota", {"quota": 1.5 * one_t4})  # the later one must go
        until(lambda: states(client, "quota")[1] == ("queued", "held"))
        assert states(client, "quota")[0][0] == "running"
        for job in ids:
            client.post(f"/v1/jobs/{job}/cancel")


def test_a_budget_that_is_spent_stops_and_holds(deciding):
    deciding.team("budget", budget=1e-7, period="day")
    token, admin = deciding.token("submitter", "budget", "bob"), deciding.token("admin")
    with deciding.client(token) as client, deciding.client(admin) as boss:
        job = client.post("/v1/jobs", {"job": script()})["id"]
        until(lambda: states(client, "budget") == [("queued", "held")])
        assert "has spent" in client.get(f"/v1/jobs/{job}/why")["sentence"]
        kinds = [one["event"] for one in client.get("/v1/events", job=job)["events"]]
        assert "Stopped" in kinds
        [spend] = [one for one in client.get("/v1/spend")["teams"] if one["team"] == "budget"]
        assert spend["spent_dollars"] >= 1e-7
        boss.patch("/v1/teams/budget", {"budget_period": "ever"})
        with pytest.raises(RequestError, match="has spent"):
            client.post("/v1/jobs", {"job": script()})
        boss.patch("/v1/teams/budget", {"budget_dollars": 100.0})
        until(lambda: states(client, "budget")[0][0] == "running")
        client.post(f"/v1/jobs/{job}/cancel")
        trail = boss.get("/v1/audit", most=1000)["events"]
        [made] = [one for one in trail if one["event"] == "Submitted" and one["job"]["id"] == job]
        assert made["actor"].startswith("bob#")
        assert [one["actor"][:4] for one in trail if one["event"] == "Cancelled"][-1] == "bob#"
        assert {one["event"] for one in trail} >= {"TeamSet", "Described", "Cancelled"}
        stopped = [one for one in client.get("/v1/events", job=job)["events"]
                   if one["event"] == "Stopped"]  # fmt: skip
        assert stopped[0]["actor"] == ""  # nobody's doing


def test_an_older_database_is_brought_up_to_date(home):
    path = home / "log.db"
    store = Store(f"sqlite:///{path}")
    store.close()
    with sqlite3.connect(path) as old:  # as format 1 had it
        old.execute("DROP INDEX ix_events_by_people")
        old.execute("ALTER TABLE events DROP COLUMN actor")
        old.execute("UPDATE format SET number = 1")
        old.execute("INSERT INTO events VALUES (1, 1.0, 'Drained', '', '{\"event\": \"Drained\", "
                    "\"time_seconds\": 1.0, \"node\": \"n\"}')")  # fmt: skip
    old.close()
    OfflineTokens(home).create(name="ada", role="admin", team="")
    store = Store(f"sqlite:///{path}")
    assert [line.actor for line in store.read_log()] == ["", "owner"]
    assert [line.sequence for line in store.read_log(by_people=True)] == [2]
    store.close()


def test_the_same_upgrade_on_postgresql(postgres):
    import sqlalchemy as sa

    url = postgres()
    engine = sa.create_engine(url)
    Store(url).close()
    with engine.begin() as connection:
        connection.execute(sa.text("DROP INDEX ix_events_by_people"))
        connection.execute(sa.text("ALTER TABLE events DROP COLUMN actor"))
        connection.execute(sa.text("UPDATE format SET number = 1"))
    engine.dispose()
    store = Store(url)
    assert all(line.actor == "" for line in store.read_log(most=10))
    store.close()


def test_a_wrong_role_leaves_nothing_behind(tmp_path):
    assert run(["token", "create", "--role", "king", "--folder", str(tmp_path / "new")]) == 2
    assert not (tmp_path / "new").exists()
