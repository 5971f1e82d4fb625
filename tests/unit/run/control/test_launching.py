"""A plan in a few words, as `why`, `show` and the page say it."""

import pytest

from drystone.describe.model_source import find_model
from drystone.describe.pool import parse_pool
from drystone.describe.recipe import Recipe
from drystone.plan.plan import Plan
from drystone.plan.search import plan_executable
from drystone.run.control.launches import Seat, describe_plan


@pytest.mark.parametrize(
    ("pool", "model", "words"),
    [
        ("1xA100-80G", "gpt2", "1 A100-80GB-SXM, even, batches 1x16"),
        ("2xA100-80G", "llama-3-8b", "2 A100-80GB-SXM, cell tp=2, batches 2x16"),
        (
            "1xA100-80G,1xV100-32G",
            "gpt2",
            "1 A100-80GB-SXM + 1 V100-32GB-SXM, uneven, batches 1x16/1x0",
        ),
    ],
)
def test_a_plan_is_uneven_only_if_it_is_and_a_cell_says_how_it_is_split(pool, model, words):
    gpus = parse_pool(pool)
    plan = plan_executable(find_model(model), Recipe(seq_len=512, global_batch=16), gpus)
    kinds = [group.gpu.name for group in gpus.groups for _ in range(group.count)]
    seats = [Seat(node="n", gpu=gpu, device=at) for at, gpu in enumerate(kinds)]

    assert isinstance(plan, Plan)
    assert describe_plan(plan, seats) == words
    assert describe_plan(None, seats).endswith(", own script")
