"""SkyPilot's task: its script really runs, on nodes whose `nvidia-smi` we say.

DRYSTONE_SKY_PYTHON names a Python that has SkyPilot 0.14.1: then its parser and its optimizer read
the task as well. It cannot be installed beside us, because it holds click and uvicorn back.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from drystone.describe.catalogue import find_gpu
from drystone.describe.machine import default_machine
from drystone.describe.model_source import resolve_model
from drystone.describe.pool import GpuGroup, make_pool
from drystone.describe.recipe import Recipe
from drystone.errors import InvalidSpec
from drystone.plan.plan import load_plan, save_plan
from drystone.plan.search import plan_data_parallel
from drystone.plan.uneven.data_parallel import plan_uneven
from drystone.run.kubernetes import ExportSettings
from drystone.run.skypilot_task import skypilot_task

NAMES = {"A100-80G": "NVIDIA A100-SXM4-80GB", "L40S": "NVIDIA L40S"}
REPORT = "sh -c 'echo rank $RANK of $WORLD_SIZE at $MASTER_ADDR with $DRYSTONE_PLAN'"


def make_plan(batch=32, **gpus):
    named = [(find_gpu(name.replace("_", "-")), count) for name, count in gpus.items()]
    pool = make_pool([GpuGroup(machine=default_machine(g, n), count=n) for g, n in named])
    model, recipe = resolve_model("gpt2"), Recipe(seq_len=1024, global_batch=batch)
    if len(gpus) > 1:
        return plan_uneven(model, recipe, pool)
    return next(
        plan
        for plan in plan_data_parallel(model, recipe, pool).plans
        if plan.num_gpus == pool.num_gpus
    )


@pytest.fixture(scope="module")
def plans():
    return make_plan(A100_80G=4), make_plan(L40S=4)


def run_node(task, folder: Path, *, device: str, rank: int):
    """One node of the cluster runs the task."""
    programs = folder / "bin"
    programs.mkdir(parents=True)
    stub = programs / "nvidia-smi"
    stub.write_text(f"#!/bin/sh\necho '{device}'\necho '{device}'\n")
    stub.chmod(0o755)
    surroundings = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "HOME": str(folder),
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NODE_RANK": str(rank),
    }
    return subprocess.run(
        ["bash", "-c", task["run"]], env=surroundings, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(("chosen", "rank"), [("A100-80G", 1), ("L40S", 0)])
def test_a_node_runs_its_ranks_of_the_plan_for_its_gpus(plans, chosen, rank, tmp_path):
    settings = ExportSettings(command=("sh", "-c", REPORT[7:-1]), gpus_per_pod=2)
    task = yaml.safe_load(yaml.safe_dump(skypilot_task(plans, settings)))

    assert task["num_nodes"] == 2
    assert task["resources"] == {
        "any_of": [{"accelerators": "A100-80GB:2"}, {"accelerators": "L40S:2"}]
    }
    done = run_node(task, tmp_path, device=NAMES[chosen], rank=rank)

    assert done.returncode == 0, done.stderr
    told = [f"rank {2 * rank + local} of 4 at 10.0.0.1 with plan.json" for local in (0, 1)]
    assert sorted(done.stdout.splitlines()) == told
    ran = load_plan(tmp_path / "drystone" / "plan.json")
    assert ran == plans[0 if chosen == "A100-80G" else 1]


def test_a_node_without_a_plan_says_so(plans, tmp_path):
    task = skypilot_task(plans, ExportSettings())
    done = run_node(task, tmp_path, device="NVIDIA A100-SXM4-40GB", rank=0)

    assert done.returncode == 2
    assert "No plan was made for NVIDIA A100-SXM4-40GB" in done.stderr


@pytest.mark.parametrize(
    ("gpus", "settings", "told"),
    [
        ([{"A100_80G": 4, "V100_32G": 2}], {}, "one GPU type, and this plan has 2"),
        ([{"A100_80G": 4}, {"L40S": 16}], {}, "1 of 4 A100-80GB-SXM, 2 of 8 L40S-48GB"),
        ([{"A100_80G": 4}, {"L40S": 4, "batch": 64}], {}, "not of one job"),
        ([{"A100_80G": 4}, {"A100_80G": 4}], {}, "two plans are for A100-80GB"),
        ([{"H20_96GB_SXM": 4}], {}, "no name of SkyPilot is known for H20-96GB-SXM"),
    ],
)
def test_what_one_task_cannot_say_is_refused(gpus, settings, told):
    with pytest.raises(InvalidSpec) as refusal:
        skypilot_task([make_plan(**one) for one in gpus], ExportSettings(**settings))

    assert told in refusal.value.message
    assert refusal.value.where


def test_the_command_writes_the_task(plans, tmp_path, capsys):
    from drystone.cli.main import run

    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for plan, path in zip(plans, paths, strict=True):
        save_plan(plan, path)
    words = ["export", str(paths[0]), "--also", str(paths[1])]

    assert run([*words, "--to", "skypilot", "--image", "registry.example/train:1"]) == 0
    task = yaml.safe_load(capsys.readouterr().out)
    assert task["resources"]["image_id"] == "docker:registry.example/train:1"
    assert "python -m drystone.run.train plan.json --steps 1000" in task["run"]
    assert run([*words, "--to", "jobset"]) == 2
    assert "--also goes with --to skypilot" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(
    not os.environ.get("DRYSTONE_SKY_PYTHON"), reason="DRYSTONE_SKY_PYTHON names no SkyPilot"
)
def test_skypilot_itself_reads_the_task_and_takes_the_cheapest(tmp_path):
    plans = make_plan(A100_80G=8), make_plan(L40S=8)
    path = tmp_path / "task.yaml"
    path.write_text(yaml.safe_dump(skypilot_task(plans, ExportSettings())))
    done = subprocess.run(
        [
            os.environ["DRYSTONE_SKY_PYTHON"],
            str(Path(__file__).parent / "real_skypilot_task.py"),
            str(path),
        ],
        env={**os.environ, "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"},
        capture_output=True, text=True, timeout=600, check=True,
    )  # fmt: skip
    told = json.loads(done.stdout.rpartition("answer: ")[2])

    assert told["num_nodes"] == 1
    assert told["accelerators"] == ["{'A100-80GB': 8}", "{'L40S': 8}"]
    assert told["chosen"] == "g6e.48xlarge"  # the cheaper one of the two
    assert told["mounts"] == {"/checkpoints": "gpt2-checkpoints"}
    assert told["run"] == yaml.safe_load(path.read_text())["run"]
