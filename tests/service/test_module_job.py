"""A Python function as a job's model: submitted, planned from its trace, trained, resumed."""

import pytest

pytest.importorskip("torch")

from systems import running

from drystone.describe.files.job import make_job
from drystone.errors import RequestError
from drystone.run.control.notes import Launched, parse, render

pytestmark = [pytest.mark.slow, pytest.mark.torch]

CLUSTER = """
nodes:
  - {gpu: A100, gpus_per_node: 1, emulate: {speed: 0.001, memory: 4GiB}}
  - {gpu: T4, gpus_per_node: 1, emulate: {speed: 0.001, memory: 4GiB}}
"""
PATIENT = {"hang_seconds": 120.0, "start_seconds": 240.0, "grace_seconds": 60.0}
FILE = """
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x):
        return x + self.up(self.norm(x))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(29, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(16, 29)

    def forward(self, tokens, following):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), following.flatten())

def build():
    return Model()

def broken():
    return nn.Linear(2, 2)
"""


def test_a_function_is_a_model(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "mine.py").write_text(FILE)
    train = {"steps": 12, "batch": 8, "sequence": 16, "checkpoint_every": 3, "learning_rate": 0.01}
    table = {"model": "mine.py:build", "train": train, "gpus": {"min": 2, "max": 2}}
    with running(tmp_path / "s", CLUSTER, **PATIENT) as system:
        with pytest.raises(RequestError, match="no list of repeated blocks"):
            system.controller.submit(make_job(table | {"model": "mine.py:broken"}, folder=tmp_path))
        job, _ = system.controller.submit(make_job(table, folder=tmp_path))
        described = system.events(job)[0]
        assert parse(render(described)) == described
        assert described.job.module.num_layers == 4

        assert system.wait_over(job, seconds=240) == ["done"]
        [launch] = [one for one in system.events(job) if isinstance(one, Launched)]
        assert {node for node, _ in launch.devices} == {"a100-0", "t4-1"}
        assert "uneven" in launch.plan
        steps = [one for one in system.reports(job) if one["event"] == "step"]
    assert [one["step"] for one in steps] == list(range(1, 13))
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert steps[0]["tokens"] == 8 * 16
