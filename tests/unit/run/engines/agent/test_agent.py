"""Agents with real processes."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from drystone.run.engines.agent import server
from drystone.run.engines.agent.client import (
    AgentClient,
    AgentGone,
    AgentRefused,
    Remote,
    start_agent,
)
from drystone.run.engines.agent.keeper import birth_of
from drystone.run.engines.agent.launches import LOST_EXIT, read_json
from drystone.run.engines.agent.network import RefusalKind, keep_secret
from drystone.run.engines.agent.server import Agent, listen
from drystone.run.fence import Fenced, check_lease, raise_fence, writing

FOREVER = 'import time\nprint(\'{"event": "started"}\', flush=True)\ntime.sleep(600)'


def until(condition, *, seconds: float = 20.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
    return found


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / ("long" * 30)
    start_agent(path, node="n0")
    yield path
    with suppress(AgentGone):
        client = AgentClient(path, controller=10**6)
        client.ask("quit")
        client.close()


@pytest.fixture
def client(folder):
    made = AgentClient(folder, controller=1)
    yield made
    made.close()


def launch(client, code: str = FOREVER, *, job="j", epoch=1, devices=(0,), lease=60.0, **more):
    ranks = [
        {"rank": rank, "device": device, "environment": {"RANK": str(rank)}}
        for rank, device in enumerate(devices)
    ]
    return client.ask(
        "launch", job_id=job, epoch=epoch, ranks=ranks, arguments=[sys.executable, "-c", code],
        lease_seconds=lease, reports="rank-0.out", **more,
    )  # fmt: skip


def status(client, **values):
    found = client.ask("poll", **values)["launches"]
    return {(one["job_id"], one["epoch"]): one for one in found}


def pids(folder: Path, name: str = "j.1") -> list[int]:
    table = json.loads((folder / "launches" / name / "processes.json").read_text())
    return [pid for pid, _ in table.values()]


def test_an_agent_starts_watches_and_stops_processes(client, folder):
    launch(client, devices=(0, 1))
    until(lambda: status(client)["j", 1]["reports"])

    assert all(birth_of(pid) for pid in pids(folder))
    assert all(os.getpgid(pid) == pid for pid in pids(folder))
    client.ask("stop", job_id="j", epoch=1, grace_seconds=5.0, note="enough")
    over = until(lambda: (one := status(client)["j", 1])["is_over"] and one)
    assert over["exits"] == {"0": -signal.SIGTERM, "1": -signal.SIGTERM}
    assert over["note"] == "enough"


def test_a_launch_is_made_once(client, folder):
    assert launch(client)["is_new"]
    assert not launch(client)["is_new"]
    with pytest.raises(AgentRefused, match="still runs") as refused:
        launch(client, epoch=2)
    assert refused.value.kind is RefusalKind.BUSY
    with pytest.raises(AgentRefused, match=r"devices \[0\]") as refused:
        launch(client, job="other")
    assert refused.value.kind is RefusalKind.BUSY
    launch(client, job="other", devices=(1,))
    client.ask("stop", job_id="j", epoch=1)
    until(lambda: status(client)["j", 1]["is_over"])
    assert not launch(client)["is_new"]  # it has ended, and is not run again
    launch(client, epoch=2)
    client.ask("stop", job_id="j", epoch=2)
    until(lambda: status(client)["j", 2]["is_over"])
    client.ask("forget", job_id="j", epoch=1)
    with pytest.raises(AgentRefused, match="later epoch"):
        launch(client, epoch=1)


def test_whoever_does_not_listen_is_killed_with_its_children(client, folder):
    code = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)"
    )
    launch(client, code)
    child = int(until(lambda: status(client)["j", 1]["reports"]))
    client.ask("stop", job_id="j", epoch=1, grace_seconds=0.3)
    over = until(lambda: (one := status(client)["j", 1])["is_over"] and one)
    assert over["exits"] == {"0": -signal.SIGKILL}
    until(lambda: not birth_of(child))


def test_a_lease_that_runs_out_ends_the_processes(client):
    launch(client, lease=0.6)
    launch(client, job="kept", devices=(1,), lease=0.6)
    for _ in range(8):
        status(client, renew=[["kept", 1]], lease_seconds=0.6)
        time.sleep(0.2)
    both = status(client)

    assert both["j", 1]["is_over"]
    assert both["j", 1]["note"] == "the lease ran out"
    assert not both["kept", 1]["is_over"]


def test_processes_die_with_their_agent_and_the_next_one_says_so(client, folder):
    launch(client, devices=(0, 1))
    agent = client.ask("hello")["pid"]
    running = pids(folder)
    os.kill(agent, signal.SIGKILL)
    until(lambda: not any(birth_of(pid) for pid in running))
    with pytest.raises(AgentGone):
        client.ask("hello")

    assert start_agent(folder, node="n0") != agent
    found = status(client)["j", 1]
    assert found["is_over"]
    assert set(found["exits"].values()) == {LOST_EXIT}
    assert not launch(client)["is_new"]


VANDAL = """
import os, pathlib, shutil, time
folder = pathlib.Path(os.environ["DRYSTONE_LEASE"]).parent
names = [path.name for path in folder.iterdir()] + ["ended.json"]
for name in {name for known in names for name in (known, f".{known}.part")}:
    path = folder / name
    path.unlink(missing_ok=True)
    WAY
