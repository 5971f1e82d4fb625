"""The search for Cells against plain loops over every layout, each estimated for itself."""

import math
from dataclasses import replace

import pytest

from drystone.describe.catalogue import find_gpu
from drystone.describe.layout import Layout, Layouts, Schedule, Sharding, check_layout
from drystone.describe.machine import default_machine
from drystone.describe.model import Attention, Block, Experts, Mlp, ModelSpec
from drystone.describe.recipe import Recipe, Recompute, RecomputeKind
from drystone.estimate.memory.peak import estimate_memory
from drystone.estimate.time.speed import estimate_speed
from drystone.plan.cells.search import search_cells


def model_of(*, layers=4, heads=4, kv_heads=2, width=64, ffn=None, name="small") -> ModelSpec:
    attention = Attention(num_heads=heads, num_kv_heads=kv_heads, head_dim=width)
    block = Block(
        attention=attention, feed_forward=ffn or Mlp(ffn_size=4 * width * heads, gated=True)
    )
    return ModelSpec(
        name=name, hidden_size=heads * width, stack=((block, layers),), vocab_size=1000
    )


DENSE = model_of(layers=6, heads=12, kv_heads=4, width=128)
LARGE = model_of(layers=8, heads=32, kv_heads=8, width=128, name="large")
MOE = model_of(layers=4, heads=8, kv_heads=8, ffn=Experts(num_experts=4, top_k=2, ffn_size=512))


def divides(number: int, by: int) -> bool:
    return number % by == 0


def every_layout(model: ModelSpec, recipe: Recipe, gpus_per_node: int, count: int):
    """The documented space, one loop a degree."""
    numbers = range(1, count + 1)
    for tp in numbers:
        stays = tp <= min(gpus_per_node, 16) and (
            count <= gpus_per_node or divides(gpus_per_node, tp)
        )
        for cp in (1, 2, 4, 8):
            long_enough = cp == 1 or recipe.seq_len // cp >= 4096
            for pp in numbers:
                for dp in numbers:
                    if dp * tp * cp * pp != count or not stays or not long_enough:
                        continue
                    for ep in range(1, dp * cp + 1):
                        if divides(dp * cp, ep) and (ep == 1 or model.is_moe):
                            yield from inner_layouts(model, recipe, (dp, tp, pp, cp, ep))


def inner_layouts(model, recipe, degrees):
    dp, tp, pp, cp, ep = degrees
    if dp > recipe.global_batch:
        return
    rank_batch = math.ceil(recipe.global_batch / dp)
    for micro in range(1, rank_batch + 1):
        for sharding in (Sharding.NONE, Sharding.ZERO1, Sharding.ZERO3):
            for virtual in (1, 2, 4):
                if not divides(rank_batch, micro) or (sharding and dp * cp == 1):
                    continue
                if virtual > 1 and not (
                    pp > 1
                    and divides(model.num_layers, pp * virtual)
                    and divides(rank_batch // micro, pp)
                ):
                    continue
                layout = Layout(
                    dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, micro_batch=micro, sharding=sharding,
                    sequence_parallel=tp > 1, virtual_stages=virtual,
                    schedule=Schedule.INTERLEAVED if virtual > 1 else Schedule.ONE_F_ONE_B,
                )  # fmt: skip
                full = replace(recipe, global_batch=recipe.global_batch * dp * micro)
                if not check_layout(model, full, layout):
                    yield layout


def best_seconds(model, recipe, machine, count) -> float:
    best = math.inf
    for layout in every_layout(model, recipe, machine.gpus_per_node, count):
        one = Layouts.of([layout])
        for kind in RecomputeKind:
            mine = replace(recipe, recompute=Recompute(kind=kind))
            memory = estimate_memory(model, mine, one, gpu=machine.gpu)
            if memory.required_range().high[0] <= machine.gpu.usable_bytes:
                best = min(best, float(estimate_speed(model, mine, one, machine).step_seconds[0]))
    return best


@pytest.mark.parametrize(
    ("model", "gpu", "gpus_per_node", "seq_len", "batch", "counts"),
    [
        (DENSE, "A100-80G", 4, 512, 8, (1, 2, 3, 4, 5, 6)),
        (DENSE, "V100-16G", 8, 2048, 12, (7, 8, 12)),
        (DENSE, "T4", 1, 1024, 6, (1, 3, 6)),
        (LARGE, "T4", 8, 1024, 16, (2, 4, 8)),
        (LARGE, "H100-80G", 8, 16384, 4, (4, 8)),
        (MOE, "L4", 4, 1024, 8, (2, 4, 8)),
        pytest.param(LARGE, "A10G", 4, 1024, 32, (9, 10, 12, 16), marks=pytest.mark.slow),
        pytest.param(MOE, "A100-40G", 8, 8192, 16, (12, 16), marks=pytest.mark.slow),
    ],
)
def test_the_same_optimum_as_every_layout(model, gpu, gpus_per_node, seq_len, batch, counts):
    machine = default_machine(find_gpu(gpu), gpus_per_node)
    recipe = Recipe(seq_len=seq_len, global_batch=batch)

    best = search_cells(model, recipe, machine, counts).best()

    found = dict(zip(best.layouts.num_gpus.tolist(), best.step_seconds.tolist(), strict=True))
    for count in counts:
        oracle = best_seconds(model, recipe, machine, count)
        assert found.get(count, math.inf) == pytest.approx(oracle, rel=1e-12)
