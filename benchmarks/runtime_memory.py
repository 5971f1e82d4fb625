"""Does a rank of the uneven engine take the memory that the planner says? On fake tensors.

    python benchmarks/runtime_memory.py [--models llama-3.2-1b llama-3-8b llama-3-70b] [--seq-len N]

The engine runs a step as one rank of many on tensors without bytes (`tests/oracles/fake_ranks.py`);
the planner's estimate (`estimate/memory/layer_major.py`) is taken without what no tensor holds
(context, workspaces) and without its margin. bf16, AdamW, layers computed again, what enters them
in host memory.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from drystone.describe.model import ModelSpec
from drystone.describe.model_source import find_model
from drystone.describe.recipe import Offload, Recipe, Recompute, RecomputeKind
from drystone.estimate.memory.layer_major import layer_major_memory
from drystone.run.train.config import RankConfig
from drystone.run.train.data import RankWork
from drystone.run.train.optimizers import choose_optimizer
from drystone.units import GiB
from figures import print_figures

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "oracles"))

from fake_ranks import peak_of_rank

# (ranks, state share of the rank asked, its micro-batch, its micro-batches)
CASES = ((2, 0.5, 1, 2), (2, 0.75, 2, 4), (4, 0.1, 1, 4), (8, 0.125, 2, 2), (8, 0.0, 4, 1),
         (4, 0.6, 0, 0))  # fmt: skip


def a_recipe(seq_len: int) -> Recipe:
    """As the planner has it for uneven plans."""
    return Recipe(
        seq_len=seq_len,
        global_batch=8,
        recompute=Recompute(kind=RecomputeKind.FULL),
        offload=Offload.ACTIVATIONS,
    )


def compare(
    model: ModelSpec, seq_len: int, cases: tuple[tuple[int, float, int, int], ...] = CASES
) -> Iterator[tuple[tuple[int, float, int, int], float, float]]:
    """Each case with the estimate and what the engine took, in bytes."""
    recipe = a_recipe(seq_len)
    for case in cases:
        num_ranks, share, micro, number = case
        other = (1.0 - share) / (num_ranks - 1)
        works = [
            RankWork(batch=micro * number, micro_batch=micro, state_share=share),
            *(RankWork(batch=1, micro_batch=1, state_share=other) for _ in range(num_ranks - 1)),
        ]
        found = peak_of_rank(
            model, recipe, works, 0, optimizer=choose_optimizer(recipe.optimizer, RankConfig())
        )
        memory = layer_major_memory(model, recipe, num_ranks=num_ranks, most_micro_batch=micro)
        yield case, float(memory.peak_bytes(share)[micro]), found


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser()
    names = ["llama-3.2-1b", "gpt2-xl", "llama-3-8b", "llama-3-70b"]
    parser.add_argument("--models", nargs="+", default=names)
    parser.add_argument("--seq-len", type=int, default=2048)
    given = parser.parse_args()
    ratios = []
    print("model             ranks share micro number  estimate    engine  estimate / engine")
    for name in given.models:
        model = find_model(name)
        started = time.perf_counter()
        length = min(given.seq_len, model.learned_positions or given.seq_len)
        for (ranks, share, micro, number), expected, found in compare(model, length):
            print(f"{name:<16} {ranks:>6} {share:>5.3f} {micro:>5} {number:>6} "
                  f"{expected / GiB:>9.2f} {found / GiB:>9.2f} {expected / found:>9.3f}",
                  flush=True)  # fmt: skip
            ratios.append(expected / found)
        print(f"  {time.perf_counter() - started:.0f} s")
    print_figures({"least_ratio": min(ratios), "most_ratio": max(ratios), "ratios": ratios})


if __name__ == "__main__":
    main()
