"""A controller that is killed again and again loses nothing, and nothing runs twice."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from drystone.run.control.live_state import LiveState
from drystone.run.control.store import Store
from drystone.run.events import Started, Submitted
from drystone.run.lifecycle import JobState

HERE = Path(__file__).parent
CLUSTER = """
nodes:
  - {gpu: A100, gpus_per_node: 2, emulate: {speed: 0.0003, memory: 4GiB}}
  - {gpu: T4, gpus_per_node: 2, emulate: {speed: 0.0003, memory: 4GiB}}
"""
NUM_KILLS = int(os.environ.get("DRYSTONE_NUM_KILLS", "8"))
FIRST_SEED = int(os.environ.get("DRYSTONE_FIRST_SEED", "1"))
NUM_STEPS = 40


class Controllers:
    """One controller after the other; each is killed at the moment that its seed says."""

    def __init__(self, folder: Path, *more: str) -> None:
        self._errors = folder / "errors"
        command = [sys.executable, str(HERE / "deadly_serve.py"), str(folder)]
        with self._errors.open("w") as errors:
            self._nursery = subprocess.Popen(
                [*command, str(folder / "c.yaml"), *more],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip

    def serve(self, seed: int) -> dict:
        """Start one and wait for its end; one that hangs ends itself."""
        self._nursery.stdin.write(f"{seed}\n")
        self._nursery.stdin.flush()
        ended = json.loads(self._nursery.stdout.readline())
        assert ended["code"] in ((-9, 0) if seed else (0,)), self._errors.read_text()[-3000:]
        return ended

    def close(self) -> None:
        self._nursery.stdin.close()
        self._nursery.stdout.close()
        self._nursery.wait(timeout=30)


# What becomes of jobs, over and over again: most do nothing but train.
KINDS = ("plain", "plain", "killed", "plain", "paused", "plain", "broken", "cancelled")
FAULTS = {"killed": "kill", "broken": "bug"}
ENDS = {"cancelled": "cancelled", "broken": "failed"}


def make_wanted(num_jobs: int) -> list[dict]:
    return [
        {
            "name": (kind := KINDS[number % len(KINDS)]),
            "command": f"python {HERE / 'trainer.py'}",
            "train": {"steps": NUM_STEPS, "batch": 4},
            "gpus": {"max": 1 + number % 2},
            "environment": {"FAULT": FAULTS.get(kind, "")},
        }
        for number in range(num_jobs)
    ]


def check_audit(lines: list[str], *, is_done: bool) -> None:
    """One run at a time, every step done, none repeated but those after the last checkpoint."""
    assert not [line for line in lines if line.endswith("twice")], lines
    step, saved, epochs = 0, 0, []
    for line in lines:
        epoch, what, number = line.split()
        if what == "started":
            epochs.append(int(epoch))
            assert int(number) == saved, lines
            step = saved
        elif what == "step":
            assert int(epoch) == epochs[-1]
            assert int(number) == step + 1, lines
            step = int(number)
        else:
            saved = int(number)
    assert epochs == sorted(set(epochs))
    assert step == NUM_STEPS or not is_done, lines


@pytest.mark.slow
def test_a_controller_killed_at_any_event_loses_nothing(tmp_path):
    (tmp_path / "c.yaml").write_text(CLUSTER)
    causes, seed = defaultdict(int), FIRST_SEED
    controllers = Controllers(tmp_path)
    while sum(causes.values()) < NUM_KILLS:
        assert seed < FIRST_SEED + 2 * NUM_KILLS + 4, causes
        wanted = make_wanted(4 + 2 * (seed - FIRST_SEED))  # everybody finds something to do
        (tmp_path / "wanted.json").write_text(json.dumps(wanted))
        ended = controllers.serve(seed)
        if ended["code"]:  # else it had done everything before its time came
            causes[ended["cause"]] += 1
            (tmp_path / "causes.json").write_text(json.dumps(causes))
        seed += 1
    controllers.serve(0)
    controllers.close()

    store = Store(f"sqlite:///{tmp_path / 'log.db'}")
    events = [event for _, event in store.read()]
    rows = {row.id: row for row in store.list_jobs()}
    store.close()
    submitted = [event.job.id for event in events if isinstance(event, Submitted)]
    assert sorted(submitted, key=int) == [str(number + 1) for number in range(len(wanted))]
    for number, job in enumerate(wanted):
        row = rows[str(number + 1)]
        # A job that was over before anybody could cancel it is done, and rightly so.
        assert row.state in (ENDS.get(job["name"], "done"), "done"), row
        assert row.state == "failed" or job["name"] != "broken", row
        audit = tmp_path / "jobs" / row.id / "checkpoints" / "audit"
        lines = audit.read_text().splitlines() if audit.exists() else []
        check_audit(lines, is_done=row.state == "done")
    check_money(tmp_path, events)
    assert len(causes) >= min(4, NUM_KILLS)


def check_money(folder: Path, events: list) -> None:
    """What jobs cost is what their GPUs cost while they had them: nothing twice, nothing lost."""
    from drystone.describe.files.cluster import load_cluster_file

    cluster = load_cluster_file(folder / "c.yaml")
    live = LiveState(cluster)
    held, dollars = {}, 0.0
    for event in events:
        live.record(event)
        job_id = getattr(event, "job_id", "")
        if isinstance(event, Started):
            rate = sum(
                count * cluster.dollars_per_gpu_hour[cluster.nodes[node].gpu]
                for node, count in event.placement
            )
            held[job_id] = (event.time_seconds, rate)
        elif job_id in held and live.state.jobs[job_id].state is not JobState.RUNNING:
            since, rate = held.pop(job_id)
            dollars += rate * (event.time_seconds - since) / 3600
    total = sum(live.dollars_at(job_id, live.state.now_seconds) for job_id in live.jobs)
    assert total == pytest.approx(dollars)
    assert not held
