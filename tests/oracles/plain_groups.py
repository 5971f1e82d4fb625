"""Every pipeline over groups of the documented space, in plain loops."""

import itertools
import math
from dataclasses import replace
from functools import cache

import numpy as np

from drystone.describe.catalogue import find_gpu
from drystone.describe.layout import Layouts
from drystone.describe.machine import default_machine
from drystone.describe.model import Attention, Block, Mlp, ModelSpec
from drystone.describe.pool import GpuGroup, make_pool
from drystone.estimate.memory.peak import estimate_memory
from drystone.estimate.time.speed import prepare
from drystone.plan.cells.search import RECOMPUTES
from drystone.plan.groups.splits import group_sharding, group_splits, join_splits

ATTENTION = Attention(num_heads=16, num_kv_heads=4, head_dim=128)


def model_of(num_layers: int, *, ffn_size=8192, vocab_size=32000, second=None) -> ModelSpec:
    block = Block(attention=ATTENTION, feed_forward=Mlp(ffn_size=ffn_size, gated=True))
    stack = ((block, num_layers),)
    if second:
        wide = replace(block, feed_forward=Mlp(ffn_size=second, gated=True))
        stack = ((block, num_layers // 2), (wide, num_layers - num_layers // 2))
    return ModelSpec(name="small", hidden_size=2048, stack=stack, vocab_size=vocab_size)


def pool_of(text: str, gpus_per_node: int):
    groups = []
    for part in text.split(","):
        count, name = part.split("x", 1)
        machine = default_machine(find_gpu(name), gpus_per_node)
        groups.append(GpuGroup(machine=machine, count=int(count)))
    return make_pool(groups)


def compositions(total: int, parts: int):
    for cuts in itertools.combinations(range(1, total), parts - 1):
        yield tuple(int(one) for one in np.diff((0, *cuts, total)))


class Oracle:
    """Plain loops; costs of stages are those of `group_splits`, memory is estimated anew."""

    def __init__(self, model, recipe, pool):
        self.model, self.recipe, self.pool = model, recipe, pool
        self.fits = cache(self._fits)

    def _fits(self, recompute, group, tp, dp, local, pp, stage, layers) -> bool:
        gpu = self.pool.groups[group].gpu
        layouts = Layouts.build(
            dp=dp, tp=tp, pp=pp, micro_batch=local, sharding=group_sharding(np.array([dp])),
            sequence_parallel=tp > 1,
        )  # fmt: skip
        recipe = replace(self.recipe, recompute=RECOMPUTES[recompute])
        memory = estimate_memory(self.model, recipe, layouts, stage=stage,
                                 layers=layers, gpu=gpu)  # fmt: skip
        return bool(memory.fits(gpu)[0])

    def best(self) -> tuple[float, float]:
        """The optimum where ties between divisions of layers turn out well, and badly."""
        low = high = math.inf
        groups, batch = self.pool.groups, self.recipe.global_batch
        sizes = tuple(one for one in range(1, min(batch, 64) + 1) if batch % one == 0)
        host = max(
            one.step_host_seconds
            for one in (prepare(self.model, self.recipe, group.machine, None) for group in groups)
        )
        for index, recompute in enumerate(RECOMPUTES):
            recipe = replace(self.recipe, recompute=recompute)
            splits = join_splits(
                [group_splits(self.model, recipe, g, self.pool.between, sizes) for g in groups]
            )
            rows = range(len(splits.tp))
            for size in sizes:
                mine = [
                    [
                        r
                        for r in rows
                        if splits.micro_batch[r] == size and splits.group_index[r] == g
                    ]
                    for g in range(len(groups))
                ]
                for order in itertools.permutations(range(len(groups))):
                    for chosen in itertools.product(*(mine[g] for g in order)):
                        for seconds in self.times(splits, chosen, index, batch // size):
                            low, high = min(low, seconds[0] + host), min(high, seconds[1] + host)
        return low, high

    def times(self, splits, chosen, recompute, num_micro):
        stages = [row for row in chosen for _ in range(splits.num_stages[row])]
        if len(stages) > self.model.num_layers:
            return
        gpus = sum(splits.num_stages[r] * splits.tp[r] * splits.dp[r] for r in chosen)
        wait = 0.02 * math.sqrt(2 * math.log(gpus))
        found = []
        for layers in compositions(self.model.num_layers, len(stages)):
            if not self.all_fit(splits, stages, layers, recompute):
                continue
            seconds = [
                layers[i] * splits.seconds.layer[row] + self.other(splits, stages, i)
                for i, row in enumerate(stages)
            ]
            slowest, total = max(seconds), sum(seconds)
            step = num_micro * (1 + wait) * slowest + total - slowest
            found.append((slowest, total, step + self.tail(splits, stages, layers)))
        if found:
            least = min(found)
            ties = [
                step for slowest, total, step in found
                if math.isclose(slowest, least[0], rel_tol=1e-9)
                and math.isclose(total, least[1], rel_tol=1e-9)
            ]  # fmt: skip
            yield min(ties), max(ties)

    def all_fit(self, splits, stages, layers, recompute) -> bool:
        ends = np.cumsum(layers)
        return all(
            self.fits(
                recompute, int(splits.group_index[row]), int(splits.tp[row]), int(splits.dp[row]),
                int(splits.local_micro[row]), len(stages), i,
                (int(ends[i] - layers[i]), int(ends[i])),
            )
            for i, row in enumerate(stages)
        )  # fmt: skip

    @staticmethod
    def other(splits, stages, i) -> float:
        """Sends, head and embedding of the i-th stage."""
        row, sends = stages[i], [0.0]
        for j in (i - 1, i + 1):
            if 0 <= j < len(stages):
                same = splits.group_index[stages[j]] == splits.group_index[row]
                sends.append(
                    (splits.seconds.inner_send if same else splits.seconds.outer_send)[row]
                )
        head = splits.seconds.head[row] if i == len(stages) - 1 else 0.0
        return max(sends) + head + (splits.seconds.embedding[row] if i == 0 else 0.0)

    @staticmethod
    def tail(splits, stages, layers) -> float:
        worst = 0.0
        for i, row in enumerate(stages):
            number = layers[i] + splits.once.outer_layers[row] * ((i == 0) + (i == len(stages) - 1))
            reduce = max(number * splits.once.reduce_layer[row], splits.once.min_reduce[row])
            update = number * splits.once.update_layer[row] + splits.once.update_fixed[row]
            worst = max(worst, reduce + update)
        return worst
