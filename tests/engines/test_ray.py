"""What is Ray's own: real training over raylets, one of them killed; locks that others respect.

What every engine must do is in `conformance.py`, and runs on Ray too.
"""

import json
from contextlib import suppress
from pathlib import Path

import pytest
from engine_ray import RayUnderTest, ray_controller
from training import losses, train
from under_test import LiveSystem

from drystone.describe.files.market import parse_market
from drystone.run.control.controller import Controller
from drystone.run.control.notes import Launched
from drystone.run.events import Interrupted, NodeRemoved
from drystone.run.lifecycle import JobState
from drystone.run.renting.joining import RayJoiner
from drystone.run.renting.provider import live_offers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("engine-ray"),
    pytest.mark.second_try("Ray"),
]

PATIENT = {"hang_seconds": 120.0, "start_seconds": 240.0, "grace_seconds": 60.0}
STEPS = 12
TRAINED = {"steps": STEPS, "checkpoint_every": 3}


class Ray(RayUnderTest):
    """For training that takes its time."""

    patience_seconds = 240.0

    def make_controller(self, folder: Path) -> Controller:
        self._folder = folder
        return ray_controller(self._cluster, folder, **PATIENT)

    def named(self, system: LiveSystem, name: str) -> str:
        """Drystone's name of a node of the fixture."""
        start = self._cluster.ray_id(name)[:6]
        return next(one.id for one in system.nodes if one.id.endswith(start))

    @property
    def cluster(self):
        return self._cluster


@pytest.fixture
def system(tmp_path):
    engine = Ray()
    engine.start(tmp_path)
    made = LiveSystem(engine, tmp_path / "s")
    try:
        made.reset()
        yield made
    finally:
        made.leave(ends_agents=True)


def ranks_alive(system: LiveSystem, job_id: str, epoch: int) -> list[int]:
    """Processes of a launch, whoever started them: found by their environment."""
    found = []
    for path in Path("/proc").iterdir():
        try:
            text = (path / "environ").read_bytes() if path.name.isdigit() else b""
            if text and (path / "stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                continue
        except OSError:
            continue
        variables = text.split(b"\0")
        mark = f"DRYSTONE_CHECKPOINTS={system.checkpoints(job_id)}".encode()
        if mark in variables and f"DRYSTONE_EPOCH={epoch}".encode() in variables:
            found.append(int(path.name))
    return found


@pytest.mark.torch
def test_a_mixed_job_whose_raylet_is_killed_learns_what_a_quiet_one_learns(system):
    pytest.importorskip("torch")
    engine = system.engine
    wide, small, spare, other = (
        engine.named(system, one) for one in ("wide", "small1", "small2", "other")
    )
    job, quiet = train(system, least=2, **TRAINED), train(system, least=1, **TRAINED)
    system.place(job, {wide: 1, small: 1}, {wide: 1, spare: 1})
    system.place(quiet, {other: 1})
    system.until(lambda: max(losses(system, job), default=0) >= 4, "steps of the mixed job")
    addresses = {one["MASTER_ADDR"] for one in environments(system, job, 1)}
    # Of the node of rank 0, which is not the controller's.
    assert addresses == {engine.cluster.ip_address("wide")} != {"127.0.0.2"}
    engine.kill_node(small)

    system.until(lambda: not ranks_alive(system, job, 1), "no orphan of the first launch")
    assert system.wait_over(job, quiet) == ["done", "done"]
    launches = [one for one in system.events(job) if isinstance(one, Launched)]
    assert [{node for node, _ in one.devices} for one in launches] == [{wide, small}, {wide, spare}]
    [fault] = [one for one in system.events(job) if isinstance(one, Interrupted)]
    assert fault.kind == "node-lost"
    [removed] = [one for one in system.events() if isinstance(one, NodeRemoved)]
    assert removed.time_seconds >= fault.time_seconds
    moved, straight = losses(system, job), losses(system, quiet)
    assert sorted(moved) == sorted(straight) == list(range(1, STEPS + 1))
    for step, [expected] in straight.items():
        assert moved[step] == pytest.approx([expected] * len(moved[step]), rel=1e-4)
    # What the dead node's ranks wrote can still be read, and the locks are given back.
    assert system.controller.read_log(job, epoch=1, rank=1, stream="out")[2] == 1
    system.until(lambda: not system.controller.engine.held(), "no lock")

    engine.cluster.revive("small1")
    system.until(lambda: len(system.nodes) == 4, "the node back, under another name")
    again = system.submit(steps=3)
    system.place(again, {engine.named(system, "small1"): 1})
    assert system.wait_over(again) == ["done"]


def environments(system: LiveSystem, job_id: str, epoch: int) -> list[dict[str, str]]:
    """The variables of the ranks of a launch that are alive."""
    found = []
    for pid in ranks_alive(system, job_id, epoch):
        text = Path(f"/proc/{pid}/environ").read_text()
        found.append(dict(one.partition("=")[::2] for one in text.split("\0") if one))
    return found


def test_gpus_that_another_user_of_ray_has_are_waited_for(system):
    from ray.util.placement_group import placement_group, remove_placement_group

    name, journal = system.engine.named(system, "small2"), system.controller.journal
    theirs = placement_group(
        [{"GPU": 1}],
        bundle_label_selector=[{"ray.io/node-id": system.engine.cluster.ray_id("small2")}],
    )
    assert theirs.wait(60)
    system.until(lambda: journal.taken == {name: 1}, "GPUs that are not ours to plan with")
    job, other = system.submit(steps=3), system.submit(steps=3)
    system.place(job, {name: 1})
    system.place(other, {system.engine.named(system, "wide"): 1})
    assert system.wait_over(other) == ["done"]
    assert system.state(job) is JobState.QUEUED
    remove_placement_group(theirs)

    assert system.wait_over(job) == ["done"]
    system.until(lambda: not system.controller.engine.held(), "no lock")


MARKET = "offers: [{name: t4, gpu: T4, num_gpus: 1, price_dollars_per_hour: 0.5}]"


def test_a_rented_node_is_attached_works_and_is_taken_out_by_the_next_controller(system, tmp_path):
    [offer] = live_offers(parse_market(MARKET), is_simulated=True)
    address, name = system.engine.cluster.address, "rented-t4-0000"
    joiner = RayJoiner(address, tmp_path / "rented")
    try:
        joiner.attach(name, offer)
        pid = json.loads((tmp_path / "rented" / f"{name}.json").read_text())["pid"]
        joiner.attach(name, offer)  # it is on its way already
        assert [one.name for one in tmp_path.glob("rented/*.json")] == [f"{name}.json"]
        assert json.loads((tmp_path / "rented" / f"{name}.json").read_text())["pid"] == pid
        system.until(lambda: name in [one.id for one in system.nodes], "the rented node")
        job = system.submit(steps=3)
        system.place(job, {name: 1})
        assert system.wait_over(job) == ["done"]
    finally:
        RayJoiner(address, tmp_path / "rented").detach(name, "it is given back")
        joiner.detach(name, "what is gone already is none")

    system.until(lambda: pid not in sessions(), "no process of the node")
    assert not (tmp_path / "rented" / f"{name}.json").exists()
    system.until(lambda: name not in [one.id for one in system.nodes], "the node gone")


def sessions() -> list[int]:
    """Of every process of this machine that lives."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
            found += [int(fields[3])] if fields[0] not in "ZX" else []
    return found
