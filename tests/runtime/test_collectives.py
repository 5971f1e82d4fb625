"""Every form of a collective gives the same result, whatever the sizes."""

import random
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

sys.path.insert(0, str(Path(__file__).parent))
from collective_cases import gather_and_reduce
from nccl_rules import NCCL_RULES
from ranks import run_ranks

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.filterwarnings("default")]


def random_cuts(chance: random.Random, num_ranks: int) -> tuple[int, ...]:
    inner = [chance.randint(0, 60) for _ in range(num_ranks - 1)]
    return (0, *sorted(inner), 60)


@pytest.mark.parametrize(("num_ranks", "backend"), [(2, "gloo"), (3, "gloo"), (3, NCCL_RULES)])
def test_all_forms_gather_and_reduce_the_same(num_ranks: int, backend: str):
    chance = random.Random(num_ranks)
    even = tuple(20 * rank for rank in range(num_ranks + 1))
    many_cuts = [even, *(random_cuts(chance, num_ranks) for _ in range(10))]
    many_cuts += [(0,) * num_ranks + (20_000,), (0,) * (num_ranks + 1)]

    by_rank = run_ranks(gather_and_reduce, num_ranks, many_cuts, torch.float32, backend=backend)

    factor = sum(range(1, num_ranks + 1))
    for index, cuts in enumerate(many_cuts):
        for rank in range(num_ranks):
            start, end = cuts[rank], cuts[rank + 1]
            for name, found in by_rank[rank][index].items():
                expected = torch.arange(cuts[-1]) * 0.5
                if name.startswith("reduce"):
                    expected = torch.arange(start, end) * float(factor)
                assert torch.equal(found, expected), (name, cuts, rank)