print('done', flush=True)
time.sleep(600)
"""
WAYS = {
    "pipes": "os.mkfifo(path)",
    "folders": "path.mkdir(); (path / 'x').touch()",
    "devices": "path.symlink_to('/dev/zero')",
    "wrong": "path.write_text('[1, {\"exits\": 3}]')",
    "deep": "path.write_text('[' * 100_000)",
    "nothing": "pass",
}


@pytest.mark.parametrize("way", WAYS)
def test_whatever_a_job_makes_of_its_launch_s_files_its_neighbours_go_on(client, folder, way):
    launch(client, VANDAL.replace("WAY", WAYS[way]), job="vandal")
    launch(client, devices=(1,), job="neighbour")
    kept = folder / "launches" / "vandal.1"
    until(lambda: not (kept / "launch.json").is_file() or way in ("wrong", "deep"))
    until(lambda: len(status(client, renew=[["vandal", 1]], lease_seconds=60.0)) == 2)

    assert not status(client)["neighbour", 1]["is_over"]
    for job in ("vandal", "neighbour"):
        client.ask("stop", job_id=job, epoch=1, grace_seconds=0, note="enough")
        until(lambda job=job: status(client)[job, 1]["is_over"])
    again = Agent(folder, node="n0", idle_seconds=60.0)  # as if the first had died
    assert again._launches["neighbour", 1].is_over
    client.ask("forget", job_id="vandal", epoch=1)


def test_an_agent_outlives_whoever_started_it(tmp_path):
    code = (
        "import sys; from pathlib import Path\n"
        "from drystone.run.engines.agent.client import start_agent\n"
        "print(start_agent(Path(sys.argv[1]), node='n'))"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    client = AgentClient(tmp_path)
    assert client.ask("hello")["pid"] == int(told.stdout)
    client.ask("quit")
    client.close()
    until(lambda: not birth_of(int(told.stdout)))


def test_an_older_controller_is_refused(client, folder):
    newer = AgentClient(folder, controller=2)
    newer.ask("poll")
    with pytest.raises(AgentRefused, match="epoch 2") as refused:
        launch(client)
    assert refused.value.kind is RefusalKind.SUPERSEDED
    newer.close()


def test_reports_are_read_in_whole_lines_and_on_from_an_offset(client):
    code = (
        "import sys, time\n"
        "for n in range(3): print(n, flush=True)\n"
        "sys.stdout.write('half'); sys.stdout.flush()\n"
        "sys.stderr.write('it went wrong\\n'); sys.exit(3)"
    )
    launch(client, code)
    over = until(lambda: (one := status(client)["j", 1])["is_over"] and one)

    assert over["reports"] == "0\n1\n2\n"
    assert over["exits"] == {"0": 3}
    assert status(client, offsets={"j.1": over["offset"]})["j", 1]["reports"] == ""
    assert "it went wrong" in client.ask("tail", job_id="j", epoch=1)["text"]
    client.ask("forget", job_id="j", epoch=1)
    assert status(client) == {}
    assert client.ask("read", job_id="j", epoch=1, name="rank-0.log")["text"] == "it went wrong\n"


@pytest.mark.parametrize(
    "request_",
    [
        {"op": "dance"}, {"op": "launch"}, {"op": "stop", "job_id": "x", "epoch": 1}, {},
        {"op": "launch", "job_id": "../x", "epoch": 1, "ranks": []},
        {"op": "read", "job_id": "..", "epoch": 1, "name": "x"},
        {"op": "read", "job_id": "a", "epoch": 1, "name": "../../../x"},
    ],
)  # fmt: skip
def test_nonsense_is_refused(client, request_):
    with pytest.raises(AgentRefused) as refused:
        client.ask(request_.pop("op", "none"), **request_)
    assert refused.value.kind is RefusalKind.INVALID


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("epoch 1 of j still runs on n0", RefusalKind.BUSY),
        ("n0 is lost: its process has ended", RefusalKind.NODE_LOST),
        ("[Errno 28] No space left on device", RefusalKind.DISK_FULL),
        ("a controller of epoch 3 gave orders after you", RefusalKind.SUPERSEDED),
        ("there is no operation 'dance'", RefusalKind.INVALID),
    ],
)
def test_the_texts_of_an_agent_of_an_earlier_version_are_understood(tmp_path, text, kind):
    """It sends no kind; and it may still run when the controller is already a new one."""
    listener = listen(tmp_path)

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(json.dumps({"ok": False, "error": text}).encode() + b"\n")

    thread = threading.Thread(target=answer)
    thread.start()
    client = AgentClient(tmp_path)
    with pytest.raises(AgentRefused) as refused:
        client.ask("launch")
    client.close()
    thread.join()
    listener.close()
    assert refused.value.kind is kind


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_by_its_number_not_by_words(tmp_path, monkeypatch, number):
    agent = Agent(tmp_path, node="n0", idle_seconds=60.0)

    def fail(_: object) -> None:
        raise OSError(number, "nothing more can be written here")

    monkeypatch.setattr(agent, "_op_hello", fail)
    answer = server._answer(agent, b'{"op": "hello"}')
    assert (answer["ok"], answer["kind"]) == (False, "disk-full")


def test_a_command_that_is_not_there_is_said(client):
    with pytest.raises(AgentRefused, match="No such file"):
        client.ask(
            "launch", job_id="j", epoch=1, ranks=[{"rank": 0, "device": 0}],
            arguments=["/no/such/program"], lease_seconds=9,
        )  # fmt: skip


def test_an_agent_is_small(folder):
    client = AgentClient(folder)
    pid = client.ask("hello")["pid"]
    client.close()
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    resident = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

    assert resident < 60 * 1024
    loaded = Path(f"/proc/{pid}/maps").read_text()
    assert "numpy" not in loaded
    assert "pydantic" not in loaded


def test_an_old_process_cannot_write(tmp_path, monkeypatch):
    fence, lease = tmp_path / "deep" / "epoch", tmp_path / "lease"
    monkeypatch.setenv("DRYSTONE_FENCE", str(fence))
    monkeypatch.setenv("DRYSTONE_LEASE", str(lease))
    monkeypatch.setenv("DRYSTONE_EPOCH", "3")
    lease.write_text(json.dumps({"epoch": 3, "expires_seconds": time.time() + 60}))
    raise_fence(fence, 3)
    with writing(), pytest.raises(Fenced, match="held"):
        raise_fence(fence, 4, wait_seconds=0.05)
    raise_fence(fence, 4)
    with pytest.raises(Fenced, match="epoch 4"), writing():
        raise AssertionError("it may not come to this")
    with pytest.raises(Fenced, match="too late"):
        raise_fence(fence, 3)


def test_a_lease_is_checked(tmp_path, monkeypatch):
    lease = tmp_path / "lease"
    check_lease()
    monkeypatch.setenv("DRYSTONE_LEASE", str(lease))
    monkeypatch.setenv("DRYSTONE_EPOCH", "3")
    for text in (
        "", json.dumps({"epoch": 4, "expires_seconds": time.time() + 60}),
        json.dumps({"epoch": 3, "expires_seconds": time.time() - 1}),
        json.dumps({"epoch": 3, "expires_monotonic_seconds": time.monotonic() - 1}),
    ):  # fmt: skip
        lease.write_text(text)
        with pytest.raises(Fenced):
            check_lease()


@pytest.fixture
def remote(tmp_path):
    """An agent that other machines reach, and the process that stands for its node."""
    life = subprocess.Popen(["sleep", "600"])
    folder = tmp_path / "remote"
    folder.mkdir()
    secret = keep_secret(tmp_path / "secret")
    subprocess.run(
        [sys.executable, "-m", "drystone.run.engines.agent", str(folder), "far",
         "--listen", "127.0.0.1", "--secret", str(tmp_path / "secret"), "--life", str(life.pid)],
        check=True,
    )  # fmt: skip
    address = until(lambda: read_json(folder / "address.json"))
    where = Remote(host=address["host"], port=address["port"], secret=secret)
    client = AgentClient(where, controller=1)
    yield client, where, life
    with suppress(AgentGone):
        client.ask("quit")
    client.close()
    life.kill()
    life.wait()


def test_a_remote_agent_answers_only_those_who_know_the_secret(remote):
    client, where, _ = remote
    stranger = AgentClient(replace(where, secret="guess"))

    assert client.ask("hello")["node"] == "far"
    with pytest.raises(AgentGone):
        stranger.ask("hello")
    stranger.close()


def test_a_remote_agent_gives_out_a_free_port_once(remote):
    client, _, _ = remote
    ports = {client.ask("port")["port"] for _ in range(20)}

    assert len(ports) == 20


def test_an_agent_ends_with_what_stands_for_its_node_and_says_so(remote, tmp_path):
    client, _, life = remote
    ranks = [{"rank": 0, "device": 0, "environment": {}}]
    client.ask(
        "launch", job_id="1", epoch=1, ranks=ranks, arguments=["sleep", "600"], environment={},
        folder="", lease_seconds=600.0,
    )  # fmt: skip
    pid, _ = read_json(tmp_path / "remote" / "launches" / "1.1" / "processes.json")["0"]
    life.kill()
    life.wait()

    told = until(lambda: client.ask("poll")["leaving"])
    assert str(life.pid) in told
    until(lambda: client.ask("poll")["launches"][0]["is_over"])
    assert not birth_of(pid)
    with pytest.raises(AgentRefused, match="is lost") as refused:
        client.ask(
            "launch", job_id="2", epoch=1, ranks=ranks, arguments=["true"], lease_seconds=9.0
        )
    assert refused.value.kind is RefusalKind.NODE_LOST
