"""Every kind of plan that the planner has for a few GPUs runs to the end under NCCL's rules."""

import itertools
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent))
from nccl_rules import NCCL_ONE_STREAM, NCCL_RULES
from ranks import run_ranks

from drystone.describe.pool import parse_pool
from drystone.plan.plan import save_plan
from drystone.run.train.collectives import Wire
from drystone.run.train.config import RankConfig
from drystone.run.train.verify import run_folder
from drystone.run.verify.plans import ON_PROCESSOR, every_kind_of_plan, recipe_for, small_model
from drystone.run.verify.ranks import losses_of, rank_gpus, read_reports

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default"), pytest.mark.slow]

# Tied heads, a mixed pool and both sets of rules; all of it takes many minutes on a small machine.
TRIED = [
    ("2xT4", True, NCCL_RULES),
    ("4xA100-80G", True, NCCL_ONE_STREAM),
    ("2xA100-80G,2xT4", False, NCCL_RULES),
]
if os.environ.get("DRYSTONE_ALL_PLANS"):
    pools = ("2xT4", "4xA100-80G", "2xA100-80G,2xT4", "8xT4", "4xA100-80G,4xT4")
    TRIED = list(itertools.product(pools, (False, True), (NCCL_RULES, NCCL_ONE_STREAM)))


def train_all(folder: Path) -> None:
    run_folder(folder, RankConfig(num_steps=2, seed=7), Wire())


@pytest.mark.parametrize(("gpus", "is_tied", "backend"), TRIED)
def test_every_kind_of_plan_ends_and_all_have_the_same_losses(tmp_path, gpus, is_tied, backend):
    pool = parse_pool(gpus)
    model = small_model(ON_PROCESSOR, is_tied=is_tied)
    plans = every_kind_of_plan(model, recipe_for(ON_PROCESSOR, pool, is_emulated=True), pool)
    assert len(plans) >= 2
    for index, plan in enumerate(plans.values()):
        save_plan(plan, tmp_path / f"{index:03d}.plan")

    run_ranks(train_all, len(rank_gpus(plan)), tmp_path, backend=backend)

    losses = [
        losses_of(read_reports(tmp_path / f"{index:03d}.reports")) for index in range(len(plans))
    ]
    for name, found in zip(plans, losses, strict=True):
        assert found == pytest.approx(losses[0], rel=1e-5), name
        assert len(found) == 2, name
