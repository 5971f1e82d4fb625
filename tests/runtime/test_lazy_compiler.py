"""A rank trains without torch's compiler, and whoever compiles finds it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent))
from command_cases import a_plan, events, rendezvous

from drystone.plan.plan import save_plan
from drystone.run.train.__main__ import main

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.filterwarnings("default")]

# In processes of their own: what was imported stays.
TRAIN = """
import sys
from drystone.run.train.__main__ import main
assert main(sys.argv[1:]) == 0
assert not any(one.startswith("torch._dynamo.") for one in sys.modules)
"""
COMPILE = """
import sys
import torch
from drystone.run.train import lazy_compiler

lazy_compiler.install()
stand_in = torch._dynamo
function = torch.optim.Optimizer.add_param_group.__wrapped__
torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
assert function.__dict__["__dynamo_disable"] is function
assert not hasattr(stand_in, "__warningregistry__")
assert sys.modules["torch._dynamo"] is stand_in

import torch._dynamo.config as config  # a part of it
real = sys.modules["torch._dynamo"]
assert real is not stand_in and real is torch._dynamo
assert config is real.config is sys.modules["torch._dynamo.config"] is stand_in.config
assert config.__spec__.origin == config.__file__
assert not any(type(one).__module__ == lazy_compiler.__name__ for one in sys.meta_path)

seen = []
def backend(graph, inputs):
    seen.append(graph)
    return graph.forward
compiled = torch.compile(lambda x: x * 2 + 1, backend=backend)
assert compiled(torch.ones(2)).tolist() == [3.0, 3.0] and len(seen) == 1
torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
assert function.__dict__["__dynamo_disable"] is not function  # the real one was asked again
"""


def run_apart(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False,
        timeout=120, env={**os.environ, **rendezvous(1), "RANK": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses_of(text: str) -> list[float]:
    return [one["loss"] for one in events(text) if one["event"] == "step"]


def test_training_needs_no_compiler_and_learns_the_same(tmp_path: Path, capsys):
    save_plan(a_plan([(4, 2, 1.0)]), tmp_path / "plan.json")
    command = [str(tmp_path / "plan.json"), "--steps", "3", "--checkpoints"]

    apart = run_apart(TRAIN, *command, str(tmp_path / "lazy"))
    assert main([*command, str(tmp_path / "plain")]) == 0

    assert len(losses_of(apart)) == 3
    assert losses_of(apart) == losses_of(capsys.readouterr().out)


def test_whoever_compiles_gets_the_real_one():
    run_apart(COMPILE)
