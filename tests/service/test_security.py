"""Each attack is refused, logged, and nothing leaks: against uvicorn as it ships."""

import contextlib
import dataclasses
import json
import logging
import os
import re
import socket
import time

import pytest
from services import UNLIMITED, serving

from drystone.run.control.access import Role
from drystone.run.events import Failed, Started
from drystone.service.answers import TooLarge
from drystone.service.auth.guard import RequestLimits
from drystone.service.uploads import Uploads

pytestmark = pytest.mark.slow
SECRET = "hunter2-of-the-environment"
LOG_TAIL = "Traceback: password=swordfish"


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with two_teams(tmp_path_factory.mktemp("security") / "s") as made:
        yield made


@pytest.fixture(scope="module")
def on_postgres(tmp_path_factory, postgres):
    with two_teams(tmp_path_factory.mktemp("security") / "p", database=postgres()) as made:
        yield made


@pytest.fixture(params=["service", "on_postgres"])
def either(request):
    """With both databases, where they matter."""
    return request.getfixturevalue(request.param)


@contextlib.contextmanager
def two_teams(folder, database: str = ""):
    """Tokens of every role in one of them; jobs of each team."""
    with serving(folder, database=database) as made:
        for team in ("red", "blue"):
            made.team(team)
        made.tokens = {role: made.token(role, "red") for role in Role}
        made.mine = made.submit("red")
        made.theirs = made.submit(
            "blue", command="python secret_train.py", environment={"KEY": SECRET}
        )
        fail(made, made.submit("blue", command="python broken.py"))
        yield made


def fail(service, job_id: str) -> None:
    """Let a job fail with the end of its log as the reason."""
    journal = service.journal
    now = journal.now()
    journal.commit(
        [
            Started(
                time_seconds=now, job_id=job_id, option=0, placement=((0, 1),),
                samples_per_second=1.0, productive_seconds=now,
            ),
            Failed(
                time_seconds=now, job_id=job_id, kind="user-error",
                reason=f"user-error: rank 0: exit code 1\n{LOG_TAIL}",
            ),
        ]
    )  # fmt: skip


@pytest.fixture
def told(caplog):
    """Everything that is logged meanwhile, once it holds a text: who asks hears before the log."""
    caplog.set_level(logging.DEBUG)

    def read(awaited: str = "") -> str:
        deadline = time.monotonic() + 10
        while True:
            text = "\n".join(record.getMessage() for record in caplog.records)
            if awaited in text:
                return text
            assert time.monotonic() < deadline, f"{awaited!r} is not in the log: {text}"
            time.sleep(0.01)

    return read


def operations(service) -> list[tuple[str, str, dict]]:
    """What the service says it can be asked, with names filled in."""
    answer = service.ask("GET", "/openapi.json")
    names = {"job_id": service.theirs, "node": "t4-1", "name": "red", "token_id": "0" * 12}
    return [
        (method.upper(), path.format(**names), operation)
        for path, methods in answer.json()["paths"].items()
        for method, operation in methods.items()
    ]


BODIES = {
    "/v1/plan": {"job": {"model": "mini-gpt", "train": {"steps": 1}}},
    "/v1/jobs": {"job": {"model": "mini-gpt", "train": {"steps": 1}}},
    "/v1/tokens": {"name": "x", "role": "admin"},
    "/v1/teams": {"name": "x"},
}
OPEN = {"/healthz", "/readyz", "/v1/session"}


def asked(service, method: str, path: str, **more):
    body = BODIES.get(path, {}) if method in ("POST", "PATCH") else None
    query = f"?bundle={'a' * 32}&name=x.py" if path == "/v1/files" else ""
    return service.ask(method, path + query, body, **more)


@pytest.mark.parametrize("token", ["", "dry_" + "0" * 12 + "_" + "A" * 43, "x", "é\u2028"])
def test_without_a_good_token_nothing_is_answered(service, told, token):
    before = service.journal.sequence
    headers = {"Authorization": f"Bearer {token}".encode()} if token else {}
    for method, path, _ in operations(service):
        if path not in OPEN:
            answer = asked(service, method, path, headers=headers)
            assert answer.status == 401, (method, path, answer)
            assert set(answer.json()) == {"error"}
            assert answer.headers["www-authenticate"] == "Bearer"
    assert service.journal.sequence == before
    told("refused 401 GET /v1/jobs of nobody known")


