"""Real training under the controller: resized, damaged and adopted, it learns the same."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from systems import Running, running

from drystone.describe.files.job import make_job
from drystone.plan.rivals import plan_words
from drystone.run.control.notes import Launched, Learned
from drystone.run.events import Interrupted
from drystone.schedule.decision import Resize, Start

pytestmark = [pytest.mark.slow, pytest.mark.torch]

CLUSTER = """
nodes:
  - {gpu: A100, gpus_per_node: 2, emulate: {speed: 0.001, memory: 4GiB}}
  - {gpu: T4, gpus_per_node: 2, emulate: {speed: 0.001, memory: 4GiB}}
"""
PATIENT = {"hang_seconds": 120.0, "start_seconds": 240.0, "grace_seconds": 60.0}


class Wanted:
    """A policy for trials: the first job gets just these GPUs, (A100, T4)."""

    def __init__(self) -> None:
        self.counts = (1, 0)

    def __call__(self, snapshot, memory):
        if not len(snapshot.jobs):
            return [], memory
        sets = snapshot.options.counts[snapshot.jobs.option_set[0]]
        speeds = snapshot.job_speeds[0]
        option = next(
            row for row in range(len(sets)) if tuple(sets[row]) == self.counts and speeds[row] > 0
        )
        placement = tuple((node, count) for node, count in enumerate(self.counts) if count)
        now = int(snapshot.jobs.option[0])
        if now == option:
            return [], memory
        kind = Start if now < 0 else Resize
        job_id = snapshot.jobs.specs[0].id
        return [kind(job_id=job_id, option=option, placement=placement, reason="wanted")], memory


def submit(system: Running, steps: int, *, checkpoint_every: int = 3, **more) -> str:
    train = {"steps": steps, "batch": 12, "sequence": 16, "checkpoint_every": checkpoint_every}
    table = {"model": "mini-gpt", "train": train} | more
    return system.controller.submit(make_job(table, folder=system.folder))[0]


def losses(system: Running, job_id: str) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for report in system.reports(job_id):
        if report["event"] == "step":
            found.setdefault(report["step"], []).append(report["loss"])
    return found


def wait_for(system: Running, job_id: str, step: int) -> None:
    system.until(lambda: max(losses(system, job_id), default=0) >= step, seconds=240)


def test_a_resized_job_learns_what_an_uninterrupted_one_learns(tmp_path, monkeypatch):
    wanted = Wanted()
    monkeypatch.setattr("drystone.run.control.controller.find_policy", lambda _: wanted)
    with running(tmp_path / "s", CLUSTER, **PATIENT) as system:
        wanted.counts = (2, 0)
        # Who may not take fewer has all counts listed, also those that fewer GPUs would beat.
        job = submit(system, 18, gpus={"min": 2})
        for counts, after in (((2, 2), 4), ((2, 1), 10)):
            wait_for(system, job, after)
            wanted.counts = counts
            system.controller.journal.wake()
        assert system.wait_over(job, seconds=240) == ["done"]
        assert [len(one.devices) for one in system.events(job) if isinstance(one, Launched)] == [
            2, 4, 3,
        ]  # fmt: skip
        wanted.counts = (1, 0)
        alone = submit(system, 18)
        assert system.wait_over(alone, seconds=240) == ["done"]
        resized, straight = losses(system, job), losses(system, alone)
    assert sorted(resized) == sorted(straight) == list(range(1, 19))
    for step, [expected] in straight.items():
        assert resized[step] == pytest.approx([expected] * len(resized[step]), rel=1e-4)


DEEP = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 256, "max_position_embeddings": 256,
}  # fmt: skip


def test_a_pipeline_over_unlike_gpus_is_chosen_launched_and_learns_the_same(tmp_path, monkeypatch):
    cluster = """
nodes:
  - {gpu: A100, emulate: {speed: 0.001, memory: 4GiB}, gpus_per_node: 1}
  - {gpu: L40S, emulate: {speed: 0.001, memory: 4GiB}, gpus_per_node: 2}
