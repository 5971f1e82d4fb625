"""`drystone top` on a terminal: a job is cancelled by keys, and a service that is away is borne."""

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from services import serving, until


class Terminal:
    """`drystone top` with somebody before it."""

    def __init__(self, url: str) -> None:
        self._ours, theirs = pty.openpty()
        variables = {"DRYSTONE_URL": url, "COLUMNS": "120", "LINES": "40", "TERM": "xterm"}
        command = [sys.executable, "-m", "drystone", "top", "--every", "0.2"]
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | variables
        )
        os.close(theirs)
        self.seen = ""

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def see(self, word: str) -> None:
        """Wait until it is shown, from now on."""
        self.seen = ""
        deadline = time.monotonic() + 60
        while word not in self.seen:
            assert time.monotonic() < deadline, self.seen[-2000:]
            if select.select([self._ours], [], [], 0.2)[0]:
                self.seen += os.read(self._ours, 65536).decode(errors="replace")

    def leave(self) -> int:
        self.press(b"q")
        try:
            while True:
                os.read(self._ours, 65536)
        except OSError:  # the other end is closed
            os.close(self._ours)
        return self.process.wait(60)


@pytest.mark.slow
def test_a_job_is_cancelled_by_keys_and_a_lost_service_is_told(tmp_path: Path):
    with serving(tmp_path / "s") as service:
        first, second = service.submit(name="first"), service.submit(name="second")
        terminal = Terminal(service.url)
        terminal.see("q quit")
        terminal.press(b"j")
        terminal.see("\x1b[7")  # a row in reverse
        terminal.press(b"c")
        terminal.see(f"Cancel job {first}?")
        terminal.press(b"n")
        terminal.see("q quit")
        assert service.controller.find(first).state == "queued"
        terminal.press(b"c")
        terminal.see(f"Cancel job {first}?")
        terminal.press(b"y")
        until(lambda: service.controller.find(first).state == "cancelled")
        assert service.controller.find(second).state == "queued"
    terminal.see("The service does not answer")
    assert terminal.leave() == 0
