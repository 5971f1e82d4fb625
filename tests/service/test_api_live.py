"""Live state, waiting, pages and numbers: what browsers and monitors rely on."""

import contextlib
import http.client
import json
import re
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
import yaml
from services import serving, until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("live") / "s") as made:
        made.team("red")
        made.viewer, made.admin = made.token("viewer", "red"), made.token("admin")
        yield made


class Listener:
    """One connection to the stream; messages are read in a thread, with an end."""

    def __init__(self, service, token: str, after: int | None = None, last: str = "") -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=30)
        headers = {"Authorization": f"Bearer {token}"}
        if last:
            headers["Last-Event-ID"] = last
        query = "" if after is None else f"?after={after}"
        self.connection.request("GET", f"/v1/stream{query}", headers=headers)
        self.sock = self.connection.sock
        self.answer = self.connection.getresponse()
        assert self.answer.status == 200
        assert self.answer.getheader("content-type").startswith("text/event-stream")
        self.messages: list[tuple[str, int, dict]] = []
        self.is_over = False
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        fields: dict[str, str] = {}
        try:
            for raw in self.answer:
                line = raw.decode().rstrip("\n")
                if line:
                    name, _, value = line.partition(": ")
                    fields[name] = value
                elif "event" in fields:
                    message = (fields["event"], int(fields["id"]), json.loads(fields["data"]))
                    self.messages.append(message)
                    fields = {}
        except (OSError, http.client.HTTPException, ValueError, AttributeError):
            pass
        self.is_over = True

    def wait(self, kind: str, holds=lambda _: True):
        def find():
            return [one for one in list(self.messages) if one[0] == kind and holds(one[2])]

        return until(find)[0]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.thread.join(timeout=20)
        assert not self.thread.is_alive()
        self.answer.close()
        self.connection.close()


def test_changes_come_without_asking(service):
    listener = Listener(service, service.viewer)
    hello = listener.wait("hello")[2]
    assert hello["is_resumed"] is False
    job = service.submit(environment={"KEY": "of-the-stream"})
    _, sequence, _ = listener.wait(
        "events", lambda data: any(one["event"] == "Submitted" for one in data["events"])
    )
    rows = listener.wait("jobs", lambda data: any(one["id"] == job for one in data["jobs"]))[2]
    assert rows["num_by_state"]["queued"] >= 1
    assert sequence > hello["sequence"]
    service.controller.drain("t4-1")
    nodes = listener.wait("cluster", lambda data: any(one["is_drained"] for one in data["nodes"]))
    assert [one["id"] for one in nodes[2]["nodes"] if one["is_drained"]] == ["t4-1"]
    service.controller.undrain("t4-1")
    assert listener.wait("tick")[2]["sequence"] >= sequence
    assert "of-the-stream" not in repr(listener.messages)
    listener.close()


def test_who_comes_back_gets_what_was_missed_and_nothing_twice(service):
    first = Listener(service, service.viewer)
    seen = first.wait("hello")[1]
    first.close()
    job = service.submit()
    second = Listener(service, service.viewer, last=str(seen))
    hello = second.wait("hello")[2]
    assert hello["is_resumed"] is True
    second.wait("jobs", lambda data: any(one["id"] == job for one in data["jobs"]))
    other = service.submit()
    second.wait("jobs", lambda data: any(one["id"] == other for one in data["jobs"]))
    told = [one["sequence"] for kind, _, data in second.messages if kind == "events"
            for one in data["events"]]  # fmt: skip
    assert told == list(range(seen + 1, seen + 1 + len(told)))
    assert len(told) == 4  # two events each
    second.close()
    far = Listener(service, service.viewer, after=10**9)
    assert far.wait("hello")[2]["is_resumed"] is False
    far.close()


def test_fifty_listeners_cost_one_look_and_all_get_the_same(service, monkeypatch):
    from drystone.service import feed

    calls = []
    real = feed.Feed._changes
    monkeypatch.setattr(
        feed.Feed, "_changes", lambda self, *given: calls.append(1) or real(self, *given)
    )
    listeners = [Listener(service, service.viewer) for _ in range(50)]
    for one in listeners:
        one.wait("hello")
    job = service.submit()
    for one in listeners:
        one.wait("jobs", lambda data: any(row["id"] == job for row in data["jobs"]))
    assert len(calls) <= 2
    for one in listeners:
        one.close()
    until(lambda: "drystone_stream_clients" in service.ask("GET", "/metrics", token=service.admin)
          .body.decode())  # fmt: skip


def test_a_revoked_token_hears_nothing_more(service):
    token = service.token("viewer", "red")
    listener = Listener(service, token)
    listener.wait("hello")
    service.ask("DELETE", f"/v1/tokens/{token.split('_')[1]}", token=service.admin)
    until(lambda: listener.is_over, seconds=30)
    listener.close()


