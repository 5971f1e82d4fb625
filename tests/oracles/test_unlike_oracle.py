"""Cells with unlike stages against every way to divide a few GPUs and layers into stages."""

import itertools
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from plain_groups import Oracle, compositions, model_of, pool_of

from drystone.describe.model_source import find_model
from drystone.describe.pool import Pool, parse_pool
from drystone.describe.recipe import Precision, Recipe
from drystone.estimate.time.speed import prepare
from drystone.plan.cells.search import RECOMPUTES
from drystone.plan.cells.unlike import plan_unlike_stages
from drystone.plan.executable import marked
from drystone.plan.groups.splits import full_splits
from drystone.run.train.cells.layout import cell_layout


class UnlikeOracle(Oracle):
    """All stages of all sizes: any GPUs, any tensor parallelism, any layers."""

    def best(self) -> tuple[float, float]:
        low = high = math.inf
        [group], batch = self.pool.groups, self.recipe.global_batch
        sizes = tuple(size for size in range(1, batch + 1) if batch % size == 0)
        counts = tuple(range(1, group.count + 1))
        host = prepare(self.model, self.recipe, group.machine, None).step_host_seconds
        for index, recompute in enumerate(RECOMPUTES):
            recipe = replace(self.recipe, recompute=recompute)
            splits = full_splits(self.model, recipe, group, self.pool.between, sizes, counts)
            single = [row for row in range(len(splits.tp)) if splits.num_stages[row] == 1]
            for size, number in itertools.product(sizes, counts[1:]):
                for gpus in compositions(group.count, number):
                    kinds = [
                        [
                            row
                            for row in single
                            if splits.micro_batch[row] == size and splits.num_gpus[row] == count
                        ]
                        for count in gpus
                    ]
                    for chosen in itertools.product(*kinds):
                        for seconds in self.times(splits, chosen, index, batch // size):
                            low, high = min(low, seconds[0] + host), min(high, seconds[1] + host)
        return low, high

    @staticmethod
    def other(splits, stages, i) -> float:
        """Within a node every stage sends over the same links."""
        row, seconds = stages[i], splits.seconds
        send = seconds.outer_send[row] if len(stages) > 1 else 0.0
        head = seconds.head[row] if i == len(stages) - 1 else 0.0
        return send + head + (seconds.embedding[row] if i == 0 else 0.0)


CASES = [
    ("2xT4", model_of(4), 1024, 4),
    ("3xT4", model_of(5, ffn_size=16384), 2048, 4),
    ("3xA100-80G", model_of(5, vocab_size=256000), 2048, 8),
    ("4xL4", model_of(6, vocab_size=256000), 4096, 4),
    ("5xA10G", model_of(5, ffn_size=16384), 4096, 4),
    ("4xT4", model_of(6, second=28672), 1024, 4),
]


@pytest.mark.parametrize(("text", "model", "seq_len", "batch"), CASES)
def test_no_division_into_stages_is_faster(text, model, seq_len, batch):
    pool = pool_of(text, 8)
    [group] = pool.groups
    within = replace(group, machine=replace(group.machine, inter=group.machine.intra))
    mine = Pool(groups=(within,), between=group.machine.intra)
    recipe = Recipe(seq_len=seq_len, global_batch=batch, precision=Precision.FP16_MIXED)

    plan = plan_unlike_stages(model, recipe, group)
    low, high = UnlikeOracle(model, recipe, mine).best()

    if plan is None:
        assert low == math.inf
    else:
        assert low * (1 - 1e-9) <= plan.step_seconds <= high * (1 + 1e-9)
        assert plan.num_gpus == group.count


def test_a_limit_changes_nothing_but_whether_there_is_an_answer():
    pool, model = pool_of("5xT4", 8), model_of(6, vocab_size=128000)
    recipe = Recipe(seq_len=1024, global_batch=8, precision=Precision.FP16_MIXED)
    plan = plan_unlike_stages(model, recipe, pool.groups[0])
    assert plan is not None

    above = plan_unlike_stages(
        model, recipe, pool.groups[0], below_seconds=plan.step_seconds * 1.01
    )
    assert above is not None
    assert above.stages == plan.stages
    seconds = plan.step_seconds
    assert plan_unlike_stages(model, recipe, pool.groups[0], below_seconds=seconds) is None


@pytest.mark.parametrize(
    ("name", "text", "batch"),
    [
        ("llama-3-8b", "7xA100-80G", 64),
        ("qwen2.5-14b", "10xL40S", 60),
        ("gemma-2-9b", "16xL4", 64),
        ("llama-3-70b", "36xA100-80G", 128),
    ],
)
def test_plans_are_executed_fit_and_keep_tensor_parallel_ranks_in_a_node(name, text, batch):
    [group] = parse_pool(text).groups
    recipe = Recipe(seq_len=4096, global_batch=batch, precision=Precision.BF16_MIXED)
    plan = plan_unlike_stages(find_model(name), recipe, group)

    assert plan is not None
    assert (
        len({(stage.dp, stage.tp, stage.end_layer - stage.first_layer) for stage in plan.stages})
        > 1
    )
    assert plan.fits
    assert not marked(plan).not_executable
    layout, node = cell_layout(plan), group.machine.gpus_per_node
    assert layout.num_ranks == group.count
    for stage in layout.stages:
        for dp_index in range(stage.dp):
            ranks = [stage.rank(dp_index, tp_index) for tp_index in range(stage.tp)]
            assert len({rank // node for rank in ranks}) == 1
