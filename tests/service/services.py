"""A service as it ships, for tests: uvicorn on a port of loopback, tokens, raw requests."""

import contextlib
import dataclasses
import http.client
import json
import socket
import threading
import time
from pathlib import Path

from systems import CLUSTER

from drystone.describe.files.cluster import parse_cluster
from drystone.describe.files.job import make_job
from drystone.run.control.access import make_team, make_token
from drystone.run.control.controller import Controller, ControllerSettings
from drystone.run.control.world import Pace
from drystone.service.app import make_app
from drystone.service.auth.guard import Limits, Reachability
from drystone.service.client import Client
from drystone.service.server import make_server

UNLIMITED = Limits(requests_per_second=1e6, burst=1e6, unknown_per_second=1e6, unknown_burst=1e6)


@dataclasses.dataclass
class Answer:
    """What came back."""

    status: int
    headers: dict
    body: bytes

    def json(self):
        return json.loads(self.body)


class Service:
    """One service, and what tests do to it."""

    def __init__(self, controller: Controller, port: int) -> None:
        self.controller, self.port = controller, port
        self.url = f"http://127.0.0.1:{port}"
        self.journal = controller.journal

    def team(self, name: str, *, quota=None, budget=None, period="month") -> None:
        note = make_team(
            name, quota=quota, budget_dollars=budget, budget_period=period,
            now_seconds=self.journal.now(),
        )  # fmt: skip
        self.journal.commit([note])

    def token(self, role: str, team: str = "", name: str = "") -> str:
        note, text = make_token(
            name=name or f"{role}-{team or 'none'}", role=role, team=team,
            now_seconds=self.journal.now(),
        )  # fmt: skip
        self.journal.commit([note])
        return text

    def client(self, token: str = "") -> Client:
        return Client(url=self.url, token=token)

    def submit(self, team: str = "", **more) -> str:
        table = {"model": "mini-gpt", "train": {"steps": 3, "batch": 4, "sequence": 16}} | more
        job = make_job(table, folder=Path("/"), owner="somebody")
        return self.controller.submit(dataclasses.replace(job, team=team))[0]

    def ask(
        self, method: str, path: str, body=None, *, token: str = "", headers=None, raw=None
    ) -> Answer:
        """One request, just as it is said."""
        sent = dict(headers or {})
        if token:
            sent["Authorization"] = f"Bearer {token}"
        if body is not None:
            raw = json.dumps(body).encode()
            sent.setdefault("Content-Type", "application/json")
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, body=raw, headers=sent)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, found, answer.read())
        finally:
            connection.close()


@contextlib.contextmanager
def serving(
    folder: Path,
    *,
    database: str = "",
    limits: Limits = UNLIMITED,
    is_deciding=False,
    **reach,
):
    """Without the loop jobs are taken in and never started; with it they wait or run."""
    pace = Pace(tick_seconds=0.05, startup_seconds=0.5, round_seconds=2.0)
    controller = Controller(
        ControllerSettings(
            folder=folder, cluster=parse_cluster(CLUSTER), database=database, pace=pace
        )
    )
    app = make_app(controller, Reachability(limits=limits, **reach))
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    server = make_server(app)
    threads = [threading.Thread(target=server.run, kwargs={"sockets": [listener]})]
    if is_deciding:
        threads.append(threading.Thread(target=controller.run))
    for thread in threads:
        thread.start()
    try:
        yield Service(controller, listener.getsockname()[1])
    finally:
        server.should_exit = True
        controller.leave()
        for thread in threads:
            thread.join()
        controller.close(ends_agents=is_deciding)
        listener.close()


def until(condition, *, seconds: float = 60.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.03)
    return found