def test_a_viewer_changes_nothing_and_a_submitter_governs_nothing(service, told):
    before = service.journal.sequence
    governing = ("/v1/tokens", "/v1/teams", "/v1/nodes", "/v1/audit")
    for method, path, operation in operations(service):
        if "security" not in operation:
            continue
        if method != "GET" or path.startswith(("/v1/tokens", "/v1/audit")):
            answer = asked(service, method, path, token=service.tokens["viewer"])
            assert answer.status == 403, (method, path, answer)
        if path.startswith(governing) and (method, path) != ("GET", "/v1/teams"):
            answer = asked(service, method, path, token=service.tokens["submitter"])
            assert answer.status == 403, (method, path, answer)
    assert service.journal.sequence == before
    assert re.search(r"refused 403 POST /v1/jobs of viewer-red#[0-9a-f]{12}", told("refused 403"))


def test_another_teams_job_is_neither_read_nor_changed(either):
    before = either.journal.sequence
    for verb in ("cancel", "pause", "resume"):
        path = f"/v1/jobs/{either.theirs}/{verb}"
        assert either.ask("POST", path, token=either.tokens["submitter"]).status == 403
    for tail in ("", "/why", "/logs"):
        path = f"/v1/jobs/{either.theirs}{tail}"
        assert either.ask("GET", path, token=either.tokens["submitter"]).status == 403
    assert either.journal.sequence == before
    assert either.ask("GET", f"/v1/jobs/{either.mine}", token=either.tokens["viewer"]).status == 200


def test_what_everybody_sees_of_other_teams_holds_no_command_no_log_and_no_variable(either):
    seen = b""
    for method, path, _ in operations(either):
        if method == "GET" and path != "/v1/stream":
            seen += asked(either, method, path, token=either.tokens["submitter"]).body
    assert b"broken" not in seen
    for hidden in ("secret_train.py", SECRET, "swordfish", "secret_sha256"):
        assert hidden.encode() not in seen, hidden
    events = either.ask("GET", "/v1/events", token=either.tokens["submitter"]).json()["events"]
    [failed] = [one for one in events if one["event"] == "Failed"]
    assert failed["reason"] == "user-error: rank 0: exit code 1"
    whole = either.ask("GET", "/v1/events", token=either.tokens["admin"]).body
    assert b"swordfish" in whole
    assert b"secret_train.py" in whole
    assert SECRET.encode() not in whole


