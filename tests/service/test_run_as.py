"""Jobs under accounts of their own: what is theirs they reach, and nothing else."""

import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest
from systems import running

from drystone.cli.serve import _check_run_as
from drystone.describe.files.cluster import parse_cluster
from drystone.describe.files.job import make_job
from drystone.errors import InvalidSpec
from drystone.run.control.admission import check_account
from drystone.run.control.controller import ControllerSettings
from drystone.run.engines.agent.accounts import account_name, find_account
from drystone.run.engines.agent.cgroups import end_group, is_in_group, make_group
from drystone.service.server import Network, serve

ACCOUNT = "nobody"
SCRIPT = """
id -un; id -Gn; echo HOME=$HOME USER=$USER
for name in log.db session.key agents jobs uploads jobs/1/epoch-1/launch.json; do
    cat "$SERVICE/$name" >/dev/null 2>&1 && echo "read $name"
    ls "$SERVICE/$name" >/dev/null 2>&1 && [ -d "$SERVICE/$name" ] && echo "listed $name"
done
cat $SERVICE/agents/*/launches/*/launch.json 2>/dev/null
cat $SERVICE/agents/t4-0/launches/1.1/launch.json 2>/dev/null && echo "read an order"
cat "$DRYSTONE_LEASE" >/dev/null && echo lease
: 1<>"$DRYSTONE_FENCE" && echo fence
echo saved > "$DRYSTONE_CHECKPOINTS/saved" && echo checkpoint
echo '{"event": "started", "step": 0}' >> "$DRYSTONE_PROGRESS"
echo '{"event": "step", "step": 2}' >> "$DRYSTONE_PROGRESS"
echo '{"event": "finished", "step": 2}' >> "$DRYSTONE_PROGRESS"
"""
CLUSTER = "nodes: [{gpu: T4, gpus_per_node: 1, emulate: {speed: 0.0003, memory: 4GiB}}]"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="left out: other accounts need root")


@pytest.fixture
def folder():
    """Below no folder that is closed to others, as those of pytest are."""
    made = Path(tempfile.mkdtemp(prefix="drystone-run-as-"))
    made.chmod(0o711)
    yield made
    shutil.rmtree(made)


@as_root
@pytest.mark.slow
def test_a_job_runs_as_its_submitter_and_reaches_only_what_is_its_own(folder):
    work = folder / "work"
    work.mkdir(mode=0o755)
    (work / "job.sh").write_text(SCRIPT)
    before = os.umask(0o022)
    try:
        with running(folder / "s", CLUSTER, settings={"run_as": "submitter"}) as system:
            job = system.submit(
                command=f"sh {work / 'job.sh'}", steps=2, owner=ACCOUNT, folder=work,
                environment={"SERVICE": str(folder / "s"), "SECRET": "hunter2"},
            )  # fmt: skip
            assert system.wait_over(job) == ["done"]
            said = system.controller.read_log(job, epoch=1, offset=0, stream="out")[0]
            saved = system.folder / "jobs" / job / "checkpoints" / "saved"
            assert saved.owner() == ACCOUNT
            with pytest.raises(InvalidSpec, match="there is no account 'mallory'"):
                system.submit(command="true", owner="mallory")
    finally:
        os.umask(before)
    home = find_account(ACCOUNT).home
    told = [ACCOUNT, "nogroup", f"HOME={home} USER={ACCOUNT}", "lease", "fence", "checkpoint"]
    assert said.splitlines() == told


def test_who_may_be_run_as():
    assert account_name("", "ada") == ""
    assert account_name("training", "ada") == "training"
    assert account_name("submitter", "ada") == "ada"
    with pytest.raises(InvalidSpec, match="jobs do not run as root"):
        find_account("root")
    with pytest.raises(InvalidSpec, match="there is no account"):
        find_account("no\0body")
    with pytest.raises(InvalidSpec, match="slurm has accounts of its own"):
        _check_run_as("submitter", "slurm")
    _check_run_as("", "slurm")


def test_code_that_would_run_as_the_service_is_refused(tmp_path):
    (tmp_path / "m.py").write_text("def build(): ...")
    table = {"model": "m.py:build", "train": {"steps": 1}}
    job = make_job(table, folder=tmp_path, owner=ACCOUNT)
    with pytest.raises(InvalidSpec, match="is looked at before the job is taken in"):
        check_account("submitter", job)
    check_account("", job)


def test_without_a_token_no_port_is_opened_for_jobs_of_other_accounts(tmp_path):
    before = os.umask(0o022)
    settings = ControllerSettings(
        folder=tmp_path / "s", cluster=parse_cluster(CLUSTER), run_as="submitter"
    )
    try:
        with pytest.raises(InvalidSpec, match="whose account"):
            serve(settings, network=Network(port=1))
    finally:
        os.umask(before)


def test_a_group_of_the_kernel_holds_what_left_its_parents():
    group = make_group(f"test-{os.getpid()}")
    if group is None:
        pytest.skip("left out: no cgroups v2 that this user may divide (run as root)")
    reading, writing = os.pipe()
    if os.fork() == 0:
        (group / "cgroup.procs").write_text("0")
        os.setsid()
        if os.fork() == 0:  # whose parent ends at once
            os.setsid()
            os.write(writing, f"{os.getpid()}\n".encode())
            time.sleep(60)
        os._exit(0)
    os.wait()
    pid = int(os.read(reading, 20))
    assert is_in_group(pid)
    assert not is_in_group(os.getpid())
    end_group(group)
    assert not group.exists()
    deadline = time.monotonic() + 5
    while is_in_group(pid):  # killed, and perhaps not yet buried
        assert time.monotonic() < deadline
        time.sleep(0.01)
