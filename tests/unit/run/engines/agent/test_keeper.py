"""Nothing of a job outlives its launch, whatever wraps it or runs away from it."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from drystone.run.engines.agent.client import AgentClient, AgentGone, start_agent
from drystone.run.engines.agent.environment import job_environment
from drystone.run.engines.agent.keeper import Command, KeptProcess, birth_of

SLEEPER = f"{sys.executable} -c 'import os, time; print(os.getpid(), flush=True); time.sleep(600)'"
# A shell that stays beside what it started; and a child in a session of its own, whose parent ends.
WRAPPED = f"{SLEEPER}; echo over"
ESCAPED = f"setsid {SLEEPER} & sleep 600"
ESCAPED_BARE = f"env -i setsid {SLEEPER} & sleep 600"


def until(condition, *, seconds: float = 20.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
    return found


def status(client):
    found = client.ask("poll")["launches"]
    return {(launch["job_id"], launch["epoch"]): launch for launch in found}


@pytest.fixture
def folder(tmp_path):
    start_agent(tmp_path / "a", node="n0")
    yield tmp_path / "a"
    with suppress(AgentGone):
        client = AgentClient(tmp_path / "a", controller=10**6)
        client.ask("quit")
        client.close()


def launched(folder, script: str) -> tuple[AgentClient, int]:
    """A client, and the process that tries to get away."""
    client = AgentClient(folder, controller=1)
    client.ask(
        "launch", job_id="j", epoch=1, ranks=[{"rank": 0, "device": 0}], lease_seconds=60.0,
        arguments=["bash", "-c", script], reports="rank-0.out",
    )  # fmt: skip
    return client, int(until(lambda: status(client)["j", 1]["reports"]))


@pytest.mark.parametrize("script", [WRAPPED, ESCAPED, ESCAPED_BARE])
def test_a_cancel_ends_also_what_left_the_group_and_the_session(folder, script):
    client, child = launched(folder, script)
    client.ask("stop", job_id="j", epoch=1, grace_seconds=0.3)
    until(lambda: status(client)["j", 1]["is_over"])
    client.close()
    assert not birth_of(child)


@pytest.mark.parametrize("script", [WRAPPED, ESCAPED, ESCAPED_BARE])
def test_an_agent_that_is_killed_takes_all_of_a_launch_along(folder, script):
    client, child = launched(folder, script)
    agent = client.ask("hello")["pid"]
    client.close()
    os.kill(agent, signal.SIGKILL)
    until(lambda: not birth_of(agent))
    start_agent(folder, node="n0")
    again = AgentClient(folder, controller=1)
    assert status(again)["j", 1]["is_over"]
    again.close()
    assert not birth_of(child)


def test_a_keeper_that_is_killed_leaves_nothing_to_stay(folder):
    client, child = launched(folder, ESCAPED_BARE)
    [[keeper, _]] = json.loads((folder / "launches/j.1/keepers.json").read_text()).values()
    os.kill(keeper, signal.SIGKILL)
    over = until(lambda: (found := status(client)["j", 1])["is_over"] and found)
    client.close()
    assert over["exits"] == {"0": -signal.SIGKILL}
    until(lambda: not birth_of(child))


class EndedAlready(subprocess.Popen):
    """Is a zombie before whoever started it goes on."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)


# An agent does not turn warnings into errors, which would keep a process from being waited for.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_how_a_rank_ended_is_known_however_soon_it_did(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", EndedAlready)  # also in the keeper, which is forked
    with (tmp_path / "out").open("ab") as file:
        rank = KeptProcess(
            Command(
                arguments=["sh", "-c", "exit 7"], environment={}, folder="", output=file, log=file
            )
        )
    try:
        assert until(lambda: [code] if (code := rank.poll()) is not None else []) == [7]
    finally:
        rank.kill()


def test_a_job_gets_what_programs_need_and_no_secret_of_the_service():
    secrets = ("PGPASSWORD", "AWS_SECRET_ACCESS_KEY", "DRYSTONE_TOKEN", "HF_TOKEN", "SLURM_JWT")
    given = dict.fromkeys(secrets, "secret") | {"PATH": "/bin", "NCCL_DEBUG": "INFO"}
    given |= {"https_proxy": "http://me:secret@proxy", "http_proxy": "http://proxy"}
    kept = {"PATH": "/bin", "NCCL_DEBUG": "INFO", "http_proxy": "http://proxy"}
    assert job_environment(given) == kept


def test_where_memory_runs_out_a_job_goes_before_its_agent_and_the_service(tmp_path):
    path = tmp_path / "b"
    agent = start_agent(path, node="n1")
    client = AgentClient(path, controller=1)
    client.ask(
        "launch", job_id="j", epoch=1, ranks=[{"rank": 0, "device": 0}], lease_seconds=60.0,
        arguments=["cat", "/proc/self/oom_score_adj"],
    )  # fmt: skip
    until(lambda: status(client)["j", 1]["is_over"])
    of_job = int(client.ask("read", job_id="j", epoch=1, name="rank-0.out")["text"])
    of_agent = int(Path(f"/proc/{agent}/oom_score_adj").read_text())
    client.ask("quit")
    client.close()
    assert of_job >= of_agent + 400


def test_neither_a_job_nor_its_agent_has_the_variables_of_who_started_them(tmp_path, monkeypatch):
    monkeypatch.setenv("PGPASSWORD", "hunter2")
    path = tmp_path / "b"
    agent = start_agent(path, node="n1")
    client = AgentClient(path, controller=1)
    client.ask(
        "launch", job_id="j", epoch=1, ranks=[{"rank": 0, "device": 0}], lease_seconds=60.0,
        arguments=["env"], environment={"MINE": "1"},
    )  # fmt: skip
    until(lambda: status(client)["j", 1]["is_over"])
    said = client.ask("read", job_id="j", epoch=1, name="rank-0.out")["text"]
    with open(f"/proc/{agent}/environ") as file:  # as root, who may read it
        environment = file.read() if os.getuid() == 0 else ""
    client.ask("quit")
    client.close()
    assert "MINE=1" in said
    assert "hunter2" not in said + environment