HOSTILE_NAMES = [
    "../x", "/etc/passwd", "a/../../x", "..", ".", "", "a//b", "a/./b", ".ssh/x", "a\\..\\b",
    "a\0b", "x/" * 9 + "x", "~/x", "a/.hidden", "%2e%2e/x", "..%2fx", "con\nx", "é", "x" * 300,
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_an_upload_stays_in_its_folder(service, name):
    from urllib.parse import quote

    folder = service.controller.settings.folder
    before = {path for path in folder.parent.rglob("*") if path.is_file()}
    path = f"/v1/files?bundle={'b' * 32}&name={quote(name, safe='')}"
    answer = service.ask("POST", path, raw=b"x", token=service.tokens["submitter"])
    new = {path for path in folder.parent.rglob("*") if path.is_file()} - before

    assert answer.status == 422, answer
    assert {one for one in new if "uploads" in one.parts} == set()


def test_an_upload_follows_no_link_and_belongs_to_its_team(service, tmp_path):
    token, bundle = service.tokens["submitter"], "c" * 32
    put = f"/v1/files?bundle={bundle}&name="
    assert service.ask("POST", f"{put}d/x.py", raw=b"print(1)", token=token).status == 201
    [home] = (service.controller.settings.folder / "uploads").glob(f"*/{bundle}")
    assert (home / "d" / "x.py").read_bytes() == b"print(1)"
    assert (home / "d" / "x.py").stat().st_mode & 0o077 == 0
    os.symlink(tmp_path, home / "out")
    assert service.ask("POST", f"{put}out/x", raw=b"x", token=token).status == 422
    os.symlink(tmp_path / "y", home / "y")
    assert service.ask("POST", f"{put}y", raw=b"x", token=token).status == 201
    assert list(tmp_path.iterdir()) == []  # the link was replaced, not followed
    other = service.token("submitter", "blue")
    body = {"job": {"command": "python d/x.py", "train": {"steps": 1}}, "files": bundle}
    assert service.ask("POST", "/v1/jobs", body, token=other).status == 404
    assert service.ask("POST", "/v1/jobs", body, token=token).status == 201


@pytest.mark.parametrize(
    "path",
    ["/v1/jobs/..%2f..%2f..%2fetc%2fpasswd", "/v1/jobs/../../etc/passwd", "/v1/jobs/1%00",
     "/v1/jobs/%2e%2e/logs", "/docs/..%2f..%2fapi.py", "/docs/../api.py", "/docs/%2e%2e%2fapi.py",
     "/page/../api.py", "/page/..%2f..%2fapi.py", "/page/%2e%2e/api.py", "//etc/passwd"],
)  # fmt: skip
def test_a_name_in_an_address_reaches_no_file(service, path):
    answer = service.ask("GET", path, token=service.tokens["admin"])

    assert answer.status in (404, 422), answer
    assert b"root:" not in answer.body
    assert b"import" not in answer.body


LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(20)
)


@pytest.mark.parametrize(
    "text",
    [LAUGHS, "model: !!python/object/apply:os.system ['touch /tmp/owned']", "model: !!binary x",
     "[" * 5000, "{" * 5000, "a: " * 2000, "- " * 20000, "model: \x07", "? " * 3000,
     "model: mini-gpt\nmodel: gpt2", "&a [*a]", "%YAML 9.9\n---\n", "a: 1e999", "a: " + "9" * 5000],
    ids=range(14),
)  # fmt: skip
def test_a_hostile_job_file_is_refused(service, text):
    answer = service.ask("POST", "/v1/jobs", {"text": text}, token=service.tokens["submitter"])

    assert answer.status == 422, answer
    assert len(answer.body) < 5000


