"""Webhooks: what is told, in which form, signed, tried again, and waited for by nobody."""

import hashlib
import hmac
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from services import serving, until

from drystone.errors import InvalidSpec
from drystone.run.events import Failed
from drystone.service.webhooks import SIGNATURE, Target, Webhooks, signature


@pytest.fixture
def receiver():
    """A server that fails the first time, and keeps what it got."""

    class Keeper(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            server.got.append((dict(self.headers), body))
            self.send_response(503 if len(server.got) == 1 else 204)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Keeper)
    server.got = []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_the_end_of_a_job_is_told_signed_and_again_where_it_was_not_taken(receiver, tmp_path):
    url = f"http://127.0.0.1:{receiver.server_port}/hook"
    with serving(tmp_path / "s") as service:
        service.team("red", budget=0.0)
        targets = [Target.parse(url), Target.parse("http://127.0.0.1:9/nobody")]
        hooks = Webhooks(service.controller, targets, "secret")
        try:
            until(lambda: hooks.num_sent >= 1, seconds=30)
        finally:
            hooks.close()
    (first, body), (again, same) = receiver.got[:2]
    assert body == same
    told = json.loads(body)
    assert told["event"] == "BudgetNearlySpent"
    assert first["Drystone-Delivery"] == again["Drystone-Delivery"] == told["id"]
    stamp, _, digest = again[SIGNATURE].partition(",v1=")
    signed = hmac.new(b"secret", f"{stamp[2:]}.".encode() + body, hashlib.sha256).hexdigest()
    assert digest == signed


@pytest.mark.slow
def test_a_job_that_failed_is_told_by_its_name(receiver, tmp_path):
    receiver.got.append(None)  # so that the first message is taken
    with serving(tmp_path / "s") as service:
        job = service.submit()
        hooks = Webhooks(
            service.controller, [Target.parse(f"http://127.0.0.1:{receiver.server_port}/")]
        )
        try:
            with service.journal.lock:
                now = service.journal.now()
                failed = Failed(time_seconds=now, job_id=job, reason="out of memory\nsecret log")
                service.journal.commit([failed])
            until(lambda: hooks.num_sent >= 1, seconds=30)
        finally:
            hooks.close()
    told = [json.loads(body) for _, body in receiver.got[1:]]
    [mine] = [message for message in told if message["event"] == "Failed"]
    assert mine["job_id"] == job
    assert mine["reason"] == "out of memory"
    assert mine["text"].startswith(f"Job {job} (")
    assert "secret" not in mine["text"]


def test_slack_gets_its_own_body():
    message = {"id": "event-1", "event": "Failed", "text": "Job 1 (a) failed"}
    plain, slack = Target.parse("https://a.example/h"), Target.parse("slack+https://b.example/h")
    assert json.loads(plain.body(message)) == message
    assert json.loads(slack.body(message)) == {"text": "Job 1 (a) failed"}
    assert Target.parse("https://hooks.slack.com/services/x").is_slack
    assert signature("s", 1, b"x") != signature("s", 2, b"x")


@pytest.mark.parametrize("text", ["file:///etc/passwd", "ftp://a.example", "https://", "nonsense"])
def test_only_web_addresses_are_taken(text):
    with pytest.raises(InvalidSpec, match="not an address"):
        Target.parse(text)
