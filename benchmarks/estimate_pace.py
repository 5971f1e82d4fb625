"""How fast are speed estimates: one layout, and a hundred thousand as an array?

    python benchmarks/estimate_pace.py

Bars: one estimate under 0.4 ms, at least 250,000 layouts a second on one core.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from drystone.describe.catalogue import find_gpu
from drystone.describe.layout import Layout, Layouts, Sharding
from drystone.describe.machine import default_machine
from drystone.describe.model import Attention, Block, Mlp, ModelSpec
from drystone.describe.recipe import Recipe
from drystone.estimate.time.speed import estimate_speed
from figures import print_figures

NUM_LAYOUTS = 100_000
MOST_SECONDS_FOR_ONE = 0.4e-3
LEAST_LAYOUTS_PER_SECOND = 250_000


def main() -> int:
    """Time both, print both, and fail when one misses its bar."""
    block = Block(
        attention=Attention(num_heads=32, num_kv_heads=8, head_dim=128),
        feed_forward=Mlp(ffn_size=14336, gated=True),
    )
    model = ModelSpec(name="8b", hidden_size=4096, stack=((block, 32),), vocab_size=128256)
    recipe = Recipe(seq_len=8192, global_batch=1024)
    machine = default_machine(find_gpu("H100-80G"))
    one = Layouts.of([Layout(dp=8, micro_batch=2, sharding=Sharding.ZERO3)])
    many = random_layouts(NUM_LAYOUTS)
    one_seconds = best_of(lambda: estimate_speed(model, recipe, one, machine), repeats=500)
    many_seconds = best_of(lambda: estimate_speed(model, recipe, many, machine), repeats=5)
    pace = NUM_LAYOUTS / many_seconds
    print(f"one estimate       {one_seconds * 1e3:8.3f} ms   (bar {MOST_SECONDS_FOR_ONE * 1e3} ms)")
    print(f"layouts a second   {pace:12,.0f}   (bar {LEAST_LAYOUTS_PER_SECOND:,})")
    print_figures({"one_seconds": one_seconds, "layouts_per_second": pace})
    return int(one_seconds > MOST_SECONDS_FOR_ONE or pace < LEAST_LAYOUTS_PER_SECOND)


def random_layouts(count: int) -> Layouts:
    """Powers of two in every direction, all shardings."""
    numbers = np.random.default_rng(0)

    def power(most: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return 2 ** numbers.integers(0, most + 1, count)

    return Layouts.build(
        dp=power(8), tp=power(3), pp=power(3), cp=power(2), micro_batch=power(4),
        sharding=numbers.integers(0, 4, count), sequence_parallel=numbers.integers(0, 2, count),
    )  # fmt: skip


def best_of(work: Callable[[], object], *, repeats: int) -> float:
    """The shortest of some runs, in seconds, after one to warm up."""
    work()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


if __name__ == "__main__":
    sys.exit(main())
