"""What is Slurm's own: real training over its nodes, its signals, others' jobs, its refusals.

What every engine must do is in `conformance.py`, and runs on Slurm too.
"""

from pathlib import Path

import pytest
from engine_slurm import NODES, SlurmUnderTest, slurm_controller
from slurm_fixture import SlurmCluster, skip_without_slurm
from training import losses, train
from under_test import PATIENCE, LiveSystem

from drystone.errors import InvalidSpec
from drystone.run.control.controller import Controller
from drystone.run.control.notes import Launched
from drystone.run.events import Failed, Interrupted
from drystone.run.lifecycle import JobState

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("engine-slurm"),
    pytest.mark.second_try("Slurm"),
]

# People who are in a hurry take nodes from the others: Slurm asks those to leave, and ends them.
CONFIG = """SchedulerParameters=bf_interval=1,bf_window=60
SlurmdTimeout=15
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=urgent Nodes=ALL PriorityTier=10 Default=NO State=UP"""
PATIENT = {**PATIENCE, "hang_seconds": 120.0, "start_seconds": 240.0, "grace_seconds": 60.0}
TRAINED = {"steps": 16, "checkpoint_every": 2}


class Slurm(SlurmUnderTest):
    """With a partition for the hurried, and settings for one test."""

    patience_seconds = 240.0

    def start(self, folder: Path) -> None:
        skip_without_slurm()
        self._killed = set()
        self.more: dict = {}
        self.cluster = self._cluster = SlurmCluster(folder / "slurm", NODES, config=CONFIG)
        self.cluster.start()

    def make_controller(self, folder: Path) -> Controller:
        return slurm_controller(self.cluster, folder, **({"partitions": ("gpu",)} | self.more))


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    engine = Slurm()
    try:
        engine.start(tmp_path_factory.mktemp("slurm"))
        yield engine
    finally:
        if hasattr(engine, "_cluster"):
            engine.close()


@pytest.fixture
def system(slurm, tmp_path, request):
    slurm.more = getattr(request, "param", {})
    made = LiveSystem(slurm, tmp_path / "s")
    try:
        yield made
    finally:
        made.leave(ends_agents=True)
        slurm.cluster.run("scancel", "--user=root")
        slurm.cluster.until(lambda: not slurm.cluster.queue(), "jobs are left in Slurm")


def jobs_of(slurm: Slurm, name: str) -> list[str]:
    """Numbers of Slurm's jobs, with the components of heterogeneous ones: `7`, `8+0`, `8+1`."""
    lines = slurm.cluster.run("squeue", "-h", "-o", "%i %j").splitlines()
    return [line.split()[0] for line in lines if line.split()[1].endswith(name)]


@pytest.mark.torch
@pytest.mark.parametrize("system", [{"patience": PATIENT}], indirect=True)
def test_a_mixed_job_that_loses_a_node_learns_what_a_quiet_one_learns(system, slurm):
    pytest.importorskip("torch")
    quiet, job = train(system, **TRAINED, least=1), train(system, **TRAINED, least=2)
    system.place(quiet, {"v1": 1})
    system.place(job, {"w1": 2, "s1": 1}, {"w1": 1, "s2": 1})
    system.until(lambda: max(losses(system, job), default=0) >= 4, "steps of the mixed job")
    parts = jobs_of(slurm, f"-{job}.1")
    assert [one.partition("+")[2] for one in parts] == ["0", "1"]  # a heterogeneous job
    slurm.kill_node("s1")

    assert system.wait_over(job, quiet) == ["done", "done"]
    launches = [one for one in system.events(job) if isinstance(one, Launched)]
    assert [{node for node, _ in one.devices} for one in launches] == [
        {"w1", "s1"}, {"w1", "s2"},
    ]  # fmt: skip
    assert [len(one.devices) for one in launches] == [3, 2]
    [fault] = [one for one in system.events(job) if isinstance(one, Interrupted)]
    assert fault.kind == "node-lost"
    assert "slurmd" in fault.reason
    slurm.revive_node("s1")
    moved, straight = losses(system, job), losses(system, quiet)
    assert sorted(moved) == sorted(straight) == list(range(1, 17))
    for step, [expected] in straight.items():
        assert moved[step] == pytest.approx([expected] * len(moved[step]), rel=1e-4)
    system.until(lambda: "s1" in [one.id for one in system.nodes], "the dead node back")


