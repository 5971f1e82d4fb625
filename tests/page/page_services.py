"""A service as it ships on a port of its own: uvicorn, the API, a controller and its store."""

import socket
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import worlds

from drystone.run.control.access import make_token
from drystone.service.app import make_app
from drystone.service.server import make_server

LIVE = "html[data-live=live]"
VIEWS = ("cluster", "jobs", "submit", "compare", "prices", "spend", "events")


class Service:
    """Start, stop, start again; the port stays."""

    def __init__(self, folder: Path, cluster: str = worlds.CLUSTER, **settings) -> None:
        self.folder, self.cluster, self.settings = folder, cluster, settings
        self.port = 0  # the first start takes one that is free
        self.expects_failures = False

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.controller = worlds.open_controller(self.folder, self.cluster, **self.settings)
        worlds.adopt(self.controller)
        self._listener = self._listen()
        self.port = self._listener.getsockname()[1]
        self._server = make_server(make_app(self.controller))
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],))
        self._thread.start()
        deadline = time.monotonic() + 60
        while not self._server.started:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def _listen(self) -> socket.socket:
        """On the port of before; somebody's connection may have it for a moment."""
        deadline = time.monotonic() + 30
        while True:
            listener = socket.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("127.0.0.1", self.port))
            except OSError:
                listener.close()
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
                continue
            listener.listen(128)
            return listener

    def stop(self) -> None:
        self.expects_failures = True
        self._server.should_exit = True
        self._thread.join(timeout=60)
        self._listener.close()
        self.controller.close()

    @contextmanager
    def running(self):
        self.start()
        try:
            yield self
        finally:
            self.stop()

    def is_expected(self, text: str) -> bool:
        """Browsers complain about every failed request; some tests mean them to fail."""
        return self.expects_failures and "Failed to load resource" in text

    def token(self, role: str, team: str = "") -> str:
        journal = self.controller.journal
        note, text = make_token(name=f"the-{role}", role=role, team=team, now_seconds=journal.now())
        journal.commit([note])
        return text

    def submit(self, name: str = "fresh", owner: str = "ada", model: str = "mini-gpt") -> str:
        table = {"name": name, "model": model, "train": {"steps": 50, "batch": 8, "sequence": 32}}
        return worlds.submit(self.controller, worlds.Arrival(0.0, table, owner))

    def jobs(self, state: str) -> list[str]:
        jobs = self.controller.journal.live.state.jobs
        return [name for name, record in jobs.items() if record.state.value == state]


def sign_in(page, token: str) -> None:
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_selector(LIVE)
