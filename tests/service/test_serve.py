"""`drystone serve` as a process: how it ends, and what it leaves."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from systems import CLUSTER, TRAINER

from drystone.run.engines.agent.client import AgentClient, AgentGone
from drystone.service.client import Client, NotRunning

pytestmark = pytest.mark.slow


def start(folder: Path, *options: str) -> subprocess.Popen:
    (folder / "c.yaml").write_text(CLUSTER)
    command = [sys.executable, "-m", "drystone", "serve", "--cluster", str(folder / "c.yaml")]
    return subprocess.Popen(
        [*command, "--folder", str(folder / "s"), *options], stderr=subprocess.DEVNULL
    )


def until(condition, seconds: float = 60.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


def answers(folder: Path) -> bool:
    with Client(folder / "s") as client:
        try:
            return client.get("/v1/health")["status"] == "ok"
        except NotRunning:
            return False


def agent_lives(folder: Path) -> bool:
    client = AgentClient(folder / "s" / "agents" / "a100-0")
    try:
        return bool(client.ask("hello"))
    except AgentGone:
        return False
    finally:
        client.close()


def test_nothing_is_announced_that_cannot_be(tmp_path):
    (tmp_path / "c.yaml").write_text(CLUSTER)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "drystone", "serve", "--cluster", str(tmp_path / "c.yaml")]
        done = subprocess.run(
            [*command, "--folder", str(tmp_path / "s"), "--port", str(port)],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    assert done.returncode == 1
    assert done.stderr.startswith(f"error: port {port} of 127.0.0.1 cannot be used")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_trains_goes_on_or_ends_with_the_service(tmp_path, number):
    first = start(tmp_path)
    until(lambda: answers(tmp_path))
    with Client(tmp_path / "s") as client:
        job = {"command": f"python {TRAINER}", "train": {"steps": 100, "batch": 4}}
        body = {"job": job | {"gpus": {"max": 1}}, "folder": "/"}
        client.post("/v1/jobs", body)
        until(lambda: client.get("/v1/jobs/1")["step"] > 3)
    first.send_signal(number)
    assert first.wait(timeout=60) == 0
    assert agent_lives(tmp_path)

    second = start(tmp_path, "--end-all")
    until(lambda: answers(tmp_path))
    with Client(tmp_path / "s") as client:
        until(lambda: client.get("/v1/jobs/1")["state"] == "done")
        assert client.get("/v1/jobs/1")["num_starts"] == 1
    assert (tmp_path / "s").stat().st_mode & 0o077 == 0
    second.send_signal(number)
    assert second.wait(timeout=60) == 0
    until(lambda: not agent_lives(tmp_path))
