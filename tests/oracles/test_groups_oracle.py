"""The search over pipelines of groups against every pipeline of the documented space."""

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from plain_groups import Oracle, model_of, pool_of

from drystone.describe.recipe import Recipe
from drystone.plan.groups.pipelines import plan_groups

CASES = [
    ("2xA100-80G,2xV100-32G", 2, model_of(4), 512, 4),
    ("4xT4,1xL4", 4, model_of(5), 1024, 4),
    ("3xA10G,2xT4", 4, model_of(6), 2048, 6),
    ("2xT4,2xP40", 2, model_of(6, ffn_size=16384), 1024, 8),
    ("4xL4,4xT4", 2, model_of(6, vocab_size=128000), 4096, 2),
    ("1xA100-80G,2xT4", 2, model_of(6, second=28672), 1024, 4),
]


@pytest.mark.parametrize(("text", "gpus_per_node", "model", "seq_len", "batch"), CASES)
def test_the_optimum_of_the_whole_space(text, gpus_per_node, model, seq_len, batch):
    pool = pool_of(text, gpus_per_node)
    recipe = Recipe(seq_len=seq_len, global_batch=batch)

    plan = plan_groups(model, recipe, pool)
    low, high = Oracle(model, recipe, pool).best()

    if plan is None:
        assert low == math.inf
    else:
        assert low * (1 - 1e-9) <= plan.step_seconds <= high * (1 + 1e-9)


def test_three_groups():
    pool = pool_of("1xA100-80G,2xT4,1xL4", 2)
    model, recipe = model_of(5), Recipe(seq_len=1024, global_batch=4)

    plan = plan_groups(model, recipe, pool)
    low, high = Oracle(model, recipe, pool).best()

    assert plan is not None
    assert low * (1 - 1e-9) <= plan.step_seconds <= high * (1 + 1e-9)
