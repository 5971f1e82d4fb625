"""`why` has an answer for every job, also where ten thousand wait."""

import random

import pytest

from drystone.describe.files.cluster import parse_cluster
from drystone.describe.files.job import make_job
from drystone.describe.job import find_shape, make_spec
from drystone.run.control.controller import Controller, ControllerSettings
from drystone.run.control.notes import Described
from drystone.run.events import Submitted
from drystone.schedule.decision import find_policy
from drystone.service.why import explain

CLUSTER = """
nodes:
  - {gpu: A100, count: 4, gpus_per_node: 8, emulate: {speed: 0.0003, memory: 4GiB}}
  - {gpu: T4, count: 4, gpus_per_node: 8, emulate: {speed: 0.0003, memory: 4GiB}}
"""
KINDS = (
    {"command": "true", "train": {"steps": 1000, "batch": 1}, "gpus": {"max": 2}},
    {"model": "mini-gpt", "train": {"steps": 1000, "batch": 8, "sequence": 32}},
    {"model": "mini-gpt", "train": {"steps": 99, "batch": 8, "sequence": 32}, "priority": 3},
    {"model": "mini-gpt", "train": {"steps": 500, "batch": 16, "sequence": 32}, "deadline": "1h"},
)
NUM_JOBS = 10_000


@pytest.mark.slow
def test_a_hundred_of_ten_thousand_jobs_say_why_they_wait_or_run(tmp_path):
    controller = Controller(
        ControllerSettings(folder=tmp_path / "s", cluster=parse_cluster(CLUSTER))
    )
    try:
        fill(controller)
        one_round(controller)
        dice = random.Random(1)
        asked = [*sorted(dice.sample(range(1, NUM_JOBS + 1), 95)), 1, 2, 3, 4, NUM_JOBS]
        found = [explain(controller, str(number)) for number in asked]
    finally:
        controller.close()

    by_state = {"queued": 0, "running": 0}
    for number, why in zip(asked, found, strict=True):
        by_state[why.state] += 1
        assert why.id == str(number)
        assert why.sentence
        assert why.options
        if why.state == "queued":
            assert 1 <= why.position <= why.num_waiting
        else:
            assert why.decision.numbers
    assert by_state["queued"] > 50
    assert by_state["running"] > 0
    positions = [(int(why.id), why.position) for why in found if why.position]
    assert [one for _, one in sorted(positions)] == sorted(one for _, one in positions)


def fill(controller: Controller) -> None:
    """All of them at once: ten thousand requests would take a while."""
    journal = controller.journal
    jobs = [make_job(kind, folder=controller.settings.folder) for kind in KINDS]
    now, events = journal.now(), []
    for number in range(NUM_JOBS):
        job, job_id = jobs[number % len(jobs)], str(number + 1)
        spec = make_spec(job, find_shape(job), job_id=job_id, submit_seconds=now)
        events += [
            Described(time_seconds=now, job_id=job_id, job=job, client_key=""),
            Submitted(time_seconds=now, job=spec),
        ]
    journal.commit(events)


def one_round(controller: Controller) -> None:
    """One decision, written down; nothing is really started, for nobody looks at the agents."""
    snapshot = controller.world.observe()
    policy = controller._noting(find_policy("prices"))
    decisions, _ = policy(snapshot, None)
    for one in decisions:
        if type(one).__name__ == "Start":
            controller.world.launch(one.job_id, one.option, one.placement, one.reason)
