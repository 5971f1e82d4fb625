"""What people are told while jobs wait for nodes that are not rented yet."""

import threading
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from renters import make_renter, open_cloud
from systems import TRAINER

from drystone.cli.main import run
from drystone.describe.files.job import make_job
from drystone.errors import DrystoneError, NothingFits
from drystone.run.control.controller import Controller
from drystone.schedule.budget.policy import budget
from drystone.service.answers import add_answers
from drystone.service.client import Client
from drystone.service.jobs import Planned
from drystone.service.shapes import Failure
from drystone.service.why import explain

# A node of either kind; the hard cap of these tests is $1.30 an hour.
MARKET = """
offers:
  - {name: t4, gpu: T4, num_gpus: 1, price_dollars_per_hour: 0.4, start_delay_seconds: 60}
  - {name: a100, gpu: A100, num_gpus: 2, price_dollars_per_hour: 2.4, start_delay_seconds: 60}
"""


def renter(folder: Path, market: str = MARKET) -> Controller:
    """A controller that does not run: what it is asked for waits."""
    return make_renter(folder / "s", open_cloud(folder, market))


def a_job(folder: Path, **gpus):
    return make_job(
        {"name": "j", "command": f"python {TRAINER}", "train": {"steps": 10}, "gpus": gpus},
        folder=folder,
    )


def test_why_answers_while_a_job_waits_for_a_type_of_which_no_node_has_joined(tmp_path):
    with closing(renter(tmp_path)) as controller:
        job, _ = controller.submit(a_job(tmp_path, max=1))
        answer = explain(controller, job)

        assert answer.state == "queued"
        assert answer.blocking == []
        assert "waits until nodes are rented" in answer.sentence


def test_options_above_the_hard_cap_are_neither_listed_nor_chosen(tmp_path):
    with closing(renter(tmp_path)) as controller:
        submitted = a_job(tmp_path, max=8)
        planned = Planned.of(controller, submitted)
        job, _ = controller.submit(submitted)
        listed = explain(controller, job).options
        snapshot = controller.journal.snapshot()
        rented = [(one.offer, one.num_nodes) for one in budget(snapshot, None)[0]]

    # Three T4 at $0.40 are $1.20; four, or one node of A100, are above the cap.
    for options in (listed, planned.options):
        assert {tuple(option.gpus.items()) for option in options} <= {
            (("T4-16GB", number),) for number in (1, 2, 3)
        }
        assert options
    assert planned.chosen in planned.options
    assert [offer for offer, _ in rented] == ["t4"]
    assert all(number <= 3 for _, number in rented)


def test_a_job_that_only_fits_above_the_hard_cap_is_refused_with_the_prices(tmp_path):
    with closing(renter(tmp_path)) as controller:
        for ask in (controller.submit, lambda job: Planned.of(controller, job)):
            with pytest.raises(NothingFits, match=r"\$1\.60 an hour, and the hard cap is \$1\.30"):
                ask(a_job(tmp_path, min=4))


def test_a_job_that_waits_when_the_cap_is_lowered_is_told_so(tmp_path):
    with closing(renter(tmp_path)) as controller:
        job, _ = controller.submit(a_job(tmp_path, min=2))
        lower = replace(controller.journal.renting, hard_cap_dollars_per_hour=0.5)
        controller.journal.renting = lower
        answer = explain(controller, job)

    assert answer.options == []
    assert "cost $0.80 an hour, and the hard cap is $0.50 an hour" in answer.sentence


REPLIES = {
    "1": (500, b"Internal Server Error"),
    "2": (502, b"<html>Bad gateway</html>"),
    "3": (503, b"[1, 2]"),
    "4": (500, b'{"error": "a text"}'),
    "5": (407, b"who are you?"),
    "6": (200, b"<html>Welcome</html>"),
}


class Other(BaseHTTPRequestHandler):
    """Something that speaks HTTP and is not Drystone, or is a Drystone that failed."""

    def do_GET(self):
        status, body = REPLIES[self.path.split("/")[3]]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def other_address():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Other)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("job", "told", "hint"),
    [
        ("1", "failed to answer (status 500)", "Try again"),
        ("2", "failed to answer (status 502)", "Try again"),
        ("3", "failed to answer (status 503)", "Try again"),
        ("4", "failed to answer (status 500)", "Try again"),
        ("5", "refused (status 407)", "Check the address"),
        ("6", "is not a Drystone service", "Check the address"),
    ],
)
def test_an_answer_that_is_not_drystone_s_becomes_a_message(
    other_address, monkeypatch, capsys, job, told, hint
):
    monkeypatch.setenv("DRYSTONE_URL", other_address)
    with Client(url=other_address) as client, pytest.raises(DrystoneError) as caught:
        client.get(f"/v1/jobs/{job}/why")
    assert told in caught.value.message
    assert hint in caught.value.hint

    assert run(["why", job]) == 1
    shown = " ".join(capsys.readouterr().err.split())
    assert told in shown
    assert hint in shown
    assert "Traceback" not in shown
    assert "Expecting value" not in shown


def test_a_fault_of_the_service_is_answered_in_the_shape_of_every_failure():
    app = FastAPI()
    add_answers(app)

    @app.get("/broken")
    def broken():
        raise KeyError("a type of which no node has joined")

    answer = TestClient(app, raise_server_exceptions=False).get("/broken")

    assert answer.status_code == 500
    assert Failure.model_validate(answer.json()).error.kind == "Fault"
    assert "KeyError" in answer.json()["error"]["message"]