"""
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "config.json").write_text(json.dumps(DEEP))
    train = {"steps": 4, "batch": 16, "sequence": 64}
    wanted = Wanted()
    monkeypatch.setattr("drystone.run.control.controller.find_policy", lambda _: wanted)
    with running(tmp_path / "s", cluster, **PATIENT) as system:
        found = []
        for counts in ((1, 2), (0, 1)):
            wanted.counts = counts
            more = {"gpus": {"min": sum(counts)}}  # then what fewer GPUs beat is listed too
            job = submit(system, 4, model=str(tmp_path / "deep"), train=train, **more)
            assert system.wait_over(job, seconds=240) == ["done"]
            [launched] = [event for event in system.events(job) if isinstance(event, Launched)]
            found.append((launched.plan, losses(system, job)))
    (piped, together), (_, alone) = found
    assert "1 A100-80GB-SXM" in piped
    assert "groups pp=" in piped
    assert sorted(together) == sorted(alone) == [1, 2, 3, 4]
    for step, [expected] in alone.items():
        assert together[step] == pytest.approx([expected], rel=1e-4)


def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(tmp_path, monkeypatch):
    wanted = Wanted()
    monkeypatch.setattr("drystone.run.control.controller.find_policy", lambda _: wanted)
    with running(tmp_path / "s", CLUSTER, **PATIENT) as system:
        job = submit(system, 14)
        wait_for(system, job, 8)
        system.controller.pause(job)
        system.until(lambda: not system.launches(), seconds=120)
        folder = system.folder / "jobs" / job / "checkpoints"
        newest = sorted(folder.glob("step-*"))[-1]
        damage(next(newest.glob("*.distcp")))
        before = sorted(folder.glob("step-*"))[-2]
        system.controller.resume(job)
        assert system.wait_over(job, seconds=240) == ["done"]
        started = [one["step"] for one in system.reports(job) if one["event"] == "started"]
        assert started == [0, int(before.name.removeprefix("step-"))]
        found = losses(system, job)
    assert sorted(found) == list(range(1, 15))
    for values in found.values():
        assert values == pytest.approx([values[0]] * len(values), rel=1e-5)


def test_a_killed_worker_of_a_gang_restarts_all_of_it_and_speeds_are_learned(tmp_path, monkeypatch):
    wanted = Wanted()
    wanted.counts = (2, 0)
    monkeypatch.setattr("drystone.run.control.controller.find_policy", lambda _: wanted)
    with running(tmp_path / "s", CLUSTER, **PATIENT) as system:
        job = submit(system, 16)
        wait_for(system, job, 7)
        launch = system.folder / "agents" / "a100-0" / "launches" / f"{job}.1"
        victim = json.loads((launch / "processes.json").read_text())["1"][0]
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        system.until(lambda: system.live.jobs[job].num_faults, seconds=60)
        noticed = time.monotonic() - killed
        assert system.wait_over(job, seconds=240) == ["done"]
        [fault] = [one for one in system.events(job) if isinstance(one, Interrupted)]
        assert fault.kind == "crash"
        assert "rank 1: died of SIGKILL" in fault.reason
        assert noticed < 30
        assert [one for one in system.events(job) if isinstance(one, Learned)]


def test_plans_that_the_estimate_cannot_tell_apart_are_tried_once(tmp_path, monkeypatch):
    wanted = Wanted()
    wanted.counts = (2, 0)
    monkeypatch.setattr("drystone.run.control.controller.find_policy", lambda _: wanted)
    with running(tmp_path / "s", CLUSTER, **PATIENT) as system:
        job = submit(system, 1100)
        system.until(lambda: kept_of(system, job), seconds=240)
        [learned] = kept_of(system, job)
        measured = {words: seconds for words, _, seconds in learned.trials}
        assert len(measured) >= 2
        assert learned.kept == min(measured, key=measured.get)
        journal = system.controller.journal
        with journal.lock:
            plan = journal.book.plan(system.live.jobs[job].job, (2, 0))
        assert plan_words(plan) == learned.kept
        wait_for(system, job, 2)
        assert min(losses(system, job)) == 1  # what was tried is no step of the job

        for counts in ((1, 0), (2, 0)):
            step = max(losses(system, job))
            wanted.counts = counts
            journal.wake()
            system.until(lambda n=counts[0]: num_devices(system, job) == n, seconds=240)
            wait_for(system, job, step + 2)
        assert [report["event"] for report in system.reports(job)].count("tried") <= 1
        assert len(kept_of(system, job)) == 1
        system.controller.cancel(job)


def num_devices(system: Running, job_id: str) -> int:
    return [len(one.devices) for one in system.events(job_id) if isinstance(one, Launched)][-1]


def kept_of(system: Running, job_id: str) -> list[Learned]:
    return [one for one in system.events(job_id) if isinstance(one, Learned) and one.kept]


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
