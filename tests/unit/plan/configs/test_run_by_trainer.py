"""An exported config really trains: the Trainer on two processes, as Accelerate starts them.

Accelerate reads `accelerate.yaml` by its own launcher, down to the environment of the processes. On
processors it runs data parallelism only: how FSDP is asked for is checked in that environment.
"""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from drystone.describe.layout import Sharding
from drystone.describe.recipe import Optimizer, Precision, Recompute
from drystone.plan.configs.setup import Setup
from drystone.plan.configs.write import write_config

PLAN = Setup(
    model="gpt2", num_gpus=2, micro_batch=3, accumulation=2, recompute=Recompute.parse("full"),
    precision=Precision.BF16_MIXED, optimizer=Optimizer.ADAM,
)  # fmt: skip


def launched(folder: Path, setup: Setup) -> tuple[int, dict[str, str]]:
    """Processes, and their environment as Accelerate's own launcher makes it."""
    launch = pytest.importorskip("accelerate.commands.launch")
    from accelerate.utils.launch import prepare_multi_gpu_env

    path = folder / "accelerate.yaml"
    path.write_text(yaml.safe_dump(write_config(setup, "accelerate")))
    words = ["--config_file", str(path), "train.py"]
    arguments, _, _ = launch._validate_launch_command(
        launch.launch_command_parser().parse_args(words)
    )
    return arguments.num_processes, prepare_multi_gpu_env(arguments)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_trainer_does_what_the_plan_says(tmp_path):
    num_processes, variables = launched(tmp_path, PLAN)
    config = tmp_path / "train.yaml"
    config.write_text(yaml.safe_dump(write_config(PLAN, "trainer")))
    words = ["--standalone", f"--nproc-per-node={num_processes}"]
    script = [str(Path(__file__).with_name("two_steps.py")), str(config), str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words, *script],
        env=os.environ | variables | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.rpartition("answer: ")[2])

    assert told.pop("loss") == pytest.approx(math.log(64), rel=0.1)
    assert told == {
        "ranks": 2,
        "precision": "bf16",
        "micro_batches": [3] * 2 * 2,  # of this rank: two steps of two
        "recomputes": True,
        "steps": 2,
        "optimizer": "AdamW",
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("keeps", [False, True])
def test_fsdp_is_asked_for_as_planned(keeps, tmp_path):
    setup = replace(PLAN, sharding=Sharding.ZERO3, keep_gathered=keeps)
    _, variables = launched(tmp_path, setup)
    assert variables["ACCELERATE_USE_FSDP"] == "true"
    assert variables["FSDP_VERSION"] == "2"
    assert variables["FSDP_RESHARD_AFTER_FORWARD"] == str(not keeps).lower()
    assert variables["ACCELERATE_MIXED_PRECISION"] == "bf16"