def test_large_bodies_are_not_read(service, told):
    limits = UNLIMITED
    token = service.tokens["submitter"]
    for told_length in (limits.max_body_bytes + 1, "9" * 30):
        with socket.create_connection(("127.0.0.1", service.port), timeout=30) as made:
            made.sendall(
                f"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
                f"Content-Length: {told_length}\r\n\r\n".encode()
            )
            head = made.recv(100)
            assert re.match(rb"HTTP/1.1 (413|400) ", head), head

    def chunks():
        for _ in range(limits.max_body_bytes // 65536 + 2):
            yield b" " * 65536

    answer = service.ask(
        "POST", "/v1/jobs", raw=chunks(), token=token,
        headers={"Content-Type": "application/json"},
    )  # fmt: skip
    assert answer.status == 413
    told("refused 413 POST /v1/jobs")


SQL = [
    "' OR '1'='1",
    "'; DROP TABLE events; --",
    '"; DELETE FROM jobs; --',
    "1 UNION SELECT 1",
    "%",
    "\\",
]


@pytest.mark.parametrize("text", SQL)
def test_sql_in_names_is_only_text(either, text):
    from urllib.parse import quote

    before = either.controller.store.last_sequence()
    token = either.tokens["admin"]
    for path in (
        f"/v1/jobs?owner={quote(text)}", f"/v1/jobs?team={quote(text)}",
        f"/v1/events?job={quote(text)}",
    ):  # fmt: skip
        answer = either.ask("GET", path, token=token)
        assert answer.status == 200
        assert answer.json().get("jobs", answer.json().get("events")) == []
    assert either.ask("GET", f"/v1/jobs/{quote(text, safe='')}", token=token).status == 404
    body = {"job": {"model": "mini-gpt", "train": {"steps": 1}}, "client_key": text}
    made = [either.ask("POST", "/v1/jobs", body, token=token).json() for _ in range(2)]
    assert made[0]["id"] == made[1]["id"]
    assert either.controller.store.last_sequence() == before + 2


def test_headers_and_lines_of_the_log_cannot_be_forged(service, told):
    path = "/v1/jobs/x%0d%0aSet-Cookie:%20a=b%0d%0a/logs"
    answer = service.ask("GET", path, token=service.tokens["admin"])
    assert answer.status in (404, 422)
    assert "set-cookie" not in answer.headers
    service.ask("GET", "/v1/audit%0arefused%20everything", headers={"Host": "a\tb"})
    service.ask("POST", "/v1/nodes/x%0a1999-01-01%20all%20is%20well/drain")
    told("\\n1999-01-01")
    assert "\n1999-01-01" not in told()


CROSS = [
    {"Origin": "http://evil.example"}, {"Origin": "null"}, {"Origin": "http://["},
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"}, {"Sec-Fetch-Site": "same-site"},
    {"Host": "evil.example"}, {"Host": "127.0.0.1.evil.example:80"}, {"Host": ""},
    {"Host": "localhost@evil.example"},
]  # fmt: skip


@pytest.mark.parametrize("headers", CROSS)
def test_other_sites_are_refused_whoever_the_browser_belongs_to(service, told, headers):
    session = service.ask("POST", "/v1/session", {"token": service.tokens["admin"]})
    cookie = session.headers["set-cookie"].split(";")[0]
    before = service.journal.sequence
    for more in ({}, {"X-Drystone": "1"}):
        answer = service.ask(
            "POST", "/v1/nodes/t4-1/drain", headers=headers | more | {"Cookie": cookie}
        )
        assert answer.status == 421, answer
        assert not any(name.startswith("access-control") for name in answer.headers)
    assert service.journal.sequence == before
    told("refused 421 POST /v1/nodes/t4-1/drain")


def test_a_cookie_alone_changes_nothing(service):
    session = service.ask("POST", "/v1/session", {"token": service.tokens["admin"]})
    set_cookie = session.headers["set-cookie"]
    cookie = {"Cookie": set_cookie.split(";")[0]}
    assert "HttpOnly" in set_cookie
    assert "SameSite=strict" in set_cookie
    assert service.ask("GET", "/v1/session", headers=cookie).json()["role"] == "admin"
    assert service.ask("POST", "/v1/nodes/t4-1/undrain", headers=cookie).status == 421
    assert (
        service.ask("POST", "/v1/nodes/t4-1/undrain", headers=cookie | {"X-Drystone": "1"}).status
        == 200
    )
    forged = {"Cookie": cookie["Cookie"][:-1] + ("0" if cookie["Cookie"][-1] != "0" else "1")}
    assert service.ask("GET", "/v1/session", headers=forged).json()["role"] == ""


def test_answers_carry_what_keeps_browsers_safe(service):
    for path in ("/docs", "/v1/session", "/nowhere"):
        headers = service.ask("GET", path).headers
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert "unsafe-inline" not in headers["content-security-policy"].partition("style-src")[0]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert "server" not in headers


def test_tokens_are_nowhere_but_with_their_owners(service, told):
    text = service.tokens["submitter"]
    secret = text.split("_", 2)[2]
    service.ask("GET", "/v1/jobs", token=text)
    service.ask("GET", f"/v1/nowhere?token={text}", token=text)
    service.ask("POST", "/v1/tokens", {"name": text, "role": "admin"}, token=text)
    service.ask("POST", "/v1/session", {"token": text + "x"})
    answers = [
        service.ask("GET", path, token=service.tokens["admin"]).body
        for path in ("/v1/tokens", "/v1/events?most=10000", "/v1/audit", "/metrics")
    ]
    files = [
        path.read_bytes()
        for path in service.controller.settings.folder.rglob("*")
        if path.is_file()
    ]
    assert secret not in told()
    assert not any(secret.encode() in one for one in answers + files)


def test_who_asks_too_much_is_told_when_to_come_back(tmp_path):
    slow = RequestLimits(requests_per_second=0.5, burst=3, unknown_per_second=0.5, unknown_burst=3)
    with serving(tmp_path / "s", limits=slow) as service:
        service.team("red")
        one, other = service.token("viewer", "red"), service.token("viewer", "red")
        answers = [service.ask("GET", "/v1/jobs", token=one) for _ in range(6)]
        assert [answer.status for answer in answers][:3] == [200] * 3
        assert answers[-1].status == 429
        assert 1 <= int(answers[-1].headers["retry-after"]) <= 2
        assert "Try again in" in answers[-1].json()["error"]["hint"]
        assert service.ask("GET", "/v1/jobs", token=other).status == 200
        guesses = [service.ask("POST", "/v1/session", {"token": "x"}).status for _ in range(6)]
        assert guesses[0] == 401
        assert guesses[-1] == 429
        assert service.ask("GET", "/healthz").status == 200


def test_a_service_that_others_can_reach_is_not_everybodys_when_its_last_token_goes(tmp_path):
    with serving(tmp_path / "s", is_loopback=False) as service:
        service.team("red")
        text = service.token("admin")
        assert service.ask("GET", "/v1/jobs", token=text).status == 200
        token_id = text.split("_")[1]
        assert service.ask("DELETE", f"/v1/tokens/{token_id}", token=text).status == 200
        assert service.ask("GET", "/v1/jobs", token=text).status == 401
        assert service.ask("GET", "/v1/jobs").status == 401


def test_without_tokens_only_names_of_loopback_are_answered(tmp_path):
    with serving(tmp_path / "s") as service:
        for host in ("localhost", f"127.0.0.1:{service.port}", "[::1]:8080"):
            assert service.ask("GET", "/v1/jobs", headers={"Host": host}).status == 200
        for host in ("10.0.0.1", "rebound.example", socket.gethostname()):
            assert service.ask("GET", "/v1/jobs", headers={"Host": host}).status == 421
        answer = service.ask("GET", "/v1/session").json()
        assert (answer["role"], answer["needs_token"]) == ("admin", False)
        assert (
            json.loads(service.ask("GET", "/openapi.json").body)["paths"]["/v1/jobs"]["get"].get(
                "security"
            )
            is None
        )


def test_uploads_have_an_end_for_each_team_and_in_all(tmp_path):
    limits = RequestLimits(max_uploads_of_caller_bytes=3000, max_uploads_bytes=5000)

    def send(token: str, number: int) -> int:
        path = f"/v1/files?bundle={number:032x}&name=x"
        return service.ask("POST", path, raw=b"x" * 1000, token=token).status

    with serving(tmp_path / "s", limits=limits) as service:
        service.team("red")
        service.team("blue")
        red, blue = (service.token(Role.SUBMITTER, team) for team in ("red", "blue"))
        assert [send(red, number) for number in range(5)] == [201, 201, 201, 413, 413]
        assert [send(blue, number) for number in range(5)] == [201, 201, 413, 413, 413]
        assert not [*(tmp_path / "s" / "uploads").rglob("*.part")]
        # What no job needs makes room after a day, and only then.
        for bundle in (tmp_path / "s" / "uploads").glob("*/*"):
            os.utime(bundle, (1.0, 1.0))
        job = {"command": "python x", "train": {"steps": 1}, "gpus": {"max": 1}}
        sent = {"job": job, "files": f"{0:032x}"}
        assert service.ask("POST", "/v1/jobs", sent, token=red).status == 201
        assert [send(blue, number) for number in range(7, 9)] == [201, 201]
        kept = sorted(path.name for path in (tmp_path / "s" / "uploads").glob("*/*"))
        assert f"{0:032x}" in kept
        assert f"{1:032x}" not in kept
        full = dataclasses.replace(limits, min_free_bytes=1 << 60)
        with pytest.raises(TooLarge, match="of the disk free"):
            Uploads(tmp_path / "s" / "uploads", full)._take_room(tmp_path / "s" / "uploads", 1)