def test_waiting_for_a_jobs_events_does_not_spin(service):
    job = service.submit()
    with service.client(service.viewer) as client:
        last = client.get("/v1/events", job=job)["last"]
        service.submit()  # something else happens
        started = time.monotonic()
        answer = client.get("/v1/events", job=job, after=last, wait=0.5)
        assert answer["events"] == []
        assert time.monotonic() - started >= 0.45
        assert answer["last"] == service.journal.sequence  # so that nobody asks for it again
        later = threading.Timer(0.2, lambda: service.controller.cancel(job))
        later.start()
        found = client.get("/v1/events", job=job, after=answer["last"], wait=20)["events"]
        later.join()
        assert [one["event"] for one in found] == ["Cancelled"]
        newest = client.get("/v1/events", most=3, newest="true")
        assert [one["sequence"] for one in newest["events"]] == list(
            range(newest["last"] - 2, newest["last"] + 1)
        )


def test_many_who_wait_do_not_keep_others_waiting(service):
    last = service.journal.sequence
    threads = [
        threading.Thread(
            target=lambda: service.ask(
                "GET", f"/v1/events?after={last}&wait=30", token=service.viewer
            )
        )
        for _ in range(60)
    ]
    for one in threads:
        one.start()
    assert service.ask("GET", "/v1/jobs", token=service.viewer).status == 200
    service.submit()
    for one in threads:
        one.join(timeout=30)
    assert not any(one.is_alive() for one in threads)


def test_pages_of_jobs_hold_each_job_once(service):
    for _ in range(5):
        service.submit()
    with service.client(service.viewer) as client:
        for newest in ("", "true"):
            seen, skip = [], 0
            while skip is not None:
                page = client.get("/v1/jobs", most=3, skip=skip, newest=newest)
                seen += [one["id"] for one in page["jobs"]]
                skip = page["next_skip"]
            assert len(seen) == len(set(seen)) == page["total"]
            assert (seen == sorted(seen, key=int)) is not bool(newest)


def test_numbers_are_in_the_format_of_prometheus(service):
    answer = service.ask("GET", "/metrics", token=service.viewer)
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = answer.body.decode().splitlines()
    sample = re.compile(r'[a-z_]+(\{[a-z_]+="[^"]*"(,[a-z_]+="[^"]*")*\})? [0-9.e+-]+(inf)?')
    names = set()
    for line in lines:
        if line.startswith("# TYPE "):
            names.add(line.split()[2])
        elif not line.startswith("#"):
            assert sample.fullmatch(line), line
    assert {"drystone_jobs", "drystone_gpus", "drystone_http_requests_total"} <= names
    buckets = [int(one.split()[-1]) for one in lines if "_seconds_bucket" in one]
    assert buckets == sorted(buckets)
    count = next(one for one in lines if one.startswith("drystone_http_request_duration_seconds_c"))
    assert int(count.split()[-1]) == buckets[-1]


def test_jobs_and_gpus_have_series_that_the_dashboard_and_the_alerts_use(service):
    job = service.submit()
    text = service.ask("GET", "/metrics", token=service.viewer).body.decode()
    assert f'drystone_job_progress_ratio{{job_id="{job}"' in text
    assert 'drystone_gpu_held{node="' in text
    known = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")}
    folder = Path(__file__).parents[2] / "examples" / "monitoring"
    board = json.loads((folder / "grafana.json").read_text())
    used = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    [group] = yaml.safe_load((folder / "alerts.yaml").read_text())["groups"]
    used += [rule["expr"] for rule in group["rules"]]
    names = {name for expression in used for name in re.findall(r"drystone_[a-z_]+", expression)}
    assert names <= known
    assert len(names) >= 15
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


@pytest.mark.skipif(not shutil.which("promtool"), reason="left out: apt install prometheus")
def test_prometheus_itself_finds_nothing_to_complain_about(service):
    service.submit()
    text = service.ask("GET", "/metrics", token=service.viewer).body
    subprocess.run(["promtool", "check", "metrics"], input=text, check=True)
    folder = Path(__file__).parents[2] / "examples" / "monitoring"
    subprocess.run(["promtool", "check", "rules", folder / "alerts.yaml"], check=True)


def test_gpus_that_nobody_holds_are_waste(service):
    answer = json.loads(service.ask("GET", "/v1/waste", token=service.viewer).body)
    free = [row for row in answer["rows"] if not row["job_id"]]
    assert all(row["unused_share"] == 1 and row["num_gpus"] > 0 for row in free)
    total = sum(row["dollars_per_hour"] for row in answer["rows"])
    assert answer["dollars_per_hour"] == pytest.approx(total)


def test_the_apis_page_needs_no_network(service):
    page = service.ask("GET", "/docs").body.decode()
    assert "http" not in re.sub(r'lang="en"|charset|viewport', "", page)
    for name in re.findall(r'(?:src|href)="([^"]+)"', page):
        answer = service.ask("GET", name)
        assert answer.status == 200
        assert len(answer.body) > 100
