"""A job that changes GPUs trains until its new ranks are up, and hands over to them."""

import json
import os

import pytest

pytest.importorskip("torch")

from systems import Running, running
from test_kill import Controllers
from test_training import Wanted, losses, submit, wait_for

from drystone.run.control.notes import Launched

pytestmark = [pytest.mark.slow, pytest.mark.torch]

# A step takes a fifth of a second: the next launch comes up within some of them.
CLUSTER = """
nodes:
  - {gpu: A100, gpus_per_node: 2, emulate: {speed: 0.00015, memory: 4GiB}}
  - {gpu: T4, gpus_per_node: 2, emulate: {speed: 0.00015, memory: 4GiB}}
"""
PATIENT = {"hang_seconds": 120.0, "start_seconds": 240.0, "grace_seconds": 60.0}
NUM_KILLS = int(os.environ.get("DRYSTONE_NUM_RESIZE_KILLS", "6"))
FIRST_SEED = int(os.environ.get("DRYSTONE_FIRST_SEED", "1"))
MANY = 990  # steps: nobody waits for the last one, and no other plans are tried


@pytest.fixture
def wanted(monkeypatch) -> Wanted:
    policy = Wanted()
    monkeypatch.setattr("drystone.run.control.controller.find_policy", lambda _: policy)
    return policy


def resize(system: Running, wanted: Wanted, counts: tuple[int, int]) -> None:
    wanted.counts = counts
    system.controller.journal.wake()


def told(system: Running, job: str, *kinds: str) -> list[tuple[str, int]]:
    return [(one["event"], one["step"]) for one in system.reports(job) if one["event"] in kinds]


def wait_started(system: Running, job: str, number: int) -> int:
    """The step at which that launch began to train."""
    system.until(lambda: len(told(system, job, "started")) >= number, seconds=240)
    return told(system, job, "started")[number - 1][1]


def end(system: Running, wanted: Wanted, job: str) -> dict[int, list[float]]:
    """End the job, and compare what it learned with a run of as many steps that nobody resized."""
    system.controller.cancel(job)
    system.until(lambda: not system.launches(), seconds=120)
    found = losses(system, job)
    wanted.counts = (2, 0)
    alone = submit(system, max(found))
    assert system.wait_over(alone, seconds=480) == ["done"]
    straight = losses(system, alone)
    assert sorted(found) == sorted(straight)
    for step, [expected, *_] in straight.items():
        assert found[step] == pytest.approx([expected] * len(found[step]), rel=1e-4)
    return found


def test_ranks_hand_over_to_more_and_to_others_and_no_step_is_done_twice(tmp_path, wanted):
    with running(tmp_path / "s", CLUSTER, **PATIENT) as system:
        wanted.counts = (1, 0)
        job = submit(system, MANY, checkpoint_every=MANY)
        for number, counts in enumerate(((2, 0), (0, 2)), start=2):
            before = wait_started(system, job, number - 1)
            wait_for(system, job, before + 3)
            resize(system, wanted, counts)
            wait_started(system, job, number)
        wait_for(system, job, wait_started(system, job, 3) + 3)
        handed = [step for _, step in told(system, job, "handed_over")]
        assert [step for _, step in told(system, job, "started")] == [0, *handed]
        launched = [one for one in system.events(job) if isinstance(one, Launched)]
        assert [len(one.devices) for one in launched] == [1, 2, 2]
        found = end(system, wanted, job)
    assert {len(values) for values in found.values()} == {1}


def test_a_controller_killed_during_resizes_loses_nothing_and_does_nothing_twice(tmp_path, wanted):
    """`DRYSTONE_NUM_RESIZE_KILLS=200` kills as often, at other moments by `DRYSTONE_FIRST_SEED`."""
    folder = tmp_path / "s"
    folder.mkdir()
    (folder / "c.yaml").write_text(CLUSTER)
    train = {"steps": 1_000_000, "batch": 12, "sequence": 16, "checkpoint_every": 1_000_000}
    (folder / "wanted.json").write_text(json.dumps([{"model": "mini-gpt", "train": train}]))
    controllers, seed, num_kills = Controllers(folder, "restless"), FIRST_SEED, 0
    while num_kills < NUM_KILLS:
        num_kills += controllers.serve(seed)["code"] != 0
        seed += 1
    controllers.close()
    with running(folder, CLUSTER, **PATIENT) as system:
        wanted.counts = (2, 0)
        step = max(losses(system, "1"), default=0)
        wait_for(system, "1", step + 3)
        events = told(system, "1", "started", "handed_over", "left")
        launched = [one for one in system.events("1") if isinstance(one, Launched)]
        found = end(system, wanted, "1")
    assert {len(values) for values in found.values()} == {1}, events
    # Those that a controller did not live to see handed over went by a checkpoint.
    assert len(launched) > 1 + NUM_KILLS // 10
    assert any(event == "handed_over" for event, _ in events) or NUM_KILLS < 20
