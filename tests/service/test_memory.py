"""Memory that runs out for real: the estimate is corrected, and another plan trains the job."""

import json

import pytest

pytest.importorskip("torch")

from systems import running

from drystone.describe.files.job import make_job
from drystone.run.control import launches as launching
from drystone.run.control.notes import Learned
from drystone.run.events import Interrupted

pytestmark = [pytest.mark.slow, pytest.mark.torch]


def test_a_job_that_ran_out_of_memory_is_planned_anew(tmp_path, monkeypatch):
    honest, calls = launching.emulation, []

    def first_too_small(plan, cluster):
        """The device has less memory than everybody thinks, once."""
        variables = honest(plan, cluster)
        calls.append(plan)
        if len(calls) == 1:
            told = json.loads(variables["DRYSTONE_EMULATE"])
            for device in told["gpus"].values():
                device["memory_bytes"] = 100_000
            variables["DRYSTONE_EMULATE"] = json.dumps(told)
        return variables

    monkeypatch.setattr(launching, "emulation", first_too_small)
    patience = {"hang_seconds": 120.0, "start_seconds": 240.0}
    cluster = "nodes: [{gpu: A100, gpus_per_node: 2, emulate: {speed: 0.002, memory: 4GiB}}]"
    with running(tmp_path / "s", cluster, **patience) as system:
        table = {"model": "mini-gpt", "train": {"steps": 6, "batch": 8, "sequence": 16}}
        made = make_job(table | {"gpus": {"max": 1}}, folder=system.folder)
        job, _ = system.controller.submit(made)
        assert system.wait_over(job, seconds=240) == ["done"]
        [fault] = [one for one in system.events(job) if isinstance(one, Interrupted)]
        lessons = [one for one in system.events(job) if isinstance(one, Learned)]

    assert fault.kind == "out-of-memory"
    assert "memory" in fault.reason
    assert max(one.memory_share for one in lessons) > 1.1
    need = [max(one.high_bytes for one in plan.needs) for plan in calls]
    assert len(need) == 2