def test_a_job_that_slurm_preempts_saves_and_goes_on_later(system, slurm):
    job = system.submit(steps=300)  # long enough for Slurm to preempt it on a busy machine
    system.place(job, {"w1": 2})
    system.wait_step(job, 7)
    hurried = slurm.cluster.run(
        "sbatch", "--parsable", "-p", "urgent", "-w", "w1", "--gres=gpu:2", "-o", "/dev/null",
        "--wrap", "sleep 600",
    ).strip()  # fmt: skip
    system.until(lambda: system.controller.find(job).state is JobState.QUEUED, "its leaving")
    [fault] = [one for one in system.events(job) if isinstance(one, Interrupted)]
    assert fault.kind == "preempted"
    assert "Slurm wants the GPUs back" in fault.reason
    assert fault.lost_samples == 0  # it saved where it was
    # The GPUs are somebody else's now: nothing is planned with them until they are free.
    assert system.controller.journal.taken == {"w1": 2}
    seen_by = system.controller.engine._inventory
    system.until(lambda: not seen_by.recalled, "the job that is in a hurry, seen on the GPUs")
    slurm.cluster.run("scancel", hurried)

    assert system.wait_over(job) == ["done"]
    steps = [line for line in system.audit(job) if " step " in line]
    assert len(steps) == 300  # none was done twice
    assert system.num_starts(job) == 2  # it did not queue behind the other


@pytest.mark.parametrize("system", [{"warning_seconds": 50}], indirect=True)
def test_the_signal_before_a_time_limit_is_a_checkpoint(system, slurm):
    job = system.submit(steps=20_000)
    system.place(job, {"s1": 1})
    system.wait_step(job, 3)
    [number] = jobs_of(slurm, f"-{job}.1")
    slurm.cluster.run("scontrol", "update", f"jobid={number}", "TimeLimit=1")  # minutes
    system.until(lambda: system.num_starts(job) == 2, "a second launch")
    [fault] = [one for one in system.events(job) if isinstance(one, Interrupted)]
    assert fault.kind == "preempted"
    assert fault.lost_samples == 0
    system.controller.cancel(job)


@pytest.mark.parametrize("system", [{"pins_nodes": False}], indirect=True)
def test_without_a_choice_of_nodes_types_and_numbers_are_asked_for(system, slurm):
    others = ["sbatch", "--parsable", "-w", "s1", "--gres=gpu:1", "-o", "/dev/null"]
    number = slurm.cluster.run(*others, "--wrap", "sleep 600").strip()
    system.until(lambda: sum(system.controller.journal.taken.values()) == 1, "others' GPU")
    [free] = [one for one in ("s1", "s2") if one not in system.controller.journal.taken]
    job = system.submit(steps=10)
    system.place(job, {free: 1, "w1": 1})

    mixed = system.submit(steps=10, mixed=True)
    system.place(job)
    system.place(mixed, {free: 1, "w1": 2})
    assert system.wait_over(mixed) == ["done"]
    folders = sorted(path.name for path in system.folder.glob(f"slurm/{mixed}.1/*/launches"))
    made = {path.parent.name for path in system.folder.glob(f"slurm/{mixed}.1/*/place.json")}
    assert made == {"s2", "w1"}, folders  # Slurm took the T4 that was free, whatever we called it
    slurm.cluster.run("scancel", number)


@pytest.mark.parametrize("system", [{"options": ("--constraint=nosuch",)}], indirect=True)
def test_what_sbatch_refuses_is_told(system):
    job = system.submit(steps=3)
    system.place(job, {"w1": 1})
    assert system.wait_over(job) == ["failed"]
    [failed] = [one for one in system.events(job) if isinstance(one, Failed)]
    assert "sbatch" in failed.reason
    assert "feature" in failed.reason.lower()


def test_drained_nodes_are_lost_and_come_back(system, slurm):
    slurm.cluster.run("scontrol", "update", "nodename=v1", "state=drain", "reason=fan")
    system.until(lambda: "v1" not in [one.id for one in system.nodes], "no drained node")
    slurm.cluster.run("scontrol", "update", "nodename=v1", "state=resume")
    system.until(lambda: "v1" in [one.id for one in system.nodes], "the node back")


def test_an_engine_that_is_not_known_is_refused(tmp_path):
    from drystone.cli.serve import EngineOptions, open_engine

    with pytest.raises(InvalidSpec, match="slurm"):
        open_engine(EngineOptions(engine="local", partition=["gpu"]), tmp_path)
