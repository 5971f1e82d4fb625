"""What a job may not do: read the service's secrets, ask as the owner, stay open to everybody."""

import contextlib
import http.client
import json
import os
import socket
import stat
import subprocess
import sys
import time

import pytest
from services import UNLIMITED, serving
from systems import CLUSTER

from drystone.describe.files.cluster import parse_cluster
from drystone.errors import InvalidSpec
from drystone.run.control.controller import Controller, ControllerSettings
from drystone.run.control.folder import keep_private
from drystone.run.control.notes import TokenRevoked
from drystone.service.auth.peers import is_job_process
from drystone.service.connections import ConnectionLimits

ASK = """
import http.client, os, socket, sys
made = socket.socket(socket.AF_UNIX)
made.connect(os.environ["SOCKET"])
asked = http.client.HTTPConnection("localhost")
asked.sock = made
body = '{"name": "pwned", "role": "admin"}'
asked.request("POST", "/v1/tokens", body=body, headers={"Content-Type": "application/json"})
print(asked.getresponse().status, flush=True)
"""


def revoke_all(service) -> None:
    journal = service.journal
    for token_id in list(journal.live.access.tokens):
        journal.commit([TokenRevoked(time_seconds=journal.now(), token_id=token_id)])


def test_a_service_whose_last_token_goes_is_nobodys(tmp_path):
    with serving(tmp_path / "s") as service:
        assert service.ask("GET", "/v1/jobs").status == 200  # everybody on this machine
        service.token("admin")
        revoke_all(service)
        assert service.ask("GET", "/v1/jobs", headers={"Host": "localhost"}).status == 401
        session = service.ask("GET", "/v1/session").json()
        assert (session["role"], session["needs_token"]) == ("", True)


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded", "Via", "X-Real-IP"])
def test_without_tokens_nobody_is_let_in_through_a_proxy(tmp_path, header):
    with serving(tmp_path / "s") as service:
        refused = service.ask("GET", "/v1/jobs", headers={header: "203.0.113.9"})
        assert refused.status == 421
        assert "drystone token create" in refused.json()["error"]["hint"]


def test_a_folder_is_closed_to_others_and_those_of_others_are_refused(tmp_path):
    folder = tmp_path / "s"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    (folder / "session.key").write_bytes(b"x" * 32)
    (folder / "session.key").chmod(0o644)
    settings = ControllerSettings(folder=folder, cluster=parse_cluster(CLUSTER))
    Controller(settings).close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "session.key").stat().st_mode) == 0o600

    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    with pytest.raises(InvalidSpec, match="shared by all users"):
        keep_private(shared)
    if os.getuid() == 0:
        theirs = tmp_path / "theirs"
        theirs.mkdir()
        os.chown(theirs, 65534, 65534)
        with pytest.raises(InvalidSpec, match="belongs to another user"):
            keep_private(theirs)


def test_what_descends_from_an_agent_is_a_jobs_process():
    assert not is_job_process(os.getpid())
    agent = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)", "drystone.run.engines.agent"]
    )
    try:
        until(lambda: is_job_process(agent.pid))  # once it is the program that it becomes
    finally:
        agent.kill()
        agent.wait()
    assert is_job_process(agent.pid)  # it has ended: nobody knows what it was


@pytest.mark.slow
def test_a_job_cannot_ask_as_the_owner_nor_read_the_variables_of_the_service(tmp_path):
    folder = tmp_path / "s"
    (tmp_path / "c.yaml").write_text(CLUSTER)
    (tmp_path / "ask.py").write_text(ASK)
    serve = subprocess.Popen(
        [sys.executable, "-m", "drystone", "serve", "--folder", str(folder), "--end-all",
         "--cluster", str(tmp_path / "c.yaml"), "--job-env", "SHARED=cache", "--job-env", "MINE"],
        env={**os.environ, "PGPASSWORD": "hunter2", "DRYSTONE_TOKEN": "hunter2", "MINE": "yes"},
    )  # fmt: skip
    try:
        name = folder / "drystone.sock"
        script = f"env; {sys.executable} {tmp_path / 'ask.py'}; setsid {sys.executable} "
        script += f"{tmp_path / 'ask.py'}; sleep 0.5"
        job = {"command": f"bash -c '{script}'", "train": {"steps": 1}, "gpus": {"max": 1}}
        job["environment"] = {"SOCKET": str(name)}
        until(lambda: name.exists() and owner(name, "GET", "/readyz")[0] == 200)
        made = owner(name, "POST", "/v1/jobs", {"job": job, "folder": str(tmp_path)})[1]["id"]
        until(lambda: owner(name, "GET", f"/v1/jobs/{made}")[1]["state"] == "done")
        said = owner(name, "GET", f"/v1/jobs/{made}/logs?stream=out")[1]["text"]
        tokens = owner(name, "GET", "/v1/tokens")[1]["tokens"]
    finally:
        serve.terminate()
        serve.wait(30)
    assert "hunter2" not in said
    assert "SHARED=cache" in said
    assert "MINE=yes" in said
    assert said.split().count("403") == 2
    assert tokens == []


def owner(path, method: str, route: str, body=None):
    """A request over the owner's socket."""
    connection = http.client.HTTPConnection("localhost", timeout=30)
    connection.sock = socket.socket(socket.AF_UNIX)
    try:
        connection.sock.connect(str(path))
        sent = json.dumps(body) if body is not None else None
        connection.request(method, route, sent, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or b"{}")
    except OSError:
        return 0, {}
    finally:
        connection.close()


def until(condition, *, seconds: float = 60.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def test_connections_that_say_nothing_keep_nobody_out_and_are_let_go(tmp_path, monkeypatch):
    given = {"max_connections": 8, "max_per_address": 6, "header_seconds": 3.0}
    monkeypatch.setattr(
        "drystone.service.server.ConnectionLimits", lambda: ConnectionLimits(**given)
    )
    with serving(tmp_path / "s", limits=UNLIMITED) as service:
        held = []
        for number in range(20):  # three times as many as may be open
            held.append(socket.create_connection(("127.0.0.1", service.port)))
            held[-1].sendall(b"GET /healthz HTTP/1.1\r\nX-A: " if number % 2 else b"")
            if number % 5 == 0:
                assert service.ask("GET", "/healthz").status == 200
        for connection in held:  # in the end all are let go, the first ones long before
            connection.settimeout(10)
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(100) == b""
            connection.close()


def test_where_all_connections_are_busy_the_next_is_told_to_come_back():
    limits = ConnectionLimits(max_connections=4, max_per_address=3)
    limits.by_address.update({"a": 3, "b": 1})
    assert not limits.has_room_for("a")
    assert not limits.has_room_for("c")  # in all there are four, and none of them waits

    class Waiting:
        def drop(self):
            limits.by_address["a"] -= 1
            del limits.waiting["a"][self]

    limits.waiting["a"] = {Waiting(): None}
    assert limits.has_room_for("c")  # in the place of one of the address that has most
    assert limits.by_address["a"] == 2


def test_a_body_that_stops_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr("drystone.service.auth.guard._BODY_SECONDS", 0.3)
    with serving(tmp_path / "s") as service:
        connection = socket.create_connection(("127.0.0.1", service.port))
        head = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(head + b'Content-Length: 100\r\n\r\n{"job"')
        connection.settimeout(10)
        assert connection.recv(100).startswith(b"HTTP/1.1 408")
        connection.close()
